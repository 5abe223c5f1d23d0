"""Sound structured output: every schema enforced or refused with a reason."""

from __future__ import annotations

from deepinfer_structured.batch import fill_masks
from deepinfer_structured.bitmask import allocate_mask, allowed_tokens, apply_mask, mask_words
from deepinfer_structured.compile import compile_spec
from deepinfer_structured.config import Limits, Options
from deepinfer_structured.errors import (
    EngineMissing,
    InvalidSpec,
    LimitExceeded,
    MatcherError,
    StructuredError,
    UnsatisfiableSchema,
    UnsupportedSchema,
)
from deepinfer_structured.grammar import Grammar
from deepinfer_structured.matcher import Matcher
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary

__all__ = [
    "EngineMissing",
    "Grammar",
    "InvalidSpec",
    "LimitExceeded",
    "Limits",
    "Matcher",
    "MatcherError",
    "Options",
    "Spec",
    "StructuredError",
    "UnsatisfiableSchema",
    "UnsupportedSchema",
    "Vocabulary",
    "allocate_mask",
    "allowed_tokens",
    "apply_mask",
    "compile_spec",
    "fill_masks",
    "mask_words",
]
