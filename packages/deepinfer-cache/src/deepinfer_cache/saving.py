"""Pages that wait to be copied to a lower tier."""

from __future__ import annotations

from collections import deque


class SaveQueue:
    """Published pages in the order of the steps that fill them."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, page: int, key: bytes, step: int) -> None:
        """`page` stands for `key` as soon as `step` is complete."""
        self._queue.append((step, page, key))

    def take(self, completed: int, limit: int) -> list[tuple[int, bytes]]:
        """Remove and return up to `limit` pages whose step is complete. They may have been evicted since."""
        taken = []
        while self._queue and len(taken) < limit and self._queue[0][0] <= completed:
            _, page, key = self._queue.popleft()
            taken.append((page, key))
        return taken
