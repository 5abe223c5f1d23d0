"""One completion that is being made: plain integers, nothing of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_FINISHED = Status.FINISHED


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion. A request with n > 1 is n sequences with the same prompt; they share its blocks by hit.

    The caller fills the first part; the scheduler owns the second. `tokens` grows by what `Scheduler.apply` is given.

    Attributes:
        seq_id: unique among unfinished sequences.
        tokens: the prompt (at least one id), then what was generated.
        max_tokens: most tokens to generate; the step that makes the last one is known ahead, so it costs no wasted row.
        priority: lower runs earlier; ties run in the order of `add`.
        salt: prefixes are shared only between sequences with the same salt.
        constrained: sampling needs a grammar mask.
        read_cache: False computes the whole prompt (prompt logprobs need every row).

        num_prompt: tokens of the prompt.
        slot: row of the block tables while it runs, else -1.
        cached_tokens: prompt tokens found in the prefix cache at the first admission; -1 before it.
        preemptions: how often it lost its slot.
        promoted: it waited longer than `SchedConfig.max_wait_steps` and now goes first, whatever its priority.
        arrived: the last step that was planned when it was added.
        last_step: the last step that has a row of it.
    """

    seq_id: int
    tokens: list[int]
    max_tokens: int
    priority: int = 0
    salt: bytes = b""
    constrained: bool = False
    read_cache: bool = True

    num_prompt: int = field(init=False)
    status: Status = field(init=False, default=Status.WAITING)
    slot: int = field(init=False, default=-1)
    order: int = field(init=False, default=-1)
    cached_tokens: int = field(init=False, default=-1)
    preemptions: int = field(init=False, default=0)
    promoted: bool = field(init=False, default=False)
    arrived: int = field(init=False, default=0)
    last_step: int = field(init=False, default=0)
    hashes: list[bytes] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key: who runs first, and who is preempted last."""
        return (0, 0, self.order) if self.promoted else (1, self.priority, self.order)


def append_tokens(sequences: list[Sequence], token_ids: np.ndarray, num_tokens: np.ndarray) -> None:
    """Give each sequence the first tokens of its row, unless it has finished meanwhile.

    Args:
        sequences: R of them.
        token_ids: int [R, k].
        num_tokens: int [R], how many count.
    """
    if (num_tokens == 1).all():  # by far the most steps
        for seq, first in zip(sequences, token_ids[:, 0].tolist(), strict=True):
            if seq.status is not _FINISHED:
                seq.tokens.append(first)
        return
    for row, (seq, number) in enumerate(zip(sequences, num_tokens.tolist(), strict=True)):
        if number and seq.status is not _FINISHED:
            seq.tokens.extend(token_ids[row, :number].tolist())
