"""`deepinfer plan`, as a user calls it."""

from __future__ import annotations

import gzip
import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer
from deepinfer_offline.cli.plan import plan
from deepinfer_offline.engine.factory import build_engine
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.planning.model import find_model
from typer.testing import CliRunner

V41 = Path(__file__).parent / "data" / "v41-oracle" / "dev-replay"


@pytest.fixture
def call():
    app = typer.Typer()
    app.command()(plan)
    app.command("other")(lambda: None)  # two commands, so that `plan` is named on the command line as in `deepinfer`
    return lambda *words: CliRunner().invoke(app, ["plan", *map(str, words)])


@pytest.fixture
def trace(tmp_path):
    """40 groups of 8 requests, 31 shared blocks and one of their own, shuffled."""
    rows = [
        [group, *range(1000 * group, 1000 * group + 30), 10**6 + 40 * i + group]
        for i in range(8)
        for group in range(40)
    ]
    random.Random(0).shuffle(rows)
    path = tmp_path / "trace.jsonl.gz"
    lines = [json.dumps({"timestamp": 0, "input_length": 16_000, "output_length": 9, "hash_ids": row}) for row in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_json_has_the_promised_keys_and_numbers(call, trace):
    result = call("--trace", trace, "--block-size", 512, "--cache-blocks", 64, 2000, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report) == ["requests", "blocks", "bound", "sizes"]
    assert (report["requests"], report["blocks"]) == (320, 320 * 32)
    bound = (40 * 7 * 31) / (320 * 32)  # 31 shared blocks are computed once instead of eight times
    assert report["bound"] == pytest.approx(bound)
    small, large = report["sizes"]
    assert list(small) == ["cache_blocks", "arrival_lru", "planned_lru", "planned_next_use"]
    assert (small["cache_blocks"], large["cache_blocks"]) == (64, 2000)
    assert small["planned_lru"] == pytest.approx(bound) == small["planned_next_use"]
    assert small["arrival_lru"] < 0.1
    assert large["arrival_lru"] == pytest.approx(bound)  # everything that repeats fits


def test_sizes_may_be_given_once_or_several_times(call, trace):
    once = call("--trace", trace, "--cache-blocks", 64, 128, 256, "--json").stdout
    often = call("--trace", trace, "--cache-blocks", 64, "--cache-blocks", 256, "--cache-blocks", 128, "--json").stdout
    assert json.loads(once) == json.loads(often)


def test_text_names_what_matters(call, trace):
    result = call("--trace", trace, "--cache-blocks", 64)
    assert "320 requests, 5,120,000 prompt tokens, 10,240 blocks of 512 tokens" in result.stdout
    assert "15,872" in result.stdout  # the shared prefixes, in tokens
    assert "Keep --order prefix" in result.stdout


def test_plot(call, trace, tmp_path):
    picture = tmp_path / "hits.svg"
    assert call("--trace", trace, "--cache-blocks", 64, 256, 1024, "--plot", picture).exit_code == 0
    root = ElementTree.parse(picture).getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [3, 3, 3]
    heights = [[float(point.split(",")[1]) for point in line.get("points").split()] for line in lines]
    assert heights[1][0] < heights[0][0]  # planned is above arrival order (y grows downwards)


def test_png_needs_matplotlib_or_draws(call, trace, tmp_path):
    picture = tmp_path / "hits.png"
    result = call("--trace", trace, "--cache-blocks", 64, 256, "--plot", picture)
    if result.exit_code == 2:
        assert "pip install matplotlib" in result.stderr
    else:
        assert picture.read_bytes()[:4] == b"\x89PNG"


def write_batch(path, prompts):
    lines = [
        json.dumps(
            {
                "custom_id": f"r{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": prompt, "max_tokens": 4},
            }
        )
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_batch_file_of_token_ids(call, tmp_path):
    prompts = [list(range(100, 164)) + [i] * 16 for i in range(10)]
    result = call(write_batch(tmp_path / "in.jsonl", prompts), "--block-size", 16, "--cache-blocks", 100, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["blocks"] == 50
    assert report["bound"] == pytest.approx(36 / 50)


def tiny_llama(folder):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "v41"])
@pytest.mark.parametrize("size", [None, 8])
def test_blocks_are_those_of_the_engine_that_would_run(call, tmp_path, kind, size):
    model = tiny_llama(tmp_path) if kind == "llama" else V41
    options = EngineOptions(
        str(model), engine="native", device="cpu", kv_memory=1 << 22, max_running=2, block_size=size
    )
    engine = build_engine(options)
    runs = engine.info.block_size
    engine.close()
    found = find_model(options)
    assert (found.engine, found.block_size) == ("native", runs)
    batch = write_batch(tmp_path / "in.jsonl", [list(range(10, 58)) + [i] * 16 for i in range(4)])
    words = ["--block-size", size] if size else []
    result = call(batch, "--model", model, "--engine", "native", *words)
    assert result.exit_code == 0, result.output
    assert f"{4 * (64 // runs)} blocks of {runs} tokens (engine native)" in result.stdout


def test_a_model_for_vllm_is_planned_with_its_blocks(call, tmp_path):
    """Here or elsewhere: planning needs no more than a tokenizer, and not even that for token ids."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    batch = write_batch(tmp_path / "in.jsonl", [[7] * 48] * 2)
    result = call(batch, "--model", tmp_path)
    assert "6 blocks of 16 tokens (engine vllm)" in result.stdout
    result = call(batch, "--model", tmp_path, "--engine", "native")
    assert result.exit_code == 2
    assert "does not run model_type 'gemma3'" in result.stderr


def test_blocks_that_are_too_long_are_the_only_advice(call, tmp_path):
    """24 shared tokens are none in blocks of 32: that nothing is shared would be the wrong thing to say."""
    batch = write_batch(tmp_path / "in.jsonl", [list(range(10, 34)) + [i] * 16 for i in range(8)])
    result = call(batch, "--block-size", 32)
    advice = "blocks of 32 tokens find 0 of them; a smaller --block-size finds more"
    assert f"{advice}; on a CPU keep to multiples of 32, others are computed by slower code." in result.stdout
    assert f"{advice}." in call(batch, "--block-size", 32, "--engine", "vllm").stdout
    assert "nothing to find" not in result.stdout


def test_a_timestamp_before_shared_text_is_found(call, tmp_path):
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(200)]
    stamped = [
        [1, 2, 3, *(rng.randrange(1000) for _ in range(6)), *shared, *(rng.randrange(1000) for _ in range(9))]
        for _ in range(60)
    ]
    result = call(write_batch(tmp_path / "in.jsonl", stamped), "--cache-blocks", 1000)
    assert "100% of the prompts part at about token" in result.stdout
    assert "move what differs" in result.stdout
    plain = [[*shared, *(rng.randrange(1000) for _ in range(9))] for _ in range(60)]
    result = call(write_batch(tmp_path / "in.jsonl", plain), "--cache-blocks", 1000)
    assert "move what differs" not in result.stdout


def test_bad_lines_are_counted_not_fatal(call, tmp_path):
    path = write_batch(tmp_path / "in.jsonl", [[5] * 32] * 3)
    path.write_text(path.read_text() + "{broken\n")
    result = call(path, "--cache-blocks", 10)
    assert result.exit_code == 0
    assert "1 line is left out" in result.stdout
    assert "line 4" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give one of INPUT and --trace"),
        (("--trace", "/nowhere.jsonl"), "does not exist"),
        (("/nowhere.jsonl",), "does not exist"),
        (("a.jsonl", "b.jsonl"), "give one INPUT"),
    ],
)
def test_what_cannot_start_exits_2_with_one_sentence(call, words, says):
    result = call(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_trace_line_that_is_none_is_named(call, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1]}\n{"hash_ids": ["x"]}\n')
    result = call("--trace", path)
    assert result.exit_code == 2
    assert "line 2" in result.stderr
