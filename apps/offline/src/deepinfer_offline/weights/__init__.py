"""Checkpoints on disk: finding them, reading their configuration, and reading their tensors with every one accounted for."""

from __future__ import annotations

from deepinfer_offline.weights.ledger import read_tensors
from deepinfer_offline.weights.reader import TensorReader
from deepinfer_offline.weights.source import ModelSource, resolve_model

__all__ = ["ModelSource", "TensorReader", "read_tensors", "resolve_model"]
