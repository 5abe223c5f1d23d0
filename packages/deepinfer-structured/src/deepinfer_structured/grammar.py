"""A specification compiled for a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_structured.engines.base import EngineGrammar
from deepinfer_structured.guard import Guard, unique_paths
from deepinfer_structured.matcher import Matcher
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary
from deepinfer_structured.whitespace import Whitespace, tables


@dataclass(frozen=True, slots=True)
class Grammar:
    """Immutable and shared by all sequences that use it.

    Attributes:
        spec: what it was compiled from.
        vocabulary: what it was compiled for.
        engine: the library that enforces it, "llguidance" or "xgrammar".
        compiled: the library's own object.
        unique: text of the schema whose `uniqueItems` a guard enforces beside the grammar, or "".
        distinct_keys: whether the guard keeps the keys of each object distinct.
        max_whitespace: longest run of whitespace outside strings, which the matcher enforces; None if the grammar does.
        notes: remarks for the user, e.g. keywords that the policy `warn` or `ignore` left out.
    """

    spec: Spec
    vocabulary: Vocabulary
    engine: str
    compiled: EngineGrammar
    notes: tuple[str, ...] = ()
    unique: str = ""
    distinct_keys: bool = False
    max_whitespace: int | None = None

    def matcher(self) -> Matcher:
        """A matcher at the start of the text."""
        guard = None
        if self.unique or self.distinct_keys:
            guard = Guard(unique_paths(self.unique or "true"), self.vocabulary, distinct_keys=self.distinct_keys)
        bound = self.max_whitespace
        whitespace = None if bound is None else Whitespace(tables(self.vocabulary, bound))
        return Matcher(self.compiled.matcher(), self.vocabulary, guard, whitespace)
