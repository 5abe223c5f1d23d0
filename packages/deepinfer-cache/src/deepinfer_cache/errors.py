"""The named errors of this package."""

from __future__ import annotations


class CacheError(ValueError):
    """Base of every error that this package raises on purpose."""


class CacheConfigError(CacheError):
    """A group or a configuration that cannot work; the message names the value and what is allowed."""


class SlotError(CacheError):
    """A slot was used against its state, e.g. freed twice."""


class IntegrityError(CacheError):
    """Bookkeeping contradicts itself. `problems` lists every contradiction that was found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
