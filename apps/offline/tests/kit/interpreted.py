"""Engines of a tiny Llama on the CUDA ops, which Triton interprets, and captures that are calls made again.

Import it where TRITON_INTERPRET=1 was set before Triton was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepinfer_kernels_cuda as kernels
import pytest
import torch
from deepinfer_offline.engine.native import ahead_step, graphs, runner
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.layer import LayerOps
from deepinfer_offline.models.llama.weights import expected_shapes
from deepinfer_offline.ops.attention.base import AttentionShape
from deepinfer_offline.ops.cuda.attention import CudaAttention
from deepinfer_offline.ops.cuda.linear import CublasLinear
from deepinfer_offline.ops.cuda.products import FusedProducts
from deepinfer_offline.ops.transfers import Download

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}


class RandomLlama:
    """A checkpoint source whose tensors are drawn when they are read."""

    name, path, model_type, config = "random-llama", Path("random-llama"), "llama", LLAMA
    shapes = expected_shapes(LlamaConfig.parse(LLAMA))

    def open(self) -> RandomLlama:
        return self

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        draw = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))
        return draw * 0.2 + 1 if len(shape) == 1 else draw * (1.0 if "embed" in name else 2 * shape[-1] ** -0.5)

    def close(self) -> None:
        """Nothing is open."""


class Repeats:
    """Stands for `Recorder`: what is recorded runs when it is replayed, and writes the memory that was returned. All graphs
    work in the same memory, so a replay spoils what others have left.
    """

    replays = tries = 0
    most = 1000  # graphs that there is memory for
    full = False

    def __init__(self, _device: str, room: int, beside: int) -> None:
        self.limit = room + beside
        self.before: Callable[[], list[torch.Tensor]] = list
        self.left: list[torch.Tensor] = []

    def record(self, work: Callable[[], Any], *, warm_ups: int) -> tuple[Any, Any] | None:
        type(self).tries += 1
        if self.most == 0:
            return None
        self.most -= 1
        for _ in range(warm_ups):
            work()
        kept = [tensor.clone() for tensor in self.before()]
        found = work()
        for tensor, value in zip(self.before(), kept, strict=True):
            tensor.copy_(value)  # recording runs nothing
        self.left += [found] if isinstance(found, torch.Tensor) else found

        def replay() -> None:
            type(self).replays += 1
            for tensor in self.left:
                tensor.fill_(-3)
            again = work()
            for target, value in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (found, again)), strict=True):
                target.copy_(value)

        return SimpleNamespace(replay=replay), found


def use_kernels(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """From now on engines take the CUDA ops and capture steps, as long as there is memory."""

    def select(shape: AttentionShape, _widths: Any) -> LayerOps:
        products = FusedProducts(kernels.llama_norm, kernels.silu_mul)
        return LayerOps(CublasLinear, kernels.llama_norm, products, CudaAttention(shape))

    def make(model: Any, cache: Any, tokens: TokenBuffer) -> Any:
        found: Any = graphs.StepGraphs(model, cache, tokens)
        state = [] if found.ahead is None else [found.ahead.state.lengths, found.ahead.state.confidence]
        found.decodes._recorder.before = lambda: [
            tokens.flat,
            *cache.layers,
            *cache.draft,
            *state,
        ]  # all graphs share it
        return found

    def download(tensors: Sequence[torch.Tensor], *clock: Any) -> Download:
        """What a replay overwrites is copied in the order of the stream; on a CPU it would be taken as it is."""
        return Download([tensor.clone() for tensor in tensors], *clock)

    for module in (runner, ahead_step):
        monkeypatch.setattr(module, "Download", download)
    monkeypatch.setattr(LayerOps, "select", select)
    monkeypatch.setattr(graphs, "Recorder", Repeats)
    monkeypatch.setattr(runner, "make_graphs", make)
    for name, value in (("most", most), ("replays", 0), ("tries", 0)):
        monkeypatch.setattr(Repeats, name, value)
