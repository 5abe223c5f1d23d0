"""`python -m deepinfer_specdec.train` on a tiny random Llama of transformers: answers, training, evaluation, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from deepinfer_specdec.dspark import DSparkModel, load_draft  # noqa: E402
from deepinfer_specdec.errors import SpecDecodeError  # noqa: E402
from deepinfer_specdec.scheduling.calibration import TemperatureScaling  # noqa: E402
from deepinfer_specdec.train.__main__ import command, main, spread_taps  # noqa: E402
from deepinfer_specdec.train.agreement import Rule  # noqa: E402
from deepinfer_specdec.train.blocks import BlockOutputs  # noqa: E402
from deepinfer_specdec.train.data import Text, read_texts, split_texts  # noqa: E402
from deepinfer_specdec.train.losses import LossWeights, block_losses  # noqa: E402
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


def test_a_killed_run_keeps_the_answers_it_has(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the sixth prompt, in the middle of a line: the second command asks for the other eleven and answers alike."""
    whole = run(target, prompts, tmp_path / "whole", "--steps", "1")
    asked, generate = [], TransformersTarget.generate

    def dies(self: TransformersTarget, *arguments: Any) -> list[list[int]]:
        asked.append(arguments)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersTarget, "generate", dies)
        with pytest.raises(KeyboardInterrupt):
            run(target, prompts, tmp_path / "parts", "--steps", "1")
    texts = tmp_path / "parts" / "texts.jsonl"
    texts.write_text(texts.read_text()[:-20])
    run(target, prompts, tmp_path / "parts", "--steps", "1")
    assert texts.read_text() == (whole / "texts.jsonl").read_text()
    other = tmp_path / "other.jsonl"
    other.write_text('{"token_ids": [7, 7, 7]}\n')
    with pytest.raises(SpecDecodeError, match=r"answers to other prompts; allowed: those of .*other.jsonl"):
        run(target, other, tmp_path / "parts", "--steps", "1")


def test_a_draft_without_a_sequential_head_is_trained(target: Path, prompts: Path, tmp_path: Path) -> None:
    made = load_draft(run(target, prompts, tmp_path / "parallel", "--steps", "2", "--markov-rank", "0"))
    assert made.markov_head is None
    assert made.confidence_head is not None


def test_texts_of_its_own_to_evaluate_on(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All texts are trained on, and of the others those whose prompts are new are evaluated on."""
    texts = run(target, prompts, tmp_path / "first", "--steps", "1") / "texts.jsonl"
    lines = texts.read_text().splitlines()
    new = [json.dumps({"token_ids": [5, 6, number, *range(1, 12)], "prompt_length": 3}) for number in range(4)]
    others = tmp_path / "others.jsonl"
    others.write_text("\n".join([*new, *lines[:3]]))
    capsys.readouterr()
    sizes = SIZES.replace(" --held-out 0.2", "").split()
    files = ["--target", str(target), "--texts", str(texts), "--held-out-texts", str(others)]
    assert command([*files, "--output", str(tmp_path / "second"), *sizes, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "16 texts, 4 held out" in said
    assert "warning: the held-out texts are" in said  # 1, 2, 3, ... is nothing that this target says
    assert command([*files, "--output", str(tmp_path / "second"), *sizes, "--steps", "2", "--anchors", "4"]) == 1
    assert "made with anchors 8, this command says 4; allowed: the same, or another" in capsys.readouterr().err


BAD = {
    "target": (["--target", "nowhere"], "target nowhere: no such folder or file"),
    "no file": (["--texts", "nowhere.jsonl"], r"nowhere.jsonl: .*allowed: a file of JSON lines"),
    "empty": (["--texts", "EMPTY"], "no line; allowed: "),
    "no field": (["--texts", "FIELD"], r":1: no field 'prompt_length'; allowed: \{\"token_ids"),
    "no json": (["--texts", "JSON"], ":2: Expecting value"),
    "vocabulary": (["--texts", "TOKEN"], r"text 2 has token 40; allowed: 0\.\.39"),
    "short": (["--texts", "SHORT"], "0 prompts with two tokens of answer; allowed: at least 2"),
    "mask": (["--mask-token", "99"], r"--mask-token 99; allowed: 0\.\.39"),
    "share": (["--held-out", "1.5"], r"--held-out 1.5; allowed: more than 0"),
    "heat": (["--temperature", "-1"], r"temperature -1.0; allowed: 0 \(greedy\) or more"),
    "steps": (["--steps", "0"], "steps 0; allowed: >= 1"),
    "taps": (["--taps", "2"], r"taps \(2,\); allowed: -1 \(embedding\)\.\.1"),
    "layers": (["--layers", "9"], "--layers 9; allowed: 1..3, the target's to start from, or --cold-start"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_told_in_a_sentence(
    name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = '{"token_ids": [1, 2, 3, 4], "prompt_length": 1}\n'
    files = {
        "EMPTY": "",
        "FIELD": '{"token_ids": [1]}\n',
        "JSON": good + "nonsense\n",
        "TOKEN": good + '{"token_ids": [2, 40, 3], "prompt_length": 1}\n',
        "SHORT": '{"token_ids": [1, 2], "prompt_length": 1}\n',
        "GOOD": good,
    }
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    wrong, words = BAD[name]
    given = {"--target": str(target), "--texts": "GOOD", "--output": str(tmp_path / "draft"), "--layers": "1"}
    given |= dict(zip(wrong[::2], wrong[1::2], strict=True))
    given["--texts"] = str(tmp_path / given["--texts"])
    assert command([word for pair in given.items() for word in pair]) == 1
    said = capsys.readouterr().err
    assert re.search(rf"^error: .*{words}", said, re.MULTILINE), said


def test_a_damaged_checkpoint_is_told(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path, "--steps", "1")
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(
        SpecDecodeError, match=r"checkpoint.pt: UnpicklingError, not a checkpoint.*delete it to start over"
    ):
        run(target, prompts, tmp_path, "--steps", "2")


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
    monkeypatch.setattr("deepinfer_specdec.train.agreement._CHUNK", chunk)
    torch.manual_seed(0)
    draft, target = torch.randn(5, 3, 30, requires_grad=True), torch.randn(5, 3, 30)
    labels, valid, over = torch.randint(30, (5, 3)), torch.rand(5, 3) > 0.3, torch.zeros(5, 3, dtype=torch.bool)
    over[2, 1], valid[2, 1] = True, False
    confidence = torch.randn(5, 3, requires_grad=True)
    weights = LossWeights(ce=0.3, tv=0.7, confidence=0.5, decay=2.0)
    losses = block_losses(BlockOutputs(draft, target, labels, confidence, valid, over), weights, Rule("standard", 1.0))
    got = torch.autograd.grad(losses.total, (draft, confidence))
    decay = torch.exp(-torch.arange(3) / 2.0)
    weight, told = valid * decay, (valid | over) * decay
    accepted = 1.0 - 0.5 * (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    ce = -draft.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    chance = confidence.sigmoid()
    label = accepted.detach() * ~over
    bce = -(label * chance.log() + (1 - label) * (1 - chance).log())
    expected = (weight * (0.3 * ce + 0.7 * 2 * (1 - accepted))).sum() / weight.sum()
    expected = expected + 0.5 * (told * bce).sum() / told.sum()
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
