"""What training needs of a target model: features and final hidden states of texts, and its ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_specdec.dspark.model import DSparkModel, TargetParts
from deepinfer_specdec.errors import SpecDecodeError

_INSTALL = "pip install transformers safetensors"


class Target(Protocol):
    """A frozen language model. `ends`: tokens after which an answer is over."""

    parts: TargetParts
    ends: frozenset[int]

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
        path: folder, or a `.gguf` file (transformers then needs `gguf` and `accelerate`).
        device, dtype: where and how it runs.
        taps: layers whose outputs are concatenated; -1 is the embedding. May be set later, before `run`.

    Raises:
        SpecDecodeError: no such file, not a causal language model with these layers, or transformers or something that it
            needs for the file is not installed.
    """

    def __init__(self, path: str | Path, device: str, dtype: torch.dtype, taps: Sequence[int] = ()) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise SpecDecodeError(f"training on a checkpoint needs transformers: {_INSTALL}") from error
        path = Path(path)
        if not path.exists():
            raise SpecDecodeError(
                f"target {path}: no such folder or file; allowed: a checkpoint folder, or a .gguf file"
            )
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if path.suffix == ".gguf" else path
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
        except (ImportError, ValueError, OSError, KeyError) as error:
            missing = "required" in str(error) or isinstance(error, ImportError)
            raise SpecDecodeError(f"target {path}: {error}{f'; {_INSTALL}' if missing else ''}") from error
        if not hasattr(getattr(model, "model", None), "layers"):
            raise SpecDecodeError(f"target {path}: {type(model).__name__}; allowed: a Llama- or Qwen-like decoder")
        self._model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self.taps = tuple(taps)
        self._device = device
        ends = model.generation_config.eos_token_id if model.generation_config.eos_token_id is not None else []
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.parts = TargetParts(model.get_input_embeddings().weight, model.get_output_embeddings().weight)

    @property
    def rope_theta(self) -> float:
        """Base of the target's rotary embedding."""
        found = getattr(self.config, "rope_parameters", None) or {}
        return float(found.get("rope_theta") or getattr(self.config, "rope_theta", None) or 1e4)

    @property
    def has_qk_norm(self) -> bool:
        """Whether the target normalises queries and keys per head, as Qwen3 does."""
        return hasattr(self._model.model.layers[0].self_attn, "q_norm")

    @torch.no_grad()
    def warm_start(self, model: DSparkModel) -> None:
        """Copy the target's last layers into the draft's; the context begins as the last tap, the Markov head silent.

        Layers of both have the same tensors by name and shape when the draft has the target's sizes. Biases, which the draft's
        layers lack, are left out.
        """
        source: Any = self._model.model.layers
        for place, layer in enumerate(model.layers):
            own = layer.state_dict()
            theirs = source[len(source) - len(model.layers) + place].state_dict()
            missing = sorted(name for name, value in own.items() if theirs.get(name, value[:0]).shape != value.shape)
            if missing:
                raise SpecDecodeError(f"the target's layers lack {missing} for a warm start; train with --cold-start")
            layer.load_state_dict({name: theirs[name].float() for name in own})
        width = model.config.hidden_size
        model.fc.weight.mul_(0.1)
        model.fc.weight[:, -width:] += torch.eye(width)
        model.norm.weight.copy_(self._model.model.norm.weight.float())
        if model.markov_head is not None:
            model.markov_head.w2.weight.zero_()

    @torch.no_grad()
    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `Target.run`. Attention is causal, so right padding changes nothing before it."""
        states = self._model.model(token_ids.to(self._device), output_hidden_states=True).hidden_states
        return torch.cat([states[tap + 1] for tap in self.taps], dim=-1), states[-1]  # the last one is after the norm

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
