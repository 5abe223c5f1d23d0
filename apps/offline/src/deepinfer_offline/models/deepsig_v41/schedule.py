"""Which layer does what: the causal encoder-decoder schedule of V4.1. `v41-model` section 1.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_offline.models.deepsig_v41.config import V41Config

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's role.

    Attributes:
        index: layer number.
        ratio: tokens of a compressed entry; 0 for a window-only layer.
        mode: `window` = no global keys; `full` = owns compressed KV and index keys; `reindex` = selects anew among the
            source's entries; `reuse` = takes the last selection.
        source: the layer whose compressed KV it reads, -1 for `window`.
        publishes_candidates: its selection step also makes the candidate set.
        uses_candidates: it selects within the candidate set.
        engram: index among the Engram tables, -1 without.
    """

    index: int
    ratio: int
    mode: Mode
    source: int
    publishes_candidates: bool
    uses_candidates: bool
    engram: int

    @property
    def selects(self) -> bool:
        return self.mode in ("full", "reindex")


@dataclass(frozen=True, slots=True)
class Schedule:
    """All layers, and where the decoder side begins.

    `cut` is the last KV source: once it has written its global entries for every token, no later layer is needed for more
    than the window of the last tokens. It equals the number of layers when no layer owns global KV.
    """

    layers: tuple[LayerPlan, ...]
    cut: int

    @property
    def sources(self) -> tuple[LayerPlan, ...]:
        """The layers that own global KV."""
        return tuple(layer for layer in self.layers if layer.mode == "full")

    @property
    def pair_sources(self) -> tuple[LayerPlan, ...]:
        """The sources with a ratio above 1: they keep an open group between steps."""
        return tuple(layer for layer in self.sources if layer.ratio > 1)


def plan_layers(config: V41Config) -> Schedule:
    """The schedule of a checked configuration."""
    layers: list[LayerPlan] = []
    source = -1
    candidate = config.candidate_source_layer_id
    for index, ratio in enumerate(config.compress_ratios[: config.num_hidden_layers]):
        mode: Mode = "window"
        if ratio:
            mode = "reuse"
            if index in config.kv_source_layer_ids:
                mode, source = "full", index
            elif index in config.index_source_layer_ids:
                mode = "reindex"
        layers.append(
            LayerPlan(
                index=index,
                ratio=ratio,
                mode=mode,
                source=source if ratio else -1,
                publishes_candidates=mode == "full" and index == candidate,
                uses_candidates=mode in ("full", "reindex") and 0 <= candidate < index,
                engram=config.engram_layer_ids.index(index) if index in config.engram_layer_ids else -1,
            )
        )
    full = [layer.index for layer in layers if layer.mode == "full"]
    return Schedule(tuple(layers), cut=max(full, default=len(layers)))
