"""Reads a checkpoint in the released layout: accounts for every tensor by name, then builds the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.deepsig_v41 import weights as w
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.layout import VISION_PREFIXES, TensorSpec, checkpoint_specs
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan, Schedule
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.deepsig import ExpertWeights
from deepinfer_offline.ops.deepsig.formats import (
    dequantize_fp4_rows,
    dequantize_fp8_rows,
    dequantize_fp8_tiles,
)

_SHOWN = 8  # names listed for each kind of mismatch
_FLOATS = ("F64", "F32", "F16", "BF16")


class TensorReader(Protocol):
    """Access to stored tensors by name; dtypes are safetensors' names, e.g. `F8_E4M3`."""

    def names(self) -> Iterable[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype name, shape) without reading the data."""
        ...

    def read(self, name: str) -> Tensor: ...


class LayoutError(EngineStartError):
    """The checkpoint's tensors are not those that its configuration implies."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """How one weight lies in the checkpoint."""

    spec: TensorSpec
    quantised: bool


def _expected_storage(spec: TensorSpec, dtype: str) -> tuple[bool, tuple[int, ...]] | None:
    """(quantised, stored shape) that `dtype` implies for `spec`, or None if it may not be stored so."""
    if dtype in _FLOATS:
        return False, spec.shape
    if dtype == "F8_E4M3" and spec.storage in ("projection", "table"):
        return True, spec.shape
    if dtype in ("I8", "U8", "F4") and spec.storage == "expert":
        return True, (spec.shape[0], spec.shape[1] // 2)
    return None


def account(reader: TensorReader, specs: dict[str, TensorSpec]) -> dict[str, StoredTensor]:
    """Match the stored tensors with the expected ones.

    Raises:
        LayoutError: names are missing, unexpected or misshapen; each is listed with what was found and expected.
    """
    present = set(reader.names())
    stored: dict[str, StoredTensor] = {}
    missing, wrong = [], []
    known: set[str] = set()
    for spec in specs.values():
        if spec.name not in present:
            if not spec.optional:
                missing.append(spec.name)
            continue
        known.add(spec.name)
        dtype, shape = reader.describe(spec.name)
        expected = _expected_storage(spec, dtype)
        if expected is None:
            wrong.append(f"{spec.name} is stored as {dtype}, which a {spec.storage} tensor may not be")
            continue
        quantised, want = expected
        if shape != want:
            wrong.append(f"{spec.name} is {dtype} {list(shape)}, expected {list(want)}")
        if quantised:
            _account_scale(reader, spec, present, known, missing, wrong)
        stored[spec.name] = StoredTensor(spec, quantised)
    unexpected = sorted(name for name in present - known if not name.startswith(VISION_PREFIXES))
    if missing or unexpected or wrong:
        raise LayoutError(_mismatch(missing, unexpected, wrong))
    return stored


def _account_scale(
    reader: TensorReader, spec: TensorSpec, present: set[str], known: set[str], missing: list[str], wrong: list[str]
) -> None:
    name = spec.scale_name
    known.add(name)
    if name not in present:
        missing.append(name)
        return
    dtype, shape = reader.describe(name)
    if dtype not in ("F8_E8M0", "U8") or shape != spec.scale_shape:
        wrong.append(f"{name} is {dtype} {list(shape)}, expected F8_E8M0 {list(spec.scale_shape)}")


def _mismatch(missing: list[str], unexpected: list[str], wrong: list[str]) -> str:
    parts = []
    for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", wrong)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {title}: {'; '.join(names[:_SHOWN])}{more}")
    return "the checkpoint does not fit its configuration: " + ". ".join(parts)


class WeightLoader:
    """Builds `ModelWeights` from a reader.

    Args:
        reader: the checkpoint.
        config: its configuration.
        schedule: of `config`.
        dtype: of the dense weights.
        device: where the weights go.
        keep_fp4: leave FP4 experts packed; they are unpacked expert by expert when used.
        pack: what becomes of a layer's experts, one layer after another; None leaves them as they are.

    Raises:
        LayoutError: see `account`.
    """

    def __init__(
        self,
        reader: TensorReader,
        config: V41Config,
        schedule: Schedule,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        keep_fp4: bool = False,
        pack: Callable[[ExpertWeights], Any] | None = None,
    ) -> None:
        self.reader, self.config, self.schedule = reader, config, schedule
        self.dtype, self.device, self.keep_fp4, self.pack = dtype, device, keep_fp4, pack
        self.stored = account(reader, checkpoint_specs(config, schedule))

    def load(self) -> w.ModelWeights:
        """Read everything, tensor by tensor: at no time are two copies of the model in memory."""
        layers = tuple(self._target_layer(layer) for layer in self.schedule.layers)
        return w.ModelWeights(
            embed=self.dense("embed.weight"),
            head=self.dense("head.weight", torch.float32),
            norm=self.dense("norm.weight"),
            layers=layers,
            draft=self._draft() if self.config.num_nextn_predict_layers else None,
        )

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One weight, dequantised if need be, on the device."""
        entry = self.stored[name]
        dtype = dtype or self.dtype
        data = self.reader.read(name)
        if not entry.quantised:
            return data.to(device=self.device, dtype=dtype)
        scale = self.reader.read(entry.spec.scale_name).view(torch.float8_e8m0fnu)
        unpack = {
            "projection": dequantize_fp8_tiles,
            "table": dequantize_fp8_rows,
            "expert": dequantize_fp4_rows,
        }[entry.spec.storage]
        return unpack(data, scale, dtype).to(self.device)

    def _float32(self, name: str) -> Tensor:
        return self.dense(name, torch.float32)

    def _hyper(self, prefix: str) -> w.HyperWeights:
        fn, base, scale = (self._float32(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        return w.HyperWeights(fn, base, ops.spread_scale(scale, self.config.hc_mult))

    def _attention(self, prefix: str) -> w.AttentionWeights:
        c = self.config
        wo_a = self.dense(f"{prefix}.wo_a.weight")
        return w.AttentionWeights(
            wqkv_a=torch.cat((self.dense(f"{prefix}.wq_a.weight"), self.dense(f"{prefix}.wkv.weight"))),
            q_norm=self.dense(f"{prefix}.q_norm.weight"),
            wq_b=self.dense(f"{prefix}.wq_b.weight"),
            kv_norm=self.dense(f"{prefix}.kv_norm.weight"),
            sink=self._float32(f"{prefix}.attn_sink"),
            wo_a=wo_a.view(c.o_groups, c.o_lora_rank, wo_a.shape[1]),
            wo_b=self.dense(f"{prefix}.wo_b.weight"),
        )

    def _experts(self, prefix: str, count: int) -> ExpertWeights:
        c = self.config
        d, m = c.hidden_size, c.moe_intermediate_size
        names = [f"{prefix}.experts.{e}" for e in range(count)]
        packed = self.keep_fp4 and all(
            self.stored[f"{n}.{p}.weight"].quantised for n in names for p in ("w1", "w2", "w3")
        )
        if packed:
            return self._packed_experts(names)
        gate_up = torch.empty(count, 2 * m, d, dtype=self.dtype, device=self.device)
        down = torch.empty(count, d, m, dtype=self.dtype, device=self.device)
        for expert, name in enumerate(names):
            gate_up[expert, :m] = self.dense(f"{name}.w1.weight")
            gate_up[expert, m:] = self.dense(f"{name}.w3.weight")
            down[expert] = self.dense(f"{name}.w2.weight")
        return ExpertWeights(gate_up, down)

    def _packed_experts(self, names: list[str]) -> ExpertWeights:
        def stack(parts: tuple[str, ...], kind: str) -> Tensor:
            raw = [torch.cat([self.reader.read(f"{n}.{p}.{kind}").view(torch.uint8) for p in parts]) for n in names]
            return torch.stack(raw).to(self.device)

        return ExpertWeights(
            gate_up=stack(("w1", "w3"), "weight").view(torch.int8),
            down=stack(("w2",), "weight").view(torch.int8),
            gate_up_scale=stack(("w1", "w3"), "scale").view(torch.float8_e8m0fnu),
            down_scale=stack(("w2",), "scale").view(torch.float8_e8m0fnu),
        )

    def _moe(self, prefix: str, experts: int) -> w.MoeWeights:
        shared = f"{prefix}.shared_experts"
        return w.MoeWeights(
            gate=self._float32(f"{prefix}.gate.weight"),
            bias=self._float32(f"{prefix}.gate.bias"),
            experts=self._experts(prefix, experts) if self.pack is None else self.pack(self._experts(prefix, experts)),
            shared_gate_up=torch.cat((self.dense(f"{shared}.w1.weight"), self.dense(f"{shared}.w3.weight"))),
            shared_down=self.dense(f"{shared}.w2.weight"),
        )

    def _block(self, prefix: str, experts: int, **extra: object) -> w.LayerWeights:
        return w.LayerWeights(
            attn_norm=self.dense(f"{prefix}.attn_norm.weight"),
            ffn_norm=self.dense(f"{prefix}.ffn_norm.weight"),
            hc_attn=self._hyper(f"{prefix}.hc_attn"),
            hc_ffn=self._hyper(f"{prefix}.hc_ffn"),
            attention=self._attention(f"{prefix}.attn"),
            moe=self._moe(f"{prefix}.ffn", experts),
            **extra,  # pyrefly: ignore
        )

    def _target_layer(self, layer: LayerPlan) -> w.LayerWeights:
        prefix = f"layers.{layer.index}"
        extra: dict[str, object] = {}
        if layer.mode == "full":
            extra["compressor"] = self._compressor(f"{prefix}.attn", layer.ratio)
        if layer.selects:
            indexer = f"{prefix}.attn.indexer"
            extra["indexer"] = w.IndexerWeights(
                self.dense(f"{indexer}.wq_b.weight"), self.dense(f"{indexer}.weights_proj.weight")
            )
        if layer.engram >= 0:
            extra["engram"] = self._engram(f"{prefix}.engram")
        return self._block(prefix, self.config.n_routed_experts, **extra)

    def _compressor(self, prefix: str, ratio: int) -> w.CompressorWeights:
        dtype = torch.float32 if ratio > 1 else self.dtype
        return w.CompressorWeights(
            wkv=self.dense(f"{prefix}.compressor.wkv.weight", dtype),
            wgate=self.dense(f"{prefix}.compressor.wgate.weight", dtype) if ratio > 1 else None,
            norm=self.dense(f"{prefix}.compressor.norm.weight"),
            wk=self.dense(f"{prefix}.indexer.wk.weight"),
            k_norm=self.dense(f"{prefix}.indexer.k_norm.weight"),
        )

    def _engram(self, prefix: str) -> w.EngramWeights:
        """The table stays as stored: a step reads a few rows of it."""
        entry = self.stored[f"{prefix}.embed.weight"]
        if entry.quantised:
            table = self.reader.read(entry.spec.name).to(self.device)
            scale = self.reader.read(entry.spec.scale_name).view(torch.float8_e8m0fnu).to(self.device)
        else:
            table, scale = self.dense(entry.spec.name), None
        return w.EngramWeights(
            table=table,
            table_scale=scale,
            wkv=self.dense(f"{prefix}.wkv.weight"),
            q_weight=self.dense(f"{prefix}.q_weight"),
            k_weight=self.dense(f"{prefix}.k_weight"),
        )

    def _draft(self) -> w.DraftWeights:
        c = self.config
        last = f"mtp.{c.num_nextn_predict_layers - 1}"
        return w.DraftWeights(
            stages=tuple(
                self._block(f"mtp.{stage}", c.dspark_n_routed_experts) for stage in range(c.num_nextn_predict_layers)
            ),
            main_proj=self.dense("mtp.0.main_proj.weight"),
            main_norm=self.dense("mtp.0.main_norm.weight"),
            norm=self.dense(f"{last}.norm.weight"),
            markov_embed=self.dense(f"{last}.markov_head.embed.weight"),
            markov_head=self.dense(f"{last}.markov_head.head.weight"),
            confidence=self._float32(f"{last}.confidence_head.proj.weight"),
        )
