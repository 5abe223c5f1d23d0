"""The folder of grammars keeps to its size."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer_structured import Spec
from deepinfer_structured.config import Options
from deepinfer_structured.lowering import Lowered
from deepinfer_structured.store import GrammarStore


def test_the_oldest_grammars_go_when_the_folder_is_full(tmp_path: Path) -> None:
    specs = [Spec.regex(letter) for letter in "abcd"]
    store, options = GrammarStore(tmp_path, most_bytes=2_600), Options()
    for age, spec in enumerate(specs):
        before = set(tmp_path.iterdir())
        store.put(spec, options, Lowered("llguidance", "x" * 1_000))
        (new,) = set(tmp_path.iterdir()) - before
        os.utime(new, (1_000 + age, 1_000 + age))
    assert [store.get(spec, options) is not None for spec in specs] == [False, False, True, True]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_600


def test_a_grammar_comes_back_whole(tmp_path: Path) -> None:
    """What the matcher must enforce beside the text as well: without it the text alone would let too much pass."""
    found = Lowered("llguidance", "x", ("note",), "{}", True, 7, ("/a", "enum"), ("", "pattern"))
    store, options = GrammarStore(tmp_path), Options(max_whitespace=7)
    store.put(Spec.regex("a"), options, found)
    assert store.get(Spec.regex("a"), options) == found
    assert store.get(Spec.regex("a"), Options()) is None
