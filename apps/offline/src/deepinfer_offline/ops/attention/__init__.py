"""Attention over paged keys and values."""

from __future__ import annotations

from deepinfer_offline.ops.attention.base import GROUP, Attention, AttentionShape

__all__ = ["GROUP", "Attention", "AttentionShape"]
