"""`--kv-store`: a later run takes the prompts' KV from a folder, and nothing in that folder changes an answer."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.tiers import DiskTier
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.engine.base import EngineStartError, EngineStats
from safetensors.torch import save_file

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM = 96, 64, 3, 4, 2, 32
BLOCK, LENGTH = 8, 360
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAIRED = "the second engine and the first one compute the same rows in other steps; float32 keeps greedy answers equal"


def save_llama(folder: Path, seed: int = 3) -> Path:
    """A random Llama whose attention is sharp enough that each token of the prompt moves the logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale * shape[-1] ** -0.5

    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN, scale=2.0), "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = random(VOCAB, HIDDEN, scale=2.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": random(HEADS * DIM, HIDDEN, scale=1.5),
            f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * DIM, HIDDEN, scale=1.5),
            f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * DIM, HIDDEN, scale=2.0),
            f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM, scale=2.0),
            f"{prefix}mlp.gate_proj.weight": random(96, HIDDEN),
            f"{prefix}mlp.up_proj.weight": random(96, HIDDEN),
            f"{prefix}mlp.down_proj.weight": random(HIDDEN, 96),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


def prompts(count: int = 5) -> list[list[int]]:
    """Prompts of about LENGTH tokens; the first two share all but their ends."""
    rng = np.random.default_rng(5)
    found = [rng.integers(0, VOCAB, LENGTH + place).tolist() for place in range(5)]
    found[1] = found[0][:300] + found[1][300:]
    return found[:count]


def run(folder: Path, ids: Sequence[Sequence[int]], **options: Any) -> tuple[list[list[int]], EngineStats]:
    """Answers, and the statistics after the engine was closed."""
    settings: dict[str, Any] = {"dtype": "float32", "engine": "native", "device": "cpu", "block_size": BLOCK}
    settings.update({"max_num_seqs": 4, **options})
    with LLM(folder, **settings) as llm:
        outputs = llm.generate([list(prompt) for prompt in ids], GREEDY)
        engine = llm.engine
    assert all(out.error is None for out in outputs)
    return [list(out.outputs[0].token_ids) for out in outputs], engine.stats()


def page_files(store: Path) -> list[Path]:
    return sorted(store.glob("*/??/*.kv"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Answers of an engine that shares nothing."""
    return run(model, prompts(), enable_prefix_caching=False)[0]


def test_the_model_depends_on_every_token(model: Path) -> None:
    """Otherwise the tests below would pass with wrong pages."""
    ids = prompts()[0]
    with LLM(model, dtype="float32", engine="native", device="cpu", block_size=BLOCK) as llm:
        whole = np.asarray(llm.logits(ids))[-1]
        for place in range(0, len(ids) - 1, 37):
            changed = [*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :]]
            assert np.abs(np.asarray(llm.logits(changed))[-1] - whole).max() > 1e-3, place


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_engine_computes_next_to_nothing(
    model: Path, tmp_path: Path, expected: list[list[int]], asynchronous: bool
) -> None:
    first, cold = run(model, prompts(), kv_store=tmp_path, async_scheduling=asynchronous)
    second, warm = run(model, prompts(), kv_store=tmp_path, async_scheduling=asynchronous)
    assert first == expected
    assert second == expected, PAIRED
    assert cold.cached_tokens >= 296  # the device's own cache
    assert cold.extra["kv_store"]["loaded_pages"] == 0
    stored = cold.extra["kv_store"]["saved_pages"]
    assert stored == len(page_files(tmp_path))
    # Whole pages of the prompts: 5 x 45 less the 37 that are shared; answers of 12 tokens fill at least one page each.
    assert 5 * 45 - 37 + 5 <= stored <= 5 * 45 - 37 + 10
    assert warm.prompt_tokens == cold.prompt_tokens == sum(map(len, prompts()))
    assert warm.computed_prompt_tokens < 0.05 * warm.prompt_tokens
    assert warm.computed_prompt_tokens == warm.prompt_tokens - warm.cached_tokens
    assert warm.extra["kv_store"]["loaded_pages"] >= 5 * 44 - 37
    assert warm.extra["kv_store"]["saved_pages"] == 0


def test_two_processes_share_a_store(model: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    def process() -> dict[str, Any]:
        code = (
            "import json, sys; from pathlib import Path; from deepinfer_offline import LLM, SamplingParams\n"
            "model, store, ids, block = json.loads(sys.argv[1])\n"
            "with LLM(model, dtype='float32', engine='native', device='cpu', block_size=block, kv_store=store) as llm:\n"
            "    outs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))\n"
            "    engine = llm.engine\n"
            "stats = engine.stats()\n"
            "print(json.dumps({'ids': [list(map(int, o.outputs[0].token_ids)) for o in outs], 'total': stats.prompt_tokens,"
            " 'computed': stats.computed_prompt_tokens, **stats.extra['kv_store']}))"
        )
        argument = json.dumps([str(model), str(tmp_path), prompts(), BLOCK])
        done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm = process(), process()
    assert cold["ids"] == warm["ids"] == expected
    assert cold["saved_pages"] == len(page_files(tmp_path))
    assert cold["computed"] > 0.5 * cold["total"]
    assert warm["computed"] < 0.05 * warm["total"]
    assert warm["saved_pages"] == 0


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def foreign(file: Path) -> None:
    file.write_bytes(b"\x89PNG" + bytes(3000))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, cut, foreign, empty])
def test_damaged_files_are_misses_with_a_warning(
    model: Path,
    tmp_path: Path,
    expected: list[list[int]],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(model, prompts(), kv_store=tmp_path)
    files = page_files(tmp_path)
    for file in files:
        damage(file)
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        answers, stats = run(model, prompts(), kv_store=tmp_path)
    assert answers == expected
    warnings = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert 1 <= len(warnings) <= len(files)
    assert len(set(warnings)) == len(warnings), "a damaged file is read once"
    assert stats.extra["kv_store"]["loaded_pages"] == 0
    assert stats.computed_prompt_tokens == stats.prompt_tokens - stats.cached_tokens
    assert stats.extra["kv_store"]["saved_pages"] >= len(warnings), "what was damaged is written again"
    answers, stats = run(model, prompts(), kv_store=tmp_path)
    assert answers == expected
    assert stats.extra["kv_store"]["loaded_pages"] > 0


def test_a_damaged_file_is_read_once_and_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request that waits for room looks for its pages in every step."""
    disk, record = DiskTier(tmp_path, bytes(16), 64), np.arange(64, dtype=np.uint8)
    disk.put(b"k" * 16, record)
    flip_a_bit(page_files(tmp_path)[0])
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        assert [disk.get(b"k" * 16) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    disk.put(b"k" * 16, record)
    found = disk.get(b"k" * 16)
    assert found is not None
    assert found.tolist() == record.tolist()


def test_one_damaged_page_costs_what_follows_it(
    model: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompts()
    run(model, ids[2:3], kv_store=tmp_path)
    key = chain_hashes(ids[2], BLOCK)[20].hex()
    (file,) = tmp_path.glob(f"*/{key[:2]}/{key}.kv")
    flip_a_bit(file)
    with caplog.at_level(logging.WARNING, "deepinfer_cache"):
        # The second request finds what the first one computes in small steps.
        answers, stats = run(model, ids[2:3] * 2, kv_store=tmp_path, max_num_batched_tokens=32)
    assert answers == expected[2:3] * 2
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    assert stats.extra["kv_store"]["loaded_pages"] == 20
    assert stats.cached_tokens == 20 * BLOCK + len(ids[2]) // BLOCK * BLOCK
    assert stats.extra["kv_store"]["saved_pages"] == 1


def test_other_weights_config_dtype_and_block_size_find_nothing(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(model, prompts(), kv_store=store)
    other = save_llama(tmp_path / "llama", seed=4)
    answers, stats = run(other, prompts(), kv_store=store)
    assert answers == run(other, prompts(), enable_prefix_caching=False)[0]
    assert stats.extra["kv_store"]["loaded_pages"] == 0
    for changes in ({"dtype": "bfloat16"}, {"block_size": 2 * BLOCK}):
        assert run(model, prompts(), kv_store=store, **changes)[1].extra["kv_store"]["loaded_pages"] == 0
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    assert run(other, prompts(), kv_store=store)[1].extra["kv_store"]["loaded_pages"] == 0
    assert len(list(store.iterdir())) == 5  # a folder a fingerprint; none is deleted


def test_one_changed_weight_is_another_model(model: Path, tmp_path: Path) -> None:
    """A change of one bit in place, with size and date kept, as a careless copy would."""
    store, copy = tmp_path / "store", tmp_path / "copy"
    shutil.copytree(model, copy)
    run(copy, prompts(1), kv_store=store)
    assert run(model, prompts(1), kv_store=store)[1].extra["kv_store"]["loaded_pages"] > 0  # the place does not matter
    weights = copy / "model.safetensors"
    before = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(copy, prompts(1), kv_store=store)[1].extra["kv_store"]["loaded_pages"] == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_pages_pushed_out_of_the_device_come_back_from_the_store(
    model: Path, tmp_path: Path, expected: list[list[int]], asynchronous: bool
) -> None:
    """Memory for two prompts, five prompts twice, a few tokens a step: pages are loaded, saved and reused meanwhile."""
    page = LAYERS * 2 * KV_HEADS * BLOCK * DIM * 4
    limits: dict[str, Any] = {"kv_memory": 110 * page, "max_model_len": 400, "max_num_batched_tokens": 64}
    answers, stats = run(model, [*prompts(), *prompts()], kv_store=tmp_path, async_scheduling=asynchronous, **limits)
    assert answers == expected * 2
    assert stats.extra["kv_store"]["loaded_pages"] > 100
    assert stats.computed_prompt_tokens < 0.55 * stats.prompt_tokens


def test_bfloat16_pages_of_the_cpu_kernels(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": 32, "max_num_seqs": 1}
    cold = run(model, prompts(), **options)[0]
    assert run(model, prompts(), kv_store=tmp_path, **options)[0] == cold
    answers, warm = run(model, prompts(), kv_store=tmp_path, **options)
    assert answers == cold
    assert warm.extra["kv_store"]["loaded_pages"] >= 5 * 10 - 9


def test_v41_pages_come_back(tmp_path: Path) -> None:
    """A hit replays the window whether its pages come from the device or from the store: equal answers."""
    replay = np.load(ORACLE / "dev-replay" / "cases.npz")
    hits = [g for g in range(int(replay["num_groups"])) if int(replay[f"g{g}_hit"]) > 8]
    assert hits
    for group in hits[:2]:
        ids, hit = replay[f"g{group}_ids"].tolist(), int(replay[f"g{group}_hit"])
        store = tmp_path / str(group)
        options: dict[str, Any] = {"block_size": 1, "kv_store": store}
        run(ORACLE / "dev-replay", [ids[:hit]], **options)
        with LLM(ORACLE / "dev-replay", dtype="float32", engine="native", device="cpu", **options) as llm:
            out = llm.generate([ids], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
            stats = llm.engine.stats()
        assert out.num_cached_tokens == hit
        assert stats.extra["kv_store"]["loaded_pages"] == hit
        assert list(out.outputs[0].token_ids) == replay[f"g{group}_both_paper_greedy"].tolist()[:8]


def test_a_step_that_fails_saves_nothing(model: Path, tmp_path: Path) -> None:
    with LLM(model, dtype="float32", engine="native", device="cpu", block_size=BLOCK, kv_store=tmp_path) as llm:
        runner = llm.engine._parts.runner  # pyrefly: ignore
        forward, steps = runner.model.forward, []

        def failing(batch: Any, cache: Any) -> Any:
            steps.append(batch)
            if len(steps) > 1:
                raise RuntimeError("no memory")
            return forward(batch, cache)

        runner.model.forward = failing
        with pytest.raises(RuntimeError, match="no memory"):
            llm.generate([[1] * 100, *prompts()], GREEDY)
    files = page_files(tmp_path)
    answers, stats = run(model, [[1] * 100, *prompts()], kv_store=tmp_path)
    assert answers == run(model, [[1] * 100, *prompts()], enable_prefix_caching=False)[0]
    assert stats.extra["kv_store"]["loaded_pages"] <= len(files)


def test_pages_of_logits_that_failed_are_not_saved(model: Path, tmp_path: Path) -> None:
    with LLM(model, dtype="float32", engine="native", device="cpu", block_size=BLOCK, kv_store=tmp_path) as llm:
        runner = llm.engine._parts.runner  # pyrefly: ignore

        def failing(batch: Any, cache: Any) -> Any:
            raise RuntimeError("no memory")

        runner.model.forward = failing
        with pytest.raises(RuntimeError, match="no memory"):
            llm.logits(prompts()[0])
    assert page_files(tmp_path) == []


def test_a_move_that_fails_fails_the_step_that_would_read_it(model: Path, tmp_path: Path) -> None:
    run(model, prompts(), kv_store=tmp_path)
    with LLM(model, dtype="float32", engine="native", device="cpu", block_size=BLOCK, kv_store=tmp_path) as llm:
        mover = llm.engine._parts.cache._mover  # pyrefly: ignore

        def failing(pages: Sequence[int], records: np.ndarray) -> None:
            raise MemoryError("no room")

        mover._scatter = failing
        with pytest.raises(MemoryError, match="no room"):
            llm.generate(prompts(), GREEDY)


def test_refusals(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(EngineStartError, match="cannot make the folder"):
        run(model, prompts(1), kv_store=file)
    with pytest.raises(EngineStartError, match="--prefix-caching"):
        run(model, prompts(1), kv_store=tmp_path, enable_prefix_caching=False)
