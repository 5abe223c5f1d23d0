"""vLLM's requests and options as this package's plain values. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HASH_BYTES = 8  # of each block hash: enough to keep neighbours together, and a wrong neighbour costs no correctness

OPTIONS_KEY = "deepinfer_sched"
DEFAULTS = {"patience": 10_000}


def prefix_key(request: Any) -> bytes:
    """Return the sort key of a `vllm.v1.request.Request`: its block hashes, shortened and joined."""
    return b"".join(bytes(block_hash)[:HASH_BYTES] for block_hash in request.block_hashes)


def options(additional_config: Any) -> dict[str, int]:
    """Read this package's part of `--additional-config '{"deepinfer_sched": {"patience": 10000}}'`.

    Raises:
        ValueError: an unknown option or a value that is not a positive integer.
    """
    given = additional_config.get(OPTIONS_KEY, {}) if isinstance(additional_config, Mapping) else {}
    for name, value in given.items():
        if name not in DEFAULTS:
            raise ValueError(f"additional_config.{OPTIONS_KEY} has no option {name!r}; it knows {', '.join(DEFAULTS)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"additional_config.{OPTIONS_KEY}.{name} must be a positive integer, got {value!r}")
    return DEFAULTS | dict(given)
