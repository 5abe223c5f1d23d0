"""Schemas as unions of cases: the search space of `keywords`, memoised, with satisfiability and membership.

Every approximation made here shrinks the set of accepted values, never grows it. A constraint that cannot be expressed
raises `UnsupportedSchema` where the schema asks for it, and drops the alternative where it only arises from a complement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepinfer_structured.config import Options
from deepinfer_structured.errors import LimitExceeded, UnsupportedSchema
from deepinfer_structured.regex import ANY as ANY_TEXT
from deepinfer_structured.regex import NEVER as NO_TEXT
from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex import alt, both, literal, matches, repeat
from deepinfer_structured.regex.ast import ANY_CHAR
from deepinfer_structured.schema import blame, keywords
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.document import Document, Node
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, join
from deepinfer_structured.schema.values import TYPES, canon, divides, is_integer, kind

_BUDGET = 400_000  # intersections of cases per document


class Solver:
    """Answers questions about the schemas of one document. Not thread-safe."""

    def __init__(self, document: Document, options: Options) -> None:
        self.document = document
        self.options = options
        self.notes: dict[str, None] = {}
        self.dropped: dict[UnsupportedSchema, None] = {}
        self.losses = 0  # grows with every union that leaves values out, and with every later use of such a union
        self._cases: dict[tuple[Obligation, str], list[c.Case]] = {}
        self._of_node: dict[tuple[Node, str, bool], list[c.Case]] = {}
        self._lossy: set[Any] = set()  # keys of the two above whose union leaves values out
        self._running: set[tuple[Node, str, bool]] = set()
        self._satisfiable: dict[Obligation, bool] = {}
        self.path: list[Node] = []  # schemas being worked on, outermost first: where a limit was hit
        self._by_name: dict[int, tuple[c.Properties, dict[str, Obligation]]] = {}  # the group keeps its id taken
        self._budget = _BUDGET
        self._deadline = time.thread_time() + options.limits.seconds

    def check_time(self) -> None:
        """Raises LimitExceeded once the compilation's processor time is over: a busy machine refuses no schema."""
        if time.thread_time() > self._deadline:
            reason = f"the schema takes more than {self.options.limits.seconds:g} s to analyse"
            raise LimitExceeded(reason, *self._blamed(), blame.FEWER)

    def _blamed(self) -> blame.Place:
        return blame.of_path(self.path) if self.path else blame.of_text(self.document.root.schema)

    def cases(self, obligation: Obligation, type_: str) -> list[c.Case]:
        """The values of a type that meet an obligation."""
        if obligation == NEVER:
            return []
        key = (obligation, type_)
        if key not in self._cases:
            self.check_time()
            before = self.losses
            found: list[c.Case] = [c.ANY[type_]]
            for node, holds in obligation:
                found = self.meet(found, self.of_node(node, type_, holds))
            self._cases[key] = found
            if self.losses > before:
                self._lossy.add(key)
        self.losses += key in self._lossy
        return self._cases[key]

    def of_node(self, node: Node, type_: str, holds: bool) -> list[c.Case]:
        """The values of a type for which a schema holds (or fails)."""
        key = (node, type_, holds)
        if key in self._of_node:
            self.losses += key in self._lossy
            return self._of_node[key]
        if key in self._running:
            raise UnsupportedSchema(node.pointer, "$ref", "it refers to itself without end", "remove the circle")
        self._running.add(key)
        self.path.append(node)
        before = self.losses
        try:
            self._of_node[key] = self.simplify(keywords.cases_of(self, node, type_, holds))
        finally:
            self.path.pop()
            self._running.discard(key)
        if self.losses > before:
            self._lossy.add(key)
        return self._of_node[key]

    def drop(self, error: UnsupportedSchema) -> None:
        """Leave values out of the union being made, and remember why."""
        self.dropped[error] = None
        self.losses += 1

    def meet(self, left: list[c.Case], right: list[c.Case]) -> list[c.Case]:
        """Pairwise intersection of two unions."""
        found: list[c.Case] = []
        for a in left:
            for b in right:
                case = self.meet_two(a, b)
                if case is not None:
                    found.append(case)
        if len(found) > self.options.limits.max_cases:
            found = self.simplify(found)
        if len(found) > self.options.limits.max_cases:
            self.notes[
                f"only {self.options.limits.max_cases} of {len(found)} combinations of alternatives are used"
            ] = None
            self.losses += 1
            found = found[: self.options.limits.max_cases]
        return found

    def meet_two(self, a: c.Case, b: c.Case) -> c.Case | None:
        """Intersection of two cases, None if it is empty as far as can be told."""
        self._budget -= 1
        if self._budget % 64 == 0:
            self.check_time()
        if self._budget < 0:
            reason = "the schema combines too many alternatives to be analysed"
            raise LimitExceeded(reason, *self._blamed(), blame.FEWER)
        if a == b:
            return a
        if isinstance(a, c.Values) != isinstance(b, c.Values):
            values, other = (a, b) if isinstance(a, c.Values) else (b, a)
            assert isinstance(values, c.Values)
            kept = tuple(v for v in values.values if self.admits(other, v))
            return c.Values(values.kind, kept) if kept else None
        found = c.meet(a, b)
        if isinstance(found, c.Object) and not self._viable(found):
            return None
        return found

    def meet_each(self, found: list[c.Case], change: Callable[[Any], c.Case]) -> list[c.Case]:
        """Apply a restriction to every case."""
        out: list[c.Case] = []
        for case in found:
            if isinstance(case, c.Values):
                changed = c.Values(case.kind, tuple(v for v in case.values if not v))
                if changed.values != case.values:
                    raise UnsupportedSchema("", "unevaluated", "listed values beside unevaluated* are not expressible")
            else:
                changed = change(case)
            if not isinstance(changed, c.Object) or self._viable(changed):
                out.append(changed)
        return out

    def simplify(self, found: list[c.Case]) -> list[c.Case]:
        """Drop repeated and covered cases; join finite sets."""
        if found and not self.document.uses_unevaluated and (every := c.ANY[found[0].kind]) in found:
            return [every]
        values: dict[Any, Any] = {}
        rest: dict[c.Case, None] = {}
        for case in found:
            if isinstance(case, c.Values):
                for v in case.values:
                    values.setdefault(canon(v), v)
            else:
                rest[case] = None
        if values:
            kind_ = kind(next(iter(values.values())))
            kept = tuple(v for v in values.values() if not any(self.admits(r, v) for r in rest))
            return [*([c.Values(kind_, kept)] if kept else []), *rest]
        return list(rest)

    def _viable(self, case: c.Object) -> bool:
        """Whether required properties can be there at all."""
        for name in case.required:
            if any(not matches(k, name) for k in case.keys):
                return False
            if not self.satisfiable(self.value_at(case, name)):
                return False
        return True

    def value_at(self, case: c.Object, name: str) -> Obligation:
        """What the value of a property must satisfy."""
        found: list[Obligation] = []
        for group in case.properties:
            own = [named] if (named := self._named(group).get(name)) is not None else []
            own += [o for language, o in group.patterns if matches(language, name)]
            found += own or [group.rest]
        return join(*found)

    def _named(self, group: c.Properties) -> dict[str, Obligation]:
        """The named properties of a group, looked up by their names."""
        if id(group) not in self._by_name:
            self._by_name[id(group)] = group, dict(reversed(group.names))
        return self._by_name[id(group)][1]

    def satisfiable(self, obligation: Obligation) -> bool:
        """False only if no value can meet the obligation."""
        if obligation in (TOP, NEVER):
            return obligation == TOP
        if obligation not in self._satisfiable:
            before = self.losses
            self._satisfiable[obligation] = True  # assumed while the answer is computed: recursion does not refute
            running, self._running = self._running, set()  # a value inside a value: no circle in place
            try:
                self._satisfiable[obligation] = any(self.cases(obligation, t) for t in TYPES)
            except UnsupportedSchema:
                return True
            finally:
                self._running = running
            if self.losses > before:
                self._lossy.add(obligation)
        if not self._satisfiable[obligation]:  # what looks empty may only have lost its values
            self.losses += obligation in self._lossy
        return self._satisfiable[obligation]

    def holds(self, obligation: Obligation, value: Any) -> bool:
        """Whether a value meets an obligation."""
        return any(self.admits(case, value) for case in self.cases(obligation, kind(value)))

    def admits(self, case: c.Case, value: Any) -> bool:
        """Whether a value of the case's type is in the case."""
        match case:
            case c.Values(_, values):
                return canon(value) in {canon(v) for v in values}
            case c.Number():
                return _admits_number(case, value)
            case c.String(languages, low, high):
                return low <= len(value) and _at_most(len(value), high) and all(matches(g, value) for g in languages)
            case c.Array():
                return self._admits_array(case, value)
            case c.Object():
                return self._admits_object(case, value)

    def _admits_array(self, case: c.Array, value: list[Any]) -> bool:
        if len(value) < case.low or not _at_most(len(value), case.high):
            return False
        if case.unique and len({canon(v) for v in value}) < len(value):
            return False
        if not all(self.holds(case.at(i), v) for i, v in enumerate(value)):
            return False
        for rule in case.contains:
            tail = value[rule.start :]
            if rule.low and sum(self.holds(rule.wanted, v) for v in tail) < rule.low:
                return False
            if rule.high is not None:
                refuted = sum(rule.opposite is not None and self.holds(rule.opposite, v) for v in tail)
                if len(tail) - refuted > rule.high:
                    return False
        return True

    def _admits_object(self, case: c.Object, value: dict[str, Any]) -> bool:
        if len(value) < case.low or not _at_most(len(value), case.high) or not set(case.required) <= value.keys():
            return False
        if not all(matches(k, name) for k in case.keys for name in value):
            return False
        if not all(self.holds(self.value_at(case, n), v) for n, v in value.items()):
            return False
        return all(any(matches(k, n) and self.holds(o, v) for n, v in value.items()) for k, o in case.exists)

    def text_language(self, obligation: Obligation) -> Language:
        """The strings that meet an obligation, as a language."""
        return alt(*(_text_language(case) for case in self.cases(obligation, "string")))


def string_language(case: c.String) -> Language:
    """The language of a string case, with its length bounds."""
    bounded = case.low or case.high is not None
    return both(*case.languages, repeat(ANY_CHAR, case.low, case.high) if bounded else ANY_TEXT)


def _text_language(case: c.Case) -> Language:
    if isinstance(case, c.Values):
        return alt(*(literal(v) for v in case.values))
    return string_language(case) if isinstance(case, c.String) else NO_TEXT


def _at_most(count: int, high: int | None) -> bool:
    return high is None or count <= high


def _admits_number(case: c.Number, value: Any) -> bool:
    if case.low is not None and (value < case.low or (case.low_open and value == case.low)):
        return False
    if case.high is not None and (value > case.high or (case.high_open and value == case.high)):
        return False
    if case.integer is not None and is_integer(value) != case.integer:
        return False
    if value in case.holes or any(divides(m, value) for m in case.non_multiples):
        return False
    return case.multiple is None or divides(case.multiple, value)
