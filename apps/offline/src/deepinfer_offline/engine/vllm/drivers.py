"""Two ways to drive vLLM from a plain loop: its step engine for one copy of the model, its asynchronous one for several."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import dataclass
from typing import Any, Protocol

RUN = 16
"""Requests in a row that go to one copy: neighbours in the job's order share prefixes, and a cache is one copy's."""
_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that vLLM did not take."""

    request_id: str
    error: Exception


class Driver(Protocol):
    """What the engine needs of vLLM."""

    config: Any

    def add(self, request_id: str, prompt: Any, params: Any, priority: int) -> None:
        """Queue a request. May raise what vLLM raises for one that it refuses, or report it by `step`."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        ...

    def step(self) -> list[Any]:
        """Work or wait for a moment; returns finished `vllm.RequestOutput`s and `Refused`s."""
        ...

    def close(self) -> None:
        """Stop vLLM's processes."""
        ...


class StepDriver:
    """One copy of the model: `vllm.v1.engine.llm_engine.LLMEngine`.

    Args:
        arguments: keyword arguments of `EngineArgs`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.config = self._engine.vllm_config

    def add(self, request_id: str, prompt: Any, params: Any, priority: int) -> None:
        self._engine.add_request(request_id, prompt, params, priority=priority)

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def step(self) -> list[Any]:
        return [output for output in self._engine.step() if output.finished]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class ParallelDriver:
    """Several copies of the model: `vllm.v1.engine.async_llm.AsyncLLM` in a thread of its own.

    vLLM's step engine waits for ever for copies that somebody else should have started, so it is not used here.

    Args:
        arguments: keyword arguments of `AsyncEngineArgs`; `data_parallel_size` is the number of copies.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True)
        self._thread.start()
        self._engine = asyncio.run_coroutine_threadsafe(_open(arguments), self._loop).result()
        self.config = self._engine.vllm_config
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tasks: dict[str, Any] = {}
        self._copy_of: dict[str, int] = {}
        self._load = [0] * arguments["data_parallel_size"]
        self._current, self._in_a_row = 0, 0

    def add(self, request_id: str, prompt: Any, params: Any, priority: int) -> None:
        if self._in_a_row >= RUN:
            self._current, self._in_a_row = self._load.index(min(self._load)), 0
        self._in_a_row += 1
        self._load[self._current] += 1
        self._copy_of[request_id] = self._current
        answer = self._answer(request_id, prompt, params, priority, self._current)
        self._tasks[request_id] = asyncio.run_coroutine_threadsafe(answer, self._loop)

    async def _answer(self, request_id: str, prompt: Any, params: Any, priority: int, copy: int) -> None:
        try:
            async for output in self._engine.generate(
                prompt, params, request_id, priority=priority, data_parallel_rank=copy
            ):
                if output.finished:
                    self._ended.put((request_id, output))
        except Exception as error:  # a refusal is the request's; the death of the engine is everybody's, see `step`
            self._ended.put((request_id, Refused(request_id, error)))

    def abort(self, request_id: str) -> None:
        self._forget(request_id)
        asyncio.run_coroutine_threadsafe(self._engine.abort(request_id), self._loop)

    def step(self) -> list[Any]:
        found = []
        try:
            found.append(self._ended.get(timeout=_WAIT_SECONDS))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        for request_id, outcome in found:
            self._forget(request_id)
            if isinstance(outcome, Refused) and self._engine.errored:
                raise outcome.error
        return [outcome for _, outcome in found]

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        self._engine.shutdown()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _forget(self, request_id: str) -> None:
        if self._tasks.pop(request_id, None) is not None:
            self._load[self._copy_of.pop(request_id)] -= 1


async def _open(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
