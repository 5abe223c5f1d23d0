"""The entry point of `vllm.general_plugins`: gives the connector a short name. Unused, it changes nothing."""

from __future__ import annotations

NAME = "DeepInferConnector"
MODULE = "deepinfer_cache.adapters.vllm.connector"


def register() -> None:
    """Make `"kv_connector": "DeepInferConnector"` known to vLLM. Safe to call any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
