"""Parquet files as batch lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.tables import TEXT, Columns, json_or_text, plain_number

_ROWS = 256  # rows that are Python objects at one time
_READ = "text, binary text, numbers, true and false, lists and structs are read"


class _CellError(ValueError):
    """A cell holds something that no JSON value stands for."""


def parquet_columns(path: Path) -> Columns:
    """Read a Parquet file's schema. Raises JobError when neither `prompt` nor `messages` is in it."""
    with _open(path) as file:
        return Columns.of(file.schema_arrow.names, path)


def read_parquet(path: Path) -> Iterator[Line]:
    """Read a Parquet file; nulls and NaN are left out.

    A cell that JSON cannot say (an infinity, a date, bytes that are not UTF-8) makes its row one bad line.

    Yields:
        One line a row, numbered from 1.

    Raises:
        JobError: the file is damaged.
    """
    columns = parquet_columns(path)
    number = 0
    with _open(path) as file:
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=list(columns.used)):
                for row in batch.to_pylist():
                    number += 1
                    yield _line(columns, row, number)
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise JobError(f"cannot read {path} after row {number}: {error}") from error


def _line(columns: Columns, row: dict[str, Any], number: int) -> Line:
    name: str | None = None if "custom_id" in row else f"row-{number}"
    try:
        if name is None:
            found = _cell("custom_id", row["custom_id"])
            name = f"row-{number}" if found is None else str(found)
        return columns.line({column: _cell(column, value) for column, value in row.items()}, number)
    except _CellError as error:
        return Line(number, b"", str(error), name)


def _cell(name: str, value: Any) -> Any:
    value = _json_value(name, value)
    is_json = isinstance(value, str) and value[:1] in ("[", "{") and name not in TEXT
    return json_or_text(value) if is_json else value


def _json_value(where: str, value: Any) -> Any:
    """A value as JSON has it. Raises _CellError, naming the column, for one that JSON does not have."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return _number(where, value)
    if isinstance(value, bytes):
        return _text(where, value)
    if isinstance(value, list):
        return [_json_value(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _json_value(f"{where}.{key}", item) for key, item in value.items() if item is not None}
    kind = "map" if isinstance(value, tuple) else type(value).__name__
    raise _CellError(f"{where} holds a {kind}; {_READ}: cast its column to one of them")


def _number(where: str, value: float) -> float | int | None:
    if math.isnan(value):  # how pandas writes a missing number
        return None
    if math.isinf(value):
        raise _CellError(f"{where} is {value}, and a parameter is a finite number; leave the cell empty for none")
    return plain_number(value)


def _text(where: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{value[error.start]:02x} at place {error.start + 1}"
        raise _CellError(f"{where} is binary and not UTF-8 text: {found}") from error


def _open(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise JobError(f"reading {path} needs pyarrow: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise JobError(f"{path} is not a Parquet file: {error}") from error
