"""Moves the content of cache pages: to and from lower tiers, and from one page to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from deepinfer_offline.engine.base import EngineStartError

if TYPE_CHECKING:
    from deepinfer_cache import CacheConfig

    from deepinfer_offline.models.base import Model


class PagedModel(Protocol):
    """A model whose pages can be moved."""

    @property
    def page_layout(self) -> str:
        """Names what the bytes of a block mean, with a version; bytes of another layout are not read."""
        ...

    def page_blocks(self, cache: Any) -> Mapping[str, tuple[torch.Tensor, ...]]:
        """Views of the pools by cache group, blocks on the first axis, the last axis contiguous."""
        ...


class PageRunner(Protocol):
    """What the mover needs of `ModelRunner`."""

    model: Model
    cache: Any

    def move(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call after the steps launched so far and before the next; a step that follows a failed one fails."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """One pool.

    Attributes:
        blocks: bytes, [blocks, ...]: numpy on a CPU (torch would start a second team of kernel threads in the caller's
            thread, which slows every step down), torch elsewhere.
        per_page: blocks of a page.
        begin: first byte of a page's record that belongs to this pool.
        end: one past the last.
    """

    blocks: Any
    per_page: int
    begin: int
    end: int


class NativePages:
    """Implements `deepinfer_cache.mover.PageMover` over the pools of a model.

    Writes and copies run in the step's thread, in the order of the calls. So do reads on an accelerator. On a CPU a page
    is read at once, because the cache asks only for pages whose last step is complete, and their content is final:
    waiting for the step in flight would leave the model idle while the next one is planned.

    Args:
        config: of the cache whose pages are moved.
        page_bytes: bytes of a record, from the model's cache groups.
    """

    def __init__(self, config: CacheConfig, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._per_page = {group.name: config.page_size // group.block_size for group in config.prefix_groups}
        self._parts: list[_Part] = []
        self._runner: PageRunner | None = None

    def bind(self, runner: PageRunner) -> None:
        """Say whose pages these are. Needed before the first move; the cache is made before the runner is."""
        model = paged_model(runner.model)
        pools = model.page_blocks(runner.cache)
        parts, begin = [], 0
        for group, per_page in self._per_page.items():
            for pool in pools[group]:
                view = pool.view(torch.uint8)
                size = view[0].numel() * per_page
                parts.append(_Part(view.numpy() if view.device.type == "cpu" else view, per_page, begin, begin + size))
                begin += size
        assert begin == self.page_bytes, f"pages have {begin} bytes, the cache groups say {self.page_bytes}"
        self._parts, self._runner = parts, runner

    # --- PageMover -------------------------------------------------------------------------------------------

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Records of pages whose content is final, uint8 [n, page_bytes]."""
        runner = self._bound()
        return self._gather(pages) if self._on_host else runner.move(lambda: self._gather(pages)).result()

    def write(self, pages: Sequence[int], records: np.ndarray) -> None:
        """Fill pages from records, uint8 [n, page_bytes], before the next step that is launched."""
        if records.shape != (len(pages), self.page_bytes):
            raise ValueError(f"records are {list(records.shape)}, must be [{len(pages)}, {self.page_bytes}]")
        targets = list(pages)
        self._bound().move(lambda: self._scatter(targets, records))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, after the steps launched so far and before the next."""
        pairs = list(sources), list(targets)
        self._bound().move(lambda: self._copy(*pairs))

    # --- inside ----------------------------------------------------------------------------------------------

    @property
    def _on_host(self) -> bool:
        return isinstance(self._parts[0].blocks, np.ndarray)

    def _bound(self) -> PageRunner:
        assert self._runner is not None, "pages move before `bind` said whose they are"
        return self._runner

    def _gather(self, pages: Sequence[int]) -> np.ndarray:
        count = len(pages)
        if not self._on_host:
            found = [part.blocks[self._index(part, pages)].reshape(count, -1) for part in self._parts]
            return torch.cat(found, 1).cpu().numpy()
        records = np.empty((count, self.page_bytes), np.uint8)
        for part in self._parts:
            records[:, part.begin : part.end] = part.blocks[self._index(part, pages)].reshape(count, -1)
        return records

    def _scatter(self, pages: Sequence[int], records: np.ndarray) -> None:
        source: Any = records
        if not self._on_host:
            source = torch.from_numpy(np.ascontiguousarray(records)).to(self._parts[0].blocks.device)
        for part in self._parts:
            shape = (len(pages) * part.per_page, *part.blocks.shape[1:])
            part.blocks[self._index(part, pages)] = source[:, part.begin : part.end].reshape(shape)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for part in self._parts:
            part.blocks[self._index(part, targets)] = part.blocks[self._index(part, sources)]

    def _index(self, part: _Part, pages: Sequence[int]) -> Any:
        """Blocks of pages, int64 [n * per_page], where the pool is."""
        blocks = (np.asarray(pages, np.int64)[:, None] * part.per_page + np.arange(part.per_page)).ravel()
        return blocks if self._on_host else torch.from_numpy(blocks).to(part.blocks.device)


def paged_model(model: Model) -> PagedModel:
    """The model, if its pages can be moved. Raises EngineStartError if not."""
    if not hasattr(model, "page_blocks"):
        raise EngineStartError(
            f"the KV blocks of model type {model.facts.model_type!r} cannot be moved; leave out --kv-store"
        )
    return cast("PagedModel", model)
