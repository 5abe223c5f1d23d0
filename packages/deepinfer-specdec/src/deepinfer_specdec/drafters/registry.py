"""Drafters by name. The factory imports what it needs, so that torch is loaded only for a drafter that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_specdec.drafters.base import Drafter
from deepinfer_specdec.errors import SpecDecodeError, UnknownNameError

Factory = Callable[..., Drafter]
_FACTORIES: dict[str, Factory] = {}


def register_drafter(name: str, factory: Factory) -> None:
    """Add a drafter. Raises SpecDecodeError when the name is taken."""
    if name in _FACTORIES:
        raise SpecDecodeError(f"drafter {name!r} is registered already; allowed: a new name")
    _FACTORIES[name] = factory


def create_drafter(name: str, **options: Any) -> Drafter:
    """Make the drafter `name`; `options` go to its factory. Raises UnknownNameError, which lists the known names."""
    if name not in _FACTORIES:
        raise UnknownNameError("drafter", name, list(_FACTORIES))
    return _FACTORIES[name](**options)


def drafter_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_FACTORIES)


def _ngram(**options: Any) -> Drafter:
    from deepinfer_specdec.drafters.ngram import NgramDrafter

    return NgramDrafter(**options)


def _suffix(**options: Any) -> Drafter:
    from deepinfer_specdec.drafters.suffix import SuffixDrafter

    return SuffixDrafter(**options)


register_drafter("ngram", _ngram)
register_drafter("suffix", _suffix)
