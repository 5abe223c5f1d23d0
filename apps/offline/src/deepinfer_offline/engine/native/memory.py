"""How much memory there is, and how many blocks of KV cache it holds."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from deepinfer_cache import CacheConfig
from deepinfer_cache import CacheGroup as PagedGroup

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import DEFAULT_PERIOD, format_bytes
from deepinfer_offline.models.base import CacheGroup, ModelFacts

_CPU_SHARE, _CPU_MOST = 0.5, 4 << 30  # of what is free: a laptop has other things to do
_DEVICE_SHARE = 0.9
_CGROUP_V2 = (Path("/sys/fs/cgroup"), "memory.max", "memory.current")
_CGROUP_V1 = (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")


def available_bytes(device: str) -> int:
    """Memory that this process may still take on a device, in bytes.

    What torch keeps of an engine that is gone is given back first, or the next one would not find it.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return min(_host_bytes(), _cgroup_bytes())
    module = getattr(torch, kind)
    gc.collect()
    module.empty_cache()
    free, _ = module.mem_get_info(device)
    return int(free)


def choose_kv_bytes(facts: ModelFacts, device: str, asked: int | None, buffers: int = 0) -> int:
    """Bytes for the KV cache: what was asked if it is there, else a share of what all else leaves.

    Args:
        facts: the model.
        device: where it runs.
        asked: the user's choice, or None.
        buffers: what the engine itself keeps on the device: token ids, inputs of steps, and what captured steps work in.

    Raises:
        EngineStartError: it does not fit; the message says the bytes asked and there.
    """
    there = available_bytes(device)
    needed = facts.weight_bytes + facts.workspace_bytes + buffers
    if needed + (asked or 0) > there:
        kv = f", the KV cache {format_bytes(asked)} (--kv-memory)" if asked else ""
        raise EngineStartError(
            f"too little memory on {device}: weights take {format_bytes(facts.weight_bytes)}, "
            f"a step {format_bytes(facts.workspace_bytes)}, buffers and captured steps {format_bytes(buffers)} "
            f"(less with a smaller --max-running, --max-tokens-per-step or --max-model-len){kv}; {format_bytes(there)} are there"
        )
    if asked is not None:
        return asked
    left = there - needed
    return int(min(left * _CPU_SHARE, _CPU_MOST)) if device == "cpu" else int(left * _DEVICE_SHARE)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A cache that fits its memory.

    Attributes:
        config: for `deepinfer_cache.CacheManager`.
        tokens: positions that its prefix groups hold.
        num_bytes: memory of all pools.
    """

    config: CacheConfig
    tokens: int
    num_bytes: int


def plan_cache(groups: tuple[CacheGroup, ...], kv_bytes: int, limits: CacheConfig) -> CachePlan:
    """Fill the memory with pages.

    Args:
        groups: what the model caches.
        kv_bytes: memory for all groups together.
        limits: everything but `num_pages`.

    Raises:
        EngineStartError: not even two pages beside the window and state groups.
    """
    page_size = limits.page_size
    page_bytes = prefix_page_bytes(groups, limits)
    fixed = sum(_fixed_bytes(group, paged, limits) for group, paged in zip(groups, limits.groups, strict=True))
    pages = (kv_bytes - fixed) // page_bytes if page_bytes else limits.max_running * limits.max_pages + 1
    if pages < 3:
        raise EngineStartError(
            f"{format_bytes(kv_bytes)} of KV memory are too little: {format_bytes(fixed + 3 * page_bytes)} are the least"
        )
    most = limits.max_running * limits.max_pages + _spare_pages(limits)
    pages = min(pages, most + 1)
    config = replace(limits, num_pages=pages - 1)  # page 0 exists besides them
    return CachePlan(config, config.num_pages * page_size, fixed + pages * page_bytes)


def choose_strategy(wanted: str, groups: tuple[CacheGroup, ...], name: str) -> str:
    """What `--window-strategy` means for a model, as `CacheConfig.strategy` says it.

    Args:
        wanted: the user's choice.
        groups: what the model caches.
        name: of the model.

    Raises:
        EngineStartError: a choice for a model without windows, or a period that parts a block.
    """
    if wanted == "auto":
        return "bounded"
    if not any(group.kind == "window" for group in groups):
        raise EngineStartError(f"--window-strategy {wanted}: {name} has no sliding windows to keep; leave it at auto")
    if not wanted.startswith("periodic"):
        return wanted
    multiple = math.lcm(*(math.lcm(1 if g.kind == "state" else g.block_size, g.hit_multiple) for g in groups))
    if wanted == "periodic":
        return f"periodic({-(-DEFAULT_PERIOD // multiple) * multiple})"
    if int(wanted.removeprefix("periodic(").removesuffix(")")) % multiple:
        raise EngineStartError(f"--window-strategy {wanted}: the period must be a multiple of {multiple} tokens")
    return wanted


def prefix_page_bytes(groups: tuple[CacheGroup, ...], config: CacheConfig) -> int:
    """Bytes of one page in all prefix groups together."""
    names = {group.name for group in config.prefix_groups}
    return sum(g.bytes_per_block * (config.page_size // g.block_size) for g in groups if g.name in names)


def paged_groups(groups: tuple[CacheGroup, ...]) -> tuple[PagedGroup, ...]:
    """The model's groups as the cache manager sees them. Bytes stay here: `plan_cache` accounts for them."""
    return tuple(PagedGroup(g.name, g.kind, g.block_size, window=g.window, hit_multiple=g.hit_multiple) for g in groups)


def _spare_pages(limits: CacheConfig) -> int:
    """Pages worth having beyond what all slots can hold: prefixes that nobody uses right now."""
    return 16 * limits.max_running * limits.max_pages


def _fixed_bytes(group: CacheGroup, paged: PagedGroup, limits: CacheConfig) -> int:
    if paged in limits.window_groups:
        return (limits.window_blocks(paged) + 1) * group.bytes_per_block
    return (limits.max_running + 1) * group.bytes_per_block if group.kind == "state" else 0


def _host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _cgroup_bytes() -> int:
    """What the container's limit leaves; a very large number without one."""
    for folder, limit, used in (_CGROUP_V2, _CGROUP_V1):
        try:
            there = int((folder / limit).read_text()) - int((folder / used).read_text())
            return there + _file_cache_bytes((folder / "memory.stat").read_text())
        except (OSError, ValueError):
            continue
    return 1 << 62


def _file_cache_bytes(text: str) -> int:
    """Cached file pages count as used, but are given back when memory is asked for."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
