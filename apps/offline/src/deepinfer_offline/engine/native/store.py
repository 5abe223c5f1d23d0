"""`--kv-store`: pages that outlive the device's memory, and the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepinfer_cache import CacheConfigError
from deepinfer_cache.tiers import DiskTier, HostTier, TieredStore, fingerprint

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.native.memory import available_bytes
from deepinfer_offline.engine.native.pages import paged_model
from deepinfer_offline.weights.digest import checkpoint_digest

if TYPE_CHECKING:
    from deepinfer_cache import CacheConfig, CacheManager
    from deepinfer_sched import Scheduler

    from deepinfer_offline.models.base import Model
    from deepinfer_offline.weights.source import ModelSource

_NUMERICS = 1
"""Raise it when the same weights and tokens begin to give other KV bytes, so that older pages are not used."""

_HOST_MOST, _HOST_SHARE, _HOST_LEAST_PAGES = 1 << 30, 8, 64
_BATCH_BYTES, _BATCH_PAGES = 64 << 20, 64  # copied at once, on the way to the store


@dataclass(frozen=True, slots=True)
class KvStore:
    """Saves finished pages as a run goes on.

    Attributes:
        cache: whose pages; it loads from the store by itself.
        scheduler: knows whether steps are in flight.
        folder: where pages are kept.
        page_bytes: bytes of a page.
    """

    cache: CacheManager
    scheduler: Scheduler
    folder: Path
    page_bytes: int

    def save(self) -> None:
        """Save every page that is complete. Call it while a step runs, and the model does not wait for it."""
        batch = max(1, min(_BATCH_PAGES, _BATCH_BYTES // self.page_bytes))
        waiting = self.cache.pending_saves
        while waiting:
            self.cache.save(batch)
            before, waiting = waiting, self.cache.pending_saves
            if waiting == before:
                return  # what is left waits for a step in flight

    def finish(self) -> None:
        """Save what is left at the end. Pages of a step that failed are not: nobody knows what is in them."""
        if not self.scheduler.in_flight:
            self.cache.complete_all()
        self.save()

    def report(self) -> dict[str, Any]:
        """Numbers for the end of a run."""
        stats = self.cache.stats()
        return {
            "folder": str(self.folder),
            "page_tokens": self.cache.page_size,
            "page_bytes": self.page_bytes,
            "loaded_pages": stats.loaded_pages,
            "saved_pages": stats.saved_pages,
        }


def check_folder(folder: Path) -> None:
    """Make the folder if it is not there. Raises EngineStartError before any weight is read if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"--kv-store: cannot make the folder {folder}: {error.strerror}") from error


def open_tiers(
    folder: Path, source: ModelSource, model: Model, config: CacheConfig, page_bytes: int, max_bytes: int | None = None
) -> TieredStore:
    """Host memory over the folder, under the fingerprint of all that decides what a page's bytes are.

    `max_bytes` bounds the folder; the least recently used pages go first.

    Raises:
        EngineStartError: the folder cannot be written, or the model has no pages that can be shared.
    """
    if not page_bytes:
        raise EngineStartError(f"--kv-store: {source.name} keeps no KV that prompts can share")
    mark = fingerprint(
        config=json.dumps(source.config, sort_keys=True, default=repr),
        weights=checkpoint_digest(source),
        device=model.options.device.partition(":")[0],
        dtype=str(model.options.dtype),
        layout=paged_model(model).page_layout,
        numerics=_NUMERICS,
        page_size=config.page_size,
        page_bytes=page_bytes,
        strategy=config.strategy,
    )
    try:
        disk = DiskTier(folder, mark, page_bytes, max_bytes or 0)
    except CacheConfigError as error:
        raise EngineStartError(f"--kv-store: {error}") from error
    return TieredStore(HostTier(page_bytes, buffer=_host_buffer(page_bytes, model.options.device)), disk)


def _host_buffer(page_bytes: int, device: str) -> np.ndarray:
    """Memory of the host tier, uint8 [pages, page_bytes]; pinned where a CUDA device copies from it."""
    pages = max(min(_HOST_MOST, available_bytes("cpu") // _HOST_SHARE) // page_bytes, _HOST_LEAST_PAGES)
    return torch.empty((pages, page_bytes), dtype=torch.uint8, pin_memory=device.startswith("cuda")).numpy()
