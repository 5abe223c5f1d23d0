"""Log-probabilities of the model's own distribution: before temperature, penalties, bias and grammar."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_offline.sampling.batch import Logprobs


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, rows: np.ndarray) -> Logprobs:
    """Log-probability and rank of one token a row, and the k likeliest. Used for drawn tokens and for prompt tokens.

    Args:
        logits: float32 [m, vocab].
        tokens: int64 [m], the drawn token, or the prompt's next token.
        k: likeliest tokens to report, 0..vocab.
        rows: int64 [m] on the host, kept in the result.

    Returns:
        All tensors on the logits' device.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    values, ids = logits.topk(k, dim=-1)
    return Logprobs(rows, (chosen - normaliser).squeeze(1), ranks, ids, values - normaliser)
