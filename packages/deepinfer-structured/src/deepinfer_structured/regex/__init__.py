"""ECMAScript regular expressions as languages over code points, with intersection and complement."""

from __future__ import annotations

from deepinfer_structured.regex.ast import ANY, EMPTY, NEVER, Node, alt, both, cat, chars, complement, literal, repeat
from deepinfer_structured.regex.match import matches
from deepinfer_structured.regex.parse import parse
from deepinfer_structured.regex.search import language

__all__ = [
    "ANY",
    "EMPTY",
    "NEVER",
    "Node",
    "alt",
    "both",
    "cat",
    "chars",
    "complement",
    "language",
    "literal",
    "matches",
    "parse",
    "repeat",
]
