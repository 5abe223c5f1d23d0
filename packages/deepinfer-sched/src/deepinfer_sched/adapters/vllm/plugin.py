"""The entry point of `vllm.general_plugins`. The scheduler is chosen by `--scheduler-cls`, so there is little to register."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.deepinfer_sched")


def register() -> None:
    """Say at debug level that the scheduler can be chosen. Changes nothing in vLLM; safe to call any number of times."""
    logger.debug("deepinfer-sched is here: --scheduler-cls deepinfer_sched.adapters.vllm.scheduler.PrefixScheduler")
