"""The connector's scheduler side: which pages a step loads and which it saves. Knows block ids and keys, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from deepinfer_cache.adapters.vllm.groups import GroupLayout, longest_hit

NULL_BLOCK = 0  # vLLM's stand-in for a page that has left the window

Move = tuple[int, bytes, int]
"""(place of the group, page key, block id)."""


@dataclass(slots=True)
class Transfers:
    """What one step moves."""

    loads: dict[str, list[Move]] = field(default_factory=dict)  # by request
    saves: list[Move] = field(default_factory=list)


class Shelf:
    """What the tiers hold of one group's pages, as far as the scheduler knows.

    Args:
        on_disk: whether the directory has a page; None without a directory.
        host_pages: pages that the workers' host memory holds; it is mirrored here as a set of keys, oldest first.
    """

    def __init__(self, on_disk: Callable[[bytes], bool] | None, host_pages: int) -> None:
        self._on_disk = on_disk
        self._host_pages = host_pages
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._lost: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._host or (key not in self._lost and self._on_disk is not None and self._on_disk(key))

    def in_host_memory(self, key: bytes) -> bool:
        """Whether a page need not come from the directory."""
        return key in self._host

    def touch(self, key: bytes) -> None:
        """A page was written or used just now."""
        self._lost.discard(key)
        self._host[key] = None
        self._host.move_to_end(key)
        while len(self._host) > self._host_pages:
            self._host.popitem(last=False)

    def lose(self, key: bytes) -> None:
        """A page could not be read by some worker: it is not there until it is written again."""
        self._host.pop(key, None)
        self._lost.add(key)


@dataclass(slots=True)
class _Tracked:
    keys: list[list[bytes]]  # of each group
    computed: int  # tokens that vLLM's own cache had when the match was made
    blocks: list[list[int]]
    saved: list[int]  # leading pages of each group that are saved, loaded or known to be kept
    loads: list[Move] = field(default_factory=list)
    host_tokens: int = 0


class Ledger:
    """Follows requests by id.

    Args:
        groups: the model's kinds of cache.
        shelves: what is stored of each.
        alignment: a hit ends at a multiple of it.
    """

    def __init__(self, groups: Sequence[GroupLayout], shelves: Sequence[Shelf], alignment: int) -> None:
        self._groups = groups
        self._shelves = shelves
        self._alignment = alignment
        self._requests: dict[str, _Tracked] = {}
        self._coming: set[tuple[int, bytes]] = set()  # pages of loads that have not been reported
        self._step = Transfers()

    def match(self, request_id: str, keys: list[list[bytes]], computed: int, length: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; at least one token of `length` is left to compute.

        None while another request loads pages of the hit: a moment later they are on the device, to be shared. (A window
        on the device serves only requests that go on from the same place, so models with windows do not wait.)

        Args:
            request_id: the request; what was known of it before is forgotten.
            keys: page keys of its prompt, for each group.
            computed: tokens that the device has.
            length: tokens of the request.
        """
        groups = len(self._groups)
        self._requests[request_id] = _Tracked(keys, computed, [[] for _ in range(groups)], [0] * groups)
        prompt = min(len(k) * group.block_size for k, group in zip(keys, self._groups, strict=True))
        hit = longest_hit(
            self._groups,
            self._alignment,
            computed,
            min(length - 1, prompt),
            lambda place, page: keys[place][page] in self._shelves[place],
        )
        full = all(group.window is None for group in self._groups)
        for place, group in enumerate(self._groups):
            if full and any((place, keys[place][page]) in self._coming for page in group.pages(computed, hit)):
                return None
        return hit - computed

    def load(self, request_id: str, blocks: Sequence[Sequence[int]], count: int) -> None:
        """`count` tokens behind those matched from are to be loaded into the request's blocks in the coming step.

        Raises:
            RuntimeError: vLLM keeps another window than this package knows; loading would leave pages unwritten.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or not count:
            return
        tracked.loads, most = [], 0
        for place, (group, shelf) in enumerate(zip(self._groups, self._shelves, strict=True)):
            pages = group.pages(tracked.computed, tracked.computed + count)
            held = blocks[place]
            outside = held[tracked.computed // group.block_size : pages.start]
            if any(b != NULL_BLOCK for b in outside) or NULL_BLOCK in held[pages.start : pages.stop]:
                raise RuntimeError(
                    f"vLLM holds other pages of cache group {group.index} than its window of {group.window} tokens"
                )
            moves = [(place, tracked.keys[place][page], held[page]) for page in pages]
            if len(moves) > most:
                most = len(moves)
                tracked.host_tokens = sum(shelf.in_host_memory(key) for _, key, _ in moves) * group.block_size
            for _, key, _ in moves:
                shelf.touch(key)
            tracked.loads += moves
        self._coming.update((place, key) for place, key, _ in tracked.loads)
        self._step.loads[request_id] = tracked.loads

    def host_tokens(self, request_id: str, count: int) -> int:
        """How many of `count` loaded tokens came from host memory; the others came from the directory."""
        tracked = self._requests.get(request_id)
        return min(tracked.host_tokens, count) if tracked is not None else 0

    def schedule(self, request_id: str, blocks: Sequence[Sequence[int]], fresh: bool, computed: int) -> None:
        """A step takes the request to `computed` tokens; `blocks` are all its blocks (`fresh`) or the new ones."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        for place, (group, shelf) in enumerate(zip(self._groups, self._shelves, strict=True)):
            if fresh:
                tracked.blocks[place] = list(blocks[place])
            else:
                tracked.blocks[place].extend(blocks[place])
            keys, held = tracked.keys[place], tracked.blocks[place]
            full = min(computed // group.block_size, len(keys), len(held))
            for page in range(tracked.saved[place], full):
                if held[page] == NULL_BLOCK:
                    continue
                if keys[page] not in shelf:
                    self._step.saves.append((place, keys[page], held[page]))
                shelf.touch(keys[page])
            tracked.saved[place] = max(tracked.saved[place], full)

    def loaded(self, requests: Iterable[str], failed: Collection[str]) -> None:
        """Loads have ended. Pages of failed ones count as lost: they are computed, and then saved anew."""
        for request_id in requests:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            self._end_loads(tracked)
            if request_id in failed:
                for place, key, _ in tracked.loads:
                    self._shelves[place].lose(key)

    def _end_loads(self, tracked: _Tracked) -> None:
        self._coming.difference_update((place, key) for place, key, _ in tracked.loads)

    def take(self) -> Transfers:
        """What the step moves; starts the next one."""
        step, self._step = self._step, Transfers()
        return step

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._end_loads(tracked)
