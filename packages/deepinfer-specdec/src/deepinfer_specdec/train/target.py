"""What training needs of a target model: features and final hidden states of texts, and its ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_specdec.dspark.model import TargetParts
from deepinfer_specdec.errors import SpecDecodeError


class Target(Protocol):
    """A frozen language model."""

    parts: TargetParts

    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(features [B, T, m * hidden], last hidden [B, T, hidden]) of right-padded texts int64 [B, T]."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Continuations of prompts, sampled at `temperature` (0: greedy)."""
        ...


class TransformersTarget:
    """A causal language model of transformers, from a folder or a GGUF file.

    Args:
        path: folder, or a `.gguf` file.
        taps: layers whose outputs are concatenated; -1 is the embedding.
        device, dtype: where and how it runs.
    """

    def __init__(self, path: str | Path, taps: Sequence[int], device: str, dtype: torch.dtype) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise SpecDecodeError("training on a checkpoint needs transformers: pip install transformers") from error
        path = Path(path)
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if path.suffix == ".gguf" else path
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
        self._model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self._taps = tuple(taps)
        self._device = device
        self.parts = TargetParts(model.get_input_embeddings().weight, model.get_output_embeddings().weight)

    @torch.no_grad()
    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `Target.run`. Attention is causal, so right padding changes nothing before it."""
        states = self._model.model(token_ids.to(self._device), output_hidden_states=True).hidden_states
        return torch.cat([states[tap + 1] for tap in self._taps], dim=-1), states[-1]  # the last one is after the norm

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """See `Target.generate`; one prompt at a time, for tools and tests. Larger jobs come from `deepinfer run`."""
        torch.manual_seed(seed)
        options: dict[str, Any] = {"do_sample": temperature > 0.0}
        if temperature > 0.0:
            options |= {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        answers = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self._device)
            full = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options)
            answers.append(full[0, len(prompt) :].tolist())
        return answers
