"""The named errors of this package."""

from __future__ import annotations


class SchedError(ValueError):
    """Base of every error that this package raises on purpose."""


class SchedConfigError(SchedError):
    """A configuration that cannot work; the message names the value and what is allowed."""


class SequenceError(SchedError):
    """A sequence that can never run, or that is unknown or already known."""
