"""CSV and TSV files as batch lines."""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.lines import MAX_LINE_BYTES, Line, open_bytes
from deepinfer_offline.job.tables import TEXT, Columns, json_or_text, plain_number

_QUOTES = "inside a quoted cell, a quote is written twice"


def csv_columns(path: Path) -> Columns:
    """Read a CSV header. Raises JobError when neither `prompt` nor `messages` is in it, or it is not CSV."""
    with _open(path) as text:
        return Columns.of(_header(_reader(text, path), path), path)


def read_csv(path: Path) -> Iterator[Line]:
    """Read a CSV (or, by its name, TSV) file with a header row.

    Cells of parameter columns are read as JSON where they are JSON (`0.7`, `["a", "b"]`), else as text; empty cells
    are left out. A row with more or fewer cells than the header, or with a quote in the wrong place, is one bad line.

    Args:
        path: the file, possibly gzip or zstd.

    Yields:
        One line a row; numbers count rows from 1, the header not counted.

    Raises:
        JobError: the file is damaged, or a quote is never closed, so that nobody knows where its rows end.
    """
    number = 0
    with _open(path) as text:
        rows = _reader(text, path)
        header = _header(rows, path)
        columns = Columns.of(header, path)
        while True:
            start = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                number += 1
                yield Line(number, b"", _fault(error, start, rows.line_num, path), _row_name(header, [], number))
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
                yield columns.line(dict(zip(header, map(_cell, header, row), strict=True)), number)


def _fault(error: csv.Error, start: int, end: int, path: Path) -> str:
    """Why a row is not CSV. Raises JobError for a quote that swallows what comes after it."""
    reason = str(error)
    if "end of data" in reason:
        raise JobError(
            f"{path}: a quote that opens in the row at line {start} of the file is never closed, and all that follows "
            f"(to line {end}) would be one cell; close it ({_QUOTES})"
        ) from error
    if "field limit" in reason and end > start:
        raise JobError(
            f"{path}: a cell of the row at line {start} of the file goes on for over {MAX_LINE_BYTES >> 20} MiB, to line "
            f"{end}; is its quote closed? ({_QUOTES})"
        ) from error
    where = f"line {start}" if end <= start else f"lines {start} to {end}"
    return f"the row ({where} of the file) is not valid CSV: {reason}; {_QUOTES}"


def _row_name(header: list[str], row: list[str], number: int) -> str | None:
    """The `custom_id` of a row with too many or too few cells; None where cells that moved may stand in its place."""
    if "custom_id" not in header:
        return f"row-{number}"
    place = header.index("custom_id")
    name = row[0] if row and place == 0 else row[-1] if place == len(header) - 1 and len(row) > len(header) else ""
    return name if name.strip() and name.isprintable() else None


def _cell(name: str, text: str) -> Any:
    if text == "" and name != "prompt":
        return None
    if name in TEXT:
        return text
    value = None if text == "NaN" else json_or_text(text)
    return plain_number(value) if isinstance(value, float) else value


def _open(path: Path) -> io.TextIOWrapper:
    # surrogateescape: bytes that are not UTF-8 spoil their own row only
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _reader(text: io.TextIOWrapper, path: Path) -> Any:
    csv.field_size_limit(MAX_LINE_BYTES)
    # strict: else a quote that is never closed takes the rest of the file for its cell without a word
    return csv.reader(text, delimiter="\t" if ".tsv" in path.suffixes else ",", strict=True)


def _header(rows: Any, path: Path) -> list[str]:
    try:
        return next(rows, [])
    except csv.Error as error:
        raise JobError(f"{path} has no header: {_fault(error, 1, rows.line_num, path)}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise JobError(f"cannot read the header of {path}: {error}") from error
