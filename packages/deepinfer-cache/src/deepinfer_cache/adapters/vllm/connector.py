"""The class that vLLM instantiates, once in the scheduler and once in each worker. A shell over `Ledger` and the tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_cache.adapters.vllm import compat, translate
from deepinfer_cache.adapters.vllm.groups import GroupLayout
from deepinfer_cache.adapters.vllm.ledger import Ledger, Move, Shelf, Transfers
from deepinfer_cache.adapters.vllm.pages import GroupPages
from deepinfer_cache.tiers import DiskTier, HostTier

compat.require_supported()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402  (after the version check)
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from deepinfer_cache.adapters.vllm.metrics import PageCounters, PageStats  # noqa: E402


@dataclass
class DeepInferMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers for one step."""

    transfers: Transfers


@dataclass
class _Store:
    """The tiers of one group, in a worker."""

    pages: GroupPages
    host: HostTier | None
    disk: DiskTier | None

    def read(self, key: bytes) -> np.ndarray | None:
        if self.host is not None and key in self.host:
            return self.host.take([key])[0]
        record = self.disk.get(key) if self.disk is not None else None
        if record is None and self.disk is not None:  # damaged or foreign: gone for the scheduler too
            self.disk.discard(key)
        return record

    def write(self, key: bytes, record: np.ndarray) -> None:
        if self.host is not None:
            self.host.put(key, record)
        if self.disk is not None:
            self.disk.put(key, record)


class DeepInferConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps prompt KV in host memory and a directory, checksummed, and gives it to later requests and later runs.

    Full attention and sliding windows are carried, each in pages of its own; a hit is as long as all of them can serve.
    A page that is damaged, foreign or gone is recomputed: it costs time, never a token.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        compat.recompute_failed_loads(vllm_config.kv_transfer_config)
        self._options = translate.ConnectorOptions.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        translate.require_whole_pages(vllm_config.parallel_config)
        self._groups = translate.cache_groups(kv_cache_config)
        self._host_pages = self._options.host_bytes // sum(group.page_bytes for group in self._groups)
        if role == KVConnectorRole.SCHEDULER:
            disks = [self._open_disk(group, group.page_bytes, 0) for group in self._groups]
            shelves = [Shelf(disk.__contains__ if disk else None, self._host_pages) for disk in disks]
            alignment = math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))
            self._ledger = Ledger(self._groups, shelves, alignment)
        else:
            self._stores: list[_Store] = []
            self._stats = PageStats()
            self._results = KVConnectorTransferResults()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a page that is not saved is a later miss."""
        return False

    def _open_disk(self, group: GroupLayout, page_bytes: int, rank: int) -> DiskTier | None:
        if self._options.directory is None:
            return None
        share = group.page_bytes / sum(each.page_bytes for each in self._groups)
        mark = translate.mark_of(self._vllm_config, rank, group)
        return DiskTier(self._options.directory, mark, page_bytes, int(self._options.disk_bytes * share))

    # --- the scheduler's side --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not translate.shareable(request):
            return 0, False
        sizes = {group.block_size for group in self._groups}
        keys = {size: translate.page_keys(request, size) for size in sizes}
        found = self._ledger.match(
            request.request_id,
            [keys[group.block_size] for group in self._groups],
            num_computed_tokens,
            request.num_tokens,
        )
        # Always ahead of the request's first step: a load that fails inside a step cannot be taken back where steps
        # are planned asynchronously, nor where there are several groups.
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._ledger.load(request.request_id, self._ours(blocks.get_block_ids()), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        host = self._ledger.host_tokens(request.request_id, num_external_tokens)
        split = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in split.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        counts = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            reached = new.num_computed_tokens + counts[new.req_id]
            self._ledger.schedule(new.req_id, self._ours(new.block_ids), True, reached)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = self._ours(cached.new_block_ids[i]) if cached.new_block_ids[i] else [[] for _ in self._groups]
            reached = cached.num_computed_tokens[i] + counts[request_id]
            self._ledger.schedule(request_id, blocks, request_id in cached.resumed_req_ids, reached)
        return DeepInferMetadata(self._ledger.take())

    def update_connector_output(self, connector_output: Any) -> None:
        self._ledger.loaded(connector_output.finished_recving or (), connector_output.failed_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ledger.finish(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def _ours(self, block_ids: Any) -> list[list[int]]:
        return [block_ids[group.index] for group in self._groups]

    # --- a worker's side -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = self._vllm_config.parallel_config.rank
        self._stores = []
        for group in self._groups:
            names = self._kv_cache_config.kv_cache_groups[group.index].layer_names
            layers = [kv_caches[name] for name in sorted(names) if name in kv_caches]
            pages = GroupPages(layers, self._kv_cache_config.num_blocks)
            host = HostTier(pages.page_bytes, self._host_pages * pages.page_bytes) if self._host_pages else None
            self._stores.append(_Store(pages, host, self._open_disk(group, pages.page_bytes, rank)))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, moves in self._transfers().loads.items():
            self._results.finished_recving.add(request_id)
            if not self._load(moves):
                self._results.failed_recving.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers of a page are saved together, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        for place, store in enumerate(self._stores):
            moves = [(key, block) for at, key, block in self._transfers().saves if at == place]
            if moves:
                for (key, _), record in zip(moves, store.pages.read([block for _, block in moves]), strict=True):
                    store.write(key, record)
                self._stats.count(pages_saved=len(moves))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def get_kv_connector_stats(self) -> PageStats | None:
        if self.role == KVConnectorRole.SCHEDULER or self._stats.is_empty():
            return None
        stats, self._stats = self._stats, PageStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PageStats:
        stats = PageStats()
        stats.count(**(data or {}))
        return stats

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **keywords: Any) -> PageCounters:
        return PageCounters(*arguments, **keywords)

    def _load(self, moves: list[Move]) -> bool:
        """Load pages; returns whether all of them could be read."""
        lost = 0
        for place, store in enumerate(self._stores):
            found = [(block, store.read(key)) for at, key, block in moves if at == place]
            pages = [(block, record) for block, record in found if record is not None]
            if pages:
                store.pages.write([block for block, _ in pages], np.stack([record for _, record in pages]))
            self._stats.count(pages_loaded=len(pages), pages_lost=len(found) - len(pages))
            lost += len(found) - len(pages)
        return not lost

    def _transfers(self) -> Transfers:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DeepInferMetadata)
        return metadata.transfers
