"""Rows of tables as batch lines: what columns mean, and the JSON line that a row stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_offline.job.codec import MAX_DEPTH, depth, dumps
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.fields import PARAMETERS
from deepinfer_offline.job.lines import Line

TEXT = frozenset({"prompt", "custom_id", "model", "user"})
"""Columns whose cells are never read as JSON."""
_URLS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_USED = frozenset({"custom_id", *_URLS, *PARAMETERS})


@dataclass(frozen=True, slots=True)
class Columns:
    """What a table's columns are taken for."""

    used: tuple[str, ...]
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str], path: Path) -> Columns:
        """Sort a table's columns. Raises JobError for two of one name, and when neither `prompt` nor `messages` is there."""
        names = tuple(names)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise JobError(f"{path} has two columns named {twice[0]!r}")
        if not set(names) & set(_URLS):
            found = ", ".join(map(repr, names[:12])) or "none"
            raise JobError(f"{path} has no column 'prompt' or 'messages'; its columns are {found}")
        return cls(tuple(n for n in names if n in _USED), tuple(n for n in names if n not in _USED))

    def line(self, cells: dict[str, Any], number: int) -> Line:
        """The batch line of a row.

        Args:
            cells: JSON values by column; columns that are not used, and None for an empty cell, may be among them.
            number: the row's.
        """
        body = {name: value for name, value in cells.items() if value is not None and name in self.used}
        name = str(body.pop("custom_id", f"row-{number}"))
        if "messages" in body and body.get("prompt") == "":  # an empty cell of a table that has both
            del body["prompt"]
        asked = [column for column in _URLS if column in self.used]
        filled = [column for column in asked if column in body]
        if not filled and len(asked) > 1:
            return Line(number, b"", f"the row has neither {' nor '.join(asked)}", name)
        url = _URLS[(filled or asked)[-1]]
        return Line(number, _encode({"custom_id": name, "method": "POST", "url": url, "body": body}))


def json_or_text(text: str) -> Any:
    """What can be written as JSON again; anything else stays the text that the parameter's check will show."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return value if depth(value) <= MAX_DEPTH else text


def plain_number(value: float) -> float | int:
    """A whole number without its `.0`: pandas turns integers beside missing ones into floats."""
    return int(value) if value.is_integer() else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _encode(line: dict[str, Any]) -> bytes:
    try:
        return dumps(line)
    except UnicodeEncodeError:
        pass
    try:  # bytes that are not UTF-8: decoding the line will say so
        return json.dumps(line, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, written as JSON escapes: decoding will say that, too
        return json.dumps(line).encode()
