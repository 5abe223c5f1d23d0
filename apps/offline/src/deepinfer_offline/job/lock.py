"""One run per OUTPUT: the journal is locked from the first moment to the last."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from deepinfer_offline.job.errors import JobError


def open_locked(path: Path, output: Path) -> int:
    """Open a file for reading and writing, make it if needed, and lock it until the descriptor is closed.

    The lock belongs to the open file: the system drops it when the process dies, however it dies.

    Args:
        path: the journal.
        output: named in messages.

    Returns:
        A file descriptor.

    Raises:
        JobError: another run holds the lock, or the folder cannot be written.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise JobError(
                f"another run is writing {output} at this moment; wait for it or choose another output"
            ) from None
        except OSError as error:
            os.close(fd)
            raise JobError(
                f"cannot lock {path}: {error.strerror}; choose an output on a file system with locks"
            ) from error
        if _is_at(fd, path):
            return fd
        os.close(fd)  # the run before us finished and removed the file between our two calls


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
