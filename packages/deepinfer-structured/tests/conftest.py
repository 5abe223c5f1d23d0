"""Shared fixtures: a byte vocabulary, a richer one, and a check of one text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepinfer_structured import Options, Spec, Vocabulary, compile_spec

_PIECES = [
    b'"a"',
    b'"a",',
    b'",',
    b'","',
    b'"]',
    b'{"',
    b'":',
    b"1,",
    b"1]",
    b", 1,",
    b",1",
    b'"},',
    b"}]",
    b"},{",
    b"ab",
]
_MORE = [
    b' "a"',
    b" -,",
    b' "\\x"',
    b" .]",
    b"{}",
    b"[]",
    b"true,",
    b" true",
    b"12",
    b"\\n",
    "é".encode(),
    "你好".encode(),
    b'"b": ',
    b"  ",
    b'a"',
]


@pytest.fixture(scope="session")
def byte_vocabulary() -> Vocabulary:
    return Vocabulary.bytewise()


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Bytes, an end token, some longer pieces, and two padding ids."""
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>", *_PIECES, *_MORE]
    return Vocabulary(tokens, eos_ids=[256], size=len(tokens) + 2)


@pytest.fixture(scope="session")
def accepts(byte_vocabulary: Vocabulary) -> Callable[..., bool]:
    """`accepts(spec_or_schema, text, **options)`: whether the whole text is accepted."""

    def check(spec: Any, text: str, **options: Any) -> bool:
        spec = spec if isinstance(spec, Spec) else Spec.json_schema(spec)
        matcher = compile_spec(spec, byte_vocabulary, Options(**options)).matcher()
        data = text.encode()
        return matcher.accept(list(data)) == len(data) and matcher.is_accepting

    return check
