"""From the loop's state to what the caller sees: completions, log-probabilities, finished requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepinfer_offline.engine.base import Completion, PositionLogprobs, RequestError, RequestOutput, TokenLogprob
from deepinfer_offline.engine.native.answer import Answer, End, Group, TokenFacts

if TYPE_CHECKING:
    from deepinfer_offline.sampling.batch import Logprobs
    from deepinfer_offline.text.tokenizer import Tokenizer


def completion(answer: Answer, end: End, tokenizer: Tokenizer | None) -> Completion:
    """The finished answer. Its text, ids and log-probabilities describe the same tokens."""
    params = answer.group.request.params
    ids = answer.seq.output_tokens[: end.num_tokens]
    facts = answer.facts[: len(ids)]
    text = end.text
    if text is None:
        shown = ids[:-1] if end.hide_last else ids
        skip = params.skip_special_tokens
        text = tokenizer.decode(shown, skip_special_tokens=skip) if tokenizer is not None else ""
    wanted = params.logprobs
    return Completion(
        index=answer.index,
        text=text,
        token_ids=ids,
        finish_reason=end.reason,
        stop_reason=end.stop_reason,
        logprobs=None if wanted is None else _positions(ids, facts, wanted, tokenizer),
        cumulative_logprob=None if wanted is None else float(sum(fact.logprob for fact in facts)),
    )


def finished(group: Group, tokenizer: Tokenizer | None) -> RequestOutput:
    """A request whose answers are all done."""
    request = group.request
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[group.completions[index] for index in sorted(group.completions)],
        num_cached_tokens=max(group.cached_tokens, 0),
        prompt_logprobs=_prompt_logprobs(group, tokenizer),
        notes=group.notes,
    )


def failed(group: Group, error: Exception) -> RequestOutput:
    """A request that failed inside the engine; answers that were done already are kept."""
    request = group.request
    if not isinstance(error, RequestError):
        error = RequestError(f"the engine failed on this request: {error}", code="engine_error")
    done = [group.completions[index] for index in sorted(group.completions)]
    return RequestOutput(request.request_id, request.prompt_token_ids, done, max(group.cached_tokens, 0), error=error)


class FactsReader:
    """Log-probabilities of one step, by draw.

    Args:
        found: host tensors; `rows` indexes the draws, ascending.
        draw_rows: int64 [n], plan row of each draw.
    """

    def __init__(self, found: Logprobs | None, draw_rows: np.ndarray) -> None:
        self._by_row: dict[int, list[int]] = {}
        if found is None:
            return
        self._chosen, self._ranks = found.chosen.tolist(), found.ranks.tolist()
        self._ids, self._values = found.top_ids.numpy(), found.top_values.numpy()
        for place, row in enumerate(draw_rows[found.rows].tolist()):
            self._by_row.setdefault(row, []).append(place)

    def get(self, plan_row: int, nth: int) -> TokenFacts | None:
        """Facts of the nth draw of a plan row, or None if that row did not ask."""
        places = self._by_row.get(plan_row)
        return None if places is None else self._facts(places[nth])

    def _facts(self, place: int) -> TokenFacts:
        return TokenFacts(self._chosen[place], self._ranks[place], self._ids[place], self._values[place])


def read_prompt(first: int, values: Logprobs, into: dict[int, TokenFacts]) -> None:
    """Store facts of prompt tokens `first + 1 ...` by their position."""
    reader = FactsReader(values, np.zeros(len(values.chosen), np.int64))
    for nth in range(len(values.chosen)):
        facts = reader.get(0, nth)
        assert facts is not None
        into[first + 1 + nth] = facts


def _positions(
    ids: list[int], facts: list[TokenFacts], top: int, tokenizer: Tokenizer | None
) -> list[PositionLogprobs]:
    return [_position(token, fact, top, tokenizer) for token, fact in zip(ids, facts, strict=True)]


def _position(token: int, fact: TokenFacts, top: int, tokenizer: Tokenizer | None) -> PositionLogprobs:
    count = len(fact.top_ids) if top < 0 else min(top, len(fact.top_ids))
    ids, values = fact.top_ids[:count].tolist(), fact.top_values[:count].tolist()
    likeliest = [_named(ids[place], values[place], place + 1, tokenizer) for place in range(count)]
    return PositionLogprobs(_named(token, fact.logprob, fact.rank, tokenizer), likeliest)


def _named(token: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> TokenLogprob:
    raw = tokenizer.vocabulary[token] if tokenizer is not None else b""
    return TokenLogprob(token, logprob, rank, raw.decode("utf-8", errors="replace"), raw)


def _prompt_logprobs(group: Group, tokenizer: Tokenizer | None) -> list[PositionLogprobs | None] | None:
    wanted, prompt = group.request.params.prompt_logprobs, group.request.prompt_token_ids
    if wanted is None:
        return None
    rest = [_position(prompt[place], group.prompt_facts[place], wanted, tokenizer) for place in range(1, len(prompt))]
    return [None, *rest]
