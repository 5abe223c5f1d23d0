"""Job planning and step scheduling for LLM engines."""

from __future__ import annotations

from deepinfer_sched.ahead import Ahead, DraftsAhead
from deepinfer_sched.cache import Cache, Hit
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.errors import SchedConfigError, SchedError, SequenceError
from deepinfer_sched.job.plan import JobPlan, SharedPrefix, plan_blocks, plan_job, plan_windows
from deepinfer_sched.scheduler import Scheduler
from deepinfer_sched.sequence import Sequence, Status
from deepinfer_sched.simulation.cost import CostModel
from deepinfer_sched.simulation.hits import replay_lru, replay_next_use
from deepinfer_sched.simulation.replay import SimulationReport, simulate
from deepinfer_sched.step import Cascade, StepPlan

__all__ = [
    "Ahead",
    "Cache",
    "Cascade",
    "CostModel",
    "DraftsAhead",
    "Hit",
    "JobPlan",
    "SchedConfig",
    "SchedConfigError",
    "SchedError",
    "Scheduler",
    "Sequence",
    "SequenceError",
    "SharedPrefix",
    "SimulationReport",
    "Status",
    "StepPlan",
    "plan_blocks",
    "plan_job",
    "plan_windows",
    "replay_lru",
    "replay_next_use",
    "simulate",
]
