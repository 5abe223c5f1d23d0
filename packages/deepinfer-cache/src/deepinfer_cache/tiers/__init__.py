"""Where pages go when the device has no room, and where later runs find them: host memory and a directory."""

from __future__ import annotations

from deepinfer_cache.tiers.disk import DiskTier
from deepinfer_cache.tiers.host import HostTier
from deepinfer_cache.tiers.record import fingerprint
from deepinfer_cache.tiers.store import TieredStore

__all__ = ["DiskTier", "HostTier", "TieredStore", "fingerprint"]
