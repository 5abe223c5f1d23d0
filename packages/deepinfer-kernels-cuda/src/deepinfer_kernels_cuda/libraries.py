"""deep_gemm, flash_mla and deep_ep behind this package's own functions, where they are importable.

Signatures are those of FlashMLA's vendored copy in vLLM 0.33, DeepGEMM 2.8 and DeepEP V2. None of the three was there when
this was measured: **not run**; tests hold the calls against the real signatures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .capability import device_arch
from .checks import require, require_dtype
from .errors import UnsupportedDeviceError
from .layouts import FP8, NVFP4, V4, pool_view
from .parallel import Dispatched
from .providers import find_library, measured

#: What each library's kernel is built for, by compute capability. An architecture is named, never `>= 90`.
SUPPORT: dict[tuple[str, str], tuple[int, ...]] = {
    ("flash_mla", "sparse_mla_decode"): (100,),
    ("flash_mla", "sparse_mla_decode_v4"): (90, 100),
    ("deep_gemm", "product"): (90, 100),
    ("deep_ep", "ExpertParallel"): (90, 100),
}
_HEADS = (64, 128)


def library_reason(library: str, op: str, device: torch.device | str) -> str | None:
    """Why a library does not serve an op on a device, or None."""
    archs = SUPPORT.get((library, op))
    if archs is None:
        return f"{library} has no {op} here"
    arch = device_arch(device)
    if arch not in archs:
        where = "no CUDA device" if arch == 0 else f"compute capability {arch / 10}"
        return f"{library}'s {op} is built for {', '.join(str(a / 10) for a in archs)}, not for {where}"
    return find_library(library).reason


def _module(library: str, op: str, device: torch.device) -> Any:
    reason = library_reason(library, op, device)
    if reason is not None:
        raise UnsupportedDeviceError(reason)
    return find_library(library).module


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [t, k] times weight [n, k] transposed, bfloat16 to float32: cuBLAS, or deep_gemm where it measures faster."""
    require_dtype("x", x, torch.bfloat16)
    if library_reason("deep_gemm", "product", x.device) is not None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    candidates = {
        "torch": lambda: torch.mm(x, weight.t(), out_dtype=torch.float32),
        "deep_gemm": lambda: deep_gemm_product(x, weight),
    }
    bucket = 1 << (x.shape[0] - 1).bit_length()
    return candidates[measured.choose(("product", bucket, *weight.shape), candidates, x.device)]()


def deep_gemm_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same by DeepGEMM's `bf16_gemm_nt`.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
    """
    library = _module("deep_gemm", "product", x.device)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    library.bf16_gemm_nt(x, weight, out)
    return out


def _pages(pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """A pool of records as FlashMLA takes it: [pages, page, 1, bytes]."""
    paged = pool if pool.dim() == 3 else pool.view(-1, page_size, pool.shape[-1])
    return paged.unsqueeze(2)


def flash_mla_decode(
    q: torch.Tensor,
    window_pool: torch.Tensor,
    window_slots: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    compressed_pool: torch.Tensor | None = None,
    compressed_slots: torch.Tensor | None = None,
    page_size: int = 64,
    return_lse: bool = False,
) -> Any:
    """`sparse_mla_decode` by FlashMLA: 528- and 288-byte records, which its kernels for compute capability 10.0 read.

    Args: as in `sparse_mla_decode`; 64 or 128 heads of 512 channels, bfloat16. `page_size` cuts a flat pool, whose
        slots it must divide.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
        ArgumentError: Other shapes.
    """
    library = _module("flash_mla", "sparse_mla_decode", q.device)
    pool_view(window_pool, FP8, 512)
    more: dict[str, Any] = {}
    if compressed_pool is not None and compressed_slots is not None:
        pool_view(compressed_pool, NVFP4, 512)
        more = {
            "extra_k_cache": _pages(compressed_pool, page_size),
            "extra_indices_in_kvcache": compressed_slots.int().unsqueeze(1),
        }
    return _flash_mla(library, q, _pages(window_pool, page_size), window_slots, sink, scale, return_lse, **more)


def flash_mla_decode_v4(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, sink: torch.Tensor | None, *, scale: float,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Sparse attention over V4's planar 584-byte records by FlashMLA.

    Args:
        q: bfloat16 [t, heads, 512]; 64 or 128 heads.
        pool: uint8 [pages, page_bytes] as in `v4_insert`; page_bytes must be page_size * 584 rounded up to 576.
        slots: int32 or int64 [t, k], -1 = absent.
        sink: float32 [heads] or None.
        scale: Logit scale.
        return_lse: Also return the natural log-sum-exp without the sink, float32 [t, heads].
    """
    library = _module("flash_mla", "sparse_mla_decode_v4", q.device)
    page = pool.shape[1] // V4.record_bytes
    cache = pool.as_strided(
        (pool.shape[0], page, 1, V4.record_bytes), (pool.stride(0), V4.record_bytes, V4.record_bytes, 1)
    )
    return _flash_mla(library, q, cache, slots, sink, scale, return_lse)


def _flash_mla(library, q, cache, slots, sink, scale, return_lse, **more) -> Any:
    require_dtype("q", q, torch.bfloat16)
    require(
        q.shape[1] in _HEADS and q.shape[2] == 512, f"q has shape {tuple(q.shape)}; allowed: 64 or 128 heads of 512"
    )
    schedule, _ = library.get_mla_metadata()
    out, lse = library.flash_mla_with_kvcache(
        q.unsqueeze(1), cache, None, None, 512, schedule, softmax_scale=scale, is_fp8_kvcache=True,
        indices=slots.int().unsqueeze(1), attn_sink=sink, **more,
    )  # fmt: skip
    return (out.squeeze(1), lse.squeeze(2)) if return_lse else out.squeeze(1)


class DeepEpParallel:
    """`ExpertParallel` by DeepEP V2's `ElasticBuffer`: bfloat16, at most `max_tokens` a rank, rows in DeepEP's own order.

    Args:
        experts: Experts in all; divisible by the group's size.
        max_tokens: Most tokens of a rank in one call.
        hidden: Channels of a token.
        top_k: Experts of a token.
        group: Process group; None is the default one.
        device: Where the tensors live.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
    """

    def __init__(
        self, experts: int, *, max_tokens: int, hidden: int, top_k: int, device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        library = _module("deep_ep", "ExpertParallel", device)
        self.group = group if group is not None else dist.group.WORLD
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        require(experts % self.size == 0, f"{experts} experts do not divide among {self.size} ranks")
        self.experts, self.max_tokens = experts, max_tokens
        self.local = experts // self.size
        self.first = self.rank * self.local
        self._buffer = library.ElasticBuffer(
            self.group, num_max_tokens_per_rank=max_tokens, hidden=hidden, num_topk=top_k, deterministic=True
        )

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """As `ExpertParallel.dispatch`."""
        require_dtype("x", x, torch.bfloat16)
        require(x.shape[0] <= self.max_tokens, f"{x.shape[0]} tokens; allowed: up to max_tokens, {self.max_tokens}")
        rows, local_ids, local_weights, handle, _event = self._buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=self.experts, num_max_tokens_per_rank=self.max_tokens,
            expert_alignment=1, do_cpu_sync=True,
        )  # fmt: skip
        # Buffers may be longer than what arrived.
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        return Dispatched(rows[:count], local_ids[:count].long(), local_weights[:count], (handle, rows.shape[0]))

    def combine(self, y: torch.Tensor, handle: Any) -> torch.Tensor:
        """As `ExpertParallel.combine`; sums in bfloat16 rows, as DeepEP has them."""
        inner, length = handle
        if length != y.shape[0]:
            y = torch.nn.functional.pad(y, (0, 0, 0, length - y.shape[0]))
        total, _weights, _event = self._buffer.combine(y.contiguous(), inner)
        return total
