"""Grammar masks: a batch of 64 sequences at a 128k vocabulary, and compile times, against plain llguidance."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

import numpy as np
from deepinfer_structured import Matcher, Spec, Vocabulary, allocate_mask, allowed_tokens, compile_spec, fill_masks
from deepinfer_structured.bitmask import Mask
from deepinfer_structured.engines import llguidance

_ROW_US, _BATCH_MS = 50.0, 2.0
_SCHEMAS: list[dict[str, object]] = [
    {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1},
            "name": {"type": "string", "minLength": 1, "maxLength": 80},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
            "state": {"enum": ["new", "open", "closed"]},
        },
        "required": ["id", "name", "state"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}},
    {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    {"oneOf": [{"required": ["a"], "properties": {"a": {"type": "string"}}}, {"required": ["b"]}], "type": "object"},
]


def vocabulary(size: int = 128_000) -> Vocabulary:
    """A made-up vocabulary with the make-up of a BPE one: bytes, words with and without a space, JSON pieces, digits."""
    rng = random.Random(0)
    tokens = {bytes([i]): None for i in range(256)}
    tokens |= dict.fromkeys(str(n).encode() for n in range(1000))
    pieces = [
        '":',
        '": "',
        '",',
        '", "',
        '"}',
        "},",
        "}]",
        "],",
        '{"',
        "[{",
        "\n  ",
        "\n    ",
        "  ",
        '"\n',
        "=>",
        "()",
        "://",
    ]
    tokens |= dict.fromkeys(p.encode() for p in pieces)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    while len(tokens) < size - 1:
        word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(2, 9)))
        style = rng.random()
        word = f" {word}" if style < 0.5 else word.capitalize() if style < 0.6 else word
        if style > 0.97:
            word = "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 3)))
        tokens[word.encode()] = None
    return Vocabulary([*tokens, b"<eos>"], eos_ids=[size - 1])


def _walks(vocab: Vocabulary, rows: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Masks of `rows` sequences over `steps` random tokens each: ms a batch here, ms a batch in plain llguidance, µs a row.

    The plain library has grammars of its own (from its own schema compiler) and follows the same tokens; who goes first
    alternates.
    """
    rng = np.random.default_rng(0)
    schemas = [_SCHEMAS[i % len(_SCHEMAS)] for i in range(rows)]
    ours = [compile_spec(Spec.json_schema(s), vocab).matcher() for s in schemas]
    single = [compile_spec(Spec.json_schema({**s, "title": "one by one"}), vocab).matcher() for s in schemas]
    plain = [_plain(s, vocab) for s in schemas]
    out, other = allocate_mask(rows, vocab.size), allocate_mask(rows, vocab.size)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(steps):
        batches = [(ours, out, times[0]), (plain, other, times[1])]
        for matchers, buffer, found in batches if step % 2 else reversed(batches):
            begin = time.perf_counter()
            _fill(matchers, buffer)
            found.append(1e3 * (time.perf_counter() - begin))
        for i, matcher in enumerate(single):
            begin = time.perf_counter()
            matcher.fill_mask(other[i])
            times[2].append(1e6 * (time.perf_counter() - begin))
        for i in range(rows):
            token = int(rng.choice(allowed_tokens(out[i], vocab.size)))
            same = [m for m in (ours[i], single[i], plain[i]) if token not in vocab.eos_ids and m.accept([token]) == 1]
            if len(same) < 3 or len(ours[i]) > 60:
                for m in (ours[i], single[i], plain[i]):
                    m.rollback(len(m))
    return times


def _fill(matchers: list[Matcher], buffer: Mask) -> None:
    fill_masks(matchers, range(len(matchers)), buffer, threads=2)


def _plain(schema: dict[str, object], vocab: Vocabulary) -> Matcher:
    text = llguidance.require().LLMatcher.grammar_from_json_schema(schema, overrides={"coerce_one_of": True})
    return Matcher(llguidance.LlguidanceGrammar(text, vocab).matcher(), vocab)


def run(argv: list[str]) -> int:
    """Print the times. Returns 1 if a median misses its bar: 50 µs a row, 2 ms a batch."""
    parser = argparse.ArgumentParser(prog="structured-masks", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    vocab = vocabulary(args.vocabulary)
    begin = time.perf_counter()
    llguidance.tokenizer(vocab)
    ready = time.perf_counter() - begin
    ours, plain, rows = _walks(vocab, args.rows, args.steps)
    found = {
        "batch_ms_median": round(float(np.median(ours)), 3),
        "batch_ms_p99": round(float(np.percentile(ours, 99)), 3),
        "plain_llguidance_batch_ms_median": round(float(np.median(plain)), 3),
        "row_us_median": round(float(np.median(rows)), 2),
        "row_us_p99": round(float(np.percentile(rows, 99)), 2),
        "tokenizer_seconds": round(ready, 2),
    }
    print(json.dumps(found) if args.json else "\n".join(f"{k:34} {v}" for k, v in found.items()))
    return int(found["row_us_median"] > _ROW_US or found["batch_ms_median"] > _BATCH_MS)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
