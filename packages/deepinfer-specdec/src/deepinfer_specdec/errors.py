"""Named errors of the package: each message carries the offending value and what is allowed."""

from __future__ import annotations


class SpecDecodeError(ValueError):
    """Base of every error that this package raises on bad input."""


class DraftShapeError(SpecDecodeError):
    """Arrays of a draft or a verification do not fit together."""


class SamplingRangeError(SpecDecodeError):
    """A temperature, top-p, top-k or min-p outside its range."""


class UnknownNameError(SpecDecodeError):
    """A drafter or a verification method that does not exist."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
        self.kind = kind
        self.name = name
        self.known = sorted(known)


class CostCurveError(SpecDecodeError):
    """A cost curve that cannot price a step."""


class CalibrationError(SpecDecodeError):
    """Calibration data or a calibration file that cannot be used."""


class CheckpointError(SpecDecodeError):
    """A draft checkpoint that does not match its configuration."""
