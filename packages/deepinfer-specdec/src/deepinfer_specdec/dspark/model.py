"""A DSpark draft model: features in, a block of hidden states out, then tokens one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer_specdec.dspark.backbone import Layer, RMSNorm, Rotation, rotation
from deepinfer_specdec.dspark.config import DSparkConfig
from deepinfer_specdec.dspark.heads import ConfidenceHead, MarkovHead

Context = list[tuple[Tensor, Tensor]]
Chooser = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The frozen ends of the target: embedding [V, hidden] and LM head [V, hidden]."""

    embedding: Tensor
    head: Tensor


class DSparkModel(nn.Module):
    """Backbone, Markov head and confidence head. The target's embedding and LM head are passed in and never trained.

    The anchor is the block's first row and predicts the first draft: gamma rows give gamma tokens.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    def context(self, features: Tensor, positions: Tensor) -> Context:
        """Keys and values of every layer for target features [B, C, m * hidden] at positions [B, C]."""
        injected, by = self.hidden_norm(self.fc(features)), self._rotation(positions)
        return [layer.context(injected, by) for layer in self._stack()]

    def block(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Iterable[tuple[Tensor, Tensor]],
        embedding: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states h [B, N * K, hidden] of N blocks a row, after the final norm.

        Args:
            anchors: int64 [B, N], the last known tokens.
            positions: int64 [B, N], their positions.
            context: keys and values layer by layer, from `context` or a cache of it.
            embedding: the target's, [V, hidden].
            mask: bool [B, N * K, C + N * K], True where visible; None: everything is.
        """
        width = self.config.block_size
        tokens = anchors[..., None].repeat(1, 1, width)
        tokens[..., 1:] = self.config.mask_token_id
        places = (positions[..., None] + torch.arange(width, device=anchors.device)).flatten(1)
        hidden = nn.functional.embedding(tokens.flatten(1), embedding).to(self.fc.weight.dtype)
        by = self._rotation(places)
        for layer, injected in zip(self._stack(), context, strict=True):
            hidden = layer(hidden, by, injected, mask)
        return self.norm(hidden)

    def _rotation(self, positions: Tensor) -> Rotation:
        return rotation(positions, self.config.head_dim, self.config.rope_theta)

    def _stack(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def base_logits(self, hidden: Tensor, target: TargetParts) -> Tensor:
        """Logits U [..., V] of the parallel stage, in the dtype of the target's head."""
        return nn.functional.linear(hidden.to(target.head.dtype), target.head)

    def sequential(
        self, base: Iterable[Tensor], hidden: Tensor, anchors: Tensor, choose: Chooser
    ) -> tuple[Tensor, Tensor]:
        """The sequential stage: token after token, each from the parallel logits and the Markov bias of the one before.

        Args:
            base: logits of the parallel stage, [R, V] for each of K columns; each is asked for when its turn comes.
            hidden: [R, K, hidden], from `block`.
            anchors: int64 [R].
            choose: takes a column's logits, float32 [R, V], and the column; returns its tokens, int64 [R].

        Returns:
            Tokens int64 [R, K] and raw confidences float32 [R, K]; a column's confidence never depends on its own token.
        """
        markov, previous = self.markov_head, anchors
        state = None if markov is None else markov.start(len(anchors), hidden)
        said = [anchors]
        for k, logits in enumerate(base):
            if markov is not None:
                bias, state = markov(previous, hidden[:, k], state)
                logits = logits + bias
            previous = choose(logits.float(), k)
            said.append(previous)
        return torch.stack(said[1:], 1), self.confidence_logits(hidden, torch.stack(said[:-1], 1))

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """float32 [...]: raw confidence for h [..., hidden] and previous tokens int64 [...].

        0 without a head: calibration, which fits an offset to each column, then makes of it the share that was kept lately.
        """
        if self.confidence_head is None:
            return hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32)
        markov = self.markov_head if self.config.confidence_with_markov else None
        return self.confidence_head(hidden, None if markov is None else markov.w1(previous))
