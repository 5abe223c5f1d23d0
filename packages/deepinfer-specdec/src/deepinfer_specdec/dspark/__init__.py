"""DSpark: block drafts from the target's hidden states (parallel backbone, Markov head, confidence head). Needs torch."""

from __future__ import annotations

from deepinfer_specdec.dspark.config import DSparkConfig
from deepinfer_specdec.dspark.drafter import DSparkDrafter
from deepinfer_specdec.dspark.loader import load_draft, save_draft
from deepinfer_specdec.dspark.model import DSparkModel

__all__ = ["DSparkConfig", "DSparkDrafter", "DSparkModel", "load_draft", "save_draft"]
