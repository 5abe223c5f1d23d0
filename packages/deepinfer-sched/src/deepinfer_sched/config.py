"""The limits and policies of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_sched.errors import SchedConfigError


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Limits and policies of a `Scheduler`.

    Attributes:
        max_running: sequences that run at once (slots).
        max_tokens_per_step: rows of one forward, over all sequences.
        max_model_len: tokens of the longest sequence, prompt and output together.
        max_in_flight: steps that may be planned and not yet applied (2 = one step ahead).
        reserve_pages: cache pages kept back for each running sequence when a new one is admitted.
        share_in_step: a page becomes findable as soon as the step that fills it is planned, also for later rows of
            that step. Right for a forward that writes the KV of all rows of a layer before any row attends there;
            switch it off otherwise.
        lookahead: waiting sequences that may be looked at behind one that is held back, e.g. because the prefix it
            shares is being computed by another one.
        max_wait_steps: steps after which a sequence that never ran goes ahead of every other one, whatever the
            priorities; 0 lets higher priorities pass it for ever.
        prompt_share: part of the token budget, beyond one token a decode row, that drafts leave to prompts when there
            are any; keeps verification from starving prefills.
        constrained_ahead: plan a grammar-bound row although the token before it is still in flight; the sampler then
            waits for that token's mask, the forward does not.
        cascade_min_rows: decode rows that must share a prefix before a cascade is worth it; 0 switches cascades off.
        cascade_min_tokens: length of the shared prefix from which a cascade is worth it.
    """

    max_running: int = 64
    max_tokens_per_step: int = 2048
    max_model_len: int = 4096
    max_in_flight: int = 2
    reserve_pages: int = 1
    share_in_step: bool = True
    lookahead: int = 64
    max_wait_steps: int = 4096
    prompt_share: float = 0.5
    constrained_ahead: bool = True
    cascade_min_rows: int = 2
    cascade_min_tokens: int = 64

    def __post_init__(self) -> None:
        for field in ("max_running", "max_tokens_per_step", "max_model_len", "max_in_flight"):
            if getattr(self, field) < 1:
                raise SchedConfigError(f"{field} {getattr(self, field)} must be at least 1")
        for field in ("reserve_pages", "lookahead", "cascade_min_rows", "cascade_min_tokens", "max_wait_steps"):
            if getattr(self, field) < 0:
                raise SchedConfigError(f"{field} {getattr(self, field)} must not be negative")
        if not 0 <= self.prompt_share <= 1:
            raise SchedConfigError(f"prompt_share {self.prompt_share} must be between 0 and 1")
        if self.max_tokens_per_step < self.max_running:
            raise SchedConfigError(
                f"max_tokens_per_step {self.max_tokens_per_step} must be at least max_running {self.max_running}: "
                "every running sequence decodes one token a step"
            )
