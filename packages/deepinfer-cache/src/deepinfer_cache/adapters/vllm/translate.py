"""vLLM's configuration and requests as this package's values. Pure functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.tiers import fingerprint

LAYOUT = "vllm-blocks-v1"  # a page: the block's bytes in every layer, layers in the order of their names
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SAMPLE = 1 << 16


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """`kv_connector_extra_config` of this connector.

    Attributes:
        directory: where pages are kept for later runs; None keeps them in host memory only.
        host_bytes: host memory for pages.
        disk_bytes: most bytes in the directory; 0 for no limit.
    """

    directory: Path | None
    host_bytes: int
    disk_bytes: int

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """Check the user's values. Raises ValueError that names the option."""
        known = {"directory", "host_bytes", "disk_bytes"}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has no option {unknown[0]!r}; it knows {', '.join(sorted(known))}"
            )
        directory = extra.get("directory")
        return cls(
            Path(directory) if directory else None,
            read_bytes("host_bytes", extra.get("host_bytes", "1GiB")),
            read_bytes("disk_bytes", extra.get("disk_bytes", 0)),
        )


def read_bytes(name: str, value: Any) -> int:
    """Read a size such as 4294967296 or "4GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", str(value).strip())
    if match is None:
        raise ValueError(f"kv_connector_extra_config.{name} must be a size like 4GiB, got {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def page_keys(request: Any, page_size: int) -> list[bytes]:
    """Keys of the full pages of a request's prompt. They depend on tokens alone, so they are equal in every process."""
    salt = getattr(request, "cache_salt", None) or ""
    return chain_hashes(list(request.prompt_token_ids or ()), page_size, salt.encode())


def shareable(request: Any) -> bool:
    """Whether tokens alone decide a request's KV: images and adapters do not enter the keys, so such requests stay out."""
    return not getattr(request, "mm_features", None) and getattr(request, "lora_request", None) is None


def mark_of(vllm_config: Any, rank: int) -> bytes:
    """Fingerprint of model, weights and page layout."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return fingerprint(
        layout=LAYOUT,
        architecture=json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        weights=weights_digest(Path(model.model), vllm_config.load_config.load_format, model.seed),
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        page_size=cache.block_size,
        ranks=f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}:{rank}",
    )


def weights_digest(folder: Path, load_format: Any, seed: int) -> bytes:
    """Digest of a checkpoint: names, sizes, and both ends of every weight file (headers name each tensor and its place)."""
    digest = hashlib.blake2b(digest_size=16)
    if str(load_format).endswith("dummy"):
        return digest.digest() + f"dummy:{seed}".encode()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        digest.update(str(folder).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE))
    return digest.digest()
