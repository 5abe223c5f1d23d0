"""vLLM's adaptive verification with this package's prices, calibration and budget. A shell: translate, plan, return.

vLLM's manager keeps what it is good at: the trimmed batch on the device, the copies that nobody waits for, one bonus token
for every request. It is asked first, and only its budget, its cost tables and the confidences it ranks by are replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from deepinfer_specdec.adapters.vllm.calibrator import CLIP, Calibrator
from deepinfer_specdec.adapters.vllm.drafting import Drafting
from deepinfer_specdec.adapters.vllm.options import VerificationOptions
from deepinfer_specdec.adapters.vllm.pricing import Points, StepPrices
from deepinfer_specdec.adapters.vllm.report import Report
from deepinfer_specdec.adapters.vllm.telemetry import Outcomes, StepClock
from deepinfer_specdec.scheduling.budget import StepLoad
from deepinfer_specdec.scheduling.drafting import drafting_gain
from deepinfer_specdec.scheduling.planner import VerificationPlanner

logger = init_logger("vllm.deepinfer_specdec")


class PlannedVerification(AdaptiveVerificationManager):
    """Takes the place of vLLM's manager, constructor and all.

    Order within a step s: `add_request`, `get_num_tokens` (the budget), `reallocate_drafts` (before the forward pass),
    `record_confidences` (after drafting). Every rank of a tensor-parallel group runs the same numbers: prices and
    temperatures are learned on its first rank and handed out in the same step everywhere. So every rank also decides alike
    whether a step drafts (`drafting.wanted`), which `compat.let_steps_skip_drafts` tells vLLM.

    A step that does not draft keeps the drafter's context up to date (vLLM's own path for steps whose drafts nobody can
    use), and leaves its rows without a draft: none of theirs is admitted until a step has drafted for them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        states = self.req_states
        slots, width = states.max_num_reqs, self.num_speculative_steps
        self._options = VerificationOptions.read(get_current_vllm_config().additional_config)
        self._leads = get_tp_group().rank_in_group == 0
        self._prices: StepPrices | None = None
        self._planner = VerificationPlanner(slots, width, self._options.edge)
        self._calibrator = Calibrator(width, self._options)
        self.drafting = Drafting(slots, self._options)
        self._temperatures: Tensor | None = None
        self._set_temperatures(self._calibrator.temperatures)
        self._raw = torch.zeros(slots, width, device=states.device)  # confidences as the drafter gave them
        self._computed_before: Tensor | None = None  # [R], of the step in flight, when it verifies drafts
        self._load: tuple[int, int] | None = None  # (requests, tokens) of the step in flight, when it may be measured
        self._step = 0
        self._drafted: np.ndarray = np.zeros(0, dtype=np.int64)  # slots that the last step drafted for
        self._clock = StepClock(states.device)
        self._outcomes = Outcomes(slots, width, states.device)
        self.report = Report(self._options.log_every)
        logger.info("Adaptive verification is planned by deepinfer-specdec.")

    def add_request(self, req_idx: int) -> None:
        super().add_request(req_idx)
        self._planner.begin(req_idx, self._step)
        self.drafting.begin(req_idx)

    def set_cost_curves(self, draft_curve: Points, verify_curve: Points) -> None:
        """Price steps by these (size, milliseconds) points, broadcast from the group's first rank."""
        draft, verify = get_tp_group().broadcast_object((list(draft_curve), list(verify_curve)), src=0)
        super().set_cost_curves(draft, verify)  # refuses an empty profile, and keeps vLLM's own tables
        self._prices = StepPrices(draft, verify, self._cudagraph_limit)
        logger.info("DeepInfer prices %d verification and %d draft sizes, unsmoothed.", len(verify), len(draft))

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        total = super().get_num_tokens(num_tokens_per_req, draft_tokens)
        assert self._batch_budget is not None
        assert self._prices is not None
        drafts_of, others_of, stock = self._batch_budget
        slots = np.array([self.req_states.req_id_to_index[name] for name in drafts_of], dtype=np.int64)
        scheduled = np.array(list(drafts_of.values()), dtype=np.int32)
        others = np.array(list(others_of.values()), dtype=np.int32)
        counts = np.where(self.drafting.held(slots), scheduled, 0)
        load = self._step_load(slots, counts, others)
        has = counts > 0
        seconds = load.seconds(self._prices.verify, load.limit)
        budget = self._planner.budget(self._step, slots[has], seconds, load.rows, counts[has])
        if self._copy_admitted_drafts_to_host and counts.sum() < scheduled.sum():
            budget = 0  # vLLM takes the scheduled counts for the admitted ones where the budget leaves nothing out
        self._batch_budget = (dict(zip(drafts_of, counts.tolist(), strict=True)), others_of, budget)
        self._load = (slots.size, total - stock + budget) if (others == 1).all() else None
        self.report.planned(int(scheduled.sum()), budget, stock)
        return total - stock + budget

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> Any:
        if self._leads:
            self._computed_before = self.req_states.num_computed_tokens.gpu[idx_mapping]
        result = super().reallocate_drafts(req_ids, idx_mapping)
        if self._leads and self._load is not None:
            self._clock.start()
        return result

    def record_confidences(self, confidence_probs: Tensor, input_batch: Any) -> None:
        idx, rows, drafts = input_batch.idx_mapping, input_batch.num_reqs, self.drafting.now
        if self._leads:
            self._send_outcomes(idx, input_batch.num_draft_tokens_per_req)
            if drafts:
                self._raw[idx] = confidence_probs[:rows]
        known = self._calibrated(confidence_probs[:rows]) if drafts else self._confidence_probs[idx]
        super().record_confidences(known, input_batch)
        # What vLLM has just made readable are the blocks of the step before.
        landed = self._stale_confidences[self._stale_idx].np
        self._planner.record(self._step - 1, self._drafted, np.cumprod(landed[self._drafted], axis=1))
        self._decide(input_batch)
        self._step += 1
        if self._step % self._options.publish_every == 0:
            self._publish()
        if self._leads:  # after that: what this step took has no say about the block that it has drafted
            self._learn(rows, drafts)

    def _decide(self, input_batch: Any) -> None:
        """Whether the next step drafts, from the drafts of the step before and the load of this one.

        The next step's drafts are verified in the one after it, three steps after those that are looked at here: older than
        the two that losslessness asks for (specdec page, A.4).
        """
        assert self._prices is not None
        sampling = self._sampling(input_batch)
        others = int(input_batch.num_tokens) - int(input_batch.num_draft_tokens) - sampling.size
        plain = float(self._prices.verify.seconds(sampling.size + others))
        drafting = float(self._prices.draft.seconds(sampling.size))
        looked = self.drafting.met(self._drafted)  # not those whose slot has a new request since
        if looked.size:
            load = StepLoad(
                looked.size, others, limit=min(looked.size * self.num_speculative_steps, self._room(looked.size))
            )
            gain = drafting_gain(
                self._planner.expected(self._step + 1, looked),
                looked.size,
                load.seconds(self._prices.verify, load.limit),
                float(self._prices.draft.seconds(looked.size)),
            )
            self.drafting.judge(gain, plain)
        self._drafted = self.drafting.passed(np.asarray(input_batch.idx_mapping_np), sampling, plain, drafting)
        self.report.drafting(self.drafting.steps, self.drafting.drafted, self.drafting.changes)

    def _step_load(self, slots: np.ndarray, counts: np.ndarray, others: np.ndarray) -> StepLoad:
        """What the step carries besides drafts, and how many fit: all must be verified in one chunk of logits."""
        states = self.req_states
        sampling = int(np.count_nonzero(states.num_computed_tokens_np[slots] + others >= states.prefill_len.np[slots]))
        assert self._prices is not None
        return StepLoad(
            rows=sampling,
            other_tokens=int(others.sum()) - sampling,
            draft_seconds=float(self._prices.draft.seconds(slots.size)) if self.drafting.wanted else 0.0,
            limit=min(int(counts.sum()), self._room(slots.size)),
        )

    def _room(self, requests: int) -> int:
        """Drafts that fit beside the requests' own tokens into one chunk of logits."""
        return max(0, self._max_total_logits - requests * self.num_bonus_tokens)

    def _calibrated(self, confidences: Tensor) -> Tensor:
        """[R, K] on the device; the very tensor while all temperatures are 1."""
        if self._temperatures is None:
            return confidences
        return torch.sigmoid(torch.logit(confidences, eps=CLIP) / self._temperatures)

    def _set_temperatures(self, temperatures: list[float]) -> None:
        self._temperatures = None
        if any(value != 1.0 for value in temperatures):
            self._temperatures = async_tensor_h2d(temperatures, device=self.req_states.device, dtype=torch.float32)

    def _send_outcomes(self, idx: Tensor, scheduled: np.ndarray) -> None:
        """Send off what became of this step's drafts: the tokens that the request state kept say how many were accepted.

        Requests with drafts are the first of the batch (`sort_batch_req_ids`), the others have nothing to tell.
        """
        before, self._computed_before = self._computed_before, None
        if before is None:
            return
        rows = int(np.count_nonzero(scheduled))
        idx, before = idx[:rows], before[:rows]
        kept = self.req_states.num_computed_tokens.gpu[idx] - before
        verified = self._batch_draft_capacity[:rows]
        rejected = torch.diff(self.query_start_loc[: rows + 1]) - kept
        self._outcomes.put(self._raw[idx], verified, verified - rejected)

    def _learn(self, rows: int, drafted: bool) -> None:
        load, self._load = self._load, None
        if load is not None:
            self._clock.stop(*load, drafted)
        else:
            self._clock.skip()
        assert self._prices is not None
        for lap in self._clock.take():
            self._prices.observe(*lap)
        for outcome in self._outcomes.take():
            self._calibrator.observe(outcome)
            self.report.verified(outcome)
        self.report.log(self._calibrator.temperatures, self._prices.observed)

    def _publish(self) -> None:
        """Hand prices and temperatures to every rank of the group, in the same step everywhere."""
        assert self._prices is not None
        learned = (*self._prices.refreshed(), self._calibrator.temperatures)
        draft, verify, temperatures = get_tp_group().broadcast_object(learned, src=0)
        self._prices.update(draft, verify)
        self._set_temperatures(temperatures)

    def _sampling(self, input_batch: Any) -> np.ndarray:
        """Slots whose block will be verified: not those in the midst of their prompt."""
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        return np.asarray(input_batch.idx_mapping_np)[ends >= input_batch.prefill_len_np].astype(np.int64)
