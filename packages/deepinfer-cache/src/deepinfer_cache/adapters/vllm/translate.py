"""vLLM's configuration and requests as this package's values. Pure functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_cache.adapters.vllm.groups import GroupLayout
from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.tiers import fingerprint

LAYOUT = "vllm-blocks-v2"  # a page: the block's bytes in every layer, layers in the order of their names
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SAMPLE = 1 << 16
_ADVICE = "drop --kv-transfer-config"


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


def cache_groups(kv_cache_config: Any) -> list[GroupLayout]:
    """The groups that a store of prefixes holds. Windows that vLLM rebuilds by replaying a hit's tail are not among them.

    Raises:
        ValueError: a kind of cache that cannot be cut into pages of a prefix, such as the state of an SSM.
    """
    groups = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        layers = list(getattr(spec, "kv_cache_specs", {"": spec}).values())  # a group of like layers of unlike sizes
        kinds = {cache_window(layer) for layer in layers}
        if len(kinds) > 1:
            raise ValueError(
                f"deepinfer-cache's connector finds layers with different windows in cache group {index}: {_ADVICE}"
            )
        size = spec.page_size_bytes * (1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names))
        groups.append(GroupLayout(index, spec.block_size, kinds.pop(), size))
    if not groups:
        raise ValueError(f"deepinfer-cache's connector finds no prefix in this model's KV cache: {_ADVICE}")
    return groups


def cache_window(spec: Any) -> int | None:
    """Tokens before the next one that a layer's cache must hold; None for all of them.

    Raises:
        ValueError: neither full nor sliding-window attention.
    """
    names = {cls.__name__ for cls in type(spec).__mro__}
    if "SlidingWindowSpec" in names:
        return spec.num_retained_tokens
    if "FullAttentionSpec" in names and getattr(spec, "attention_chunk_size", None) is None:
        return None
    raise ValueError(
        f"deepinfer-cache's connector carries full and sliding-window attention, not {type(spec).__name__}: {_ADVICE}"
    )


def require_whole_pages(parallel_config: Any) -> None:
    """Raise ValueError where context parallelism spreads the tokens of a page over ranks."""
    ranks = parallel_config.decode_context_parallel_size * parallel_config.prefill_context_parallel_size
    if ranks > 1:
        raise ValueError(
            f"deepinfer-cache's connector keeps whole pages, and context parallelism spreads them over {ranks} ranks: {_ADVICE}"
        )


def page_keys(request: Any, page_size: int) -> list[bytes]:
    """Keys of the full pages of a request's prompt. They depend on tokens alone, so they are equal in every process."""
    salt = getattr(request, "cache_salt", None) or ""
    return chain_hashes(list(request.prompt_token_ids or ()), page_size, salt.encode())


def shareable(request: Any) -> bool:
    """Whether tokens alone decide a request's KV: images and adapters do not enter the keys, so such requests stay out."""
    return not getattr(request, "mm_features", None) and getattr(request, "lora_request", None) is None


def mark_of(vllm_config: Any, rank: int, group: GroupLayout) -> bytes:
    """Fingerprint of model, weights and the page layout of one cache group."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return fingerprint(
        layout=LAYOUT,
        architecture=json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        weights=weights_digest(Path(model.model), vllm_config.load_config.load_format, model.seed),
        dtype=str(model.dtype),
        cache_dtype=str(cache.cache_dtype),
        page_size=group.block_size,
        group=f"{group.index}:{group.window}",
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
