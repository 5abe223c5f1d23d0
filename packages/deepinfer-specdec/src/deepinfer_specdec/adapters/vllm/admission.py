"""vLLM's ranking of drafts on the device with a tie rule that no token's value can move."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_draft_budget(
    confidence_probs: Tensor, idx_mapping: Tensor, capacities: Tensor, draft_budget: int, num_steps: int
) -> None:
    """Lower `capacities` in place to the drafts admitted when the `draft_budget` surest of all requests are taken.

    Equal survivals go to the earlier column, then to the lower row, as in `deepinfer_specdec.admit`; `torch.topk` promises
    no order among equals. Survival never grows along a row, so what is admitted are prefixes. Nothing waits for the device.

    Args:
        confidence_probs: float32 [slots, num_steps], conditional confidences; column j must not depend on draft j itself.
        idx_mapping: int64 [R], slot of each row.
        capacities: int32 [R], drafts that each row has; at least `draft_budget` together.
        draft_budget: drafts to admit.
        num_steps: columns.
    """
    survival = confidence_probs[idx_mapping].cumprod(dim=1)
    columns = torch.arange(num_steps, device=survival.device)
    survival = survival.masked_fill(columns[None, :] >= capacities[:, None], -1.0)
    ranked = survival.t().flatten()  # column-major: a stable order is then column first, row second
    order = ranked.argsort(descending=True, stable=True)
    admitted = torch.zeros_like(ranked, dtype=torch.bool).index_fill_(0, order[:draft_budget], True)
    torch.sum(admitted.view(num_steps, -1), dim=0, dtype=capacities.dtype, out=capacities)
