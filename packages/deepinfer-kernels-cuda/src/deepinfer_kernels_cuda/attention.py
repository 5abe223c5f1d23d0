"""Sparse MLA: the public functions, their checks, and which kernel serves a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .capability import device_arch, sm_count
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .layouts import FP8, NVFP4, PoolView, pool_view
from .libraries import flash_mla_prefill, prefill_reason
from .native import NativeKernel, native_reason
from .providers import measured

_LOG2E = 1.4426950408889634
_INDEX_DTYPES = (torch.int32, torch.int64)


#: Keys of a tile, heads of a block.
_TILE, _HEADS = 64, 64
#: Blocks that may share one query, and up to how many queries (times blocks of heads) they do on 132 multiprocessors: more would
#: not all run at once, since the blocks of a cluster lie in one group of 16 or 18 multiprocessors (of 8 no more were timed).
_SPLITS = {2: 66, 4: 30, 8: 8}
_POOLS = "PqqPPqqqiiiiPPqqqiiiiPPqqPiif"
#: One build for each number of blocks that share a query.
_SPARSE_MLA = {
    splits: NativeKernel(
        "sparse_mla.cu",
        "sparse_mla",
        f"{_POOLS}i",
        threads=512,
        shared=227 * 1024,
        defines=(f"SPLITS={splits}",),
    )
    for splits in (1, *_SPLITS)
}


@dataclass(frozen=True)
class Few:
    """A build of the kernel for few queries: a cluster serves a unit, `heads` heads of a query, and takes all its keys at once.

    Attributes:
        splits: Blocks of a cluster.
        heads: 16 or 32.
        parts: Warps that share a tile of 16 keys: 1, 2 or 4.
        most: Units that run at once on 132 multiprocessors, a block each.
    """

    splits: int
    heads: int
    parts: int
    most: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 keys that a block has room for: as many keys as V4.1 selects with its window, and no more."""
        return -(-640 // (16 * self.splits))

    @property
    def shared(self) -> int:
        """Bytes of shared memory: keys, then queries and logits or what takes their place, the rest."""
        keys, slices = 16 * self.tiles, self.splits * -(-16 // self.splits)
        before = self.heads * (1024 + 4 * self.parts * (keys + 8))
        after = self.heads * (2 * keys + 16 + 68 * slices)
        return keys * 1024 + max(before, after) + 4 * (keys + self.heads) + 8 * self.splits * self.heads + 24

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of the source."""
        return (f"SPLITS={self.splits}", f"HEADS={self.heads}", f"PARTS={self.parts}", f"SHARED={self.shared}")

    def has_room(self, window_keys: int, other_keys: int) -> bool:
        """Whether the block with most of a query's tiles can hold them; the two pools are dealt out from opposite ends."""
        window, other = -(-window_keys // 16), -(-other_keys // 16)
        n = self.splits
        return max((other - rank + n - 1) // n + (window + rank) // n for rank in range(n)) <= self.tiles


#: Fastest first, where it has room.
FEW = (
    Few(10, 16, 2, 7),
    Few(8, 16, 2, 15),
    Few(6, 16, 2, 17),
    Few(5, 16, 2, 22),
    Few(4, 16, 2, 30),
    Few(6, 32, 2, 17),
    Few(5, 32, 2, 22),
)
_SPARSE_MLA_FEW = {
    few: NativeKernel(
        "sparse_mla_few.cu", "sparse_mla_few", _POOLS,
        threads=32 * few.tiles * few.parts, shared=few.shared, defines=few.defines,
    )
    for few in FEW
}  # fmt: skip


def choose_splits(queries: int, head_blocks: int, tiles: int, sms: int) -> int:
    """Blocks of one cluster that share a query's keys: as many as run at once, a tile a block or more."""
    units = queries * head_blocks
    return max((n for n, most in _SPLITS.items() if 132 * units <= most * sms and n <= tiles), default=1)


def choose_rest(queries: int, head_blocks: int, tiles: int, sms: int) -> int:
    """Queries that would begin one more round of a block each, where clusters serve them faster; 0 where none do.

    At 640 keys a round takes longer than a launch for up to 66 queries; with fewer keys that was not measured.
    """
    if queries * head_blocks <= sms or tiles < 10:
        return 0
    rest = -(-(queries * head_blocks % sms) // head_blocks)
    return rest if rest and choose_splits(rest, head_blocks, tiles, sms) > 1 else 0


def choose_few(
    queries: int,
    heads: int,
    window_keys: int,
    other_keys: int,
    sms: int,
    runs: Callable[[Few], bool] = lambda _few: True,
) -> Few | None:
    """The build whose clusters all run at once and have room for the keys, or None. `runs`: whether the device can hold one of
    its clusters at all, asked last since it builds the kernel.
    """
    at_once = (few for few in FEW if 132 * queries * -(-heads // few.heads) <= few.most * sms)
    return next((few for few in at_once if few.has_room(window_keys, other_keys) and runs(few)), None)


def _check(q: torch.Tensor, slots: torch.Tensor, name: str) -> None:
    require_dims(name, slots, 2)
    require_dtype(name, slots, *_INDEX_DTYPES)
    require_inner(name, slots)
    require(slots.shape[0] == q.shape[0], f"{name} has {slots.shape[0]} rows; q has {q.shape[0]}")


def sparse_mla_decode(
    q: torch.Tensor,
    window_pool: torch.Tensor,
    window_slots: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    compressed_pool: torch.Tensor | None = None,
    compressed_slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    splits: int | Few | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of single queries over paged records (V4.1 section 2.3), keys equal to values.

    Args:
        q: bfloat16 (or float32, portable kernel only) [t, heads, n], rotated; heads 1..128, n <= 512.
        window_pool: uint8 pool of `fp8` records of n channels.
        window_slots: int32 or int64 [t, w]; -1 or out of range = absent, never read.
        sink: float32 [heads] natural logits, +-inf allowed, or None.
        scale: Logit scale, usually n^-0.5.
        compressed_pool: uint8 pool of `nvfp4` records, or None.
        compressed_slots: int32 or int64 [t, k].
        out: Where to write; default a new tensor.
        splits: How blocks share a query's keys (sm90): 1, 2, 4 or 8 of them, or a build of the kernel for few queries, one
            of `FEW` with room for the keys; default what runs fastest.
        kernel: `sm90` or `portable`; default what the device supports best.
        return_lse: Also return the natural log-sum-exp without the sink, float32 [t, heads], +inf for empty rows.

    Returns:
        [t, heads, n] in q's dtype, not yet rotated back; rows without keys are zeros.

    Raises:
        ArgumentError: Shapes, dtypes or strides that the kernels do not take.
    """
    require_dims("q", q, 3)
    require_dtype("q", q, torch.bfloat16, torch.float32)
    require_inner("q", q)
    t, heads, n = q.shape
    require(1 <= heads <= 128, f"q has {heads} heads; allowed: 1..128")
    require(2 <= n <= 512 and n % 2 == 0, f"q has {n} channels; allowed: even, up to 512")
    _check(q, window_slots, "window_slots")
    require_same_device(q, window_pool, window_slots, sink, compressed_pool, compressed_slots)
    window = pool_view(window_pool, FP8, n)
    if (compressed_pool is None) != (compressed_slots is None):
        require(False, "compressed_pool and compressed_slots come together")
    extra_pool, extra_slots, extra = window_pool, window_slots[:, :0], PoolView(0, 0, 1, 0)
    if compressed_pool is not None and compressed_slots is not None:
        _check(q, compressed_slots, "compressed_slots")
        extra_pool, extra_slots, extra = compressed_pool, compressed_slots, pool_view(compressed_pool, NVFP4, n)
        if extra_slots.dtype != window_slots.dtype:
            extra_slots = extra_slots.to(window_slots.dtype)
    if sink is not None:
        require(tuple(sink.shape) == (heads,), f"sink has shape {tuple(sink.shape)}; it needs [{heads}]")
        sink = sink.float()
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(t, heads, dtype=torch.float32, device=q.device)
    if t:
        if kernel is None:
            kernel = "sm90" if _fits_sm90(q, out, window_pool, compressed_pool) else "portable"
        args = (q, window_pool, window_slots, window, extra_pool, extra_slots, extra, sink, out, lse, scale * _LOG2E)
        if kernel == "sm90":
            _launch_sm90(*args, splits=splits)
        else:
            _launch_portable(*args)
    return (out, lse) if return_lse else out


def _fits_sm90(q: torch.Tensor, out: torch.Tensor, *pools: torch.Tensor | None) -> bool:
    """Whether the Hopper kernel serves these tensors: its loads and stores are 16 bytes wide, its width is 512."""
    if device_arch(q.device) != 90 or q.dtype != torch.bfloat16 or q.shape[-1] != 512 or native_reason() is not None:
        return False
    wide = [t for t in (q, out, *pools) if t is not None]
    if any(not 0 <= s < 2**32 for pool in pools if pool is not None for s in pool.stride()):
        return False
    return all(t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1]) for t in wide)


def _launch_portable(q, pool, slots, view, extra_pool, extra_slots, extra, sink, out, lse, scale_log2) -> None:
    from .kernels.sparse_mla import sparse_mla_kernel

    t, heads, n = q.shape
    d = max(16, 1 << (n - 1).bit_length())
    bh = 16 if heads <= 16 else 32
    sparse_mla_kernel[(t, -(-heads // bh))](
        q, q.stride(0), q.stride(1),
        pool, slots, view.stride_page, view.stride_row, slots.stride(0), slots.shape[1], view.slots,
        extra_pool, extra_slots, extra.stride_page, extra.stride_row, extra_slots.stride(0), extra_slots.shape[1],
        extra.slots, sink, out, out.stride(0), out.stride(1), lse, heads, scale_log2,
        W_PAGE=view.page_size, X_PAGE=extra.page_size, HAS_SINK=sink is not None,
        CHANNELS=n, D=d, BH=bh, BN=32 if q.dtype == torch.bfloat16 else 16, num_warps=8, num_stages=1,
    )  # fmt: skip


def _page_shift(size: int) -> int:
    """log2 of a page size, -1 where it is no power of two."""
    return size.bit_length() - 1 if size & (size - 1) == 0 else -1


def _arguments(q, pool, slots, view, extra_pool, extra_slots, extra, sink, out, lse, scale_log2) -> tuple[float, ...]:
    """What both kernels for sm90 take, in order."""
    return (
        q.data_ptr(), q.stride(0), q.stride(1),
        pool.data_ptr(), slots.data_ptr(), view.stride_page, view.stride_row, slots.stride(0), slots.shape[1],
        view.slots, view.page_size, _page_shift(view.page_size),
        extra_pool.data_ptr(), extra_slots.data_ptr(), extra.stride_page, extra.stride_row, extra_slots.stride(0),
        extra_slots.shape[1], extra.slots, extra.page_size, _page_shift(extra.page_size),
        sink.data_ptr() if sink is not None else 0, out.data_ptr(), out.stride(0), out.stride(1), lse.data_ptr(), q.shape[1],
        int(slots.dtype == torch.int64), scale_log2,
    )  # fmt: skip


def _launch_sm90(q, pool, slots, view, extra_pool, extra_slots, extra, sink, out, lse, scale_log2, *, splits) -> None:
    """`splits`: a number, a `Few`, or None for what runs fastest: two launches where a last round would be nearly empty."""
    t, heads, _ = q.shape
    keys, sms = (slots.shape[1], extra_slots.shape[1]), sm_count(q.device)
    blocks, tiles = -(-heads // _HEADS), sum(-(-n // _TILE) for n in keys)
    rest = choose_rest(t, blocks, tiles, sms) if splits is None else 0
    if rest:
        for part, chosen in ((slice(0, t - rest), 1), (slice(t - rest, t), None)):
            _launch_sm90(
                q[part], pool, slots[part], view, extra_pool, extra_slots[part], extra, sink, out[part], lse[part], scale_log2,
                splits=chosen,
            )  # fmt: skip
        return
    arguments = _arguments(q, pool, slots, view, extra_pool, extra_slots, extra, sink, out, lse, scale_log2)
    splits = splits or choose_few(
        t, heads, *keys, sms, lambda few: _SPARSE_MLA_FEW[few].clusters(q.device, few.splits) > 0
    )
    if isinstance(splits, Few):
        require(splits in _SPARSE_MLA_FEW, f"splits is {splits}; allowed: {FEW}")
        require(splits.has_room(*keys), f"{splits} has no room for {keys[0]} and {keys[1]} keys")
        grid = (splits.splits, -(-heads // splits.heads), t)
        _SPARSE_MLA_FEW[splits](grid, *arguments, device=q.device, cluster=splits.splits)
        return
    splits = splits or choose_splits(t, blocks, tiles, sms)
    require(splits in _SPARSE_MLA, f"splits is {splits}; allowed: {', '.join(map(str, _SPARSE_MLA))}")
    items = t * blocks  # without a cluster a block takes several of them, one after the other
    grid = (items * splits if splits > 1 else min(items, sms), 1, 1)
    _SPARSE_MLA[splits](grid, *arguments, items, device=q.device, cluster=splits)


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attention of single queries over a dense workspace (window rows and compressed entries together).

    Args:
        q: bfloat16 or float32 [t, heads, n], rotated; heads 1..128, n <= 512.
        kv: [u, n] in q's dtype, already rounded to the cache formats.
        indices: int32 or int64 [t, l] into kv; -1 or out of range = absent.
        sink: float32 [heads] or None.
        scale: Logit scale.
        kernel: `portable` or `flash_mla`; default the one that measures faster, once a power of two of tokens.

    Returns:
        [t, heads, n] in q's dtype, not yet rotated back.

    Raises:
        ArgumentError: Shapes, dtypes or strides that the kernels do not take.
        UnsupportedDeviceError: `flash_mla` by name, where it is not.
    """
    require_dims("q", q, 3)
    require_dims("kv", kv, 2)
    require_inner("q", q)
    require_inner("kv", kv)
    _check(q, indices, "indices")
    t, heads, n = q.shape
    require(1 <= heads <= 128, f"q has {heads} heads; allowed: 1..128")
    require(kv.shape[1] == n, f"kv has {kv.shape[1]} channels; q has {n}")
    require_same_device(q, kv, indices, sink)
    require(kernel in (None, "portable", "flash_mla"), f"kernel is {kernel!r}; allowed: portable, flash_mla")
    if not t:
        return torch.empty_like(q)
    ways = {"portable": lambda: _prefill_portable(q, kv, indices, sink, scale)}
    if kernel == "flash_mla" or (kernel is None and prefill_reason(q, kv) is None):
        ways["flash_mla"] = lambda: flash_mla_prefill(q, kv, indices, sink, scale=scale)
    if kernel is None:
        key = ("sparse_mla_prefill", 1 << (t - 1).bit_length(), heads, indices.shape[1])
        kernel = measured.choose(key, ways, q.device) if len(ways) > 1 else "portable"
    return ways[kernel]()


def _prefill_portable(q, kv, indices, sink, scale) -> torch.Tensor:
    from .kernels.sparse_mla import sparse_mla_workspace_kernel

    t, heads, n = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(t, heads, dtype=torch.float32, device=q.device)
    wide = q.dtype == torch.float32
    bh = 16 if heads <= 16 or wide else min(64, 1 << math.ceil(math.log2(heads)))
    sparse_mla_workspace_kernel[(t, -(-heads // bh))](
        q, q.stride(0), q.stride(1), kv, kv.stride(0), kv.shape[0], indices, indices.stride(0), indices.shape[1],
        sink.float() if sink is not None else lse, out, out.stride(0), out.stride(1), lse, heads, scale * _LOG2E,
        HAS_SINK=sink is not None, CHANNELS=n, D=max(16, 1 << (n - 1).bit_length()), BH=bh,
        BN=16 if wide else 32, num_warps=8, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out
