"""Filtering by temperature, min_p, top_k, top_p, and the draw itself by inverse distribution function."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_offline.ops.cuda.support import kernels, supports
from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.batch import SamplingTable
from deepinfer_offline.sampling.random import uniform
from deepinfer_offline.sampling.select import select_limits

_SORTED = 4096  # vocabularies up to this size are sorted on a CPU too
_PIECE = 256  # tokens summed at once; two levels keep the search cheap at 100,000 tokens
_LOG2_E = 1.4426950408889634


def draw(logits: torch.Tensor, table: SamplingTable, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """Draw a token a row with the row's own filters and random numbers.

    Args:
        logits: float32 [n, vocab], all rows with temperature > 0. Not changed.
        table: parameters by slot.
        slots, positions: int64 [n] on the host.

    Returns:
        int64 [n].
    """
    filters = used_filters(table, slots)
    numbers, heat, *columns = upload(
        [uniform(table.seed[slots], positions), table.temperature[slots], *filters.values()], logits.device
    )
    fused = draw_fused(logits, heat, numbers, dict(zip(filters, columns, strict=True)))
    return fused if fused is not None else pick(filtered_weights(logits, table, slots), numbers)


def draw_fused(
    logits: torch.Tensor, temperature: torch.Tensor, numbers: torch.Tensor, filters: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """The draw by one kernel package's filters, which search for the limits instead of sorting; None where there is none.

    Args:
        logits: float32 [n, vocab].
        temperature: float32 [n].
        numbers: float64 [n].
        filters: `min_p` float32 [n], `top_k` int64 [n], `top_p` float32 [n], those that change anything.
    """
    if not logits.is_cuda or supports("sample")(str(logits.device), logits.dtype) is not None:
        return None
    return kernels().sample(logits, temperature, numbers, **filters)


def used_filters(table: SamplingTable, slots: np.ndarray) -> dict[str, np.ndarray]:
    """The filter columns of these slots that change anything."""
    columns = {"min_p": table.min_p[slots], "top_k": table.top_k[slots], "top_p": table.top_p[slots]}
    neutral = {"min_p": 0, "top_k": 0, "top_p": 1}
    return {name: column for name, column in columns.items() if (column != neutral[name]).any()}


def filtered_weights(logits: torch.Tensor, table: SamplingTable, slots: np.ndarray) -> torch.Tensor:
    """Unnormalised probabilities after temperature and filters, float32 [n, vocab]; dropped tokens weigh 0.

    The likeliest token weighs 1. Ties with the last kept token are kept, so the result does not depend on a sort.
    """
    device = logits.device
    weights = scaled_weights(logits, torch.from_numpy(table.temperature[slots]).to(device, non_blocking=True))
    floor = table.min_p[slots]
    if (floor > 0).any():
        limit = torch.from_numpy(floor).to(device, non_blocking=True)[:, None]
        weights = weights.masked_fill(weights < limit, 0)
    top_k, top_p = table.top_k[slots], table.top_p[slots]
    if (top_k > 0).any() or (top_p < 1).any():
        limit = _threshold(weights, top_k, top_p)
        weights = weights.masked_fill(weights < limit, 0)
    return weights


def scaled_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities at float32 [n] temperatures, the likeliest token weighs 1."""
    # 2^x instead of e^x: MKL's e^x takes 4 to 20 times as long where the result is 0 or nearly 0, as forbidden tokens' is.
    scale = torch.full_like(temperature, _LOG2_E) / temperature
    return (logits - logits.amax(dim=-1, keepdim=True)).mul_(scale[:, None]).exp2_()


def selects(weights: torch.Tensor) -> bool:
    """Whether limits are counted on the host (`select_limits`), which a large vocabulary on a CPU is."""
    return weights.device.type == "cpu" and weights.shape[-1] > _SORTED


def _threshold(weights: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """The smallest weight that each row keeps, float32 [n, 1]. Rows without either filter keep all."""
    if not selects(weights):
        return sorted_limits(weights, top_k, top_p)
    limits = np.zeros(len(top_k), np.float32)
    rows = np.flatnonzero((top_k > 0) | (top_p < 1))
    chosen = weights.numpy() if len(rows) == len(top_k) else weights.numpy()[rows]
    limits[rows] = select_limits(chosen, top_k[rows], top_p[rows].astype(np.float64))
    return torch.from_numpy(limits)[:, None]


def sorted_limits(weights: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """The same by sorting, without a decision that the host would have to wait for: the accelerator's way."""
    device = weights.device
    most = None if (top_p < 1).any() else max(1, int(top_k.max()))
    there = [torch.from_numpy(column).to(device, non_blocking=True) for column in (top_k, top_p.astype(np.float64))]
    return ordered_limits(weights, there[0], there[1], most)


def ordered_limits(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, most: int | None = None
) -> torch.Tensor:
    """Limits from the weights in order, float32 [n, 1].

    Args:
        weights: float32 [n, vocab].
        top_k: int64 [n], 0 keeps all.
        top_p: float64 [n].
        most: the largest `top_k` where no row has a `top_p`: the others need not be in order.
    """
    vocab = weights.shape[-1]
    if most is None:
        ordered = weights.sort(dim=-1, descending=True).values
    else:
        ordered = weights.topk(most, dim=-1).values
    width = ordered.shape[-1]
    kept, share = torch.where(top_k > 0, top_k, vocab)[:, None], top_p[:, None]
    by_k = torch.where(kept <= width, ordered.gather(1, (kept - 1).clamp(max=width - 1)), 0.0)
    sums = torch.where(ordered >= by_k, ordered, 0).cumsum(dim=-1, dtype=torch.float64)
    first = (sums >= share * sums[:, -1:]).to(torch.uint8).argmax(dim=-1, keepdim=True)
    by_p = torch.where(share < 1, ordered.gather(1, first), 0.0)
    return torch.maximum(torch.where(kept < vocab, by_k, 0.0), by_p)


def pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of weights passes the number's share of the total.

    Args:
        weights: float32 [n, vocab], not negative.
        numbers: float64 [n] in (0, 1).

    Returns:
        int64 [n]; never a token of weight 0.
    """
    n, vocab = weights.shape
    pieces = -(-vocab // _PIECE)
    padded = torch.nn.functional.pad(weights, (0, pieces * _PIECE - vocab)).view(n, pieces, _PIECE)
    sums = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = numbers[:, None] * sums[:, -1:]
    piece = (sums > goal).to(torch.uint8).argmax(dim=-1, keepdim=True)
    goal = goal - torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, piece[:, :, None].expand(n, 1, _PIECE)).squeeze(1).double()
    running = inside.cumsum(dim=-1)
    # Rounding can leave the goal above the last sum of its piece: then the piece's last possible token is drawn.
    found = running > goal
    last = _PIECE - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    place = torch.where(found.any(dim=-1, keepdim=True), found.to(torch.uint8).argmax(dim=-1, keepdim=True), last)
    return (piece * _PIECE + place).squeeze(1)
