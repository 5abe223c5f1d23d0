"""The lightning indexer: scores of compressed entries, and the two-level selection of the decoder.

`v41-model` section 2.5. r = compress ratio; entry j covers tokens [j * r, (j + 1) * r) and is visible to the query at position i
iff j < (i + 1) // r.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig.topk import topk_mask


def indexer_logits(queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Score every visible compressed entry for every query: sum over heads of weight * relu(query . key).

    Args:
        queries: float [b, q, heads, n], rotated and rounded to MXFP4. b = groups of queries that share their keys.
        weights: float [b, q, heads], already scaled by n^-0.5 * heads^-0.5.
        keys: float [b, s, n], rounded to MXFP4.
        visible: int [b, q], entries that each query may see.

    Returns:
        [b, q, s] in queries' dtype, -inf where the entry is not visible.
    """
    b, q, heads, _ = queries.shape
    products = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).relu_()
    scores = torch.bmm(weights.reshape(b * q, 1, heads), products.view(b * q, heads, -1)).view(b, q, -1)
    columns = torch.arange(keys.shape[1], device=keys.device)
    return scores.masked_fill_(columns >= visible.unsqueeze(-1), -torch.inf)


def candidate_mask(scores: Tensor, visible: Tensor, *, blocks: int, block_size: int) -> Tensor:
    """The entries that later index layers may choose from: the best blocks and always the newest visible one.

    Args:
        scores: float [t, s], -inf where not visible.
        visible: int [t], visible entries of each query.
        blocks: blocks to keep.
        block_size: consecutive entries of a block; its score is the maximum of its entries.

    Returns:
        bool [t, s]; a subset of the visible entries.
    """
    width = scores.shape[-1]
    best = functional.pad(scores, (0, -width % block_size), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1)
    newest = ((visible - 1) // block_size).unsqueeze(-1)
    columns = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill(columns == newest, torch.inf)
    chosen = topk_mask(best, blocks).repeat_interleave(block_size, dim=-1)[:, :width]
    return chosen & (scores > -torch.inf)
