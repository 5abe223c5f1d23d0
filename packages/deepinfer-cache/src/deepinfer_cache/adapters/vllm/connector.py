"""The class that vLLM instantiates, once in the scheduler and once in each worker. A shell over `Ledger` and the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_cache.adapters.vllm import compat, translate
from deepinfer_cache.adapters.vllm.ledger import Ledger, Transfers
from deepinfer_cache.tiers import DiskTier, HostTier

compat.require_supported()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402  (after the version check)
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger  # noqa: E402

logger = init_logger("vllm.deepinfer_cache")


@dataclass
class DeepInferMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers for one step."""

    transfers: Transfers


class DeepInferConnector(KVConnectorBase_V1):
    """Keeps prompt KV in host memory and a directory, checksummed, and gives it to later requests and later runs.

    A page that is damaged, foreign or gone is recomputed: it costs time, never a token.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        compat.recompute_failed_loads(vllm_config.kv_transfer_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"deepinfer-cache's connector serves models with one kind of KV cache, this one has {len(groups)}: "
                "drop --kv-transfer-config"
            )
        self._options = translate.ConnectorOptions.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._page_bytes = groups[0].kv_cache_spec.page_size_bytes * len(groups[0].layer_names)
        self._page_size = vllm_config.cache_config.block_size
        rank = vllm_config.parallel_config.rank if role == KVConnectorRole.WORKER else 0
        mark = translate.mark_of(vllm_config, rank)
        directory, limit = self._options.directory, self._options.disk_bytes
        self._disk = DiskTier(directory, mark, self._page_bytes, limit) if directory else None
        host_pages = self._options.host_bytes // self._page_bytes
        if role == KVConnectorRole.SCHEDULER:
            on_disk = self._disk.__contains__ if self._disk is not None else None
            self._ledger = Ledger(self._page_size, on_disk, host_pages)
        else:
            self._host = HostTier(self._page_bytes, self._options.host_bytes) if host_pages else None
            self._layers: list[torch.Tensor] = []
            self._failed: set[int] = set()

    # --- the scheduler's side --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not translate.shareable(request):
            return 0, False
        keys = translate.page_keys(request, self._page_size)
        return self._ledger.match(request.request_id, keys, num_computed_tokens, request.num_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = blocks.get_block_ids()[0]
            self._ledger.load(request.request_id, ids, num_external_tokens)  # its own count is set later

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        counts = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._ledger.schedule(new.req_id, new.block_ids[0], True, new.num_computed_tokens + counts[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i][0] if cached.new_block_ids[i] else []
            resumed = request_id in cached.resumed_req_ids
            self._ledger.schedule(request_id, blocks, resumed, cached.num_computed_tokens[i] + counts[request_id])
        return DeepInferMetadata(self._ledger.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ledger.finish(request.request_id)
        return False, None

    # --- a worker's side -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = [kv_caches[name] for name in sorted(kv_caches)]
        found = sum(layer[0].numel() * layer.element_size() for layer in self._layers)
        if found != self._page_bytes:
            raise ValueError(
                f"a block has {found} bytes in {len(self._layers)} layers, {self._page_bytes} were expected"
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._transfers().loads
        blocks: list[int] = []
        records: list[np.ndarray] = []
        for key, block in loads:
            record = self._read(key)
            if record is None:
                self._failed.add(block)
            else:
                blocks.append(block)
                records.append(record)
        if blocks:
            self._write_blocks(blocks, np.stack(records))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers of a page are saved together, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        saves = self._transfers().saves
        if not saves:
            return
        records = self._read_blocks([block for _, block in saves])
        for (key, _), record in zip(saves, records, strict=True):
            if self._host is not None:
                self._host.put(key, record)
            if self._disk is not None:
                self._disk.put(key, record)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _transfers(self) -> Transfers:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DeepInferMetadata)
        return metadata.transfers

    def _read(self, key: bytes) -> np.ndarray | None:
        if self._host is not None and key in self._host:
            self._host.touch(key)
            return self._host.take([key])[0]
        if self._disk is None:
            return None
        record = self._disk.get(key)
        if record is None:  # damaged or foreign: gone for the scheduler too, so that the page is saved anew
            self._disk.discard(key)
        return record

    def _read_blocks(self, blocks: list[int]) -> np.ndarray:
        """Records of blocks, uint8 [n, page_bytes]."""
        parts = [layer[blocks].contiguous().view(torch.uint8).reshape(len(blocks), -1).cpu() for layer in self._layers]
        return torch.cat(parts, 1).numpy()

    def _write_blocks(self, blocks: list[int], records: np.ndarray) -> None:
        data, at = torch.from_numpy(records), 0
        for layer in self._layers:
            width = layer[0].numel() * layer.element_size()
            part = data[:, at : at + width].contiguous().view(layer.dtype).reshape(len(blocks), *layer.shape[1:])
            layer[blocks] = part.to(layer.device)
            at += width
