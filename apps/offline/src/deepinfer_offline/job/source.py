"""INPUT, whatever its format: lines that can be read twice."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deepinfer_offline.job.csv_table import csv_columns, read_csv
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.lines import Line, read_lines
from deepinfer_offline.job.parquet_table import parquet_columns, read_parquet

_PARQUET_MAGIC = b"PAR1"
_COMPRESSED = {".gz", ".zst", ".zstd"}


class Source:
    """An opened INPUT.

    A file is read from where it is, once to judge the job and once to run it. A pipe, such as standard input, is first
    copied to a temporary file, which `close` removes.

    Attributes:
        name: INPUT as the user wrote it.
        path: the file that is read.
        kind: `jsonl`, `csv` or `parquet`.
        ignored_columns: columns of a table that mean nothing here.
    """

    def __init__(self, name: str) -> None:
        """Find INPUT and what it is. Raises JobError when it cannot be read."""
        self.name = name
        self._spool: Path | None = None
        if name == "-":
            self._spool = _copy_stdin()
        elif Path(name).is_fifo():  # `deepinfer run <(zcat ...)`
            with open(name, "rb") as pipe:
                self._spool = _copy(pipe)
        self.path = self._spool or Path(name)
        _check_readable(self.path)
        self.kind = _kind(self.path)
        self.ignored_columns: tuple[str, ...] = ()
        if self.kind != "jsonl":
            find = csv_columns if self.kind == "csv" else parquet_columns
            self.ignored_columns = find(self.path).ignored
        self._stamp = self._stat()

    def lines(self) -> Iterator[Line]:
        """Read INPUT from its start.

        Raises:
            JobError: the file is damaged, or changed since it was opened.
        """
        reader = {"jsonl": read_lines, "csv": read_csv, "parquet": read_parquet}[self.kind]
        yield from reader(self.path)
        if self._stat() != self._stamp:
            raise JobError(f"{self.name} changed while it was read; run the command again with --fresh")

    def close(self) -> None:
        """Remove the copy of a pipe, if there is one."""
        if self._spool is not None:
            self._spool.unlink(missing_ok=True)

    def _stat(self) -> tuple[int, int]:
        try:
            stat = self.path.stat()
        except OSError as error:
            raise JobError(f"cannot read {self.name}: {error.strerror}") from error
        return stat.st_size, stat.st_mtime_ns


def _copy_stdin() -> Path:
    if sys.stdin is None or sys.stdin.isatty():
        raise JobError("INPUT is - but nothing is piped in; try `cat requests.jsonl | deepinfer run - -o out.jsonl`")
    return _copy(sys.stdin.buffer)


def _copy(pipe: IO[bytes]) -> Path:
    with tempfile.NamedTemporaryFile(prefix="deepinfer-", suffix=".jsonl", delete=False) as copy:
        shutil.copyfileobj(pipe, copy, 1 << 20)
    return Path(copy.name)


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise JobError(f"INPUT {path} is a folder; give one file")
    if not path.exists():
        raise JobError(f"INPUT {path} does not exist")
    if not path.is_file():
        raise JobError(f"INPUT {path} is not a regular file; to read from a pipe use -")
    try:
        path.open("rb").close()
    except OSError as error:
        raise JobError(f"cannot read INPUT {path}: {error.strerror}") from error


def _kind(path: Path) -> str:
    with path.open("rb") as stream:
        if stream.read(4) == _PARQUET_MAGIC:
            return "parquet"
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    if suffixes and suffixes[-1] in (".csv", ".tsv"):
        return "csv"
    return "parquet" if suffixes and suffixes[-1] in (".parquet", ".pq") else "jsonl"
