"""The loop's own state of a request and of each of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from deepinfer_sched import Sequence as Scheduled

from deepinfer_offline.engine.base import Completion, FinishReason, Request
from deepinfer_offline.sampling.random import child_seed, request_seed
from deepinfer_offline.text.watch import TextWatch

if TYPE_CHECKING:
    from deepinfer_offline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What the sampler reports of one drawn token: log-probability, rank, and the k likeliest tokens."""

    logprob: float
    rank: int
    top_ids: np.ndarray
    top_values: np.ndarray


@dataclass(frozen=True, slots=True)
class End:
    """Why an answer ended, and the text and tokens it keeps (None: all of them)."""

    reason: FinishReason
    stop_reason: str | int | None = None
    text: str | None = None
    num_tokens: int | None = None
    hide_last: bool = False  # the last token is a stop id: kept in the ids, not in the text


@dataclass(slots=True, eq=False)
class Answer:
    """One of the n answers of a request while it is made.

    Attributes:
        group: the request it belongs to.
        index: 0..n-1.
        seq: the scheduler's sequence; `seq.tokens` grows when the scheduler applies a step.
        seed: key of its stream of random numbers.
        limit: tokens, prompt included, at which it ends.
        matcher: its place in the grammar, or None.
        drafts: ids that its next row may verify; the row's masks follow them.
        watch: looks for stop strings, or None.
        facts: one entry a token when log-probabilities are wanted.
    """

    group: Group
    index: int
    seq: Scheduled
    seed: int
    limit: int
    matcher: Any = None
    drafts: Sequence[int] = ()
    watch: TextWatch | None = None
    facts: list[TokenFacts] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether a drawn token matters by its id alone."""
        return self.matcher is None and self.watch is None and self.group.request.params.logprobs is None

    def take(self, token: int, facts: TokenFacts | None, place: int) -> End | None:
        """Account for one drawn token, `place` tokens behind those that the scheduler has applied.

        Stop ids come before stop strings, and these before the length limit.

        A stop string that cuts an answer inside its grammar ends it as the length limit does, with reason `length`:
        what says `stop` is complete.

        Raises:
            GrammarBrokenError: the grammar does not allow the token.
        """
        count = len(self.seq.tokens) - self.seq.num_prompt + place + 1
        if facts is not None:
            self.facts.append(facts)
        params = self.group.request.params
        if self.matcher is not None and self.matcher.accept([token]) != 1:
            raise GrammarBrokenError(token, count)
        if count > params.min_tokens or self.matcher is not None:
            if token in self.group.stop_ids:
                return End("stop", token, hide_last=not params.include_stop_str_in_output)
            if token in self.group.eos_ids:
                return End("stop", None, hide_last=not params.include_stop_str_in_output)
        if self.watch is not None and (stop := self.watch.push(token)) is not None:
            text, kept = self.watch.cut(stop)
            return End("stop" if self._is_complete(text, kept, count) else "length", stop.string, text, kept)
        if self.matcher is not None and self.matcher.is_terminated:
            return End("stop")
        if self.seq.num_prompt + count >= self.limit:
            return End("length")
        return None

    def _is_complete(self, text: str, kept: int, count: int) -> bool:
        """Whether the grammar lets the answer end where a stop string cuts it: `text`, which `kept` of `count` tokens hold."""
        if self.matcher is None:
            return True
        assert self.watch is not None
        if (self.watch.ends[kept - 1] if kept else 0) != len(text):
            return False  # cut inside a token
        place = self.matcher.clone()
        place.rollback(count - kept)
        return place.is_accepting or place.is_terminated


class GrammarBrokenError(RuntimeError):
    """A token was drawn that the grammar forbids; the fault is the engine's, and ends one request."""

    def __init__(self, token: int, count: int) -> None:
        super().__init__(f"token {token}, number {count} of the answer, is not allowed by the grammar")


@dataclass(slots=True, eq=False)
class Group:
    """A request and its answers.

    Attributes:
        request: what was asked.
        stop_ids: stop ids of the request.
        eos_ids: end-of-sequence ids that count; empty with `ignore_eos`.
        answers: the n answers.
        completions: finished answers by index.
        prompt_facts: by prompt position, for `prompt_logprobs`.
        cached_tokens: prompt tokens found in the prefix cache when it was first admitted; -1 before.
        notes: what its grammar does not enforce.
    """

    request: Request
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    answers: list[Answer] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    prompt_facts: dict[int, TokenFacts] = field(default_factory=dict)
    cached_tokens: int = -1
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        return len(self.completions) == self.request.params.n


def stop_sets(request: Request, eos_ids: Sequence[int] | frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """(stop ids, end-of-sequence ids that count) of a request. An id that is in both counts as a stop id."""
    params = request.params
    return frozenset(params.stop_token_ids or ()), frozenset() if params.ignore_eos else frozenset(eos_ids)


def make_answers(
    group: Group, grammar: Any, first_id: int, max_model_len: int, engine_seed: int, tokenizer: Tokenizer | None
) -> list[Answer]:
    """The n answers of a request, each with its sequence, random stream, stop strings and place in the grammar."""
    request, params = group.request, group.request.params
    seed = params.seed if params.seed is not None else request_seed(engine_seed, request.request_id)
    length = len(request.prompt_token_ids)
    room = max_model_len - length
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    group.notes = grammar.notes if grammar is not None else ()
    return [
        Answer(
            group,
            index,
            Scheduled(
                first_id + index,
                list(request.prompt_token_ids),
                most,
                priority=request.priority,
                constrained=grammar is not None,
                read_cache=params.prompt_logprobs is None or index > 0,
            ),
            child_seed(seed, index),
            length + most,
            matcher=grammar.matcher() if grammar is not None else None,
            watch=text_watch(request, tokenizer),
        )
        for index in range(params.n)
    ]


def text_watch(request: Request, tokenizer: Tokenizer | None) -> TextWatch | None:
    """A watch for the request's stop strings, or None if it has none."""
    params = request.params
    if not params.stop or tokenizer is None:
        return None
    return TextWatch(
        tokenizer,
        params.stop,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        include_stop=params.include_stop_str_in_output,
    )
