"""Options and limits of a compilation, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

PropertyOrder = Literal["schema", "any"]
OnUnsupported = Literal["error", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a specification may cost before it is refused.

    Attributes:
        max_bytes: size of the specification as JSON text.
        max_depth: nesting of the specification.
        max_rules: grammar rules after lowering.
        max_cases: alternatives that one schema may be split into.
        seconds: processor time to analyse a schema. The worker may use half as much again for that, half of which goes to
            a second analysis with four alternatives where the first runs out; and as much to build the grammar on trial.
        safe_bytes: a lowered grammar up to this size is built in the calling process without a trial in the worker.
        worker_mib: address space of the worker process, MiB.
    """

    max_bytes: int = 4_000_000
    max_depth: int = 200
    max_rules: int = 50_000
    max_cases: int = 256
    seconds: float = 4.0
    safe_bytes: int = 64_000
    worker_mib: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_depth", "max_rules", "max_cases", "worker_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"limit {name} must be at least 1, got {getattr(self, name)}")
        if self.seconds <= 0:
            raise ValueError(f"limit seconds must be positive, got {self.seconds}")


@dataclass(frozen=True, slots=True)
class Options:
    """How specifications become grammars.

    Attributes:
        max_whitespace: longest run of whitespace between two JSON tokens; 0 allows none.
        on_unsupported: what to do with a keyword that no engine enforces.
        property_order: "schema" writes properties as the schema lists them, then all others; "any" leaves the order to the
            model, for objects of up to 60 named properties.
        formats: enforce known `format`s; False treats all of them as annotations, as the JSON Schema standard does.
        limits: see `Limits`.
        cache_dir: folder in which analysed specifications are kept between runs; None keeps them in memory only. Trust its
            content as you trust code: a stored grammar is not checked again.
    """

    max_whitespace: int = 32
    on_unsupported: OnUnsupported = "error"
    property_order: PropertyOrder = "schema"
    formats: bool = True
    limits: Limits = field(default_factory=Limits)
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_whitespace <= 10_000:
            raise ValueError(f"max_whitespace must be within 0..10000, got {self.max_whitespace}")
        if self.property_order not in get_args(PropertyOrder):
            raise ValueError(f"property_order must be one of {get_args(PropertyOrder)}, got {self.property_order!r}")
        if self.on_unsupported not in get_args(OnUnsupported):
            raise ValueError(f"on_unsupported must be one of {get_args(OnUnsupported)}, got {self.on_unsupported!r}")
