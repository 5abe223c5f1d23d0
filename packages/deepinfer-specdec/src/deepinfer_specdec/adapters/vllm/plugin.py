"""The entry point of `vllm.general_plugins`. A proposer is chosen in `--speculative-config`, so nothing is registered."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.deepinfer_specdec")


def register() -> None:
    """Say at debug level how a proposer is chosen. Changes nothing in vLLM; safe to call any number of times."""
    logger.debug(
        "deepinfer-specdec is here: --speculative-config "
        '\'{"method": "custom_class", "model": "deepinfer_specdec.adapters.vllm.proposer.SuffixProposer", ...}\''
    )
