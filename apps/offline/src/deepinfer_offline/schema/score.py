"""Score schema enforcement on a set of schemas with valid and invalid instances (MaskBench's format).

A schema passes if it compiles, every valid instance is accepted and every invalid one is rejected. Instances are written
compactly with one space after `,` and `:`, as Python's `json.dumps` does, and fed token by token; after each token the
mask of the next one is computed, so that mask times are those of real decoding.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from deepinfer_structured import MatcherError, Options, Spec, StructuredError, Vocabulary, allocate_mask, compile_spec
from deepinfer_structured.worker import Worker

_MASKED_TOKENS = 256  # tokens of an instance after which a mask is timed


@dataclass(frozen=True, slots=True)
class Verdict:
    """One schema. `status` is pass, compile_error, accepts_invalid or refuses_valid; times are milliseconds and µs."""

    name: str
    status: str
    reason: str = ""
    compile_ms: float = 0.0
    mask_us: tuple[float, ...] = ()


@dataclass(slots=True)
class Score:
    """The figures of a run; the fields of the JSON report."""

    total: int = 0
    passed: int = 0
    compile_error: int = 0
    accepts_invalid: int = 0
    refuses_valid: int = 0
    compile_ms_median: float = 0.0
    compile_ms_p99: float = 0.0
    mask_us_median: float = 0.0
    mask_us_p99: float = 0.0
    vocabulary: str = "bytes"
    property_order: str = "any"
    failures: list[dict[str, str]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """The report as a JSON object; `pass` is the number of schemas that pass."""
        values = asdict(self)
        values["pass"] = values.pop("passed")
        values["pass_rate"] = round(self.passed / self.total, 4) if self.total else 0.0
        return values


class CaseError(ValueError):
    """A file of cases cannot be read; the message names the file, the line and what a line must be."""


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSON-lines file, plain or gzipped: `{name, schema, tests: [{valid, data}]}` a line.

    Raises:
        CaseError: a line is something else.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _case(line)
                except ValueError as error:
                    form = "{name, schema, tests: [{valid, data}]}"
                    raise CaseError(f"{path}: line {number}: {error}; a line is {form}") from None


def _case(line: str) -> dict[str, Any]:
    """The case of a line. Raises ValueError, which says what is wrong with it."""
    try:
        case = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(case, dict):
        raise ValueError("not an object")
    missing = [name for name in ("name", "schema", "tests") if name not in case]
    if missing:
        raise ValueError(f"no {missing[0]!r}")
    tests = case["tests"]
    if not isinstance(tests, list) or not all(
        isinstance(test, dict) and isinstance(test.get("valid"), bool) and "data" in test for test in tests
    ):
        raise ValueError("'tests' is no list of {valid: true or false, data}")
    return case


def score_case(case: dict[str, Any], options: Options) -> Verdict:
    """Score one schema, in this process."""
    vocabulary = _vocabulary()
    start = time.perf_counter()
    try:
        grammar = compile_spec(Spec.json_schema(case["schema"]), vocabulary, options)
    except StructuredError as error:
        return Verdict(case["name"], "compile_error", str(error), 1e3 * (time.perf_counter() - start))
    compile_ms = 1e3 * (time.perf_counter() - start)
    masks: list[float] = []
    wrong = {"accepts_invalid": "", "refuses_valid": ""}
    for index, test in enumerate(case["tests"]):
        text = json.dumps(test["data"], ensure_ascii=False)
        accepted = _accepts(grammar.matcher(), text.encode(), masks)
        if accepted != test["valid"]:
            kind = "accepts_invalid" if accepted else "refuses_valid"
            wrong[kind] = wrong[kind] or f"instance {index}: {text[:200]}"
    status = next((kind for kind, reason in wrong.items() if reason), "pass")
    return Verdict(case["name"], status, wrong.get(status, ""), compile_ms, tuple(masks))


_VOCABULARY: list[Vocabulary] = []


def _vocabulary() -> Vocabulary:
    if not _VOCABULARY:
        _VOCABULARY.append(Vocabulary.bytewise())
    return _VOCABULARY[0]


def _accepts(matcher: Any, tokens: bytes, masks: list[float]) -> bool:
    row = allocate_mask(1, matcher.vocabulary.size)[0]
    try:
        for i, token in enumerate(tokens):
            if i < _MASKED_TOKENS:
                start = time.perf_counter()
                matcher.fill_mask(row)
                masks.append(1e6 * (time.perf_counter() - start))
            if matcher.accept([token]) != 1:
                return False
        return matcher.is_accepting
    except MatcherError:
        return False


def score(
    path: Path, options: Options, *, processes: int = 2, seconds: float = 60.0, limit: int | None = None
) -> Score:
    """Score all schemas of a file, each in a worker process with a time limit.

    Args:
        path: JSON lines, `.gz` or not.
        options: how to compile.
        processes: workers at a time.
        seconds: time limit of one schema; beyond it the schema counts as a compile error.
        limit: only the first schemas of the file.
    """
    cases = [c for i, c in enumerate(read_cases(path)) if limit is None or i < limit]
    workers: SimpleQueue[Worker] = SimpleQueue()
    pool = [Worker() for _ in range(processes)]
    for worker in pool:
        workers.put(worker)

    def one(case: dict[str, Any]) -> Verdict:
        worker = workers.get()
        try:
            return worker.call(__name__, "score_case", (case, options), seconds)
        except StructuredError as error:
            return Verdict(case["name"], "compile_error", str(error), 1e3 * seconds)
        finally:
            workers.put(worker)

    try:
        with ThreadPoolExecutor(processes) as threads:
            verdicts = list(threads.map(one, cases))
    finally:
        for worker in pool:
            worker.close()
    return summarise(verdicts, options)


def summarise(verdicts: list[Verdict], options: Options) -> Score:
    """The figures of a list of verdicts."""
    found = Score(total=len(verdicts), property_order=options.property_order)
    for verdict in verdicts:
        if verdict.status == "pass":
            found.passed += 1
        else:
            setattr(found, verdict.status, getattr(found, verdict.status) + 1)
            found.failures.append({"name": verdict.name, "status": verdict.status, "reason": verdict.reason})
    times = np.array([v.compile_ms for v in verdicts] or [0.0])
    masks = np.array([m for v in verdicts for m in v.mask_us] or [0.0])
    found.compile_ms_median, found.compile_ms_p99 = (round(float(np.percentile(times, q)), 3) for q in (50, 99))
    found.mask_us_median, found.mask_us_p99 = (round(float(np.percentile(masks, q)), 3) for q in (50, 99))
    return found
