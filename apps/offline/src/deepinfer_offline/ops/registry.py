"""Which implementation serves an op on a device, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SupportFn = Callable[[str, torch.dtype], str | None]
"""(device, dtype) -> None if the provider serves it there, else the reason why not."""

_BANDS = {"portable": 0, "library": 100, "kernel": 200, "plugin": 300}


class OpRegistryError(ValueError):
    """A provider is registered twice, or an op has no provider for a device."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an op.

    Attributes:
        op: the op's name.
        name: who provides it, unique within the op.
        band: `portable` (right everywhere), `library` (e.g. oneDNN), `kernel` (our own), `plugin`; later bands win.
        is_supported: asks whether it serves a device and dtype.
        load: returns the implementation; called once the provider is chosen.
        accepts: asks whether it serves a shape, given as `detail` to `select`; None accepts all.
        device: kind of device that it is made for, e.g. `cpu`; None: any.
    """

    op: str
    name: str
    band: str
    is_supported: SupportFn
    load: Callable[[], Any]
    accepts: Callable[[Any], str | None] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.band not in _BANDS:
            raise OpRegistryError(f"provider {self.name!r}: band {self.band!r} is not one of {', '.join(_BANDS)}")

    def refusal(self, device: str, dtype: torch.dtype, detail: Any = None) -> str | None:
        """Why it does not serve a device, dtype and shape, or None."""
        reason = self.is_supported(device, dtype)
        if reason is None and detail is not None and self.accepts is not None:
            reason = self.accepts(detail)
        return reason


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the capability table: `reason` is None for a provider that can serve the op."""

    op: str
    provider: str
    reason: str | None
    chosen: bool


class OpRegistry:
    """Providers by op. Filled at import, read when a model is built."""

    def __init__(self) -> None:
        self._providers: dict[str, list[Provider]] = {}

    def register(self, provider: Provider) -> None:
        """Add a provider. Raises OpRegistryError if the op has one of that name."""
        known = self._providers.setdefault(provider.op, [])
        if any(other.name == provider.name for other in known):
            raise OpRegistryError(f"op {provider.op!r} already has a provider {provider.name!r}")
        known.append(provider)
        known.sort(key=lambda p: -_BANDS[p.band])

    def select(self, op: str, device: str, dtype: torch.dtype, detail: Any = None) -> Provider:
        """The best provider of an op for a device, dtype and, where a provider is particular about it, shape.

        Raises:
            OpRegistryError: no provider serves it; the message has every provider's reason.
        """
        reasons = []
        for provider in self._known(op):
            reason = provider.refusal(device, dtype, detail)
            if reason is None:
                return provider
            reasons.append(f"{provider.name}: {reason}")
        raise OpRegistryError(f"op {op!r} on {device} in {dtype}: " + "; ".join(reasons))

    def missed(self, op: str, device: str, dtype: torch.dtype, detail: Any = None) -> str | None:
        """The faster provider that is made for this kind of device and does not serve, with its reason; None if there is none."""
        kind = torch.device(device).type
        for provider in self._known(op):
            reason = provider.refusal(device, dtype, detail)
            if reason is None:
                return None
            if provider.device == kind:
                return f"{provider.name}: {reason}"
        return None

    def capabilities(self, device: str, dtype: torch.dtype) -> list[Capability]:
        """The capability table: every provider of every op, the chosen one first."""
        rows = []
        for op in sorted(self._providers):
            chosen = False
            for provider in self._known(op):
                reason = provider.refusal(device, dtype)
                rows.append(Capability(op, provider.name, reason, reason is None and not chosen))
                chosen = chosen or reason is None
        return rows

    def _known(self, op: str) -> list[Provider]:
        if op not in self._providers:
            raise OpRegistryError(f"no op {op!r}; there are {', '.join(sorted(self._providers))}")
        return self._providers[op]


def slower_notes(missed: Mapping[str, str | None]) -> tuple[str, ...]:
    """Sentences for the user about ops that something faster could serve, by the answers of `OpRegistry.missed`."""
    ops: dict[str, list[str]] = {}
    for op, reason in missed.items():
        if reason is not None:
            ops.setdefault(reason, []).append(op)
    return tuple(f"slower code serves {', '.join(names)} ({reason})" for reason, names in ops.items())


registry = OpRegistry()
"""The process-wide table that `deepinfer doctor` prints."""


def anywhere(_device: str, _dtype: torch.dtype) -> str | None:
    """`is_supported` of a provider that is right on every device."""
    return None
