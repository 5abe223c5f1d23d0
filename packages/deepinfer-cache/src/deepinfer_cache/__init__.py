"""Paged KV blocks, prefix index, bounded replay and storage tiers for LLM engines."""

from __future__ import annotations

from deepinfer_cache import integrity, replay
from deepinfer_cache.config import CacheConfig
from deepinfer_cache.errors import CacheConfigError, CacheError, IntegrityError, SlotError
from deepinfer_cache.group import CacheGroup
from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.hit import MISS, Hit
from deepinfer_cache.manager import CacheManager
from deepinfer_cache.mover import LowerTier, PageMover
from deepinfer_cache.stats import CacheStats
from deepinfer_cache.strategy import STRATEGIES, Resume, WindowStrategy, make_strategy

__all__ = [
    "MISS",
    "STRATEGIES",
    "CacheConfig",
    "CacheConfigError",
    "CacheError",
    "CacheGroup",
    "CacheManager",
    "CacheStats",
    "Hit",
    "IntegrityError",
    "LowerTier",
    "PageMover",
    "Resume",
    "SlotError",
    "WindowStrategy",
    "chain_hashes",
    "integrity",
    "make_strategy",
    "replay",
]
