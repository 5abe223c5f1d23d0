"""From obligations to rules: one rule for each obligation that occurs, shared by all places where it does."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from deepinfer_structured.errors import LimitExceeded, UnsupportedSchema
from deepinfer_structured.regex import ANY as ANY_TEXT
from deepinfer_structured.regex import NEVER as NO_TEXT
from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex.quote import quoted as quoted_terminal
from deepinfer_structured.regex.quote import quoted_literal
from deepinfer_structured.schema import blame, emit_array, emit_object, numbers
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.obligation import TOP, Obligation
from deepinfer_structured.schema.rules import COLON, COMMA, DEAD, Expr, Ref, RuleSet, Term, choice, seq, size
from deepinfer_structured.schema.solver import Solver, string_language
from deepinfer_structured.schema.values import TYPES, is_integer, kind

_FREE_CHAR = (
    r'/(?:[^"\\\x00-\x1f]|\\(?:["\\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})))/"
)
STRING = Term("STRING")


class Emitter:
    """Fills a `RuleSet`. `skip` is the JSON of the whitespace pattern, for inline number schemas."""

    def __init__(self, solver: Solver, skip: str | None) -> None:
        self.solver = solver
        self.skip = skip
        self.out = RuleSet()
        self.out.terminals["FREE"] = _FREE_CHAR
        self.out.terminals["STRING"] = r'"\"" FREE* "\""'
        self.guarded = False
        self.distinct_keys = False
        self._rules: dict[Obligation, str] = {}
        self._terminals: dict[str, str] = {}
        self._pending: list[Obligation] = []
        self._count = 0
        self._largest: dict[bool, tuple[int, blame.Place]] = {}

    def run(self, root: Obligation) -> RuleSet:
        """Emit the rules of an obligation and of all that it leads to; the root rule is `start`."""
        self.out.rules["start"] = self.value(root)
        while self._pending:
            obligation = self._pending.pop()
            nodes = [node for node, _ in obligation]
            self.solver.path[:] = nodes  # for messages
            self.solver.check_time()
            rules, terminals = len(self.out.rules), len(self.out.terminals)
            self.out.rules[self._rules[obligation]] = self._body(obligation)
            made = list(self.out.rules.values())[rules:] if len(self.out.rules) > rules else []
            self._weigh(False, sum(map(size, made)), nodes)
            self._weigh(True, sum(map(len, list(self.out.terminals.values())[terminals:])), nodes)
        return self.out

    def largest(self, *, textual: bool) -> blame.Place:
        """The keyword that was lowered to the most rules, or to the longest terminals."""
        return self._largest[textual][1] if textual in self._largest else ("", "type")

    def _weigh(self, textual: bool, weight: int, nodes: list[Node]) -> None:
        if weight > self._largest.get(textual, (0, ("", "")))[0]:
            self._largest[textual] = weight, blame.of_nodes(nodes, textual=textual)

    def fresh(self, prefix: str) -> str:
        """A new rule name."""
        self._count += 1
        if self._count > self.solver.options.limits.max_rules:
            reason = f"the schema needs more than {self.solver.options.limits.max_rules} grammar rules"
            raise LimitExceeded(reason, *self.largest(textual=False), blame.SMALLER)
        return f"{prefix}{self._count}"

    def value(self, obligation: Obligation) -> Expr:
        """A reference to the rule for values that meet an obligation."""
        if obligation not in self._rules:
            self._rules[obligation] = self.fresh("v") if obligation != TOP else "any"
            self._pending.append(obligation)
        return Ref(self._rules[obligation])

    def terminal(self, text: str) -> Expr:
        """A reference to a named terminal with this definition."""
        if text not in self._terminals:
            self._terminals[text] = f"T{len(self._terminals)}"
            self.out.terminals[self._terminals[text]] = text
        return Term(self._terminals[text])

    def key(self, language: Language) -> Expr:
        """A property name in a language, with its quotes."""
        return self.quoted(language) if language != NO_TEXT else DEAD

    def quoted(self, language: Language) -> Expr:
        """A JSON string with content in a language."""
        return STRING if language == ANY_TEXT else self.terminal(quoted_terminal(language))

    def name(self, text: str) -> Expr:
        """One property name."""
        options = quoted_literal(text)
        return Term(options if " | " not in options else f"({options})")

    def literal(self, value: Any) -> Expr:
        """One given value."""
        return _literal(value)

    def guard_unique(self) -> None:
        """Record that distinct items out of many values are left to the guard."""
        self.guarded = True

    def guard_keys(self) -> None:
        """Record that a repeated key would break a count or a condition, and is left to the guard."""
        self.distinct_keys = True

    def _body(self, obligation: Obligation) -> Expr:
        options: list[Expr] = []
        failure: UnsupportedSchema | None = None
        for type_ in TYPES:
            for case in self.solver.cases(obligation, type_):
                try:
                    options.append(self._case(case))
                except numbers.Inexpressible as error:
                    reason = f"{error} is not expressible beside the other constraints here"
                    failure = UnsupportedSchema(_pointer(obligation), "multipleOf", reason, "simplify the bounds")
                    self.solver.notes[f"left out: {reason}"] = None
        if failure is not None and not options:
            raise failure
        return choice(*options)

    def _case(self, case: c.Case) -> Expr:
        match case:
            case c.Values(_, values):
                return self._values(values)
            case c.Number():
                return self._number(case)
            case c.String():
                return self._string(case)
            case c.Array():
                return emit_array.emit(self, case)
            case c.Object():
                return emit_object.emit(self, case)

    def _values(self, values: tuple[Any, ...]) -> Expr:
        scalars = [v for v in values if not isinstance(v, (list, dict))]
        options = [_literal(v) for v in values if isinstance(v, (list, dict))]
        if scalars:
            options.append(self.terminal(" | ".join(dict.fromkeys(s for v in scalars for s in _spellings(v)))))
        return choice(*options)

    def _number(self, case: c.Number) -> Expr:
        schema = numbers.as_json(case)
        if schema is not None:
            guidance = f',"x-guidance":{{"whitespace_pattern":{self.skip}}}' if self.skip else _NO_SPACE
            return Term(f"%json {schema[:-1]}{guidance}}}")
        try:
            text = numbers.terminal(case)
        except numbers.Inexpressible:
            few = numbers.listed(case)
            if few is None:
                raise
            kept = [n for n in few if self.solver.admits(case, Decimal(numbers.plain(n)))]
            text = " | ".join(f'"{numbers.plain(n)}"' for n in kept)
        return self.terminal(text) if text else DEAD

    def _string(self, case: c.String) -> Expr:
        if case.languages:
            language = string_language(case)
            return DEAD if language == NO_TEXT else self.quoted(language)
        if not case.low and case.high is None:
            return STRING
        if case.high == 0:
            return self.terminal('"\\"\\""')
        return self.terminal(f'"\\"" FREE{{{case.low},{"" if case.high is None else case.high}}} "\\""')


_NO_SPACE = ',"x-guidance":{"whitespace_flexible":false}'


def _pointer(obligation: Obligation) -> str:
    return obligation[0][0].pointer if obligation else ""


def _spellings(value: Any) -> list[str]:
    """Terminals for a scalar value in its usual spellings."""
    if isinstance(value, str):
        return [quoted_literal(value)]
    if kind(value) != "number":
        return [json.dumps(json.dumps(value))]
    texts = [f"{value:f}" if abs(value) < 10**16 else str(value)]
    if is_integer(value):
        texts.append(str(int(value)))
    return [json.dumps(t) for t in dict.fromkeys(texts)]


def _literal(value: Any) -> Expr:
    """The tokens of a value; whitespace may stand between them."""
    if isinstance(value, list):
        parts: list[Expr] = [Term('"["')]
        for i, item in enumerate(value):
            parts += ([COMMA] if i else []) + [_literal(item)]
        return seq(*parts, Term('"]"'))
    if isinstance(value, dict):
        parts = [Term('"{"')]
        for i, (name, item) in enumerate(value.items()):
            parts += ([COMMA] if i else []) + [Term(f"({quoted_literal(name)})"), COLON, _literal(item)]
        return seq(*parts, Term('"}"'))
    return Term(f"({' | '.join(_spellings(value))})")
