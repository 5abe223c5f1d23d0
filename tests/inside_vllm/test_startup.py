"""Starts of `deepinfer run --engine vllm` that cannot work: one sentence with the root cause, no traceback."""

import json
import re
import shutil

import pytest
from deepinfer_offline.cli.main import call

pytestmark = pytest.mark.vllm

# Not said by a program: torch's warnings at the first import, and vLLM's progress bar, which goes to pytest's own stderr here.
NOISE = re.compile(r"W\d{4} .*torch/|Loading safetensors|$")
SMALL = ["--dtype", "float32", "--max-model-len", "256", "--kv-memory", "4MiB"]


@pytest.fixture
def refusal(tmp_path, capfd):
    """Run one request and return what `deepinfer run` says when it fails."""
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}\n'
    )

    def start(model, *options):
        arguments = ["run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-m", str(model), "--quiet"]
        code = call([*arguments, "--engine", "vllm", *SMALL, *options])
        lines = "".join(capfd.readouterr()).splitlines()
        said = "\n".join(line for line in lines if not NOISE.match(line)).strip()
        print(said)
        assert code != 0, said
        assert "Traceback" not in said
        assert "see" not in said.lower().split(), said
        assert len(said.splitlines()) == 1, said
        return said

    return start


@pytest.fixture
def changed(byte_model, tmp_path):
    """A copy of the model with other entries in its config.json."""

    def copy(**entries):
        folder = tmp_path / "model"
        shutil.copytree(byte_model, folder)
        config = json.loads((folder / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


ARGUMENTS = {
    "a context that the model does not have": (
        ["--max-model-len", "99999"],
        ["--max-model-len 99999 is more than the model's context of 2048 tokens"],
    ),
    "a number that is none": (
        ["--engine-arg", "max-num-seqs=many"],
        ["max_num_seqs: 'many' is not of type int or none"],
    ),
    "a number that cannot be": (
        ["--engine-arg", "max-num-batched-tokens=-1"],
        ["max_num_batched_tokens: Input should be"],
    ),
    "an object that is a number": (
        ["--engine-arg", "kv-transfer-config=5"],
        ["kv_transfer_config: Input should be a dictionary"],
    ),
    "a choice that is not offered": (
        ["--engine-arg", "kv-cache-dtype=fp3"],
        ["cache_dtype: Invalid kv_cache_dtype: 'fp3'"],
    ),
    "an object that is no JSON": (["--engine-arg", "speculative-config={bad"], ["speculative_config", "is not JSON"]),
    "an object with an unknown key": (["--engine-arg", 'speculative-config={"bad": 1}'], ["bad: Unexpected keyword"]),
    "workers that the heads cannot be spread over": (["--tensor-parallel", "5"], ["4 attention heads", "5 workers"]),
    "a scheduler from nowhere": (["--engine-arg", "scheduler-cls=nowhere.Such"], ["No module named 'nowhere'"]),
    "a scheduler that its module lacks": (
        ["--engine-arg", "scheduler-cls=vllm.v1.core.sched.scheduler.Nope"],
        ["vllm.v1.core.sched.scheduler", "Nope"],
    ),
    "a cache too small for one request": (["--kv-memory", "4KiB"], ["--kv-memory"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_cannot_be_is_named(refusal, byte_model, case):
    options, words = ARGUMENTS[case]
    said = refusal(byte_model, *options)
    assert all(word in said for word in words), said


def test_a_checkpoint_whose_format_has_no_kernel_here(refusal, changed):
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    said = refusal(changed(quantization_config=gptq))
    assert "gptq" in said


def test_weights_that_were_cut(refusal, changed):
    folder = changed()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert "a weight file is cut off or damaged" in refusal(folder)


def test_weights_that_are_missing(refusal, changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    assert "Cannot find any model weights" in refusal(folder)


def test_weights_of_another_size(refusal, changed):
    assert "not of the size that config.json asks for: 128 where 256 is wanted" in refusal(
        changed(intermediate_size=256)
    )


def test_a_folder_without_a_tokenizer(refusal, changed):
    folder = changed()
    (folder / "tokenizer.json").unlink()
    assert "is tokenizer.json there?" in refusal(folder)


def test_an_unknown_architecture(refusal, changed):
    said = refusal(changed(architectures=["FooForCausalLM"]))
    assert "FooForCausalLM" in said
