"""Everything that this package raises. Each error names the offending value and, where there is one, a way out."""

from __future__ import annotations


class StructuredError(ValueError):
    """Base of all errors of this package: a specification that fails its own request and no other."""


class InvalidSpec(StructuredError):  # noqa: N818
    """The specification is malformed: not a schema, a regex that does not parse, an empty choice list."""


class UnsupportedSchema(StructuredError):  # noqa: N818
    """No engine can enforce a keyword of the schema, and the policy is to refuse.

    Attributes:
        pointer: JSON pointer of the keyword's place in the schema, e.g. `/properties/tags`.
        keyword: the keyword, e.g. `uniqueItems`.
        reason: why it cannot be enforced.
        way_out: what the user can change.
    """

    def __init__(self, pointer: str, keyword: str, reason: str, way_out: str = "") -> None:
        self.pointer, self.keyword, self.reason, self.way_out = pointer, keyword, reason, way_out
        hint = f" Way out: {way_out}" if way_out else ""
        super().__init__(f"schema at {pointer or '/'}: keyword {keyword!r} cannot be enforced: {reason}.{hint}")

    def __reduce__(self) -> tuple[type[UnsupportedSchema], tuple[str, str, str, str]]:
        return UnsupportedSchema, (self.pointer, self.keyword, self.reason, self.way_out)


class _PlacedError(StructuredError):
    """An error of a specification that may know the keyword to blame.

    Attributes:
        reason: what went wrong.
        pointer: JSON pointer of the keyword's place in the schema; "" is the root.
        keyword: the keyword to blame, or "" if there is none (the specification is no schema, or is broken as a whole).
        way_out: what the user can change.
    """

    def __init__(self, reason: str, pointer: str = "", keyword: str = "", way_out: str = "") -> None:
        self.reason, self.pointer, self.keyword, self.way_out = reason, pointer, keyword, way_out
        place = f"schema at {pointer or '/'}: keyword {keyword!r}: " if keyword else ""
        hint = f". Way out: {way_out}" if way_out else ""
        super().__init__(f"{place}{reason}{hint}")

    def __reduce__(self) -> tuple[type[_PlacedError], tuple[str, str, str, str]]:
        return type(self), (self.reason, self.pointer, self.keyword, self.way_out)


class UnsatisfiableSchema(_PlacedError, InvalidSpec):  # noqa: N818
    """No JSON value fits the schema, so there is nothing to generate."""


class LimitExceeded(_PlacedError):  # noqa: N818
    """The specification is larger, deeper or slower to compile than `Limits` allows."""


class EngineMissing(StructuredError):  # noqa: N818
    """The grammar library that this specification needs is not installed."""


class MatcherError(RuntimeError):
    """The grammar library gave up while matching (its own limits), or the matcher was misused."""
