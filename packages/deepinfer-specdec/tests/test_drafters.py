"""N-gram and suffix drafts against searches that read the whole text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from deepinfer_specdec import Draft, Drafter, NgramDrafter, SuffixDrafter, create_drafter
from deepinfer_specdec.drafters.automaton import ROOT, SuffixAutomaton
from deepinfer_specdec.errors import SpecDecodeError, UnknownNameError
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def occurs(texts: list[list[int]], piece: list[int]) -> bool:
    return any(text[i : i + len(piece)] == piece for text in texts for i in range(len(text) - len(piece) + 1))


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.randoms())
def test_automaton_knows_exactly_the_substrings(texts: list[list[int]], order: random.Random) -> None:
    """Texts grow at the same time, in random turns; then every word of up to 4 tokens is looked up."""
    automaton, states, done = SuffixAutomaton(), [ROOT] * len(texts), [0] * len(texts)
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        i = order.choice([i for i, t in enumerate(texts) if done[i] < len(t)])
        states[i] = automaton.append(states[i], texts[i][done[i]])
        done[i] += 1
    for length in range(1, 5):
        for word in np.ndindex(*(4,) * length):
            state = ROOT
            for token in word:
                state = automaton.step(state, token) if state >= 0 else -1
            assert (state >= 0) == occurs(texts, list(word))


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_automaton_is_small_and_links_are_suffixes(text: list[int]) -> None:
    automaton, state = SuffixAutomaton(), ROOT
    for token in text:
        state = automaton.append(state, token)
        assert automaton.length(state) == automaton.tokens
    assert len(automaton) <= max(2, 2 * len(text))
    while state != ROOT:
        assert automaton.length(automaton.link(state)) < automaton.length(state)
        state = automaton.link(state)


@settings(max_examples=150, deadline=None)
@given(TEXT.filter(lambda t: len(t) >= 3))
def test_ngram_guesses_what_followed_the_last_occurrence(text: list[int]) -> None:
    drafter = NgramDrafter(max_draft=3, orders=(3, 2))
    cut = len(text) // 2
    drafter.begin(0, text[: max(1, cut)])
    drafter.extend(0, text[max(1, cut) :])
    expected: list[int] = []
    for n in (3, 2):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]] if len(text) > n else []
        if ends:
            long = text[ends[-1] :]
            expected = (long * 3)[:3]  # going round the period
            break
    draft = drafter.propose([0])
    assert draft.token_ids[0, : draft.counts[0]].tolist() == expected


def test_bulk_and_single_indexing_agree() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(300)]
    bulk, single = NgramDrafter(), NgramDrafter()
    bulk.begin(0, text)
    single.begin(0, text[:1])
    for token in text[1:]:
        single.extend(0, [token])
    assert bulk._histories[0].index == single._histories[0].index


def test_suffix_learns_from_other_sequences_and_prefers_the_frequent() -> None:
    drafter = SuffixDrafter(max_draft=4)
    for name, tail in enumerate([7, 7, 8]):
        drafter.begin(name, [100 + name, 1, 2, 3, tail, 50, 51])
        drafter.end(name)
    drafter.begin(9, [200, 1, 2, 3])
    draft = drafter.propose([9])
    assert draft.token_ids[0].tolist() == [7, 50, 51, -1]
    assert draft.confidences[0, 0] < draft.confidences[0, 1]  # 7 was contested, 50 after it never


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_protocol_limits_and_unknown_sequences(name: str) -> None:
    drafter = create_drafter(name, max_draft=5)
    assert isinstance(drafter, Drafter)
    drafter.begin(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    drafter.begin(1, np.array([5], np.int32))
    draft = drafter.propose([1, 0], np.array([5, 2], np.int32))
    assert draft.counts.tolist() == [0, 2]
    assert draft.token_ids[1, :2].tolist() == [4, 5]
    drafter.end(0)
    drafter.end(77)
    with pytest.raises(UnknownNameError, match="ngram, suffix"):
        create_drafter("medusa")
    with pytest.raises(SpecDecodeError, match="allowed: >= 1"):
        create_drafter(name, max_draft=0)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["ngram", "suffix"]), TEXT, st.lists(st.integers(0, 3), max_size=30), st.floats(0.0, 1.0))
def test_a_floor_only_cuts_what_is_worth_nothing(name: str, text: list[int], more: list[int], floor: float) -> None:
    """Up to the first guess below the floor the draft is the one without a floor, and that guess is its last."""
    drafts = []
    for used in (0.0, floor):
        drafter = create_drafter(name, max_draft=6)
        drafter.begin(0, text)
        for token in more:  # teaches the confidences; equally in both, drafts are made before and after
            drafter.propose([0])
            drafter.extend(0, [token])
        drafts.append(drafter.propose([0], floor=used))
    whole, cut = drafts
    below = np.flatnonzero(whole.survivals()[0, : whole.counts[0]] < np.float32(floor) * (1 - 1e-6))
    kept = int(below[0]) + 1 if below.size else int(whole.counts[0])
    assert cut.counts[0] == kept
    assert cut.token_ids[0, :kept].tolist() == whole.token_ids[0, :kept].tolist()
    assert cut.confidences[0, :kept].tolist() == whole.confidences[0, :kept].tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1, width=32)), max_size=5), max_size=6))
def test_packing_keeps_every_row(rows: list[list[tuple[int, float]]]) -> None:
    draft = Draft.from_rows([[t for t, _ in row] for row in rows], [[c for _, c in row] for row in rows], 5)
    for row, wanted in enumerate(rows):
        assert draft.counts[row] == len(wanted)
        assert draft.token_ids[row].tolist() == [t for t, _ in wanted] + [-1] * (5 - len(wanted))
        assert draft.confidences[row].tolist() == [c for _, c in wanted] + [0.0] * (5 - len(wanted))
    with pytest.raises(SpecDecodeError, match="allowed: equal"):
        Draft.from_rows([[1, 2]], [[0.5]])


def test_suffix_memory_is_bounded_and_survives_the_turnover() -> None:
    drafter = SuffixDrafter(max_draft=4, capacity=400)
    rng = random.Random(1)
    most = 0
    for name in range(40):
        drafter.begin(name, [rng.randrange(1000) for _ in range(60)])
        most = max(most, drafter.states)
        if name % 2:
            drafter.end(name)
    assert most <= 2 * 400 * 2 + 2  # two states a token, two generations
    drafter.extend(38, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert drafter.propose([38]).token_ids[0, :3].tolist() == [4, 5, 6]


def test_confidence_becomes_the_hit_rate_whether_or_not_a_draft_was_asked_for() -> None:
    """One guess in every four tokens, right 3 times in 4. The later ones of 1,200 say so; no cell of the table holds all."""
    rng = random.Random(2)
    drafter = NgramDrafter(max_draft=1, orders=(2,))
    drafter.begin(0, [1, 2, 3, 1, 2])
    history, said = drafter._histories[0], []
    for step in range(1200):
        if step % 2:
            said.append(float(drafter.propose([0]).confidences[0, 0]))
        guess = history.tokens[history.lookup()[0]]
        drafter.extend(0, [guess if rng.random() < 0.75 else 10_000 + step, 20_000 + step, 1, 2])
    assert np.mean(said[300:]) == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_drafter_that_was_not_asked_knows_as_much_as_one_that_was(name: str) -> None:
    """Speculation that is off asks now and then. If what it then hears were poorer, it would stay off where drafts pay."""
    rng = random.Random(4)
    phrases = [[rng.randrange(50) for _ in range(6)] for _ in range(8)]
    text = [token for _ in range(60) for token in rng.choice(phrases)]
    asked, silent = create_drafter(name, max_draft=6), create_drafter(name, max_draft=6)
    for drafter in (asked, silent):
        drafter.begin(0, text[:40])
    for token in text[40:]:
        asked.propose([0])
        asked.extend(0, [token])
    silent.extend(0, text[40:])
    first, second = asked.propose([0]), silent.propose([0])
    assert first.counts[0] > 0
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.confidences.tolist() == second.confidences.tolist()


def test_a_place_further_on_is_as_sure_as_it_will_be_once_it_is_reached() -> None:
    """What a draft says of its fourth guess, if the three before hold, the next draft says of its first when they held."""
    drafter = SuffixDrafter(max_draft=4)
    text = list(range(100, 140))
    drafter.begin(0, text * 3)
    drafter.begin(1, [7, 8, *text[:9]])
    drafter.extend(1, text[9:20])
    ahead = float(drafter.propose([1]).confidences[0, 3])
    drafter.extend(1, text[20:23])
    there = float(drafter.propose([1]).confidences[0, 0])
    assert ahead == pytest.approx(there, abs=0.1)  # three more right guesses were learned from in between
    assert ahead > 0.6


def test_a_sequence_that_copies_is_trusted_more_than_one_that_meets_a_phrase() -> None:
    """Both stand after the same two words. One was guessed right for twenty tokens, the other not once before."""
    drafter = SuffixDrafter(max_draft=4)
    rng = random.Random(5)
    source = rng.sample(range(1000), 200)
    drafter.begin(0, source)
    for name in range(1, 30):
        drafter.begin(name, [5000 + name])
        start = rng.randrange(150)
        if name % 2:
            drafter.extend(name, source[start : start + 40])
        else:
            for place in range(0, 20, 2):
                drafter.extend(name, [*source[start + place : start + place + 2], rng.randrange(2000, 3000)])
    drafter.begin(98, [6000])
    drafter.begin(99, [6001])
    drafter.extend(98, source[20:42])
    drafter.extend(99, [*rng.sample(range(3000, 4000), 20), *source[40:42]])
    copying, meeting = drafter.propose([98, 99]).survivals()[:, 3]
    assert copying > 0.8
    assert meeting < 0.5 * copying


def test_contexts_too_short_for_a_guess_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have as many ways on as the job has words: one look at them costs more than a step's other work."""
    asked: list[int] = []
    plain = SuffixAutomaton.likeliest

    def likeliest(self: SuffixAutomaton, state: int) -> tuple[int, int, int, int]:
        asked.append(self.length(state))
        return plain(self, state)

    monkeypatch.setattr(SuffixAutomaton, "likeliest", likeliest)
    drafter = SuffixDrafter(max_draft=4, min_match=2)
    drafter.begin(0, [word for other in range(50) for word in (1, other + 100)])
    drafter.extend(0, [1, 999, 1, 100, 1])
    drafter.propose([0])
    assert asked
    assert min(asked) >= 2
