"""The contract of paged attention: one object a model, one cache a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepinfer_offline.models.base import ForwardBatch

GROUP = "kv"
"""Name of the prefix group that holds keys and values."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a provider needs to know to lay out its cache.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: channels of a head.
        block_size: positions of a block.
        dtype: of activations and cache.
        device: torch device string.
        norm_eps: of the query/key norms, if the layers have them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: str
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class Attention(Protocol):
    """Causal attention over paged keys and values, with the rotary embedding and the optional query/key norms.

    The cache layout belongs to the provider; a layer's cache is opaque to everyone else.

    Attributes:
        layout: name and version of the cache layout: equal only where equal bytes mean equal keys and values.
    """

    layout: str

    def allocate(self, num_blocks: int) -> Any:
        """The cache of one layer, all finite (zeros)."""
        ...

    def blocks(self, cache: Any) -> torch.Tensor:
        """A view of a layer's cache with blocks on the first axis and the last axis contiguous."""
        ...

    def prepare(self, batch: ForwardBatch, rope: torch.Tensor) -> Any:
        """What all layers share: indices, masks, work lists.

        Args:
            batch: the step.
            rope: float32 [positions, 2, head_dim / 2], cos and sin of every position.
        """
        ...

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: Any,
        prepared: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise, rotate, write keys and values of all tokens, then attend.

        Every row sees positions up to its own. All tokens are written before any is attended, so a row may share blocks
        that another row of the same step fills. Positions below a row's write floor are not written.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values. May be overwritten.
            cache: of this layer; written in place.
            prepared: from `prepare`.
            q_norm, k_norm: RMS weights [head_dim], or None.

        Returns:
            [T, num_heads * head_dim], dtype of `qkv`.
        """
        ...
