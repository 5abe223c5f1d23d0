"""Paged attention by the C kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.ops.attention.base import AttentionShape
from deepinfer_offline.ops.cpu.build import cpu_kernels
from deepinfer_offline.ops.cpu.memory import huge_zeros
from deepinfer_offline.ops.cpu.plan import Plan, PlanArrays, plan_arrays, shape_reason


class CpuAttentionError(ValueError):
    """A shape that the kernels do not have."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: Plan
    keep: tuple[PlanArrays, torch.Tensor, torch.Tensor, torch.Tensor]  # what the plan points at


class CpuAttention:
    """The `Attention` provider for AVX-512 BF16. A layer's cache is [blocks, kv_heads, 2, block_size * head_dim].

    Raises:
        CpuAttentionError: a shape that `shape_reason` refuses.
    """

    layout = "cpu-avx512-bf16-1"

    def __init__(self, shape: AttentionShape) -> None:
        reason = shape_reason(shape)
        if reason is not None:
            raise CpuAttentionError(reason)
        library = cpu_kernels().library
        assert library is not None, "selected although the kernels are not there"
        assert library.deepinfer_plan_bytes() == ctypes.sizeof(Plan), "Plan in plan.py differs from kernels.c"
        self.shape = shape
        self._kernel = library.deepinfer_attention
        self._kernel.argtypes = [ctypes.c_void_p] * 6
        self._kernel.restype = None

    def allocate(self, num_blocks: int) -> torch.Tensor:
        s = self.shape
        return huge_zeros((num_blocks, s.num_kv_heads, 2, s.block_size * s.head_dim), s.dtype)

    def blocks(self, cache: torch.Tensor) -> torch.Tensor:
        return cache

    def prepare(self, batch: ForwardBatch, rope: torch.Tensor) -> _Prepared:
        s, tokens = self.shape, len(batch.token_ids)
        arrays = plan_arrays(batch, s)
        query = torch.empty(tokens * s.num_heads * s.head_dim, dtype=s.dtype)
        partial = torch.empty(max(1, arrays.partial_rows * s.num_heads * (s.head_dim + 1)))
        plan = Plan(tokens, s.num_heads, s.num_kv_heads, s.head_dim, s.block_size, s.scale, s.norm_eps)
        arrays.fill(plan)
        plan.rope, plan.query, plan.partial = rope.data_ptr(), query.data_ptr(), partial.data_ptr()
        plan.units = len(arrays.arrays["order"])
        plan.columns = arrays.arrays["table"].shape[1]
        plan.merges = len(arrays.arrays["merge_tokens"])
        return _Prepared(plan, (arrays, query, partial, rope))

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        prepared: _Prepared,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        s, plan = self.shape, prepared.plan
        out = qkv.new_empty(len(qkv), s.num_heads * s.head_dim)
        norms = [None if weight is None else weight.data_ptr() for weight in (q_norm, k_norm)]
        self._kernel(ctypes.addressof(plan), qkv.data_ptr(), cache.data_ptr(), out.data_ptr(), *norms)
        return out
