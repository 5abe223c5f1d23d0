"""Writes a checkpoint in the released layout: FP8 projections, FP4 experts, FP8 Engram tables, the rest as it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.layout import TensorSpec, checkpoint_specs
from deepinfer_offline.models.deepsig_v41.schedule import plan_layers
from deepinfer_offline.ops.deepsig.formats import quantize_fp4_rows, quantize_fp8_rows, quantize_fp8_tiles

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_QUANTISERS = {"projection": quantize_fp8_tiles, "expert": quantize_fp4_rows, "table": quantize_fp8_rows}


def stored_form(spec: TensorSpec, value: Tensor, *, quantise: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint tensors of one weight: itself in `dtype`, or its codes and scales.

    Raises:
        ValueError: the value does not have the shape that the specification states.
    """
    if tuple(value.shape) != spec.shape:
        raise ValueError(f"{spec.name} has shape {list(value.shape)}, the layout says {list(spec.shape)}")
    if quantise and spec.storage in _QUANTISERS:
        codes, scales = _QUANTISERS[spec.storage](value.detach().cpu())
        return {spec.name: codes, spec.scale_name: scales}
    return {spec.name: value.detach().cpu().to(dtype).contiguous()}


def write_checkpoint(
    folder: Path,
    raw_config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 4 << 30,
) -> list[Path]:
    """Write `config.json` and safetensors shards that `WeightLoader` reads.

    Args:
        folder: created if absent.
        raw_config: the `config.json` mapping. With a `quantization_config`, projections, experts and tables are quantised.
        tensors: (released name, logical float value) of every weight; may be a generator, so that a model larger than memory
            can be written piece by piece.
        dtype: of what is not quantised; weights that the layout keeps in float32 (hyper-connections, sinks, gate biases) stay so.
        shard_bytes: a new file begins when one has reached this size.

    Returns:
        the shards.

    Raises:
        ConfigError: the configuration is inconsistent.
        ValueError: a tensor is unknown, misshapen, given twice or missing.
    """
    config = V41Config.parse(raw_config)
    specs = checkpoint_specs(config, plan_layers(config))
    shards = _Shards(folder, shard_bytes)
    given: set[str] = set()
    for name, value in tensors:
        if name not in specs or name in given:
            raise ValueError(f"{name} is {'given twice' if name in given else 'not a tensor of this configuration'}")
        given.add(name)
        kept = torch.float32 if _keeps_float32(name) else dtype
        shards.add(stored_form(specs[name], value, quantise=config.quantised, dtype=kept))
    missing = sorted(name for name, spec in specs.items() if name not in given and not spec.optional)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, e.g. {', '.join(missing[:4])}")
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    return shards.close()


def _keeps_float32(name: str) -> bool:
    return ".hc_" in name or name.endswith(
        (".attn_sink", ".gate.bias", ".gate.bias_vl", ".confidence_head.proj.weight")
    )


class _Shards:
    """Collects tensors into files of about `limit` bytes and writes the index."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limit = folder, limit
        self.pending: dict[str, Tensor] = {}
        self.size = 0
        self.files: list[tuple[Path, list[str], int]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self.pending.update(tensors)
        self.size += sum(t.numel() * t.element_size() for t in tensors.values())
        if self.size >= self.limit:
            self._flush()

    def _flush(self) -> None:
        if not self.pending:
            return
        from safetensors.torch import save_file

        path = self.folder / f"part-{len(self.files):05d}.safetensors"
        save_file(self.pending, path, metadata={"format": "pt"})
        self.files.append((path, list(self.pending), self.size))
        self.pending, self.size = {}, 0

    def close(self) -> list[Path]:
        """Write what is left, give the files their final names and index them."""
        self._flush()
        total = len(self.files)
        if total == 1:
            return [self.files[0][0].rename(self.folder / "model.safetensors")]
        weight_map: dict[str, str] = {}
        paths = []
        for number, (path, names, _) in enumerate(self.files, start=1):
            final = path.rename(self.folder / f"model-{number:05d}-of-{total:05d}.safetensors")
            weight_map.update(dict.fromkeys(names, final.name))
            paths.append(final)
        index = {"metadata": {"total_size": sum(size for *_, size in self.files)}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return paths
