"""CSV and Parquet as batch lines: each row becomes the JSON line that asks for the same."""

from __future__ import annotations

import csv
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_offline.job.codec import MAX_DEPTH, depth, dumps
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.fields import PARAMETERS
from deepinfer_offline.job.lines import MAX_LINE_BYTES, Line, open_bytes

_URLS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_USED = frozenset({"custom_id", *_URLS, *PARAMETERS})
_TEXT = frozenset({"prompt", "custom_id", "model", "user"})  # never read as JSON
_ROWS = 256  # rows of a Parquet file that are Python objects at one time


@dataclass(frozen=True, slots=True)
class Columns:
    """What a table's columns are taken for."""

    used: tuple[str, ...]
    ignored: tuple[str, ...]


def csv_columns(path: Path) -> Columns:
    """Read a CSV header. Raises JobError when neither `prompt` nor `messages` is in it."""
    with _open_csv(path) as text:
        return _columns(next(_reader(text, path), []), path)


def read_csv(path: Path) -> Iterator[Line]:
    """Read a CSV (or, by its name, TSV) file with a header row.

    Cells of parameter columns are read as JSON where they are JSON (`0.7`, `["a", "b"]`), else as text; empty cells
    are left out. A row with more or fewer cells than the header is one bad line.

    Args:
        path: the file, possibly gzip or zstd.

    Yields:
        One line a row; numbers count rows from 1, the header not counted.

    Raises:
        JobError: the file is damaged.
    """
    number = 0
    with _open_csv(path) as text:
        rows = _reader(text, path)
        header = next(rows, [])
        while True:
            try:
                row = next(rows, None)
            except csv.Error as error:
                number += 1
                yield Line(number, b"", f"the row is not valid CSV: {error}", _row_name(header, [], number))
                continue
            except (OSError, EOFError, zlib.error) as error:
                raise JobError(f"cannot read {path} after row {number}: {error}") from error
            if row is None:
                return
            if not row:
                continue
            number += 1
            if len(row) != len(header):
                fault = f"the row has {len(row)} cells and the header has {len(header)}"
                yield Line(number, b"", fault, _row_name(header, row, number))
            else:
                yield Line(number, _line(zip(header, map(_csv_cell, header, row), strict=True), number))


def _row_name(header: list[str], row: list[str], number: int) -> str | None:
    """The `custom_id` of a row with too many or too few cells; None where cells that moved may stand in its place."""
    if "custom_id" not in header:
        return f"row-{number}"
    place = header.index("custom_id")
    name = row[0] if row and place == 0 else row[-1] if place == len(header) - 1 and len(row) > len(header) else ""
    return name if name.strip() and name.isprintable() else None


def parquet_columns(path: Path) -> Columns:
    """Read a Parquet file's schema. Raises JobError when neither `prompt` nor `messages` is in it."""
    with _open_parquet(path) as file:
        return _columns(file.schema_arrow.names, path)


def read_parquet(path: Path) -> Iterator[Line]:
    """Read a Parquet file; nulls and NaN are left out. Yields one line a row, numbered from 1."""
    columns = parquet_columns(path)
    number = 0
    with _open_parquet(path) as file:
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(columns.used)):
                for row in batch.to_pylist():
                    number += 1
                    yield Line(number, _line(((k, _parquet_cell(k, v)) for k, v in row.items()), number))
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise JobError(f"cannot read {path} after row {number}: {error}") from error


def _line(cells: Iterable[tuple[str, Any]], number: int) -> bytes:
    body = {name: value for name, value in cells if value is not None and name in _USED}
    custom_id = body.pop("custom_id", f"row-{number}")
    url = _URLS["messages" if "messages" in body else "prompt"]
    line = {"custom_id": str(custom_id), "method": "POST", "url": url, "body": body}
    try:
        return dumps(line)
    except UnicodeEncodeError:
        pass
    try:  # bytes that are not UTF-8: decoding the line will say so
        return json.dumps(line, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, written as JSON escapes: decoding will say that, too
        return json.dumps(line).encode()


def _columns(names: Iterable[str], path: Path) -> Columns:
    names = tuple(names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobError(f"{path} has two columns named {twice[0]!r}")
    if not set(names) & set(_URLS):
        found = ", ".join(map(repr, names[:12])) or "none"
        raise JobError(f"{path} has no column 'prompt' or 'messages'; its columns are {found}")
    return Columns(tuple(n for n in names if n in _USED), tuple(n for n in names if n not in _USED))


def _csv_cell(name: str, text: str) -> Any:
    if text == "" and name != "prompt":
        return None
    if name in _TEXT:
        return text
    return None if text == "NaN" else _json_or_text(text)


def _json_or_text(text: str) -> Any:
    """What can be written as JSON again; anything else stays the text that the parameter's check will show."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return value if depth(value) <= MAX_DEPTH else text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _parquet_cell(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _json_or_text(value) if value[:1] in ("[", "{") and name not in _TEXT else value
    return _json_value(value)


def _json_value(value: Any) -> Any:
    """A value as JSON has it: pandas writes missing numbers as NaN and turns integers beside them into floats."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items() if item is not None}
    return value if isinstance(value, str | int | None) else str(value)


def _open_csv(path: Path) -> io.TextIOWrapper:
    # surrogateescape: bytes that are not UTF-8 spoil their own row only
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _reader(text: io.TextIOWrapper, path: Path) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    return csv.reader(text, delimiter="\t" if ".tsv" in path.suffixes else ",")


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise JobError(f'reading {path} needs `pip install "deepinfer-offline[parquet]"`') from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise JobError(f"{path} is not a Parquet file: {error}") from error
