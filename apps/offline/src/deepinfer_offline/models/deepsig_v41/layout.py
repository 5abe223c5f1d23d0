"""The released checkpoint layout: every tensor by name, with its logical shape and how it may be stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan, Schedule

Storage = Literal["plain", "projection", "expert", "table"]
VISION_PREFIXES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One weight.

    Attributes:
        name: in the checkpoint. Quantised weights (`*.weight`) have their scales beside them (`*.scale`).
        shape: logical, unpacked.
        storage: `plain` = float; `projection` = float, or E4M3 with a scale for each 32x32 tile; `expert` = float, or packed
            E2M1 with a scale for each row and 32 columns; `table` = float, or E4M3 with a scale for each row and 32 columns.
        optional: may be absent, because text inference does not read it.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage = "plain"
    optional: bool = False

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def scale_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        blocks = -(-columns // 32)
        return (-(-rows // 32), blocks) if self.storage == "projection" else (rows, blocks)

    @property
    def count(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total


def _moe(prefix: str, c: V41Config, experts: int) -> Iterator[TensorSpec]:
    d, m = c.hidden_size, c.moe_intermediate_size
    yield TensorSpec(f"{prefix}.gate.weight", (experts, d))
    yield TensorSpec(f"{prefix}.gate.bias", (experts,))
    yield TensorSpec(f"{prefix}.gate.bias_vl", (experts,), optional=True)
    for expert in range(experts):
        for name, shape in (("w1", (m, d)), ("w3", (m, d)), ("w2", (d, m))):
            yield TensorSpec(f"{prefix}.experts.{expert}.{name}.weight", shape, "expert")
    for name, shape in (("w1", (m, d)), ("w3", (m, d)), ("w2", (d, m))):
        yield TensorSpec(f"{prefix}.shared_experts.{name}.weight", shape, "projection")


def _block(prefix: str, c: V41Config, experts: int) -> Iterator[TensorSpec]:
    """What every layer and every draft stage has."""
    d, heads, dim = c.hidden_size, c.num_attention_heads, c.head_dim
    yield TensorSpec(f"{prefix}.attn_norm.weight", (d,))
    yield TensorSpec(f"{prefix}.ffn_norm.weight", (d,))
    yield TensorSpec(f"{prefix}.attn.wq_a.weight", (c.q_lora_rank, d), "projection")
    yield TensorSpec(f"{prefix}.attn.q_norm.weight", (c.q_lora_rank,))
    yield TensorSpec(f"{prefix}.attn.wq_b.weight", (heads * dim, c.q_lora_rank), "projection")
    yield TensorSpec(f"{prefix}.attn.wkv.weight", (dim, d), "projection")
    yield TensorSpec(f"{prefix}.attn.kv_norm.weight", (dim,))
    yield TensorSpec(f"{prefix}.attn.attn_sink", (heads,))
    per_group = heads * dim // c.o_groups
    yield TensorSpec(f"{prefix}.attn.wo_a.weight", (c.o_groups * c.o_lora_rank, per_group), "projection")
    yield TensorSpec(f"{prefix}.attn.wo_b.weight", (d, c.o_groups * c.o_lora_rank), "projection")
    mixes = c.hc_mult * (c.hc_mult + 2)
    for site in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.hc_{site}_fn", (mixes, c.hc_mult * d))
        yield TensorSpec(f"{prefix}.hc_{site}_base", (mixes,))
        yield TensorSpec(f"{prefix}.hc_{site}_scale", (3,))
    yield from _moe(f"{prefix}.ffn", c, experts)


def _selection(prefix: str, c: V41Config, layer: LayerPlan) -> Iterator[TensorSpec]:
    """Compressor and indexer of a layer, as far as it has them."""
    d, dim = c.hidden_size, c.head_dim
    if layer.mode == "full":
        yield TensorSpec(f"{prefix}.compressor.wkv.weight", (dim, d))
        yield TensorSpec(f"{prefix}.compressor.norm.weight", (dim,))
        if layer.ratio > 1:
            yield TensorSpec(f"{prefix}.compressor.wgate.weight", (dim, d))
        yield TensorSpec(f"{prefix}.indexer.wk.weight", (c.index_head_dim, dim))
        yield TensorSpec(f"{prefix}.indexer.k_norm.weight", (c.index_head_dim,))
    if layer.selects:
        yield TensorSpec(
            f"{prefix}.indexer.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "projection"
        )
        yield TensorSpec(f"{prefix}.indexer.weights_proj.weight", (c.index_n_heads, d))


def _engram(prefix: str, c: V41Config, layer: LayerPlan) -> Iterator[TensorSpec]:
    width = c.engram_hash_heads * c.engram_head_dim
    yield TensorSpec(f"{prefix}.embed.weight", (c.engram_num_embeddings[layer.engram], c.engram_head_dim), "table")
    yield TensorSpec(f"{prefix}.wkv.weight", (c.hidden_size * (c.hc_mult + 1), width), "projection")
    yield TensorSpec(f"{prefix}.q_weight", (c.hc_mult, c.hidden_size))
    yield TensorSpec(f"{prefix}.k_weight", (c.hc_mult, c.hidden_size))


def _draft(c: V41Config) -> Iterator[TensorSpec]:
    d, last = c.hidden_size, c.num_nextn_predict_layers - 1
    for stage in range(c.num_nextn_predict_layers):
        yield from _block(f"mtp.{stage}", c, c.dspark_n_routed_experts)
    yield TensorSpec("mtp.0.main_proj.weight", (d, d * len(c.dspark_target_layer_ids)), "projection")
    yield TensorSpec("mtp.0.main_norm.weight", (d,))
    yield TensorSpec(f"mtp.{last}.norm.weight", (d,))
    yield TensorSpec(f"mtp.{last}.markov_head.embed.weight", (c.vocab_size, c.dspark_markov_rank))
    yield TensorSpec(f"mtp.{last}.markov_head.head.weight", (c.vocab_size, c.dspark_markov_rank))
    yield TensorSpec(f"mtp.{last}.confidence_head.proj.weight", (1, d + c.dspark_markov_rank))


def checkpoint_specs(c: V41Config, schedule: Schedule) -> dict[str, TensorSpec]:
    """Every weight of the text model and its draft, by name (scales are implied by `TensorSpec.scale_name`)."""
    specs = [
        TensorSpec("embed.weight", (c.vocab_size, c.hidden_size)),
        TensorSpec("norm.weight", (c.hidden_size,)),
        TensorSpec("head.weight", (c.vocab_size, c.hidden_size)),
    ]
    for layer in schedule.layers:
        prefix = f"layers.{layer.index}"
        specs.extend(_block(prefix, c, c.n_routed_experts))
        specs.extend(_selection(f"{prefix}.attn", c, layer))
        if layer.engram >= 0:
            specs.extend(_engram(f"{prefix}.engram", c, layer))
    if c.num_nextn_predict_layers:
        specs.extend(_draft(c))
    return {spec.name: spec for spec in specs}
