"""Named errors of the kernel package."""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error this package raises."""


class ArgumentError(KernelError, ValueError):
    """An argument has a shape, dtype, stride or value that the op does not accept."""


class UnsupportedDeviceError(KernelError, RuntimeError):
    """The op has no implementation for this device; the message carries the reason."""
