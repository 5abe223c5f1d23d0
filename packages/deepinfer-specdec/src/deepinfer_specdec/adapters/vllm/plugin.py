"""The entry point of `vllm.general_plugins`. Everything here is chosen by a flag of vLLM's own, so nothing is registered."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.deepinfer_specdec")


def register() -> None:
    """Say at debug level how to ask for this package. Changes nothing in vLLM; safe to call any number of times."""
    logger.debug(
        "deepinfer-specdec is here: --speculative-config "
        '\'{"method": "custom_class", "model": "deepinfer_specdec.adapters.vllm.proposer.SuffixProposer", ...}\', or '
        "--worker-extension-cls deepinfer_specdec.adapters.vllm.worker.PlannedSpeculation beside adaptive verification"
    )
