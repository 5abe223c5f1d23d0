"""Which drafter an engine gets, and why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_specdec import create_drafter
from deepinfer_specdec.scheduling.budget import EDGE

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.native.ahead_drafts import AheadDrafts
from deepinfer_offline.engine.native.ahead_step import AheadSteps, can_run_ahead
from deepinfer_offline.engine.native.dspark import can_draft, make_dspark
from deepinfer_offline.engine.native.flags import NO_DRAFT
from deepinfer_offline.engine.native.speculation import Speculation

if TYPE_CHECKING:
    from deepinfer_cache import CacheManager
    from deepinfer_sched import Scheduler

    from deepinfer_offline.engine.native.runner import ModelRunner
    from deepinfer_offline.engine.options import EngineOptions
    from deepinfer_offline.sampling import Sampler

_LOG = logging.getLogger(__name__)
_CHOSEN = "chosen by --speculative"


def make_speculation(
    options: EngineOptions, runner: ModelRunner, scheduler: Scheduler, cache: CacheManager, sampler: Sampler
) -> Speculation | None:
    """What `--speculative` asks for; None for `off`. The choice and its reason are logged and reported.

    Raises:
        EngineStartError: `dspark` for a model without a draft, or a draft that cannot be used.
    """
    if options.speculative == "off":
        return None
    name, reason = choose_drafter(options.speculative, options.draft_model, drafts=can_draft(runner.model))
    _LOG.info("speculation with the %s drafter: %s", name, reason)
    if name != "dspark":
        return Speculation(create_drafter(name), scheduler, runner, reason)
    drafter = make_dspark(runner, scheduler, cache.block_table, sampler.choose, options.draft_model)
    ahead = None
    if options.async_scheduling and can_run_ahead(runner.model):
        steps = runner.ahead = AheadSteps(runner, sampler.table, lambda: drafter.calibration.scaling)
        builds = runner.model.options.device == "cpu"
        ahead = AheadDrafts(drafter, scheduler, EDGE, builds=builds, graphs=steps.graphs)
    return Speculation(drafter, scheduler, runner, reason, trial=True, ahead=ahead)


def choose_drafter(wanted: str, draft_model: Path | None, *, drafts: bool) -> tuple[str, str]:
    """(name, reason) of the drafter.

    Args:
        wanted: `auto`, `dspark`, `ngram` or `suffix`.
        draft_model: the draft that was given.
        drafts: whether the model has a draft, its own or the given one.

    Raises:
        EngineStartError: `dspark` without a draft.
    """
    if wanted == "dspark" and not drafts:
        raise EngineStartError(NO_DRAFT)
    if wanted != "auto":
        return wanted, _CHOSEN
    if draft_model is not None:
        return "dspark", f"dspark: --draft-model {draft_model} was made for this model"
    if drafts:
        return "dspark", "dspark: the checkpoint brings its own draft"
    return "suffix", "suffix: needs no draft model, and outputs of one job repeat its prompts and each other"
