"""The connector's scheduler side: which pages a step loads and which it saves. Knows block ids and keys, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """What one step moves: (page key, block id) pairs."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Tracked:
    keys: list[bytes]
    computed: int = 0  # tokens that vLLM's own cache had when the match was made
    blocks: list[int] = field(default_factory=list)
    saved: int = 0  # leading pages that are saved, loaded or known to be kept


class Ledger:
    """Follows requests by id.

    Args:
        page_size: tokens of a page, which is a block of vLLM.
        on_disk: whether the directory has a page; None without a directory.
        host_pages: pages that the workers' host memory holds; it is mirrored here as a set of keys, oldest first.
    """

    def __init__(self, page_size: int, on_disk: Callable[[bytes], bool] | None, host_pages: int) -> None:
        self._page_size = page_size
        self._on_disk = on_disk
        self._host_pages = host_pages
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._requests: dict[str, _Tracked] = {}
        self._step = Transfers()

    def match(self, request_id: str, keys: list[bytes], computed: int, length: int) -> int:
        """Tokens beyond `computed` that can be loaded; at least one token of `length` is left to compute."""
        self._requests[request_id] = _Tracked(keys, computed)
        if computed % self._page_size:
            return 0
        first, last = computed // self._page_size, (length - 1) // self._page_size
        found = first
        while found < min(last, len(keys)) and self._kept(keys[found]):
            found += 1
        return (found - first) * self._page_size

    def load(self, request_id: str, blocks: list[int], count: int) -> None:
        """`count` tokens behind those matched from are to be loaded into the request's blocks in the coming step."""
        tracked = self._requests.get(request_id)
        if tracked is None or not count:
            return
        first, last = tracked.computed // self._page_size, (tracked.computed + count) // self._page_size
        self._step.loads += list(zip(tracked.keys[first:last], blocks[first:last], strict=True))
        for key in tracked.keys[first:last]:
            self._touch(key)

    def schedule(self, request_id: str, blocks: list[int], fresh: bool, computed: int) -> None:
        """A step takes the request to `computed` tokens; `blocks` are all its blocks (`fresh`) or the new ones."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks) if fresh else tracked.blocks + list(blocks)
        full = min(computed // self._page_size, len(tracked.keys), len(tracked.blocks))
        for page in range(tracked.saved, full):
            if not self._kept(tracked.keys[page]):
                self._step.saves.append((tracked.keys[page], tracked.blocks[page]))
            self._touch(tracked.keys[page])
        tracked.saved = max(tracked.saved, full)

    def take(self) -> Transfers:
        """What the step moves; starts the next one."""
        step, self._step = self._step, Transfers()
        return step

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def forget(self, keys: set[bytes]) -> None:
        """These pages could not be loaded: they are not there."""
        for key in keys:
            self._host.pop(key, None)

    def _kept(self, key: bytes) -> bool:
        return key in self._host or (self._on_disk is not None and self._on_disk(key))

    def _touch(self, key: bytes) -> None:
        self._host[key] = None
        self._host.move_to_end(key)
        while len(self._host) > self._host_pages:
            self._host.popitem(last=False)
