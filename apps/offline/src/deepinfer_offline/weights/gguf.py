"""GGUF files: configuration and tensors under their Hugging Face names.

transformers reads the same files, but parses every vocabulary entry through numpy first, twice, which takes longer than
loading the weights. Here the header is walked once; block formats are decoded by the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.weights.gguf_cursor import DAMAGE, GgufCursor

if TYPE_CHECKING:
    import torch

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # general.architecture -> model_type

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TOP["output.weight"] = "lm_head.weight"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_UNREADABLE = (OSError, *DAMAGE)
ROPE_DIVISORS = "rope_freqs.weight"
"""Per-frequency divisors that Llama 3 files carry; they end up in the configuration."""


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]  # as torch sees it, slowest dimension first
    kind: int  # GGML quantisation type
    offset: int  # bytes from the start of the data section


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays of strings are skipped) and tensor entries of a file."""

    facts: Mapping[str, Any]
    entries: Mapping[str, _Entry]
    data_start: int


def read_header(path: Path) -> GgufHeader:
    """Read everything before the tensor data.

    Raises:
        EngineStartError: not a GGUF file of version 2 or 3, or it ends early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderCursor(data).header()
    except _UNREADABLE as error:
        raise EngineStartError(f"{path} is not a GGUF file that this version reads: {error}") from error


class GgufTensors:
    """A `TensorReader` over one GGUF file. Block formats come out as float32."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._data = _map(path, header)
        self._names = {_hf_name(name): name for name in header.entries if name != ROPE_DIVISORS}
        self._entries = header.entries
        self._heads = _permuted_heads(header.facts)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {hf: self._entries[name].shape for hf, name in self._names.items()}

    def read(self, name: str) -> torch.Tensor:
        import torch  # a header is read without it

        stored = self._names[name]
        values = _decode(self._data, self._entries[stored], self._path)
        for suffix, heads in self._heads.items():
            if suffix in name:
                values = _halves_first(values, heads)
        if not values.flags.writeable:  # a view of the file: torch wants memory of its own
            values = values.copy()
        return torch.from_numpy(np.ascontiguousarray(values))

    def close(self) -> None:
        """The map is closed when it is collected."""


def gguf_config(path: Path, header: GgufHeader) -> dict[str, Any]:
    """The Hugging Face configuration that a GGUF file describes.

    Raises:
        EngineStartError: an architecture that the native engine does not run.
    """
    facts = header.facts
    family = facts.get("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise EngineStartError(
            f"{path} has GGUF architecture {family!r}; the native engine reads {', '.join(_FAMILIES)}"
        )

    def fact(key: str, default: Any = None) -> Any:
        return facts.get(f"{family}.{key}", default)

    heads, width = fact("attention.head_count"), fact("embedding_length")
    known = isinstance(heads, int) and isinstance(width, int) and heads > 0
    table = header.entries.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise EngineStartError(f"{path} has no matrix token_embd.weight, so it holds no whole model")
    return {
        "model_type": _FAMILIES[family],
        "dtype": "bfloat16",
        "vocab_size": table.shape[0],
        "hidden_size": width,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": fact("attention.key_length") or fact("rope.dimension_count") or (width // heads if known else None),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": fact("context_length"),
        "tie_word_embeddings": "output.weight" not in header.entries,
        "attention_bias": "blk.0.attn_q.bias" in header.entries,
        "rope_parameters": _rope(path, header, fact),
    }


def _rope(path: Path, header: GgufHeader, fact: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": fact("rope.freq_base", 10000.0)}
    kind = fact("rope.scaling.type")
    if kind in ("linear", "yarn"):
        rope["rope_type"] = kind
        rope["factor"] = fact("rope.scaling.factor", 1.0)
        if fact("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = fact("rope.scaling.original_context_length")
    elif kind not in (None, "none"):
        raise EngineStartError(f"{path} scales its rotary embedding by {kind!r}; the native engine knows linear, yarn")
    if ROPE_DIVISORS in header.entries:
        rope["divisors"] = _decode(_map(path, header), header.entries[ROPE_DIVISORS], path).tolist()
    return rope


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
    return name  # reported as unexpected, under the name it has in the file


def _permuted_heads(facts: Mapping[str, Any]) -> dict[str, int]:
    """Projections whose head channels GGUF stores interleaved (the `llama` architecture does), and their heads."""
    if facts.get("general.architecture") != "llama":
        return {}
    heads = facts["llama.attention.head_count"]
    return {".self_attn.q_proj.": heads, ".self_attn.k_proj.": facts.get("llama.attention.head_count_kv", heads)}


def _halves_first(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved rotary pairs (0, 1), (2, 3), ... back to pairs (k, k + half)."""
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _map(path: Path, header: GgufHeader) -> np.ndarray:
    """The tensor data. Raises EngineStartError if there is none."""
    try:
        return np.memmap(path, np.uint8, mode="r", offset=header.data_start)
    except _UNREADABLE as error:
        raise EngineStartError(f"{path} ends before its tensor data does: {error}") from error


def _decode(data: np.ndarray, entry: _Entry, path: Path) -> np.ndarray:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(entry.kind)
        block, width = GGML_QUANT_SIZES[kind]
        count = math.prod(entry.shape)
        raw = data[entry.offset : entry.offset + count // block * width]
        if len(raw) != count // block * width:
            raise EngineStartError(f"{path} ends before its tensor data does")
        rows = raw.reshape(*entry.shape[:-1], entry.shape[-1] // block * width)
        return dequantize(rows, kind)
    except (*DAMAGE, NotImplementedError) as error:
        raise EngineStartError(f"{path} stores tensors in GGML type {entry.kind}, which cannot be decoded") from error


class _HeaderCursor(GgufCursor):
    """Passes over arrays of strings: vocabularies are long."""

    def header(self) -> GgufHeader:
        tensors, pairs = self.begin()
        facts = dict(self.pair() for _ in range(pairs))
        entries = dict(self.entry() for _ in range(tensors))
        alignment = facts.get("general.alignment", 32)
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        return GgufHeader(facts, entries, -(-self.at // alignment) * alignment)

    def strings(self, count: int) -> None:
        length, data, at = struct.Struct("<Q"), self.data, self.at
        for _ in range(count):
            at += 8 + length.unpack_from(data, at)[0]
        self.at = at

    def entry(self) -> tuple[str, _Entry]:
        name = self.string()
        (dims,) = self.take("<I")
        shape = self.take(f"<{dims}Q")
        kind, offset = self.take("<IQ")
        return name, _Entry(tuple(int(size) for size in reversed(shape)), kind, offset)
