"""Mutate schemas and regular expressions and compile them: nothing may crash, hang or grow without bound.

    python packages/deepinfer-structured/tests/fuzz.py [--count 20000] [--seed 0] [--schemas FILE.jsonl]

Exits with 1 if a compilation takes more than 2 s of processor time in this process or memory grows by over 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from deepinfer_structured import MatcherError, Spec, StructuredError, Vocabulary, compile_spec

_DATA = Path(__file__).parent / "data/schema-cases-dev.jsonl"
_PATTERNS = [
    r"^(a|b)*c{2,5}$",
    r"(?=.*\d)[a-z]{3,}",
    r"^\w+@\w+\.\w+$",
    r"[^\s/]+(/[^\s/]+)*",
    r"^(?!x).{1,9}$",
    r"\bfoo\b|é+",
]
_GRAMMARS = ['start: "a" b+\nb: /[0-9]{1,3}/ | "(" start ")"', 'root ::= "x" item*\nitem ::= [a-z]+ ("," item)?']
_PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "0",
    "1",
    "99999999",
    "true",
    "null",
    "\\",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{1000}",
    "^",
    "$",
    "|",
]
_PIECES += [
    '"not":{',
    '"oneOf":[',
    '"$ref":"#"',
    '"type":',
    '"pattern":"(a*)*b"',
    '"uniqueItems":true',
    "\\u0000",
    "é",
    "(?=",
    "[^",
    "-",
]


def mutate(text: str, rng: random.Random) -> str:
    """Delete, copy and insert a few pieces."""
    for _ in range(rng.randint(1, 5)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + 20)
        kind = rng.random()
        if kind < 0.3:
            text = text[:a] + text[b:]
        elif kind < 0.5:
            text = text[:b] + text[a:b] * rng.randint(1, 3) + text[b:]
        else:
            text = text[:a] + rng.choice(_PIECES) + text[a:]
    return text


def mutated_spec(schemas: list[str], rng: random.Random) -> Spec:
    """A mutated specification; half of the schemas stay well-formed JSON with a mutated value inside."""
    kind = rng.random()
    if kind < 0.25:
        return Spec.regex(mutate(rng.choice(_PATTERNS), rng))
    if kind < 0.3:
        return Spec.grammar(mutate(rng.choice(_GRAMMARS), rng))
    if kind < 0.6:
        pattern = mutate(rng.choice(_PATTERNS), rng)
        return Spec.json_schema(
            {rng.choice(["allOf", "anyOf", "oneOf"]): [{"pattern": pattern}, json.loads(rng.choice(schemas))]}
        )
    return Spec.json_schema(mutate(rng.choice(schemas), rng))


def fuzz(count: int, seed: int, schemas: list[str]) -> int:
    """Compile `count` mutated specifications; returns how many were too slow."""
    rng, vocabulary, outcomes, slow = random.Random(seed), Vocabulary.bytewise(), Counter(), 0
    worst = (0.0, "")
    for _ in range(count):
        spec, start = mutated_spec(schemas, rng), time.process_time()
        try:
            matcher = compile_spec(spec, vocabulary).matcher()
            matcher.mask()
            outcomes["compiled"] += 1
        except (StructuredError, MatcherError) as error:
            outcomes[type(error).__name__] += 1
        taken = time.process_time() - start
        worst = max(worst, (taken, spec.content))
        slow += taken > 2.0
    sys.stdout.write(f"{dict(outcomes)}; slowest {worst[0]:.2f} s: {worst[1][:200]!r}; over 2 s: {slow}\n")
    return slow


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemas", type=Path, default=_DATA)
    arguments = parser.parse_args()
    schemas = [json.dumps(json.loads(line)["schema"]) for line in arguments.schemas.read_text().splitlines()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slow = fuzz(arguments.count, arguments.seed, schemas)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    sys.stdout.write(f"{arguments.count} specifications, memory grew by {grown} MiB\n")
    sys.exit(1 if slow or grown > 1024 else 0)


if __name__ == "__main__":
    main()
