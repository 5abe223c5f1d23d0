"""The contract between the job layer and an engine: requests in, finished outputs out, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from deepinfer_offline.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that this engine cannot run. The job layer answers it with status 400; other requests go on.

    Attributes:
        code: machine-readable reason, e.g. `context_length_exceeded`.
        param: the offending field of the request body, if one field is to blame.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class EngineStartError(RuntimeError):
    """The engine cannot start (no such model, too little memory, ...). The message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: the prompt, at least one id.
        params: how to sample; `params.n` completions share the prompt.
        priority: lower runs earlier; ties run in the order of arrival.
        grammar: a compiled grammar of `deepinfer_structured`, or None.
        prompt: the text that the ids were made from, for messages only.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    grammar: Any = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability (natural log) of one token, and its rank (1 = most likely) under the model's distribution."""

    token_id: int
    logprob: float
    rank: int
    decoded: str
    raw: bytes  # the token's own bytes: a token can hold part of a character


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The drawn (or prompt) token of one position and the most likely ones, likeliest first."""

    chosen: TokenLogprob
    top: Sequence[TokenLogprob] = ()


@dataclass(slots=True)
class Completion:
    """One of the n answers. `text`, `token_ids` and `logprobs` always describe the same tokens.

    `stop_reason` is the stop string or stop id that ended it, None for the end-of-sequence token or the length limit.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request, its n completions in index order.

    `num_cached_tokens` counts prompt tokens found in the prefix cache when the request was first admitted.
    `error` is set (and `outputs` may be empty) when the request failed inside the engine.
    `notes` say what the request's grammar does not enforce, if anything.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: RequestError | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs: filled once at start. `notes` are sentences for the user, e.g. that slower code serves and why."""

    engine: str  # "native" or "vllm"
    model: str  # the name that requests are answered under
    device: str  # e.g. "cpu (AMD EPYC, 2 threads)"
    dtype: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    kv_tokens: int  # tokens that fit the KV memory
    kv_bytes: int
    weight_bytes: int
    block_size: int
    notes: tuple[str, ...] = ()
    graph_bytes: int = 0  # device memory set aside for captured steps


@dataclass(slots=True)
class EngineStats:
    """Counters since the start. Times are seconds."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache (first admission only)
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    prefill_seconds: float = 0.0  # steps that carry prompt tokens
    decode_seconds: float = 0.0  # steps that carry decode rows only
    peak_kv_blocks: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0  # rows that verified drafts: one sequence in one step
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Runs requests. Single-threaded: one caller adds, steps and aborts."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Any:
        """`deepinfer_offline.text.tokenizer.Tokenizer`, or None for a model folder without one."""

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and then queues nothing, when it can never run."""

    def abort(self, request_id: str) -> None:
        """Forget a request; it yields no output. Unknown ids are ignored."""

    def step(self) -> list[RequestOutput]:
        """Run one step; return what finished, in no particular order."""

    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats:
        """A snapshot; does not change the engine."""

    def close(self) -> None: ...
