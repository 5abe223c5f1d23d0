"""The draft's Markov head: logits of a draft position given the token before it. `v41-model` section 2.9."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class MarkovStep(NamedTuple):
    """logits float32 [b, vocab]; embedding [b, rank] of the previous tokens, for the confidence head."""

    logits: Tensor
    embedding: Tensor


def markov_step(base_logits: Tensor, previous: Tensor, embed: Tensor, head: Tensor) -> MarkovStep:
    """Add the transition bias of the previous token.

    Args:
        base_logits: float32 [b, vocab], of one draft position.
        previous: int64 [b], the token drafted (or sampled) just before.
        embed: float [vocab, rank].
        head: float [vocab, rank].
    """
    embedding = functional.embedding(previous, embed)
    return MarkovStep(base_logits + functional.linear(embedding, head).float(), embedding)


def confidence(hidden: Tensor, embedding: Tensor, weight: Tensor) -> Tensor:
    """Raw confidence (before the sigmoid) that a draft position is accepted.

    Args:
        hidden: float [b, d], collapsed draft state before the final norm.
        embedding: float [b, rank], of the previous token.
        weight: float32 [1, d + rank].

    Returns:
        float32 [b].
    """
    return functional.linear(torch.cat((hidden.float(), embedding.float()), dim=-1), weight.float()).squeeze(-1)
