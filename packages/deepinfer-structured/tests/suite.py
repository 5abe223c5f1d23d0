"""Run the official JSON-Schema-Test-Suite through the matcher.

    python packages/deepinfer-structured/tests/suite.py PATH/TO/JSON-Schema-Test-Suite [--draft draft2020-12] [--required]

Prints, for each draft, how many schemas pass (all instances right), accept an invalid instance, refuse a valid one, or
are refused with a reason. Exits with 1 if an invalid instance is accepted in a required part. For comparison: of the 461
schemas of draft 2020-12 (with the optional ones), xgrammar 0.2.9 passes 177 and llguidance 1.9.1 passes 181.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from deepinfer_structured import (
    Grammar,
    MatcherError,
    Options,
    Spec,
    StructuredError,
    UnsatisfiableSchema,
    Vocabulary,
    compile_spec,
)

_URIS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def accepts(grammar: Grammar | None, value: object) -> bool:
    """Whether the grammar accepts a value; None accepts nothing (an unsatisfiable schema)."""
    if grammar is None:
        return False
    data, matcher = list(json.dumps(value, ensure_ascii=False).encode()), grammar.matcher()
    try:
        return matcher.accept(data) == len(data) and matcher.is_accepting
    except MatcherError:
        return False


def judge(schema: object, tests: list[dict[str, object]], options: Options, vocabulary: Vocabulary) -> tuple[str, str]:
    """The status of one schema of the suite, and what went wrong."""
    try:
        grammar = compile_spec(Spec.json_schema(schema), vocabulary, options)
    except UnsatisfiableSchema:
        grammar = None
    except StructuredError as error:
        return "refused", str(error)
    status, detail = "pass", ""
    for test in tests:
        try:
            accepted = accepts(grammar, test["data"])
        except UnicodeEncodeError:
            continue  # a lone surrogate: not text
        if accepted and not test["valid"]:
            return "accepts invalid", f"{test['description']}: {json.dumps(test['data'])[:80]}"
        if not accepted and test["valid"]:
            status, detail = "refuses valid", f"{test['description']}: {json.dumps(test['data'])[:80]}"
    return status, detail


def run(root: Path, draft: str, required_only: bool, verbose: bool) -> int:
    """Run one draft; returns the number of wrong acceptances in required parts."""
    vocabulary, counts, wrong = Vocabulary.bytewise(), {True: Counter(), False: Counter()}, 0
    folder = root / "tests" / draft
    for path in sorted(folder.rglob("*.json")):
        required = "optional" not in path.relative_to(folder).parts
        if required_only and not required:
            continue
        # `format` is an annotation in the required parts, and asserted in optional/format
        options = Options(property_order="any", formats=path.parent.name == "format")
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": _URIS.get(draft, ""), **schema}
            status, detail = judge(schema, group["tests"], options, vocabulary)
            counts[required][status] += 1
            wrong += required and status == "accepts invalid"
            if (verbose and status != "pass") or status == "accepts invalid":
                _say(f"  {status}: {path.relative_to(folder)}: {group['description']}: {detail[:150]}")
    for required, found in counts.items():
        if found:
            total = found.total()
            parts = ", ".join(f"{n} {status}" for status, n in found.most_common())
            _say(f"{draft} {'required' if required else 'optional'}: {found['pass']} of {total} schemas pass ({parts})")
    _say(
        f"{draft}: {sum(f['pass'] for f in counts.values())} of {sum(f.total() for f in counts.values())} schemas pass"
    )
    return wrong


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--draft", action="append", help="draft2020-12 and draft7 by default")
    parser.add_argument("--required", action="store_true", help="skip the optional parts")
    parser.add_argument("--verbose", action="store_true", help="list every schema that does not pass")
    arguments = parser.parse_args()
    drafts = arguments.draft or ["draft2020-12", "draft7"]
    sys.exit(1 if sum(run(arguments.path, d, arguments.required, arguments.verbose) for d in drafts) else 0)


if __name__ == "__main__":
    main()
