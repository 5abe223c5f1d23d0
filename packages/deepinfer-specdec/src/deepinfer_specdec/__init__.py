"""Drafting and load-aware verification for speculative decoding.

The core speaks numpy and plain integers. Torch is imported only by `deepinfer_specdec.verification.batched` and by
DSpark.
"""

from __future__ import annotations

from deepinfer_specdec.draft import Draft, Verification
from deepinfer_specdec.drafters.base import Drafter, FeatureDrafter
from deepinfer_specdec.drafters.ngram import NgramDrafter
from deepinfer_specdec.drafters.registry import create_drafter, drafter_names, register_drafter
from deepinfer_specdec.drafters.suffix import SuffixDrafter
from deepinfer_specdec.scheduling.admission import admit
from deepinfer_specdec.scheduling.calibration import (
    OnlineCalibration,
    TemperatureScaling,
    fit_conditional,
    fit_scaling,
    fit_sts,
)
from deepinfer_specdec.scheduling.cost import CostCurve, CostOptions
from deepinfer_specdec.scheduling.planner import VerificationPlanner
from deepinfer_specdec.statistics import SpeculationStatistics
from deepinfer_specdec.verification.distribution import GREEDY, SamplingFilter, distribution
from deepinfer_specdec.verification.reference import verify

__all__ = [
    "GREEDY",
    "CostCurve",
    "CostOptions",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "NgramDrafter",
    "OnlineCalibration",
    "SamplingFilter",
    "SpeculationStatistics",
    "SuffixDrafter",
    "TemperatureScaling",
    "Verification",
    "VerificationPlanner",
    "admit",
    "create_drafter",
    "distribution",
    "drafter_names",
    "fit_conditional",
    "fit_scaling",
    "fit_sts",
    "register_drafter",
    "verify",
]
