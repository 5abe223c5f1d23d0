"""Training on a synthetic language: the draft learns it, resumes to the same weights, and its checkpoint loads back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_specdec.drafters.base import FeatureDrafter  # noqa: E402
from deepinfer_specdec.dspark import DSparkConfig, DSparkDrafter, DSparkModel, load_draft, save_draft  # noqa: E402
from deepinfer_specdec.dspark.heads import MarkovHead  # noqa: E402
from deepinfer_specdec.dspark.model import TargetParts  # noqa: E402
from deepinfer_specdec.errors import CheckpointError  # noqa: E402
from deepinfer_specdec.train.agreement import Rule  # noqa: E402
from deepinfer_specdec.train.blocks import block_mask, run_blocks, sample_anchors  # noqa: E402
from deepinfer_specdec.train.data import Text, collate, read_texts, split_texts  # noqa: E402
from deepinfer_specdec.train.evaluate import evaluate  # noqa: E402
from deepinfer_specdec.train.loop import TrainOptions, train  # noqa: E402

VOCAB, HIDDEN = 24, 32


class MarkovTarget:
    """A target whose next token depends on the last one alone, through a random but peaked table: x -> mostly perm(x).

    Its "hidden state" is the embedding of the token (one tap and the last one alike), its head the table's logits.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.successor = torch.randperm(VOCAB, generator=generator)
        logits = torch.randn(VOCAB, VOCAB, generator=generator) * 0.5
        logits[torch.arange(VOCAB), self.successor] += 5.0
        head = torch.linalg.pinv(embedding) @ logits  # embedding @ head = logits, exactly: HIDDEN >= VOCAB
        self.probabilities = logits.softmax(-1)
        self.parts = TargetParts(embedding, head.T.contiguous())
        self.ends = frozenset()

    def run(self, token_ids):
        hidden = self.parts.embedding[token_ids]
        return hidden, hidden

    def generate(self, prompts, max_tokens, temperature, seed):
        generator = torch.Generator().manual_seed(seed)
        answers = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(max_tokens):
                tokens.append(int(torch.multinomial(self.probabilities[tokens[-1]], 1, generator=generator)))
            answers.append(tokens[len(prompt) :])
        return answers


def config(**changes) -> DSparkConfig:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_layers": 1, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "taps": (0,), "num_target_layers": 2, "block_size": 4, "markov_rank": 16,
        "rope_theta": 1e4,
    }  # fmt: skip
    return DSparkConfig(**(sizes | changes))


def texts(target: MarkovTarget, count: int = 40) -> list[Text]:
    prompts = [[i % VOCAB, (5 * i) % VOCAB] for i in range(count)]
    answers = target.generate(prompts, 24, 1.0, 1)
    return [Text((*p, *a), len(p)) for p, a in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    target = MarkovTarget()
    training, held_out = split_texts(texts(target), 0.2)
    torch.manual_seed(0)
    model = DSparkModel(config())
    options = TrainOptions(steps=100, batch_size=8, anchors=12, learning_rate=1e-2, save_every=50)
    history = train(model, target, training, options, progress=False)
    return target, model, training, held_out, history


def measure(model, target, held_out):
    return evaluate(model, target, held_out, Rule(), batch_size=8, max_length=64, device="cpu")


def test_training_learns_the_language(trained) -> None:
    """The language is almost deterministic, so a good draft's blocks survive; an untrained one's do not."""
    target, model, _, held_out, history = trained
    after = measure(model, target, held_out)
    torch.manual_seed(0)
    before = measure(DSparkModel(config()), target, held_out)
    assert np.mean(history[-10:]) < 0.75 * np.mean(history[:5])
    assert before.survival[1] < 0.25  # the anchor's own embedding gives the first position away, no more
    assert after.accepted_length > 3.0
    assert (np.diff(after.survival) <= 1e-9).all()
    assert "accepted length" in after.table()


def test_drafts_of_the_trained_model_follow_the_language(trained) -> None:
    target, model, _, _, _ = trained
    drafter = DSparkDrafter(model.eval(), target.parts)
    assert isinstance(drafter, FeatureDrafter)
    hits = 0
    for start in range(VOCAB):
        tokens = [start]
        for _ in range(5):
            tokens.append(int(target.successor[tokens[-1]]))
        drafter.begin(start, tokens)
        drafter.observe(start, 0, target.run(torch.tensor(tokens))[0])
    draft = drafter.propose(list(range(VOCAB)))
    for row in range(VOCAB):
        token = int(target.successor[target.successor[target.successor[target.successor[target.successor[row]]]]])
        hits += int(draft.token_ids[row, 0] == int(target.successor[token]))
    assert hits >= 0.8 * VOCAB
    assert draft.distributions is None


def test_drafting_one_sequence_equals_drafting_it_in_a_batch(trained) -> None:
    """Rows of other lengths are padding to each other; float32 sums in another order move confidences by less than 1e-5."""
    target, model, _, _, _ = trained
    drafter = DSparkDrafter(model.eval(), target.parts)
    for name, length in ((0, 3), (1, 9), (2, 6)):
        tokens = [(name + 3 * i) % VOCAB for i in range(length)]
        drafter.begin(name, tokens)
        drafter.observe(name, 0, target.run(torch.tensor(tokens))[0])
    together = drafter.propose([0, 1, 2])
    for name in range(3):
        alone = drafter.propose([name])
        assert alone.token_ids[0].tolist() == together.token_ids[name].tolist()
        np.testing.assert_allclose(alone.confidences[0], together.confidences[name], atol=1e-5)


def test_the_drafter_drafts_what_training_computed(trained) -> None:
    """The cached, step-by-step path against the teacher-forced one: same h, so same confidence logits at the first position."""
    target, model, training, _, _ = trained
    model.eval()
    text = training[0]
    batch = collate([text], target, 64, "cpu")
    anchor = torch.tensor([[10]])
    with torch.no_grad():
        out = run_blocks(model, target.parts, batch, anchor, torch.ones(1, 1, dtype=torch.bool))
    drafter = DSparkDrafter(model, target.parts)
    drafter.begin(0, list(text.token_ids[:11]))
    drafter.observe(0, 0, batch.features[0, :15])  # positions at and after the anchor are there and must not be seen
    draft = drafter.propose([0])
    np.testing.assert_allclose(drafter.confidence_logits[0, 0], float(out.confidence[0, 0]), atol=1e-4)
    assert draft.token_ids[0, 0] == int(out.draft_logits[0, 0].argmax())


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    target = MarkovTarget()
    training, _ = split_texts(texts(target, 16), 0.2)

    def run(steps_first: int) -> dict:
        torch.manual_seed(3)
        model = DSparkModel(config())
        whole = TrainOptions(steps=12, batch_size=4, anchors=4, save_every=6)
        checkpoint = tmp_path / f"{steps_first}" / "checkpoint.pt"
        if steps_first:

            class StopError(Exception):
                pass

            class Interrupting(MarkovTarget):
                calls = 0

                def run(self, token_ids):
                    self.calls += 1
                    if self.calls > steps_first:
                        raise StopError
                    return super().run(token_ids)

            with pytest.raises(StopError):
                train(model, Interrupting(), training, whole, checkpoint, progress=False)
            torch.manual_seed(99)
            model = DSparkModel(config())
        train(model, target, training, whole, checkpoint, progress=False)
        return model.state_dict()

    whole, resumed = run(0), run(8)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_checkpoints_round_trip_and_refuse_other_shapes(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("safetensors")
    model = DSparkModel(config(markov_kind=kind))
    save_draft(model, tmp_path)
    loaded = load_draft(tmp_path)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    save_draft(DSparkModel(config(markov_kind=kind, num_layers=2)), tmp_path / "two")
    (tmp_path / "two" / "config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"not known .*layers\.1"):
        load_draft(tmp_path / "two")


def test_drafts_without_a_confidence_head_load_and_say_nothing(tmp_path: Path) -> None:
    """Nor does one that reads h alone look at the previous token."""
    pytest.importorskip("safetensors")
    save_draft(DSparkModel(config(confidence_head=False)), tmp_path / "none")
    none = load_draft(tmp_path / "none")
    assert not [name for name in none.state_dict() if name.startswith("confidence_head")]
    hidden, anchors = torch.randn(3, 4, HIDDEN), torch.tensor([1, 2, 3])
    _, confidences = none.sequential(
        torch.randn(3, 4, VOCAB).unbind(1), hidden, anchors, lambda logits, _column: logits.argmax(-1)
    )
    assert confidences.dtype == torch.float32
    assert torch.equal(confidences, torch.zeros(3, 4))
    save_draft(DSparkModel(config(confidence_with_markov=False)), tmp_path / "alone")
    alone = load_draft(tmp_path / "alone")
    assert torch.equal(
        alone.confidence_logits(hidden[:, 0], anchors), alone.confidence_logits(hidden[:, 0], anchors + 1)
    )
    text = (tmp_path / "none" / "config.json").read_text()
    (tmp_path / "none" / "config.json").write_text(text.replace('head": false', 'head": true'))
    with pytest.raises(CheckpointError, match=r"missing .*confidence_head"):
        load_draft(tmp_path / "none")


def test_drafts_without_a_sequential_head_load_and_draft_by_the_parallel_stage(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    parallel = config(markov_rank=0, confidence_with_markov=False)
    save_draft(DSparkModel(parallel), tmp_path)
    draft = load_draft(tmp_path)
    assert draft.config == parallel
    assert not [name for name in draft.state_dict() if name.startswith("markov")]
    base, hidden = torch.randn(3, 4, VOCAB), torch.randn(3, 4, HIDDEN)
    tokens, _ = draft.sequential(
        base.unbind(1), hidden, torch.tensor([1, 2, 3]), lambda logits, _column: logits.argmax(-1)
    )
    assert torch.equal(tokens, base.argmax(-1))
    with pytest.raises(CheckpointError, match="markov_rank 0; allowed: false"):
        config(markov_rank=0)
    with pytest.raises(CheckpointError, match="markov_rank -1; allowed: >= 0"):
        config(markov_rank=-1)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_teacher_forcing_equals_stepping(kind: str) -> None:
    torch.manual_seed(1)
    head = MarkovHead(config(markov_kind=kind))
    previous, hidden = torch.randint(VOCAB, (3, 4)), torch.randn(3, 4, HIDDEN)
    state, stepped = head.start(3, hidden), []
    for k in range(4):
        bias, state = head(previous[:, k], hidden[:, k], state)
        stepped.append(bias)
    torch.testing.assert_close(torch.stack(stepped, 1), head.teacher_forced(previous, hidden))


def test_block_mask_shows_the_past_and_the_own_block() -> None:
    mask = block_mask(torch.tensor([[2, 4]]), length=5, width=2)[0]
    assert mask.int().tolist() == [
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 1, 1],
    ]
    windowed = block_mask(torch.tensor([[4]]), length=5, width=1, window=2)[0]
    assert windowed.int().tolist() == [[0, 0, 1, 1, 0, 1]]


def test_anchors_are_tokens_that_the_target_made() -> None:
    trainable = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
    anchors, real = sample_anchors(trainable, 4, torch.Generator().manual_seed(0))
    assert set(anchors[0][real[0]].tolist()) == {2, 3}
    assert not real[1].any()


def test_texts_round_trip(tmp_path: Path) -> None:
    made = texts(MarkovTarget(), 4)
    (tmp_path / "t.jsonl").write_text("".join(text.line() for text in made))
    assert read_texts(tmp_path / "t.jsonl") == made


def test_the_last_layer_may_not_be_tapped() -> None:
    with pytest.raises(CheckpointError, match="allowed: -1"):
        config(taps=(0, 1))
