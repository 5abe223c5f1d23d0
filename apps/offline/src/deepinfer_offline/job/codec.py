"""JSON in and out: strict when it reads, always valid when it writes."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from deepinfer_offline.job.errors import LineError, show

try:
    import orjson
except ImportError:  # the standard library writes the same bytes, only slower
    orjson = None

MAX_DEPTH = 100
"""Levels of lists and objects in a line: JSON writers and chat templates recurse, and orjson stops at 254."""

_FIRST = re.compile(r'\s*\{\s*"(\w+)"\s*:\s*("(?:[^"\\]|\\.)*")\s*,')  # an object's first key, with a whole string
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _DuplicateKeyError(ValueError):
    pass


class _ConstantError(ValueError):
    pass


def dumps(value: Any) -> bytes:
    """Write JSON as UTF-8 without spaces and without a newline. The caller keeps NaN and infinities out."""
    if orjson is not None:
        try:
            return orjson.dumps(value)
        except TypeError:  # integers over 64 bits
            pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def loads(raw: bytes) -> Any:
    """Read JSON that this program wrote."""
    return json.loads(raw) if orjson is None else orjson.loads(raw)


def decode_line(raw: bytes) -> Any:
    """Read one input line.

    Args:
        raw: the line without its newline.

    Returns:
        The JSON value.

    Raises:
        LineError: not UTF-8, not JSON, nested too deeply, an object with the same key twice, NaN or an infinity, or
            half of a surrogate pair. All of these are read differently by different JSON libraries.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise LineError(f"the line is not UTF-8: {found}", code="invalid_encoding") from None
    try:
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except _DuplicateKeyError as error:
        raise LineError(
            f"the key {show(error.args[0])} appears twice in one object", code="duplicate_key", param=str(error.args[0])
        ) from None
    except RecursionError:
        raise LineError("the line is nested too deeply", code="invalid_json") from None
    except UnicodeEncodeError:
        raise LineError("a string holds half of a surrogate pair, which is no character", code="invalid_json") from None
    except json.JSONDecodeError as error:
        where = f"at column {error.colno}" if error.lineno == 1 else f"at character {error.pos + 1}"
        what = error.msg.removesuffix(" at").rstrip(": ")  # Python's words end in the middle of a sentence
        raise LineError(f"the line is not valid JSON: {what} {where}", code="invalid_json") from None
    except _ConstantError as error:
        raise LineError(f"the line is not valid JSON: {error}", code="invalid_json") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise LineError(f"the line holds an integer of over {most} digits", code="invalid_json") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise LineError(f"the line is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    return value


def find_string(raw: bytes, key: str) -> str | None:
    """The string under a key of an object that `decode_line` refuses, so that the refusal can still be named by it.

    Args:
        raw: the line.
        key: a key of the outermost object.

    Returns:
        None unless the line is an object for a lenient reader, has the key once and has a readable string there.
    """
    try:
        pairs = _PAIRS.decode(raw.decode("utf-8", errors="replace"))
        found = [value for name, value in pairs if name == key] if isinstance(pairs, tuple) else []
        if len(found) != 1 or not isinstance(found[0], str) or "\ufffd" in found[0]:
            return None
        found[0].encode()
    except (ValueError, RecursionError):
        return None
    return found[0]


def find_first_string(raw: bytes, key: str) -> str | None:
    """The string under the first key of a line that is no JSON, such as one that was cut off; None if that is another key."""
    try:
        start = _FIRST.match(raw.decode("utf-8"))
        if start is None or start[1] != key or raw.count(f'"{key}"'.encode()) != 1:
            return None
        found = json.loads(start[2])
        found.encode()
    except ValueError:
        return None
    return found


def depth(value: Any) -> int:
    """Levels of lists and objects in a JSON value, itself included; found without recursion."""
    levels, level = 0, [value]
    while level:
        levels += 1
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [entry for item in inner for entry in (item.values() if isinstance(item, dict) else item)]
    return levels


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return value


def _no_constant(name: str) -> Any:
    raise _ConstantError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_PAIRS = json.JSONDecoder(object_pairs_hook=tuple)  # objects become tuples, so that equal keys stay apart
