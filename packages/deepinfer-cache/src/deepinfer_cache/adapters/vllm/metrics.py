"""What the connector moved, in vLLM's log and among its Prometheus counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "pages_loaded": "Pages of prompt KV taken from host memory or the directory",
    "pages_saved": "Pages of prompt KV written to host memory or the directory",
    "pages_lost": "Pages that were expected and could not be read: damaged, foreign or gone, and computed again",
}


@dataclass
class PageStats(KVConnectorStats):
    """Counts of `COUNTERS` since the last report of a worker."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def count(self, **pages: int) -> None:
        """Add to counters."""
        for name, number in pages.items():
            self.data[name] += number

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTERS, 0)

    def aggregate(self, other: KVConnectorStats) -> PageStats:
        self.count(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PageCounters(KVConnectorPromMetrics):
    """The counters as `vllm:deepinfer_cache_<name>`, one for each engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = {}
        for name, about in COUNTERS.items():
            family = self._counter_cls(f"vllm:deepinfer_cache_{name}", documentation=about, labelnames=self._labelnames)
            self._counters[name] = {
                engine: family.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if number:
                self._counters[name][engine_idx].inc(number)
