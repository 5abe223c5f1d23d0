"""Does the bookkeeping of a cache add up? For idle moments and for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from deepinfer_cache.errors import IntegrityError
from deepinfer_cache.manager import CacheManager
from deepinfer_cache.window import WindowBlocks


def check(manager: CacheManager) -> None:
    """Compare everything that is stored twice. Costs about a microsecond a page; changes nothing.

    Raises:
        IntegrityError: something contradicts itself; `problems` lists all of it.
    """
    problems = [*_check_tables(manager), *_check_pages(manager), *_check_index(manager)]
    for blocks in manager._windows.values():
        problems.extend(_check_window(blocks))
    if problems:
        raise IntegrityError(problems)


def _check_tables(manager: CacheManager) -> Iterator[str]:
    for slot in range(manager.config.max_running):
        held, row = int(manager._held[slot]), manager.pages[slot]
        if (row[:held] == 0).any():
            yield f"slot {slot} holds {held} pages, but its table has {np.count_nonzero(row[:held])} of them"
        if row[held:].any():
            yield f"slot {slot} holds {held} pages, but its table goes on behind them"
        if held and not manager._open[slot]:
            yield f"slot {slot} is closed and holds {held} pages"
        if manager._committed[slot] > held:
            yield f"slot {slot} published {manager._committed[slot]} pages and holds {held}"


def _check_pages(manager: CacheManager) -> Iterator[str]:
    pool = manager._pool
    holders: Counter[int] = Counter()
    for slot in range(manager.config.max_running):
        holders.update(manager.pages[slot, : int(manager._held[slot])].tolist())
    for _, pages in manager._fenced:
        holders.update(pages)
    fenced = sum(len(pages) for _, pages in manager._fenced)
    if fenced != manager._fenced_pages:
        yield f"{fenced} pages wait behind fences, {manager._fenced_pages} are counted"
    free = Counter(pool.free_pages())
    for page in range(1, pool.num_pages + 1):
        if pool.refs[page] != holders[page]:
            yield f"page {page} has {pool.refs[page]} references and {holders[page]} holders"
        places = [bool(holders[page]), page in pool.evictor, *[True] * free[page]]
        if sum(places) != 1:
            where = f"used {places[0]}, cached {places[1]}, {free[page]} times free"
            yield f"page {page} must be in one place: {where}"
    if 0 in holders or 0 in free or 0 in pool.evictor:
        yield "page 0 is in use"


def _check_index(manager: CacheManager) -> Iterator[str]:
    pool = manager._pool
    free = set(pool.free_pages())
    for key, page in pool.index.items():
        if pool.keys[page] != key:
            yield f"the index leads to page {page}, which stands for something else"
    for page in range(1, pool.num_pages + 1):
        key = pool.keys[page]
        if key is not None and pool.index.get(key) != page:
            yield f"page {page} stands for a prefix that the index does not know"
        if key is not None and page in free:
            yield f"page {page} is free and still stands for a prefix"
    for page in pool.partial.pages():
        if page in free:
            yield f"page {page} is free and its first tokens are still offered"


def _check_window(blocks: WindowBlocks) -> Iterator[str]:
    name = blocks.group.name
    holders = Counter(block for held in blocks.holders() for block in held)
    free = blocks.free_blocks()
    unused = set(free)
    if len(unused) != len(free) or 0 in free or 0 in holders:
        yield f"{name}: a block is free twice, or block 0 is in use"
    for block in range(1, blocks.num_blocks + 1):
        if blocks.refs[block] != holders[block]:
            yield f"{name}: block {block} has {blocks.refs[block]} references and {holders[block]} holders"
        if (block in holders) == (block in unused):
            yield f"{name}: block {block} must be either held or free"
    held = sum(last - first for first, last in blocks._ranges())
    if np.count_nonzero(blocks.table) != held:
        yield f"{name}: the table has {np.count_nonzero(blocks.table)} blocks, {held} are held"
