"""From logits to the distribution that tokens are drawn from: masks, temperature, min-p, top-k, top-p (in this order)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import DraftShapeError, SamplingRangeError


@dataclass(frozen=True, slots=True)
class SamplingFilter:
    """How one request turns logits into a distribution. Temperature 0 is greedy: all mass on the lowest-indexed
    maximum.

    Attributes:
        temperature: >= 0.
        top_k: keep the k largest (ties with the k-th stay); 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass; (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest; [0, 1].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise SamplingRangeError(f"temperature {self.temperature}; allowed: >= 0")
        if self.top_k < -1:
            raise SamplingRangeError(f"top_k {self.top_k}; allowed: -1 or 0 (all), or >= 1")
        if not 0.0 < self.top_p <= 1.0:
            raise SamplingRangeError(f"top_p {self.top_p}; allowed: (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise SamplingRangeError(f"min_p {self.min_p}; allowed: [0, 1]")


GREEDY = SamplingFilter(temperature=0.0)


def unpack_mask(mask: NDArray[np.int32], vocab: int) -> NDArray[np.bool_]:
    """Bool [..., V] from an int32 bitmask [..., ceil(V / 32)], bit i of word w allowing token 32 * w + i."""
    words = np.ascontiguousarray(mask).view(np.uint8)
    bits = np.unpackbits(words, axis=-1, bitorder="little")
    if bits.shape[-1] < vocab:
        raise DraftShapeError(f"bitmask covers {bits.shape[-1]} tokens; allowed: at least the vocabulary, {vocab}")
    return bits[..., :vocab].astype(bool)


def distribution(
    logits: NDArray[np.floating], rule: SamplingFilter, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Probabilities float64 [..., V] of `logits` [..., V] under `rule`; tokens where `mask` [..., V] is False get 0.

    Raises:
        DraftShapeError: a row has no allowed token.
    """
    values = np.asarray(logits, dtype=np.float64)
    if mask is not None:
        values = np.where(mask, values, -np.inf)
    top = values.max(axis=-1, keepdims=True)
    if not np.isfinite(top).all():
        raise DraftShapeError("a row of logits has no allowed token; allowed: at least one finite logit per row")
    if rule.temperature == 0.0:
        probabilities = np.zeros_like(values)
        np.put_along_axis(probabilities, values.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return probabilities
    probabilities = np.exp((values - top) / rule.temperature)
    if rule.min_p > 0.0:  # the likeliest token has weight 1 before normalisation
        probabilities = np.where(probabilities >= rule.min_p, probabilities, 0.0)
    if 0 < rule.top_k < values.shape[-1]:
        kth = np.partition(probabilities, -rule.top_k, axis=-1)[..., [-rule.top_k]]
        probabilities = np.where(probabilities >= kth, probabilities, 0.0)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    return _top_p(probabilities, rule.top_p) if rule.top_p < 1.0 else probabilities


def _top_p(probabilities: NDArray[np.float64], mass: float) -> NDArray[np.float64]:
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    before = np.cumsum(ranked, axis=-1) - ranked
    ranked = np.where(before < mass, ranked, 0.0)  # the first token always stays: nothing is before it
    kept = np.empty_like(probabilities)
    np.put_along_axis(kept, order, ranked, axis=-1)
    return kept / kept.sum(axis=-1, keepdims=True)
