"""deep_gemm, flash_mla and deep_ep behind this package's own functions, where they are importable.

Signatures are those of FlashMLA's and DeepGEMM 2.8's copies in vLLM 0.33 and of DeepEP V2. `RAN` names what was compared
with the portable ops on a card; everything else was not run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .capability import RUN_ON, device_arch
from .checks import require, require_dims, require_dtype, require_inner
from .errors import UnsupportedDeviceError
from .layouts import FP8, NVFP4, V4, pool_view
from .parallel import Dispatched
from .providers import find_library, measured

#: What each library's kernel is built for, by compute capability. An architecture is named, never `>= 90`.
SUPPORT: dict[tuple[str, str], tuple[int, ...]] = {
    ("flash_mla", "sparse_mla_decode"): (100,),
    ("flash_mla", "sparse_mla_decode_v4"): (90, 100),
    ("flash_mla", "sparse_mla_prefill"): (90, 100),
    ("deep_gemm", "product"): (90, 100),
    ("deep_ep", "ExpertParallel"): (90, 100),
}
#: Ops that a library has by name but in other formats on compute capability 9.0, and for 10.0 in kernels never run here.
APART: dict[tuple[str, str], str] = {
    ("deep_gemm", "moe_experts"): "its FP4 experts are for 10.0; on 9.0 it multiplies FP8 or bfloat16 weights",
    ("deep_gemm", "mx_linear"): "its scales of 32 channels are for 10.0; on 9.0 they are float32, one for 128 x 128",
    ("deep_gemm", "indexer_logits"): "its FP4 keys are for 10.0; on 9.0 a key is FP8 with one float32 scale",
    ("deep_gemm", "mhc_step"): "its whole seam is for 10.0; 9.0 has the product of the streams alone",
}
#: Compared with the portable op on a card (vLLM 0.33.0's copies), by compute capability.
RAN: dict[tuple[str, str], tuple[int, ...]] = {
    ("flash_mla", "sparse_mla_decode_v4"): (90,),
    ("flash_mla", "sparse_mla_prefill"): (90,),
    ("deep_gemm", "product"): (90,),
}
_HEADS = (64, 128)
#: Keys of a tile of FlashMLA's: its kernels refuse a list that is no multiple (of two tiles at prefill).
_KEYS = 64


@dataclass(frozen=True)
class LibraryRow:
    """One line of the libraries' table: which copy serves an op on a device, or why none does."""

    library: str
    op: str
    copy: str | None
    reason: str | None
    note: str


def library_table(device: torch.device | str) -> list[LibraryRow]:
    """For every op that a library could serve: the copy found, or the reason why it does not serve the device."""
    arch = device_arch(device)
    rows = []
    for library, op in (*SUPPORT, *APART):
        reason = library_reason(library, op, device)
        ran = arch in RAN.get((library, op), ())
        note = "" if reason else f"compared and measured on {RUN_ON[arch]}" if ran else "not run"
        rows.append(LibraryRow(library, op, None if reason else _copy(library), reason, note))
    return rows


def _copy(library: str) -> str:
    """Module and version of the copy in use."""
    name = getattr(find_library(library).module, "__name__", library)
    for part in (name, name.rpartition(".")[0], name.partition(".")[0]):
        version = getattr(sys.modules.get(part), "__version__", None)
        if version:
            return f"{name} ({part} {version})"
    return name


def library_reason(library: str, op: str, device: torch.device | str) -> str | None:
    """Why a library does not serve an op on a device, or None."""
    if (library, op) in APART:
        return f"{library} does not serve {op}: {APART[library, op]}"
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
    require(
        pool.dim() == 3 or pool.shape[0] % page_size == 0,
        f"{pool.shape[0]} slots do not divide into pages of {page_size}",
    )
    paged = pool if pool.dim() == 3 else pool.view(-1, page_size, pool.shape[-1])
    return paged.unsqueeze(2)


def _planes(pool: torch.Tensor) -> torch.Tensor:
    """A pool of planar records as FlashMLA takes it; the last bytes of a page are padding."""
    require_dtype("pool", pool, torch.uint8)
    require_dims("pool", pool, 2)
    require_inner("pool", pool)
    page, apart = pool.shape[1] // V4.record_bytes, pool.stride(0)
    require(
        pool.shape[1] == V4.page_bytes(page) and apart % 16 == 0 and pool.data_ptr() % 16 == 0,
        f"pool pages have {pool.shape[1]} bytes, {apart} apart; {page} rows need {V4.page_bytes(page)}, at addresses in 16s",
    )
    return pool.as_strided((pool.shape[0], page, 1, V4.record_bytes), (apart, V4.record_bytes, V4.record_bytes, 1))


def _lists(slots: torch.Tensor, count: int, multiple: int) -> torch.Tensor:
    """Slots as FlashMLA takes them: int32 [t, 1, k], k filled up with -1, which alone means absent."""
    known = slots.masked_fill((slots < 0) | (slots >= count), -1).int()
    more = -(-max(known.shape[1], 1) // multiple) * multiple - known.shape[1]
    return torch.nn.functional.pad(known, (0, more), value=-1).unsqueeze(1)


def _query(q: torch.Tensor) -> torch.Tensor:
    """A query whose rows start at addresses in 16s, as bulk copies want them."""
    require_dtype("q", q, torch.bfloat16)
    require(
        q.dim() == 3 and q.shape[1] in _HEADS and q.shape[2] == 512,
        f"q has shape {tuple(q.shape)}; allowed: 64 or 128 heads of 512",
    )
    fits = q.data_ptr() % 16 == 0 and q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    return q if fits else q.contiguous()


def flash_mla_schedule(device: torch.device | str) -> Any:
    """How FlashMLA spreads a decode over a card: made by the first call that takes it, good for calls of equal shapes.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
    """
    return _module("flash_mla", "sparse_mla_decode_v4", torch.device(device)).get_mla_metadata()[0]


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
    schedule: Any = None,
) -> Any:
    """`sparse_mla_decode` by FlashMLA: 528- and 288-byte records, which its kernels for compute capability 10.0 read.

    Args: as in `sparse_mla_decode`; 64 or 128 heads of 512 channels, bfloat16. `page_size` cuts a flat pool, whose
        slots it must divide. `schedule`: of `flash_mla_schedule`; default a new one a call.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
        ArgumentError: Other shapes.
    """
    library = _module("flash_mla", "sparse_mla_decode", q.device)
    pool_view(window_pool, FP8, 512)
    more: dict[str, Any] = {}
    if compressed_pool is not None and compressed_slots is not None:
        pool_view(compressed_pool, NVFP4, 512)
        more = _extra(_pages(compressed_pool, page_size), compressed_slots)
    cache = _pages(window_pool, page_size)
    return _flash_mla(library, q, cache, window_slots, sink, scale, return_lse, schedule, **more)


def flash_mla_decode_v4(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    compressed_pool: torch.Tensor | None = None,
    compressed_slots: torch.Tensor | None = None,
    return_lse: bool = False,
    schedule: Any = None,
) -> Any:
    """Sparse attention over V4's planar 584-byte records by FlashMLA.

    Args:
        q: bfloat16 [t, heads, 512]; 64 or 128 heads.
        pool: uint8 [pages, page_bytes] as in `v4_insert`; page_bytes must be page_size * 584 rounded up to 576.
        slots: int32 or int64 [t, k]; -1 or out of range = absent, of no influence whatever the memory holds.
        sink: float32 [heads] or None.
        scale: Logit scale.
        compressed_pool: A second pool of such records, or None.
        compressed_slots: int32 or int64 [t, m] into it.
        return_lse: Also return the natural log-sum-exp without the sink, float32 [t, heads], +inf for empty rows.
        schedule: Of `flash_mla_schedule`; default a new one a call, which costs a launch.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
        ArgumentError: Other shapes.
    """
    library = _module("flash_mla", "sparse_mla_decode_v4", q.device)
    more: dict[str, Any] = {}
    if compressed_pool is not None and compressed_slots is not None:
        more = _extra(_planes(compressed_pool), compressed_slots)
    return _flash_mla(library, q, _planes(pool), slots, sink, scale, return_lse, schedule, **more)


def _extra(cache: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    lists = _lists(slots, cache.shape[0] * cache.shape[1], _KEYS)
    return {"extra_k_cache": cache, "extra_indices_in_kvcache": lists}


def _flash_mla(library, q, cache, slots, sink, scale, return_lse, schedule, **more) -> Any:
    q = _query(q)
    if q.shape[0] == 0:
        empty = torch.empty_like(q)
        return (empty, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else empty
    schedule = library.get_mla_metadata()[0] if schedule is None else schedule
    out, lse = library.flash_mla_with_kvcache(
        q.unsqueeze(1), cache, None, None, 512, schedule, softmax_scale=scale,
        is_fp8_kvcache=True, indices=_lists(slots, cache.shape[0] * cache.shape[1], _KEYS),
        attn_sink=None if sink is None else sink.float().contiguous(), **more,
    )  # fmt: skip
    return (out.squeeze(1), lse.squeeze(2)) if return_lse else out.squeeze(1)


def flash_mla_prefill(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """`sparse_mla_prefill` by FlashMLA: bfloat16, 64 or 128 heads of 512 channels; arguments as there.

    Raises:
        UnsupportedDeviceError: The library is not there or has no kernel for the device.
        ArgumentError: Other shapes.
    """
    library = _module("flash_mla", "sparse_mla_prefill", q.device)
    q = _query(q)
    require_dtype("kv", kv, torch.bfloat16)
    require(kv.dim() == 2 and kv.shape[1] == 512, f"kv has shape {tuple(kv.shape)}; allowed: [u, 512]")
    if q.shape[0] == 0 or kv.shape[0] == 0:
        return torch.zeros_like(q)
    if kv.stride(0) % 8 or kv.stride(1) != 1 or kv.data_ptr() % 16:
        kv = kv.contiguous()
    out, _most, _lse = library.flash_mla_sparse_fwd(
        q, kv.unsqueeze(1), _lists(indices, kv.shape[0], 2 * _KEYS), scale, 512,
        None if sink is None else sink.float().contiguous(),
    )  # fmt: skip
    return out


def prefill_reason(q: torch.Tensor, kv: torch.Tensor) -> str | None:
    """Why FlashMLA does not serve a `sparse_mla_prefill` of such tensors, or None."""
    if q.dtype != torch.bfloat16 or q.shape[1] not in _HEADS or q.shape[2] != 512 or kv.dtype != torch.bfloat16:
        return f"flash_mla takes bfloat16, 64 or 128 heads of 512; q is {q.dtype} {tuple(q.shape)}"
    return library_reason("flash_mla", "sparse_mla_prefill", q.device)


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
        """As `ExpertParallel.dispatch` without `most`."""
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
