"""The entry point of `vllm.general_plugins`: gives the connector a short name. Unused, it changes nothing."""

from __future__ import annotations

import logging

NAME = "DeepInferConnector"
MODULE = "deepinfer_cache.adapters.vllm.connector"

logger = logging.getLogger("vllm.deepinfer_cache")


def register() -> None:
    """Make `"kv_connector": "DeepInferConnector"` known to vLLM. Safe to call any number of times.

    A vLLM whose factory lies elsewhere goes without: it does not catch what an entry point raises, and would not start.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logger.debug("deepinfer-cache cannot offer %s to this vLLM: %s", NAME, error)
        return
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
