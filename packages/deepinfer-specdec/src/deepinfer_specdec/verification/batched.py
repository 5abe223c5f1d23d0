"""The batched torch twin of `reference`: same methods, same random bits, any device, no host synchronisation.

It emits what the numpy reference emits for the same probabilities; a draw can differ only where float64 sums in another
order put a boundary between two tokens on the other side of the random number (odds about 1e-15 a draw).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_specdec.errors import DraftShapeError, UnknownNameError
from deepinfer_specdec.verification import randomness
from deepinfer_specdec.verification.reference import METHODS


def _wrap(value: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _wrap(randomness.GOLDEN)
_MIX1 = _wrap(randomness.MIX1)
_MIX2 = _wrap(randomness.MIX2)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX1
    value = (value ^ _shift(value, 27)) * _MIX2
    return value ^ _shift(value, 31)


def uniform(seed: Tensor, position: Tensor, stream: int, anchor: Tensor | int = 0) -> Tensor:
    """float64 numbers in [0, 1), bit for bit those of `randomness.uniform`.

    Args:
        seed: int64, broadcastable with `position` (an unsigned seed by its bits).
        position: int64, index of the token in its sequence.
        stream: one of the streams of `randomness`.
        anchor: int64 or 0, see there.
    """
    key = _mix(seed + _GOLDEN)
    key = _mix(key ^ (position * _GOLDEN + stream))
    block = torch.as_tensor(anchor, dtype=torch.int64, device=key.device)
    key = _mix(key + block * _MIX1 + _GOLDEN)
    return _shift(key, 11).double() * 2.0**-53


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """int64 [...], indices drawn by `u` [...] from non-negative `weights` [..., V], in index order."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, u[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # never past the last token of positive weight
    return torch.minimum(index, last)[..., 0]


@dataclass(frozen=True, slots=True)
class BatchedVerification:
    """Device tensors with the meaning of `Verification`: token_ids int64 [R, K + 1] padded with -1, accepted int64 [R]."""

    token_ids: Tensor
    accepted: Tensor


def verify_batched(
    token_ids: Tensor,
    counts: Tensor,
    target: Tensor,
    seeds: Tensor,
    anchors: Tensor,
    proposal: Tensor | None = None,
    method: str = "standard",
) -> BatchedVerification:
    """Verify R drafts at once.

    Args:
        token_ids: int64 [R, K], padded with any value.
        counts: int64 [R], 0..K.
        target: probabilities [R, K + 1, V], float32 or float64; rows past `counts` are not used but must be finite with
            a positive sum.
        seeds: int64 [R].
        anchors: int64 [R], position of each sequence's last emitted token.
        proposal: [R, K, V], what the drafts were drawn from; None for one-hot drafts.
        method: "coupled", "standard" or "block".
    """
    if method not in METHODS:
        raise UnknownNameError("verification method", method, list(METHODS))
    rows, width = token_ids.shape
    if target.ndim != 3 or tuple(target.shape[:2]) != (rows, width + 1):
        raise DraftShapeError(f"target has shape {tuple(target.shape)}; allowed: {(rows, width + 1)} + (vocab,)")
    inside = torch.arange(width, device=token_ids.device) < counts[:, None]
    guesses = token_ids.clamp(min=0)
    positions = anchors[:, None] + 1 + torch.arange(width + 1, device=token_ids.device)
    if method == "coupled" or (method == "standard" and proposal is None):
        return _coupled(guesses, inside, target, seeds, positions)
    if proposal is None:
        proposal = torch.nn.functional.one_hot(guesses, target.shape[-1]).to(target.dtype)
    if method == "standard":
        accepted = _standard(guesses, inside, proposal, target, seeds, positions)
        weight = None
    else:
        accepted, weight = _block(guesses, inside, counts, proposal, target, seeds, positions, anchors)
    return _emit(guesses, accepted, counts, proposal, target, weight, seeds, positions)


def _prefix_length(kept: Tensor) -> Tensor:
    """int64 [R]: leading True entries of bool [R, K]."""
    return kept.long().cumprod(1).sum(1)


def _coupled(guesses: Tensor, inside: Tensor, target: Tensor, seeds: Tensor, positions: Tensor) -> BatchedVerification:
    drawn = inverse_cdf(target, uniform(seeds[:, None], positions, randomness.TARGET))
    accepted = _prefix_length(inside & (drawn[:, :-1] == guesses))
    columns = torch.arange(drawn.shape[1], device=drawn.device)
    return BatchedVerification(torch.where(columns <= accepted[:, None], drawn, -1), accepted)


def _of_guess(distributions: Tensor, guesses: Tensor) -> Tensor:
    return distributions.gather(-1, guesses[..., None])[..., 0].double()


def _standard(
    guesses: Tensor, inside: Tensor, proposal: Tensor, target: Tensor, seeds: Tensor, positions: Any
) -> Tensor:
    ratio = _of_guess(target[:, :-1], guesses) / _of_guess(proposal, guesses)
    u = uniform(seeds[:, None], positions[:, :-1], randomness.ACCEPT)
    return _prefix_length(inside & (u < ratio.clamp(max=1.0)))


def _block(
    guesses: Tensor,
    inside: Tensor,
    counts: Tensor,
    proposal: Tensor,
    target: Tensor,
    seeds: Tensor,
    positions: Tensor,
    anchors: Tensor,
) -> tuple[Tensor, Tensor]:
    ratio = _of_guess(target[:, :-1], guesses) / _of_guess(proposal, guesses)
    weights = [torch.ones_like(ratio[:, 0])] if ratio.shape[1] else []
    for k in range(ratio.shape[1]):  # a running product clipped at 1 has no closed form
        weights.append((weights[-1] * ratio[:, k]).clamp(max=1.0))
    if not weights:
        return torch.zeros_like(counts), torch.ones(counts.shape[0], 1, dtype=torch.float64, device=counts.device)
    weight = torch.stack(weights, 1)
    after = weight[:, 1:]
    # Column k - 1 of `after` decides about keeping k guesses; its successor's distributions are column k of target and
    # proposal.
    following = torch.cat([proposal[:, 1:], proposal[:, :1]], 1)
    excess = (after[..., None] * target[:, 1:].double() - following.double()).clamp(min=0.0).sum(-1)
    room = excess + 1.0 - after
    inner = torch.where(room > 0.0, excess / room.where(room > 0.0, torch.ones_like(room)), torch.ones_like(room))
    columns = torch.arange(1, weight.shape[1], device=counts.device)
    probability = torch.where(columns == counts[:, None], after, inner)
    u = uniform(seeds[:, None], positions[:, :-1], randomness.BLOCK, anchors[:, None])
    accepted = torch.where(inside & (u < probability), columns, 0).amax(1)
    return accepted, weight


def _emit(
    guesses: Tensor,
    accepted: Tensor,
    counts: Tensor,
    proposal: Tensor,
    target: Tensor,
    weight: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> BatchedVerification:
    rows, width = guesses.shape
    index = torch.arange(rows, device=guesses.device)
    p = target[index, accepted].double()
    if width:
        q = proposal[index, accepted.clamp(max=width - 1)].double()
        scaled = p if weight is None else p * weight[index, accepted][:, None]
        excess = (scaled - q).clamp(min=0.0)
        empty = excess.sum(-1, keepdim=True) <= 0.0  # only by rounding, see `reference.residual`
        rejected = (accepted < counts)[:, None]
        p = torch.where(rejected & ~empty, excess, p)
    last = inverse_cdf(p, uniform(seeds, positions[index, accepted], randomness.TARGET))
    columns = torch.arange(width + 1, device=guesses.device)
    padded = torch.cat([guesses, guesses.new_zeros(rows, 1)], 1)
    tokens = torch.where(columns < accepted[:, None], padded, -1)
    return BatchedVerification(tokens.scatter(1, accepted[:, None], last[:, None]), accepted)
