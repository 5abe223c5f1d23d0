"""Which experts a token goes to, and with what weight. `v41-model` section 2.6."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig.topk import topk_lowest_index

_SORT_EXPERTS = 64  # up to here a stable sort is faster than selection


def router(x: Tensor, weight: Tensor, bias: Tensor, *, k: int, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Select k experts by sqrt(softplus(x . w)) + bias; ties go to the lowest expert.

    Args:
        x: float [t, d].
        weight: float [experts, d].
        bias: float32 [experts]; takes part in the selection only, not in the weights.
        k: experts of a token.
        normalise: divide the weights by their sum (+ 1e-20).
        scale: `routed_scaling_factor`.

    Returns:
        expert ids int64 [t, k], distinct, in no particular order, and their weights float32 [t, k].
    """
    scores = functional.softplus(functional.linear(x.float(), weight.float())).sqrt()
    biased = scores + bias
    if biased.shape[1] <= _SORT_EXPERTS:
        ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    else:
        ids = topk_lowest_index(biased, k).to(torch.int64)
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * scale
