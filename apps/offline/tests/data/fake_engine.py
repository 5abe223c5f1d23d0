"""A deterministic engine without a model, for tests of the job layer; as a script, `deepinfer` on top of it.

Answers depend on the prompt's tokens and the seed alone. Environment: FAKE_STEP_SECONDS slows every step down, FAKE_LOG
gets a line for every request that is computed, FAKE_FAIL names what goes wrong (`start`, `step`, or a word: prompts that
hold it fail inside the engine).
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from deepinfer_offline.engine.base import (
    Completion,
    EngineInfo,
    EngineStartError,
    EngineStats,
    PositionLogprobs,
    Request,
    RequestError,
    RequestOutput,
    TokenLogprob,
)

CONTEXT = 4096
RUNNING = 8


class FakeTemplate:
    """Renders roles in brackets."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        if any(message.get("content") == "refuse me" for message in messages):
            raise RequestError("the chat template refuses these messages", code="chat_template_error", param="messages")
        text = "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages)
        if options.get("tools"):
            text = f"<tools>{[tool['function']['name'] for tool in options['tools']]}{text}"
        return text + ("<assistant>" if options.get("add_generation_prompt", True) else "")


class FakeTokenizer:
    """A token is a byte."""

    chat_template = FakeTemplate()
    eos_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        return len(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.chat_template.render(messages, **options), add_special_tokens=False)

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        return bytes(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


class FakeEngine:
    """Implements the Engine protocol. Requests finish a few steps after they are added, not in their order."""

    def __init__(self, options: Any = None) -> None:
        self.options = options
        self.tokenizer = FakeTokenizer()
        self.info = EngineInfo(
            engine="native",
            model="fake-model",
            device="cpu",
            dtype="float32",
            max_model_len=CONTEXT,
            vocab_size=256,
            kv_tokens=1 << 20,
            kv_bytes=1 << 20,
            weight_bytes=0,
            block_size=16,
        )
        self.order: list[str] = []
        self._waiting: deque[Request] = deque()
        self._stats = EngineStats()
        self._pause = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
        self._log = os.environ.get("FAKE_LOG")
        self._fail = os.environ.get("FAKE_FAIL", "")
        self.closed = False

    def add_request(self, request: Request) -> None:
        assert type(request.prompt_token_ids) is list
        assert request.prompt_token_ids
        if b"too special" in bytes(request.prompt_token_ids):
            raise RequestError("the engine cannot run this", code="engine_refuses", param="prompt")
        self._waiting.append(request)
        self.order.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)

    def step(self) -> list[RequestOutput]:
        time.sleep(self._pause)
        if self._fail == "step" and self._stats.steps == 3:
            raise RuntimeError("the device is lost")
        self._stats.steps += 1
        batch = [self._waiting.popleft() for _ in range(min(RUNNING, len(self._waiting)))]
        batch.sort(key=lambda request: request.request_id)  # an order that has nothing to do with the input's
        return [self._answer(request) for request in batch]

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def stats(self) -> EngineStats:
        return self._stats

    def close(self) -> None:
        self.closed = True

    def _answer(self, request: Request) -> RequestOutput:
        prompt, params = bytes(request.prompt_token_ids), request.params
        if self._log:
            with open(self._log, "a") as log:
                log.write(f"{hashlib.sha256(prompt).hexdigest()} {request.request_id}\n")
        if self._fail and self._fail.encode() in prompt:
            error = RequestError("out of luck", code="engine_error")
            return RequestOutput(request.request_id, request.prompt_token_ids, [], error=error)
        outputs = [self._complete(prompt, request, index) for index in range(params.n)]
        stats = self._stats
        stats.prompt_tokens += len(prompt)
        stats.computed_prompt_tokens += len(prompt) - 3
        stats.cached_tokens += 3
        stats.generated_tokens += sum(len(answer.token_ids) for answer in outputs)
        stats.finished += 1
        stats.prefill_seconds += 0.001
        shown = None
        if params.prompt_logprobs is not None:
            shown = [None, *(_position(token, params.prompt_logprobs) for token in prompt[1:])]
        return RequestOutput(request.request_id, request.prompt_token_ids, outputs, 3, shown)

    def _complete(self, prompt: bytes, request: Request, index: int) -> Completion:
        params = request.params
        key = b"greedy" if params.greedy else f"{params.seed} {index}".encode()
        text = hashlib.sha256(prompt + key).hexdigest()[: params.max_tokens]
        if params.structured_outputs is not None:
            text = '{"city":"Paris"}'
        if b"call a tool" in prompt:
            text = 'Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        ids = list(text.encode())
        shown = [_position(token, params.logprobs) for token in ids] if params.logprobs is not None else None
        reason = "length" if len(ids) == params.max_tokens else "stop"
        return Completion(index, text, ids, reason, None, shown, -1.0)


def _position(token: int, top: int) -> PositionLogprobs:
    def facts(token: int, logprob: float, rank: int) -> TokenLogprob:
        raw = bytes([token])
        return TokenLogprob(token, logprob, rank, raw.decode(errors="replace"), raw)

    # a masked token has minus infinity, a broken one has no number
    worst = (float("-inf"), float("nan"))
    return PositionLogprobs(
        facts(token, -0.5, 1), [facts((token + i) % 256, worst[i % 2] if i else -0.5, i + 1) for i in range(top)]
    )


def create_engine(options: Any) -> FakeEngine:
    if os.environ.get("FAKE_FAIL") == "start":
        raise EngineStartError("the KV cache of 8.00 GiB does not fit the 4.00 GiB of free memory")
    return FakeEngine(options)


if __name__ == "__main__":
    import deepinfer_offline

    # the job layer needs sampling.params alone; importing the package would import torch, two seconds a start
    sampling = types.ModuleType("deepinfer_offline.sampling")
    sampling.__path__ = [str(os.path.join(os.path.dirname(deepinfer_offline.__file__), "sampling"))]
    sys.modules[sampling.__name__] = sampling
    factory = types.ModuleType("deepinfer_offline.engine.factory")
    factory.build_engine = create_engine  # type: ignore[attr-defined]
    factory.check_start = lambda options: None  # type: ignore[attr-defined]
    sys.modules[factory.__name__] = factory
    from deepinfer_offline.cli.main import main

    main()
