"""`python -m deepinfer_specdec.train` on a tiny random Llama of transformers: answers, training, evaluation, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from deepinfer_specdec.dspark import DSparkModel, load_draft  # noqa: E402
from deepinfer_specdec.errors import SpecDecodeError  # noqa: E402
from deepinfer_specdec.scheduling.calibration import TemperatureScaling  # noqa: E402
from deepinfer_specdec.train.__main__ import main, spread_taps  # noqa: E402
from deepinfer_specdec.train.data import Text, read_texts, split_texts  # noqa: E402
from deepinfer_specdec.train.losses import LossWeights, acceptance, block_losses  # noqa: E402
from deepinfer_specdec.train.target import TransformersTarget  # noqa: E402

VOCAB = 40
SIZES = "--layers 1 --taps 0 1 --block-size 3 --markov-rank 8 --batch-size 4 --anchors 8 --held-out 0.2 --device cpu"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3, rope_theta=5e4,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    asked = np.random.default_rng(0).integers(1, VOCAB, (16, 4)).tolist()
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in asked))
    return file


def run(target: Path, prompts: Path, output: Path, *more: str) -> Path:
    files = ["--target", str(target), "--prompts", str(prompts), "--output", str(output), "--answer-tokens", "16"]
    main([*files, *SIZES.split(), *more])
    return output


def test_a_run_leaves_a_draft_and_says_how_good_it_is(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run(target, prompts, tmp_path, "--steps", "12", "--learning-rate", "3e-3")
    said = capsys.readouterr()
    for words in ("accepted length", "ECE before", "ECE after STS", "held out"):
        assert words in said.out
    assert "12/12" in said.err
    draft = load_draft(output)
    config = draft.config
    assert (config.taps, config.num_target_layers, config.rope_theta, config.qk_norm) == ((0, 1), 3, 5e4, False)
    assert len(TemperatureScaling.load(output / "sts.json").temperatures) == 3
    texts = read_texts(output / "texts.jsonl")
    assert len(texts) == 16
    assert all(len(text.token_ids) == 20 and text.prompt_length == 4 for text in texts)


def test_an_interrupted_run_goes_on(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its third step; the second command trains the rest and ends with the same weights as one command does."""
    whole = run(target, prompts, tmp_path / "whole", "--steps", "6", "--save-every", "2")
    steps, forward = [0], TransformersTarget.run

    def dies(self: TransformersTarget, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps[0] += 1
        if steps[0] == 4:
            raise KeyboardInterrupt
        return forward(self, token_ids)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersTarget, "run", dies)
        with pytest.raises(KeyboardInterrupt):
            run(target, prompts, tmp_path / "parts", "--steps", "6", "--save-every", "2")
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == 2
    parts = run(target, prompts, tmp_path / "parts", "--steps", "6", "--save-every", "2")
    expected = load_draft(whole).state_dict()
    for name, value in load_draft(parts).state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_bfloat16_trains_too(target: Path, prompts: Path, tmp_path: Path) -> None:
    output = run(target, prompts, tmp_path, "--steps", "3", "--dtype", "bfloat16")
    assert all(value.isfinite().all() for value in load_draft(output).state_dict().values())


def test_a_warm_start_is_the_targets_own_layers(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Before any training the draft's layer is the target's last one, its context the last tap, its Markov head silent."""
    output = run(target, prompts, tmp_path, "--steps", "1", "--learning-rate", "0")
    draft, theirs = load_draft(output), TransformersTarget(target, "cpu", torch.float32)
    own, last = draft.layers[0].state_dict(), theirs._model.model.layers[2].state_dict()
    assert own.keys() == last.keys()
    assert all(torch.equal(own[name], last[name]) for name in own)
    assert not draft.markov_head.w2.weight.any()
    assert (draft.fc.weight[:, 32:].diagonal() > 0.9).all()


def test_features_are_the_outputs_of_the_tapped_layers(target: Path) -> None:
    """Against hooks on the layers themselves; tap -1 is the embedding."""
    found = TransformersTarget(target, "cpu", torch.float32, (-1, 0, 1))
    ids = torch.randint(1, VOCAB, (2, 9))
    outputs: list[torch.Tensor] = []
    for layer in found._model.model.layers[:2]:
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    features, last = found.run(ids)
    expected = torch.cat([found.parts.embedding[ids], *outputs], dim=-1)
    assert torch.equal(features, expected)
    logits = last @ found.parts.head.T
    torch.testing.assert_close(logits, found._model(ids).logits, atol=1e-4, rtol=1e-4)


def test_sizes_that_do_not_match_are_told(target: Path, prompts: Path, tmp_path: Path) -> None:
    draft = DSparkModel(load_draft(run(target, prompts, tmp_path, "--steps", "1")).config)
    other = TransformersTarget(target, "cpu", torch.float32)
    del other._model.model.layers[2].self_attn.q_proj
    with pytest.raises(SpecDecodeError, match=r"q_proj.*--cold-start"):
        other.warm_start(draft)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_the_written_gradient_is_the_traced_one(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through the formulas of the paper. Float32 sums of 30 values: 1e-6."""
    monkeypatch.setattr("deepinfer_specdec.train.losses._CHUNK", chunk)
    torch.manual_seed(0)
    draft, target = torch.randn(5, 3, 30, requires_grad=True), torch.randn(5, 3, 30)
    labels, valid = torch.randint(30, (5, 3)), torch.rand(5, 3) > 0.3
    confidence = torch.randn(5, 3, requires_grad=True)
    weights = LossWeights(ce=0.3, tv=0.7, confidence=0.5, decay=2.0)
    losses = block_losses(draft, target, labels, confidence, valid, weights)
    got = torch.autograd.grad(losses.total, (draft, confidence))
    weight = valid * torch.exp(-torch.arange(3) / 2.0)
    accepted = acceptance(draft, target)
    ce = -draft.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    chance = confidence.sigmoid()
    label = accepted.detach()
    bce = -(label * chance.log() + (1 - label) * (1 - chance).log())
    expected = (weight * (0.3 * ce + 0.7 * 2 * (1 - accepted) + 0.5 * bce)).sum() / weight.sum()
    torch.testing.assert_close(losses.total, expected, atol=1e-6, rtol=1e-6)
    for one, two in zip(got, torch.autograd.grad(expected, (draft, confidence)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_answers_to_one_prompt_stay_on_one_side() -> None:
    texts = [Text((n % 7, 1, 2, 3, n), 2) for n in range(40)]
    training, held_out = split_texts(texts, 0.3)
    assert len(training) + len(held_out) == 40
    assert not {text.token_ids[:2] for text in training} & {text.token_ids[:2] for text in held_out}
    with pytest.raises(SpecDecodeError, match="1 prompts"):
        split_texts([Text((1, 2, 3), 1)] * 5, 0.5)


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (1, 8, 14, 20, 27)), (4, (1,)), (3, (1,)), (36, (1, 9, 17, 25, 33))]
)
def test_default_taps(layers: int, expected: tuple[int, ...]) -> None:
    assert spread_taps(layers) == expected
