"""Checks of the paths of a job, before anything is read or written."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.options import JobOptions
from deepinfer_offline.job.output import partial_path


def check_places(options: JobOptions) -> None:
    """Refuse paths that would overwrite each other or cannot be written.

    Raises:
        JobError: one sentence about the first fault.
    """
    _check_writable(options.output, "OUTPUT")
    inputs = [("INPUT", Path(options.input))] if options.input != "-" else []
    written = [
        ("OUTPUT", options.output),
        ("OUTPUT's journal", options.journal),
        ("OUTPUT's partial file", partial_path(options.output)),
    ]
    if options.report is not None:
        _check_writable(options.report, "the report")
        written.append(("the report", options.report))
    named = [*inputs, *written]
    for i, (name, path) in enumerate(named):
        for other, second in named[i + 1 :]:
            if _same(path, second):
                way_out = "OUTPUT" if other.startswith("OUTPUT") else other.removeprefix("the ")
                raise JobError(f"{name} and {other} are the same file, {path}; choose another {way_out}")


def _check_writable(path: Path, name: str) -> None:
    folder = path.parent
    if not folder.exists():
        raise JobError(f"{name} {path} cannot be written: the folder {folder} does not exist")
    if not folder.is_dir():
        raise JobError(f"{name} {path} cannot be written: {folder} is not a folder")
    if path.is_dir():
        raise JobError(f"{name} {path} is a folder; give a file name")
    if path.exists() and not path.is_file():
        raise JobError(f"{name} {path} is not a regular file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise JobError(f"{name} {path} cannot be written: no permission to write in {folder}")
    if path.exists() and not os.access(path, os.W_OK):
        raise JobError(f"{name} {path} cannot be written: the file is read-only")


def _same(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return first.resolve() == second.resolve()
