"""What the sampler reads and writes: the per-slot table of parameters, the rows of one step, the drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.sampling.params import SamplingParams


class SamplingTable:
    """Sampling parameters of the running sequences, one row a slot, as numpy columns.

    Written when a sequence gets its slot, in the order of the steps (by the thread that runs them), read by `Sampler`.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 [max_running].
        top_k: int64 [max_running], 0 keeps all.
        seed: uint64 [max_running], key of the sequence's stream of random numbers.
        prompt_len: int64 [max_running].
        min_len: int64 [max_running], stop ids are not drawn at positions below it.
        logprobs: int64 [max_running], likeliest tokens to report, -1 for none reported at all.
    """

    def __init__(self, max_running: int) -> None:
        def column(dtype: type, value: float = 0) -> np.ndarray:
            return np.full(max_running, value, dtype)

        self.temperature = column(np.float32)
        self.top_p = column(np.float32, 1)
        self.min_p = column(np.float32)
        self.presence = column(np.float32)
        self.frequency = column(np.float32)
        self.repetition = column(np.float32, 1)
        self.top_k = column(np.int64)
        self.seed = column(np.uint64)
        self.prompt_len = column(np.int64)
        self.min_len = column(np.int64)
        self.logprobs = column(np.int64, -1)
        self.penalised = column(np.bool_)
        self.biased = column(np.bool_)
        self.stop_ids: list[np.ndarray] = [np.empty(0, np.int64)] * max_running
        self.bias_ids: list[np.ndarray] = [np.empty(0, np.int64)] * max_running
        self.bias_values: list[np.ndarray] = [np.empty(0, np.float32)] * max_running

    def write(
        self, slot: int, params: SamplingParams, *, seed: int, prompt_len: int, stop_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Fill a slot's row for a sequence that starts or resumes there.

        Args:
            slot: row to fill.
            params: the request's parameters.
            seed: the sequence's own stream, from `deepinfer_offline.sampling.random.child_seed`.
            prompt_len: tokens of the request's prompt (not of generated tokens that are recomputed).
            stop_ids: end-of-sequence and stop ids that `params.min_tokens` holds back.
            vocab_size: columns of the logits.
        """
        self.temperature[slot] = 0 if params.greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = params.top_k if 0 < params.top_k < vocab_size else 0
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.prompt_len[slot] = prompt_len
        self.min_len[slot] = prompt_len + params.min_tokens
        self.penalised[slot] = params.penalised
        wanted = params.logprobs
        self.logprobs[slot] = -1 if wanted is None else (vocab_size if wanted < 0 else min(wanted, vocab_size))
        self.stop_ids[slot] = np.asarray(sorted(stop_ids), np.int64)
        bias = params.logit_bias or {}
        self.biased[slot] = bool(bias)
        self.bias_ids[slot] = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values[slot] = np.fromiter(bias.values(), np.float32, len(bias))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of logits to draw from, in the order of the logits.

    Attributes:
        slots: int64 [n] on the host: the sequence of each row. A verification row appears once a position.
        positions: int64 [n] on the host: index in the sequence of the token to draw (prompt length for the first).
        tokens: integer [max_running, max_len] on the device: ids of every slot; `tokens[slot, :position]` are the ones
            before. Read for penalties only.
        mask_rows: int64 [m] on the host: rows that a grammar constrains, or None.
        masks: int32 [m, ceil(vocab / 32)] on the host: bit t of word t // 32 allows token t, or None.
        likeliest: int64 [n] on the device: the argmax of the untouched logits, where it is known already.
    """

    slots: np.ndarray
    positions: np.ndarray
    tokens: torch.Tensor | None = None
    mask_rows: np.ndarray | None = None
    masks: np.ndarray | None = None
    likeliest: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (natural log, of the model's own distribution) of m positions, on the logits' device.

    Attributes:
        rows: int64 [m] on the host: which rows of the batch.
        chosen: float32 [m] of the drawn (or prompt) token.
        ranks: int64 [m], 1 for the likeliest; equal logits share the better rank.
        top_ids: int64 [m, k], likeliest first.
        top_values: float32 [m, k].
    """

    rows: np.ndarray
    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def take(self, places: np.ndarray) -> Logprobs:
        """Those at the given places, int64 [k]; for tensors on the host."""
        values = (self.chosen, self.ranks, self.top_ids, self.top_values)
        return Logprobs(self.rows[places], *(value[torch.from_numpy(places)] for value in values))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Drawn tokens: `ids` int64 [n] on the logits' device; `logprobs` of the rows that asked, or None."""

    ids: torch.Tensor
    logprobs: Logprobs | None = None
