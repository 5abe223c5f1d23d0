"""What the loaders need of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class TensorReader(Protocol):
    """The tensors of one checkpoint under their Hugging Face names. Read in any order, from several threads."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, before anything is read."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in its stored dtype (float32 where the stored form is a quantised block format)."""
        ...

    def close(self) -> None: ...
