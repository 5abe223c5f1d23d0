"""vLLM's attention seam over `paged`: backend, metadata builder, implementation. A shell: translate, call, return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from deepinfer_offline.engine.vllm.cpu import paged


class TorchCpuBackend(AttentionBackend):
    """Decoder attention over paged keys and values: GQA, sliding window, sinks, soft cap."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # [block, head, token, key | value]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[TorchCpuImpl]:
        return TorchCpuImpl

    @staticmethod
    def get_builder_cls() -> type[TorchCpuMetadataBuilder]:
        return TorchCpuMetadataBuilder


@dataclass
class TorchCpuMetadata:
    """What every layer of one step shares."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    groups: list[paged.RowGroup]
    causal: bool


class TorchCpuMetadataBuilder(AttentionMetadataBuilder[TorchCpuMetadata]):
    """Groups the rows of a step once, for all layers of a cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TorchCpuMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc[: common.num_reqs + 1]
        groups = paged.plan_groups(
            starts, common.seq_lens[: common.num_reqs], common.block_table_tensor, self.block_size
        )
        return TorchCpuMetadata(common.num_actual_tokens, common.slot_mapping, groups, bool(common.causal))


class TorchCpuImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("DeepInfer's CPU attention has no ALiBi: run this model on a GPU")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"DeepInfer's CPU attention serves decoders only, not {attn_type!r}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.window = sliding_window or 0
        self.softcap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TorchCpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling run
            return output
        tokens = attn_metadata.num_actual_tokens
        paged.attend(
            query[:tokens].view(tokens, self.num_heads, self.head_size),
            kv_cache,
            attn_metadata.groups,
            output[:tokens].view(tokens, self.num_heads, self.head_size),
            scale=self.scale,
            window=self.window,
            causal=attn_metadata.causal,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        paged.insert(key, value, kv_cache, slot_mapping)
