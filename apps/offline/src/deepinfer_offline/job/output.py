"""OUTPUT: written in input order from the journal, and there only when it is whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepinfer_offline.job.answer import OK, copy_answer, line_id
from deepinfer_offline.job.codec import loads
from deepinfer_offline.job.difference import describe_difference
from deepinfer_offline.job.errors import JobError, LineError
from deepinfer_offline.job.journal import Journal
from deepinfer_offline.job.lines import Line, read_lines
from deepinfer_offline.job.options import JobOptions
from deepinfer_offline.job.request import name_of, read_object
from deepinfer_offline.job.scan import JobIndex

_BUFFER = 1 << 20
_TICK = 4096
_LOOKED_AT = 100  # lines that tell whether OUTPUT is of this job at all


@dataclass(slots=True)
class Written:
    """What an OUTPUT holds."""

    answered: int = 0
    failed: int = 0
    copied: int = 0


def partial_path(path: Path) -> Path:
    """Where an OUTPUT grows until it is whole."""
    return path.with_name(path.name + ".partial")


def write_output(
    path: Path, journal: Journal, index: JobIndex, lines: Iterator[Line], job: str, progress: Callable[[int], None]
) -> Written:
    """Write OUTPUT beside its place, flush it, move it into place.

    Args:
        path: OUTPUT.
        journal: holds an answer for every record that copies none.
        index: of the first pass.
        lines: INPUT from its start; read only if some record copies another one's answer.
        job: fingerprint that answers' ids are made with.
        progress: called now and then with the number of lines written.

    Raises:
        JobError: the disk is full or failed. The journal is left as it is.
    """
    partial = partial_path(path)
    written = Written()
    done = journal.answered()
    copies = bool((~done).any())
    try:
        with partial.open("wb", buffering=_BUFFER) as stream:
            for record in range(len(index)):
                line = next(lines) if copies else None
                result, status = _answer(record, line, journal, index, job)
                stream.write(result + b"\n")
                written.copied += not done[record]
                written.answered += status == OK
                written.failed += status != OK
                if record % _TICK == 0:
                    progress(record)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)  # it may be what fills the disk
        raise JobError(
            f"cannot write {error.filename or partial}: {error.strerror}"  # the command says where the answers are
        ) from error
    return written


def read_finished(path: Path, lines: Iterator[Line], options: JobOptions) -> Iterator[tuple[int, bytes]]:
    """Read an OUTPUT that an earlier run finished.

    Args:
        path: OUTPUT.
        lines: INPUT from its start.
        options: of this job; the ids in OUTPUT must be made with them.

    Yields:
        For each record the status (0: no response) and the OUTPUT line.

    Raises:
        JobError: OUTPUT does not answer this INPUT with this model and these options, line by line.
    """
    results, job = read_lines(path), options.fingerprint()
    way_out = "choose another output, or replace it with --fresh"
    some_fit = f"--retry-errors keeps the good answers that still fit and runs the rest; or {way_out}"
    number = 0
    for number, line in enumerate(lines, start=1):
        result = next(results, None)
        if result is None:
            way_out = some_fit if number > 1 else way_out
            raise JobError(
                f"{path} exists and is not this job's result: it has {number - 1} lines, the input has more; {way_out}"
            )
        key, status = _read_result(result.raw)
        if key != line_id(job, line):
            rest = itertools.islice(zip(lines, results, strict=False), _LOOKED_AT)
            fit = number > 1 or any(_read_result(there.raw)[0] == line_id(job, asked) for asked, there in rest)
            difference = describe_difference(options, line, result.raw, others_fit=fit)
            raise JobError(
                f"{path} exists and is not this job's result; line {number} differs in {difference}; "
                f"{some_fit if fit else way_out}"
            )
        yield status, result.raw
    if next(results, None) is not None:
        raise JobError(f"{path} exists and has more lines than the input; {some_fit if number else way_out}")


def compare_finished(path: Path, lines: Iterator[Line], options: JobOptions) -> Iterator[tuple[str, bytes]]:
    """Compare an OUTPUT that an earlier run finished with an INPUT that may have been corrected since.

    Args:
        path: OUTPUT.
        lines: INPUT from its start.
        options: of this job.

    Yields:
        For each OUTPUT line what it is, and the line: `kept`, the good answer of the INPUT line in its place, made with
        this model and these options; `stale`, a good answer of something else; `failed`; `foreign`, no answer at all.
    """
    job = options.fingerprint()
    for result in read_lines(path):
        line = next(lines, None)
        key, status = _read_result(result.raw)
        if key is None:
            yield "foreign", result.raw
        elif status != OK:
            yield "failed", result.raw
        else:
            yield ("kept" if line is not None and key == line_id(job, line) else "stale"), result.raw


def _read_result(raw: bytes) -> tuple[str | None, int]:
    """The id that an OUTPUT line answers, None if it is no line of this program, and its status."""
    try:
        value = loads(raw)
        prefix, _, key = value["id"].rpartition("batch_req_")
        status = value["response"]["status_code"] if value["response"] is not None else 0
        return (key, int(status)) if not prefix and key else (None, 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, 0


def _answer(record: int, line: Line | None, journal: Journal, index: JobIndex, job: str) -> tuple[bytes, int]:
    if journal.length[record]:
        return journal.result(record), int(journal.status[record])
    assert line is not None, f"record {record} has no answer"
    original = int(index.same_answer[record])
    assert original >= 0, f"record {record} has no answer"
    assert journal.length[original], f"record {original} has no answer to copy"
    try:
        custom_id = name_of(read_object(line))
    except LineError as error:
        raise JobError("the input changed while it was read; run the command again with --fresh") from error
    result = copy_answer(
        journal.result(original), int(index.numbers[original]), line.number, line_id(job, line), custom_id
    )
    return result, int(journal.status[original])


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
