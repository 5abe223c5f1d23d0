"""What a trained draft says of itself against what becomes of its drafts: by decoding with the package's own verification, and on
texts generated here."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_specdec.dspark import DSparkConfig, DSparkDrafter, DSparkModel  # noqa: E402
from deepinfer_specdec.dspark.model import TargetParts  # noqa: E402
from deepinfer_specdec.errors import SpecDecodeError  # noqa: E402
from deepinfer_specdec.scheduling.calibration import sigmoid  # noqa: E402
from deepinfer_specdec.train.agreement import Rule  # noqa: E402
from deepinfer_specdec.train.blocks import run_blocks, sample_anchors  # noqa: E402
from deepinfer_specdec.train.data import Text, collate  # noqa: E402
from deepinfer_specdec.train.evaluate import evaluate, summarise  # noqa: E402
from deepinfer_specdec.train.loop import TrainOptions, train  # noqa: E402
from deepinfer_specdec.train.walk import Blocks, walk  # noqa: E402
from deepinfer_specdec.verification.batched import verify_batched  # noqa: E402

VOCAB, HIDDEN, WIDTH, END = 24, 48, 4, 0
HEAT = 0.8


class Language:
    """The next token follows from the last two: nearly surely after some, hardly after others. END ends a text.

    Args:
        other: how much the last but one says. Not at all: easy to learn.

    A "hidden state" is the embeddings of the two tokens side by side, so that its head is exact.
    """

    def __init__(self, other: float) -> None:
        generator = torch.Generator().manual_seed(0)
        embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        embedding[:, HIDDEN // 2 :] = 0.0
        by_last, by_other = (torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
        by_other *= other
        by_last[torch.arange(VOCAB), torch.randperm(VOCAB, generator=generator)] += torch.linspace(0.0, 6.0, VOCAB)
        by_last[:, END] -= 2.0
        back = torch.linalg.pinv(embedding[:, : HIDDEN // 2])
        self.parts = TargetParts(embedding, torch.cat([back @ by_last, back @ by_other]).T.contiguous())
        self.ends = frozenset({END})

    def run(self, token_ids):
        now = self.parts.embedding[token_ids]
        before = torch.cat([torch.zeros_like(now[..., :1, :]), now[..., :-1, :]], dim=-2)
        hidden = torch.cat([now[..., : HIDDEN // 2], before[..., : HIDDEN // 2]], dim=-1)
        return hidden, hidden

    def chances(self, token_ids):
        """What follows every token of [..., T] at HEAT, [..., T, VOCAB]."""
        return (self.run(token_ids)[1] @ self.parts.head.T / HEAT).softmax(-1)

    def texts(self, count: int, seed: int, longest: int = 24) -> list[Text]:
        """Answers at HEAT to prompts of two tokens."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, VOCAB, (count, 2), generator=generator)
        for _ in range(longest):
            ids = torch.cat([ids, torch.multinomial(self.chances(ids[:, -2:])[:, -1], 1, generator=generator)], 1)
        found = []
        for row in ids.tolist():
            stop = row.index(END) + 1 if END in row else len(row)
            found.append(Text(tuple(row[:stop]), 2))
        return [text for text in found if len(text.token_ids) > 3]


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(other=0.0)


def trained(language: Language, rule: Rule) -> DSparkModel:
    config = DSparkConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        taps=(0,), num_target_layers=2, block_size=WIDTH, markov_rank=32, rope_theta=1e4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DSparkModel(config)
    options = TrainOptions(steps=150, batch_size=16, anchors=12, learning_rate=1e-2, rule=rule)
    train(model, language, language.texts(1000, seed=1), options, progress=False)
    return model.eval()


@pytest.fixture(scope="module")
def standard(language: Language) -> DSparkModel:
    return trained(language, Rule("standard", HEAT))


def measured(model, language, rule, texts=6000):
    return evaluate(model, language, language.texts(texts, seed=2), rule, batch_size=250, max_length=64, device="cpu")


def test_the_calibration_error_of_a_trained_draft_is_within_two_percent(language, standard) -> None:
    """On 6,000 texts that it never saw. Chance alone makes 0.2 to 0.3 %."""
    result = measured(standard, language, Rule("standard", HEAT))
    assert result.blocks > 20_000
    assert result.accepted_length > 4.0
    assert result.sts.errors.max() < result.raw.errors.max()
    assert result.sts.errors.max() <= 0.02, result.table()
    assert "within 2%" in result.verdict()
    assert not result.doubts()


def test_a_head_for_another_verification_is_off_by_an_offset(language, standard) -> None:
    """Rejection sampling keeps more than coupled draws do: the head promises too much, and a temperature cannot say so."""
    result = measured(standard, language, Rule("coupled", HEAT))
    assert result.raw.errors.max() > 0.15
    assert result.offset.errors.max() < 0.85 * result.sts.errors.max()
    assert result.best is result.offset


def test_confidences_are_those_of_the_rule_that_they_were_trained_for(language, standard) -> None:
    """The head as training leaves it, before any scaling."""
    coupled = trained(language, Rule("coupled", HEAT))
    wrong = measured(standard, language, Rule("coupled", HEAT), texts=1000).raw.errors
    right = measured(coupled, language, Rule("coupled", HEAT), texts=1000).raw.errors
    assert right.max() < 0.08  # another seed or processor trains another head: 0.04 to 0.06
    assert (right < 0.5 * wrong).all()


def decode(language: Language, model: DSparkModel, texts: int) -> list[int]:
    """Drafts kept in every whole block of texts that are decoded with drafts, by the package's drafter and verification."""

    def heated(_, logits):
        return (logits / HEAT).softmax(-1)

    drafter = DSparkDrafter(model, language.parts, heated, seed=7)
    kept = []
    for number, text in enumerate(language.texts(texts, seed=5)):
        tokens = list(text.token_ids[:3])  # a prompt and the token that comes with it
        drafter.begin(number, tokens)
        while END not in tokens and len(tokens) <= 26 - WIDTH:
            drafter.observe(number, 0, language.run(torch.tensor(tokens))[0])
            draft = drafter.propose([number])
            guesses = torch.from_numpy(draft.token_ids).long()
            seen = torch.cat([torch.tensor([tokens[-2:]]), guesses], 1)
            target = language.chances(seen)[:, 1:].double()
            found = verify_batched(
                guesses, torch.tensor([WIDTH]), target, torch.tensor([number]), torch.tensor([len(tokens) - 1]),
                torch.from_numpy(draft.distributions),
            )  # fmt: skip
            said = found.token_ids[0, : int(found.accepted[0]) + 1].tolist()
            if END in said[:-1]:  # what stands after an end is no part of the text
                said = said[: said.index(END) + 1]
            kept.append(min(int(found.accepted[0]), len(said)))
            tokens += said
            drafter.extend(number, said)
        drafter.end(number)
    return kept


def test_walking_along_texts_keeps_what_decoding_keeps() -> None:
    """300 texts decoded against 3,000 walked along: 4 sigma of a share are below 0.08.

    Evenly spread anchors, as in training, find more of the first drafts kept: they lie in easy stretches as often as in others.
    """
    rule, rich = Rule("standard", HEAT), Language(other=1.5)
    model = trained(rich, rule)
    kept = np.array(decode(rich, model, 300))
    texts = rich.texts(3000, seed=6)
    blocks = walk(model, rich, texts, rule, batch_size=500, max_length=64, device="cpu")
    decoded = (kept[:, None] > np.arange(WIDTH)).mean(axis=0)
    walked = (blocks.kept[:, None] > np.arange(WIDTH)).mean(axis=0)
    sigma = np.sqrt(decoded * (1.0 - decoded) / len(kept)) + 1e-3
    assert (np.abs(decoded - walked) < 4.0 * sigma).all(), (decoded, walked)
    batch = collate(texts[:1000], rich, 64, "cpu")
    with torch.no_grad():
        anchors = sample_anchors(batch.trainable, 8, torch.Generator().manual_seed(0))
        out = run_blocks(model, rich.parts, batch, *anchors)
    spread = rule.acceptance(out.target_logits, out.draft_logits)[out.valid.all(1)][:, 0].mean()
    assert float(spread) > walked[0] + 0.02


def test_a_texts_end_and_a_cut_are_not_the_same(language, standard) -> None:
    """After an end no draft is kept, so blocks reach there; a text that was cut says nothing of what comes after it."""
    finished, cut = Text((5, 6, 7, END), 2), Text((5, 6, 7, 8), 2)
    sizes = {"batch_size": 2, "max_length": 64, "device": "cpu"}
    blocks = walk(standard, language, [finished, cut], Rule("coupled", HEAT), **sizes)
    assert set(blocks.text.tolist()) == {0}
    assert blocks.kept.max() <= 1
    batch = collate([finished, cut], language, 64, "cpu")
    anchors = torch.tensor([[2], [2]])
    out = run_blocks(standard, language.parts, batch, anchors, torch.ones(2, 1, dtype=torch.bool))
    assert out.valid.tolist() == [[True, False, False, False]] * 2
    assert out.over.tolist() == [[False, True, False, False], [False] * 4]


def made(count: int, seed: int = 0, slope: float = 1.0, offset: float = 0.0) -> Blocks:
    """Blocks whose head is off by a slope and an offset."""
    random = np.random.default_rng(seed)
    truth = random.normal(0.5, 1.5, (count, 3))
    kept = np.cumprod(random.random((count, 3)) < sigmoid(truth), axis=1).sum(axis=1)
    logits = ((truth - offset) / slope).astype(np.float32)
    return Blocks(logits, kept, np.arange(count), random.normal(0.0, 1.0, count).astype(np.float32))


def table(blocks: Blocks):
    return summarise(blocks, blocks.text % 2 == 0, Rule(), len(blocks.kept))


def test_the_verdict_knows_error_from_chance() -> None:
    """The same good head by few and by many blocks, and one whose offset no temperature takes away."""
    assert "within 2%" in table(made(40_000)).verdict()
    few = table(made(400, slope=0.5)).verdict()
    assert "too few to tell, chance alone makes" in few
    skewed = table(made(40_000, offset=-1.5))
    assert skewed.raw.errors.max() > 0.1
    assert skewed.sts.errors.max() > 0.04
    assert skewed.best.name == "STS with offsets"
    assert skewed.best.errors.max() < 0.02
    np.testing.assert_allclose(skewed.best.scaling.offsets, -1.5, atol=0.1)
    plain = table(made(40_000, slope=0.4))
    assert plain.best.name == "after STS"
    np.testing.assert_allclose(np.log(plain.best.scaling.temperatures * 0.4), 0.0, atol=0.2)


def test_chance_is_what_a_perfect_head_measures() -> None:
    """Over 20 samples of 1,000 blocks: the mean error of the true head is the chance that one sample states, within a fifth."""
    measured = [table(made(1000, seed)).raw for seed in range(20)]
    ratio = np.mean([one.errors for one in measured]) / np.mean([one.chance for one in measured])
    assert 0.8 < ratio < 1.25
    assert np.mean([one.errors < one.chance_most for one in measured]) > 0.8


def test_texts_of_another_temperature_are_noticed(language, standard) -> None:
    result = measured(standard, language, Rule("coupled", 0.4), texts=200)
    (doubt,) = result.doubts()
    assert "less likely than answers of this target at temperature 0.4" in doubt


def test_texts_too_short_for_a_block_are_told(language, standard) -> None:
    with pytest.raises(
        SpecDecodeError, match="no block in 2 held-out texts; allowed: answers longer than a block of 4"
    ):
        evaluate(
            standard, language, [Text((1, 2, 3, 4), 2)] * 2, Rule(), batch_size=2, max_length=64, device="cpu"
        )  # fmt: skip
