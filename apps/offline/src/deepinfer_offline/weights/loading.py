"""Loading away from the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def run_in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread that ends with it, and return or raise what it does.

    A thread that runs a parallel torch operation keeps a team of kernel threads for as long as it lives. OpenMP lets the
    members of a team spin for their next piece of work only while all teams together fit the processors, so a team left
    behind by loading would slow every step down.
    """
    threads = torch.get_num_threads()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            torch.set_num_threads(threads)
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="deepinfer-load")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
