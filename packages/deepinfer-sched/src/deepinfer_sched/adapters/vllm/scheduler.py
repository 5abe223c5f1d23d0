"""vLLM's asynchronous scheduler with a waiting queue that follows the prefix tree. A shell over `PrefixQueue`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deepinfer_sched.adapters.vllm import compat, translate
from deepinfer_sched.prefix_queue import PrefixQueue

compat.require_supported()

from vllm.logger import init_logger  # noqa: E402  (the check above must speak before vLLM's modules are touched)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy  # noqa: E402

logger = init_logger("vllm.deepinfer_sched")


class PrefixRequestQueue(RequestQueue):
    """vLLM's queue interface over `PrefixQueue`."""

    def __init__(self, patience: int) -> None:
        self._queue: PrefixQueue[Any] = PrefixQueue(patience)

    def add_request(self, request: Any) -> None:
        self._queue.push(request, translate.prefix_key(request))

    def pop_request(self) -> Any:
        return self._queue.pop()

    def peek_request(self) -> Any:
        return self._queue.peek()

    def prepend_request(self, request: Any) -> None:
        self._queue.push_front(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self._queue.push_front(request)

    def remove_request(self, request: Any) -> None:
        self._queue.remove(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in set(requests) & set(self._queue):
            self._queue.remove(request)

    def __bool__(self) -> bool:
        return len(self._queue) > 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue)


class PrefixScheduler(AsyncScheduler):
    """Admits waiting requests in the order of the prefix tree, so that a shared prefix is used up before it is evicted.

    Everything else, asynchronous scheduling included, is vLLM's. With `--scheduling-policy priority` vLLM's own order
    stands, since a priority is a stronger wish than a cache hit.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = translate.options(self.vllm_config.additional_config)
        if self.policy == SchedulingPolicy.PRIORITY:
            logger.warning("deepinfer-sched leaves the order to --scheduling-policy priority")
            return
        if not self.vllm_config.cache_config.enable_prefix_caching:
            logger.warning(
                "deepinfer-sched orders by shared prefixes, and prefix caching is off: nothing will be shared"
            )
        self.waiting = PrefixRequestQueue(chosen["patience"])
