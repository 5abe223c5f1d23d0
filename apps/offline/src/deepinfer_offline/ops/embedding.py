"""Rows of a table by token."""

from __future__ import annotations

import torch

from deepinfer_offline.ops.registry import Provider, anywhere, registry


def embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of a table.

    Args:
        table: [n, width].
        ids: int64 [T].

    Returns:
        [T, width], a copy.
    """
    return table[ids]


registry.register(Provider("embed", "portable", "portable", anywhere, lambda: embed))
