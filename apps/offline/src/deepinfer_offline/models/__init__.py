"""Models of the native engine."""

from __future__ import annotations

from deepinfer_offline.models.base import CacheGroup, ForwardBatch, HostBatch, Model, ModelFacts, ModelOptions
from deepinfer_offline.models.registry import known_model_types, model_class, register_model

__all__ = [
    "CacheGroup",
    "ForwardBatch",
    "HostBatch",
    "Model",
    "ModelFacts",
    "ModelOptions",
    "known_model_types",
    "model_class",
    "register_model",
]
