"""The folder that vLLM loads for a GGUF file: its weights are the file's of now, not of an earlier run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.vllm.export import exported_folder
from deepinfer_offline.weights.source import resolve_model

ROWS = 4096  # the tensor is past the first mebibyte, which holds the header


def write_gguf(path: Path) -> None:
    """A file of one matrix and a byte-level tokenizer, in the names of llama.cpp."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{place}>" for place in range(3, ROWS))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    values = np.random.default_rng(3).standard_normal((ROWS, 128), np.float32)
    writer.add_tensor("token_embd.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def exported(path: Path) -> tuple[Path, torch.Tensor]:
    from safetensors.torch import load_file

    folder = exported_folder(resolve_model(str(path)), torch.float32)
    return folder, load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_weights_that_changed_in_place_are_exported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    write_gguf(file)
    first, before = exported(file)
    assert exported(file)[0] == first
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size - 4)
        stream.write(np.float32(0.5).tobytes())
    assert file.stat().st_size == size
    again, after = exported(file)
    assert again != first
    assert after[-1, -1] == 0.5
    assert torch.equal(after.flatten()[:-1], before.flatten()[:-1])
