"""What a user can change so that more of a job is found in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from deepinfer_sched import JobPlan

from deepinfer_offline.planning.report import PlanReport

SAMPLE = 256  # prompts that are looked at closely
_SHINGLE = 16  # tokens; a run of this length that many prompts contain is no coincidence
_NOTHING = 0.01  # a hit rate that is not worth a word
_COMMON = 0.5  # share of the sample that must contain it


@dataclass(frozen=True, slots=True)
class Hidden:
    """Text that most prompts share but that no cache can find, because something that differs stands before it.

    Attributes:
        tokens: median length of it in a prompt.
        share: share of the sampled prompts that have it.
        parts_at: median token at which a prompt parts from the one it shares most with.
        examples: two prompts (indices into the sample) that part there.
    """

    tokens: int
    share: float
    parts_at: int
    examples: tuple[int, int]


def find_hidden(sample: Sequence[np.ndarray], block_size: int) -> Hidden | None:
    """Look for shared text behind differing text. None when there is too little of it to care."""
    if len(sample) < 4:
        return None
    shared, partners = _shared_lengths(sample)
    common = [max(0, int(mask[length:].sum())) for mask, length in zip(_common_masks(sample), shared, strict=True)]
    lengths = np.array([len(tokens) for tokens in sample])
    hidden = np.array(common)
    found = hidden >= np.maximum(2 * block_size, 0.1 * lengths)
    if found.mean() < _COMMON:
        return None
    first = int(np.flatnonzero(found)[0])
    return Hidden(
        tokens=int(np.median(hidden[found])),
        share=float(found.mean()),
        parts_at=int(np.median(np.array(shared)[found])),
        examples=(first, partners[first]),
    )


def advise(
    report: PlanReport, plan: JobPlan, sample: Sequence[np.ndarray], decode: Callable[[list[int]], str] | None = None
) -> tuple[str, ...]:
    """Sentences for the user, most useful first.

    Args:
        report: the hit rates.
        plan: the job.
        sample: token ids of some prompts, at most `SAMPLE`; none for a trace.
        decode: turns ids into text, to show where prompts part.
    """
    short = tuple(_short_prefix(plan, sample, report.engine))
    sizes = () if short and report.bound < _NOTHING else (*_size(report), *_order(report))
    return (*_hidden_text(plan, sample, decode), *short, *sizes)


def _hidden_text(
    plan: JobPlan, sample: Sequence[np.ndarray], decode: Callable[[list[int]], str] | None
) -> Iterator[str]:
    hidden = find_hidden(sample, plan.block_size)
    if hidden is None:
        return
    saved = int(hidden.tokens * hidden.share * len(plan.order))
    where = ""
    if decode is not None:
        texts = [
            decode(sample[i][max(hidden.parts_at - 6, 0) : hidden.parts_at + 10].tolist()) for i in hidden.examples
        ]
        where = f" ({texts[0]!r} against {texts[1]!r})"
    yield (
        f"{hidden.share:.0%} of the prompts part at about token {hidden.parts_at}{where} and go on with about {hidden.tokens} "
        "tokens that most others have too. A cache finds a prefix only up to the first token that differs: move what differs "
        f"(a timestamp, an id, a name) behind the shared text. That saves up to {saved:,} prefill tokens."
    )


def _short_prefix(plan: JobPlan, sample: Sequence[np.ndarray], engine: str) -> Iterator[str]:
    if len(sample) < 4:
        return
    typical = int(np.median(_shared_lengths(sample)[0]))
    lost = typical % plan.block_size
    price = "; on a CPU keep to multiples of 32, others are computed by slower code" if engine == "native" else ""
    if typical >= 8 and lost >= max(4, 0.25 * typical):
        yield (
            f"Prompts share about {typical} tokens, and blocks of {plan.block_size} tokens find {typical - lost} of them; "
            f"a smaller --block-size finds more{price}."
        )


def _size(report: PlanReport) -> Iterator[str]:
    if report.bound < _NOTHING:
        yield "Hardly any prompt starts like another one, so there is nothing to find: cache size and order do not matter."
        return
    enough = [size for size in report.sizes if max(size.planned_lru, size.planned_next_use) >= report.bound - 0.01]
    if enough:
        size = enough[0].cache_blocks
        yield f"A cache of {size:,} blocks ({size * report.block_size:,} tokens) is enough when the job is planned."
    elif report.sizes:
        best = max(max(size.planned_lru, size.planned_next_use) for size in report.sizes)
        yield (
            f"No size given comes within a point of the bound {report.bound:.1%}; the best reaches {best:.1%}. "
            "Give the cache more memory."
        )


def _order(report: PlanReport) -> Iterator[str]:
    gains = [(max(size.planned_lru, size.planned_next_use) - size.arrival_lru, size) for size in report.sizes]
    if not gains:
        return
    gain, size = max(gains, key=lambda item: item[0])
    if gain > 0.01:
        yield (
            f"Keep --order prefix: at {size.cache_blocks:,} blocks it finds {gain * report.blocks:,.0f} blocks more than "
            "running the file as it comes."
        )


def _shared_lengths(sample: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """For each prompt, the longest prefix it shares with another one of the sample, and which one that is."""
    order = sorted(range(len(sample)), key=lambda i: sample[i].tolist())
    shared, partner = [0] * len(sample), [order[1]] * len(sample)
    for left, right in itertools.pairwise(order):  # the best partner is a neighbour in sorted order
        length = _common_prefix(sample[left], sample[right])
        for one, other in ((left, right), (right, left)):
            if length > shared[one] or partner[one] == one:
                shared[one], partner[one] = length, other
    return shared, partner


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


def _common_masks(sample: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each prompt, bool for each token: it lies in a run of `_SHINGLE` tokens that much of the sample contains."""
    weights = np.random.default_rng(3).integers(0, 2**64, _SHINGLE, np.uint64) | np.uint64(1)
    names = [_shingles(tokens, weights) for tokens in sample]
    values, counts = np.unique(np.concatenate([np.unique(name) for name in names]), return_counts=True)
    frequent = values[counts >= _COMMON * len(sample)]
    masks = []
    for tokens, name in zip(sample, names, strict=True):
        mask = np.zeros(len(tokens), bool)
        for start in np.flatnonzero(np.isin(name, frequent)).tolist():
            mask[start : start + _SHINGLE] = True
        masks.append(mask)
    return masks


def _shingles(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    if len(tokens) < _SHINGLE:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(
        tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), _SHINGLE
    )
    return windows @ weights
