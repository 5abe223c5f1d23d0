"""Sampled answers with drafts follow the model's own distribution, which is computed here from its softmax.

The model is the toy whose logits hash the whole prefix, so the probability of every first, second and third token is known
exactly; the drafter guesses what other answers to the same prompt said, so its guesses are often, not always, kept. Pearson's
chi-square over single tokens and pairs, cells below ten expected answers pooled: p >= 1e-3 from these seeds, and p < 1e-6
against the same probabilities at a temperature that is off by a fifth, so that the test can fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.engine.native.speculation import Speculation
from deepinfer_offline.sampling import SamplingParams
from deepinfer_specdec.drafters.suffix import SuffixDrafter
from toy_engine import make_engine, prefix_hash, run, toy_logits

PROMPT = [40, 41, 42, 43, 40, 41, 42]
DRAWS, EACH, TOP, TEMPERATURE = 8_192, 1_024, 12, 0.4
Answer = tuple[int, ...]


def drawn() -> tuple[Counter[Answer], dict]:
    """Answers of three tokens, by how often they came up, and what speculation reports."""
    plain = make_engine(ahead=1, running=64, budget=512, pages=1_000)
    parts = plain._parts
    speculation = Speculation(SuffixDrafter(), parts.scheduler, parts.runner)
    speculation.force(7)
    engine = NativeEngine(replace(parts, speculation=speculation))
    params = SamplingParams(n=EACH, max_tokens=3, temperature=TEMPERATURE, top_k=TOP, ignore_eos=True)
    requests = [Request(str(seed), PROMPT, replace(params, seed=seed)) for seed in range(DRAWS // EACH)]
    found = run(engine, requests)
    return Counter(tuple(a.token_ids) for output in found.values() for a in output.outputs), speculation.report()


def following(prefix: Answer, temperature: float) -> dict[int, float]:
    """Exact probabilities of the token after the prompt and `prefix`: softmax over the TOP likeliest."""
    logits = toy_logits(torch.tensor([prefix_hash([*PROMPT, *prefix])]))[0].double() / temperature
    values, ids = logits.topk(TOP)
    return dict(zip(ids.tolist(), torch.softmax(values, 0).tolist(), strict=True))


def distribution(temperature: float) -> dict[Answer, float]:
    """Exact probability of every answer of three tokens."""
    found: dict[Answer, float] = {(): 1.0}
    for _ in range(3):
        found = {
            (*answer, token): chance * share
            for answer, chance in found.items()
            for token, share in following(answer, temperature).items()
        }
    return found


def p_value(counts: Counter[Answer], chances: dict[Answer, float], part: slice) -> float:
    """Of the observed counts of a part of the answers under the chances."""
    seen: Counter[Answer] = Counter()
    expected: dict[Answer, float] = {}
    for answer, count in counts.items():
        seen[answer[part]] += count
    for answer, chance in chances.items():
        expected[answer[part]] = expected.get(answer[part], 0.0) + chance * DRAWS
    assert seen.keys() <= expected.keys()
    rare = {kind for kind, number in expected.items() if number < 10}
    cells = [(seen[kind], number) for kind, number in expected.items() if kind not in rare]
    if rare:
        cells.append((sum(seen[kind] for kind in rare), sum(expected[kind] for kind in rare)))
    statistic = sum((count - number) ** 2 / number for count, number in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.fixture(scope="module")
def sample() -> tuple[Counter[Answer], dict]:
    return drawn()


def test_drafts_are_kept_and_dropped(sample) -> None:
    """Otherwise the comparison below would say nothing about keeping or dropping one."""
    report = sample[1]
    assert report["verified_tokens"] > DRAWS / 3
    assert 0.15 < report["accepted_tokens"] / report["verified_tokens"] < 0.9


@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 2), slice(1, 3)], ids=str)
def test_answers_follow_the_exact_distribution(sample, part: slice) -> None:
    assert p_value(sample[0], distribution(TEMPERATURE), part) >= 1e-3


def test_a_temperature_that_is_off_is_noticed(sample) -> None:
    wrong = distribution(1.2 * TEMPERATURE)
    assert min(p_value(sample[0], wrong, part) for part in (slice(0, 2), slice(1, 3))) < 1e-6
