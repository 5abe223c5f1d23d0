"""Reading exactly the tensors that a model expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.weights.reader import TensorReader

if TYPE_CHECKING:
    import torch

_LISTED = 5  # names shown of each kind of mistake


def check_tensors(
    reader: TensorReader,
    expected: Mapping[str, tuple[int, ...]],
    path: Path,
    ignored: Callable[[str], bool] = lambda _: False,
) -> None:
    """Compare a checkpoint's tensors with what the model needs.

    Args:
        reader: the checkpoint.
        expected: shape of every tensor of the model.
        path: named in the error.
        ignored: names that may be there and are not read (e.g. buffers that are computed anew).

    Raises:
        EngineStartError: tensors are missing, unexpected or misshapen; each kind is listed by name.
    """
    there = reader.shapes
    missing = [name for name in expected if name not in there]
    unexpected = [name for name in there if name not in expected and not ignored(name)]
    misshapen = [
        f"{name} is {list(there[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in there and tuple(there[name]) != tuple(shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    problems = [f"{len(names)} {kind} ({_shorten(names)})" for kind, names in kinds.items() if names]
    if problems:
        raise EngineStartError(f"the weights in {path} do not fit their configuration: {', '.join(problems)}")


def read_tensors(
    reader: TensorReader, names: list[str], dtype: torch.dtype, threads: int = 2
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read tensors in the given order, a few ahead in other threads, converted to `dtype`."""

    def read(name: str) -> torch.Tensor:
        return reader.read(name).to(dtype)

    with ThreadPoolExecutor(threads, thread_name_prefix="deepinfer-weights") as pool:
        ahead = 4 * threads
        waiting = [pool.submit(read, name) for name in names[:ahead]]
        for place, name in enumerate(names):
            if place + ahead < len(names):
                waiting.append(pool.submit(read, names[place + ahead]))
            yield name, waiting[place].result()
            waiting[place] = None  # type: ignore[call-overload]  # the tensor lives on only where the caller keeps it


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
