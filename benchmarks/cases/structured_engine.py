"""Structured output in the engine: mixed batches at temperature 1, every finished answer validated, and what masks cost.

What is fair: the free requests share steps with the constrained ones, so a run that just leaves the constrained ones out
would answer another question (less work). The run "without their masks" therefore keeps all requests, prompts, lengths and
the order, and only takes the grammar away: each constrained request becomes a plain one exactly as long as its answer was.
Masks, matchers and masked sampling are then the only difference. Both kinds of runs alternate; a ratio is formed within each
pair, next to each other in time, and their median counts, so that a machine that slows down for a while does not decide.

First all requests run cold: grammars are compiled on their own thread while free requests run ahead, and the answers are
judged. The timed runs take grammars that are ready, so constrained requests are queued as fast as free ones: the harder
case, for while grammars compile the free requests have the engine to themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
from deepinfer_offline import LLM, SamplingParams, StructuredOutputs
from deepinfer_offline.engine.base import Engine, Request, RequestOutput
from deepinfer_offline.engine.options import DEFAULT_MODEL
from deepinfer_offline.engine.structured import GrammarCompiler

_LOSS = 0.10
_FIELDS: dict[str, Any] = {
    "state": {"enum": ["new", "open", "closed"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 999},
    "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 50},
    "ready": {"type": "boolean"},
    "name": {"type": "string", "minLength": 1, "maxLength": 12},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "day": {"type": "string", "format": "date"},
    "labels": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "uniqueItems": True, "maxItems": 3},
    "sizes": {"type": "array", "items": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95}, "maxItems": 3},
    "place": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["x"],
              "additionalProperties": False},
    "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
    "kind": {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
}  # fmt: skip


def schemas(count: int) -> list[dict[str, Any]]:
    """`count` different closed objects of two or three fields."""
    rng, found = random.Random(5), {}
    while len(found) < count:
        names = rng.sample(sorted(_FIELDS), rng.randint(2, 3))
        schema = {
            "type": "object",
            "properties": {name: _FIELDS[name] for name in names},
            "required": names[: rng.randint(1, len(names))],
            "additionalProperties": False,
        }
        found[json.dumps(schema)] = schema
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of all requests: outputs by id, tokens a second of the free requests, seconds in all."""

    outputs: dict[str, RequestOutput]
    free_rate: float
    seconds: float


def _requests(llm: LLM, args: argparse.Namespace) -> list[Request]:
    """Free and constrained requests in turn."""
    tokenizer, wanted = llm.get_tokenizer(), schemas(args.schemas)
    made = []
    for i in range(args.requests):
        free = SamplingParams(temperature=1.0, seed=i, max_tokens=args.free_tokens, ignore_eos=True)
        made.append(Request(f"free-{i}", tokenizer.encode(f"Story {i}: once upon a time"), free))
        schema = wanted[i % len(wanted)]
        form = StructuredOutputs(json=schema)
        bound = SamplingParams(temperature=1.0, seed=i, max_tokens=args.bound_tokens, structured_outputs=form)
        prompt = f"Record {i} as compact JSON with the fields {', '.join(schema['properties'])}: "
        made.append(Request(f"bound-{i}", tokenizer.encode(prompt), bound))
    return made


def _compiled(llm: LLM, requests: Sequence[Request]) -> list[Request]:
    """The same requests with their grammars, so that constrained ones are queued as fast as free ones."""
    compiler = GrammarCompiler(llm.get_tokenizer(), llm.info.vocab_size)
    made = []
    for request in requests:
        form = request.params.structured_outputs
        made.append(request if form is None else replace(request, grammar=compiler.submit(form).result()))
    compiler.close()
    return made


def _without_masks(requests: Sequence[Request], outputs: dict[str, RequestOutput]) -> list[Request]:
    """The same requests; in the place of each constrained one a plain one as long as its answer was."""
    made = []
    for request in requests:
        if request.params.structured_outputs is not None:
            length = len(outputs[request.request_id].outputs[0].token_ids)
            params = replace(request.params, structured_outputs=None, max_tokens=length, ignore_eos=True)
            request = replace(request, params=params, grammar=None)
        made.append(request)
    return made


def _drive(engine: Engine, requests: Sequence[Request]) -> Pass:
    outputs: dict[str, RequestOutput] = {}
    begin = last_free = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
            if output.request_id.startswith("free"):
                last_free = time.perf_counter()
    tokens = sum(len(o.outputs[0].token_ids) for name, o in outputs.items() if name.startswith("free"))
    return Pass(outputs, tokens / (last_free - begin), time.perf_counter() - begin)


def _judge(requests: Sequence[Request], outputs: dict[str, RequestOutput]) -> dict[str, int]:
    """How the constrained answers ended: `valid`, `invalid`, `cut_by_length`, `failed`."""
    found = dict.fromkeys(("valid", "invalid", "cut_by_length", "failed"), 0)
    for request in requests:
        form = request.params.structured_outputs
        if form is None:
            continue
        output = outputs[request.request_id]
        if output.error is not None:
            found["failed"] += 1
        elif output.outputs[0].finish_reason == "length":
            found["cut_by_length"] += 1
        else:
            found["valid" if _is_valid(form.json, output.outputs[0].text) else "invalid"] += 1
    return found


def _is_valid(schema: Any, text: str) -> bool:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    try:
        return checker.is_valid(json.loads(text))
    except ValueError:
        return False


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Run both kinds of passes `args.repeats` times in turn."""
    warm = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(choice=["warm", "up"]))
    llm.generate("warm up", warm)
    requests = _requests(llm, args)
    cold = _drive(llm.engine, requests)
    counts, plain = _judge(requests, cold.outputs), _without_masks(requests, cold.outputs)
    ready, with_masks, without = _compiled(llm, requests), [], []
    for repeat in range(args.repeats):
        for made, asked in ((with_masks, ready), (without, plain))[:: 1 if repeat % 2 else -1]:
            made.append(_drive(llm.engine, asked))
    ratios = [a.free_rate / b.free_rate for a, b in zip(with_masks, without, strict=True)]
    masked, free = (statistics.median(p.free_rate for p in found) for found in (with_masks, without))
    return {
        "constrained": counts,
        "schemas": args.schemas,
        "free_tokens_per_second_with_masks": round(masked, 1),
        "free_tokens_per_second_without": round(free, 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "seconds_cold_with_compilation": round(cold.seconds, 1),
        "seconds_with_masks": round(statistics.median(p.seconds for p in with_masks), 1),
        "seconds_without": round(statistics.median(p.seconds for p in without), 1),
        "cores": os.cpu_count(),
    }


def run(argv: list[str]) -> int:
    """Print the figures. Returns 1 if an answer is invalid or failed, or free requests lose more than 10 %."""
    parser = argparse.ArgumentParser(prog="structured-engine", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the model (default: the embedded one)")
    parser.add_argument("--requests", type=int, default=200, help="constrained requests, and as many free ones")
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--free-tokens", type=int, default=24)
    parser.add_argument("--bound-tokens", type=int, default=96)
    parser.add_argument("--running", type=int, default=32, help="sequences at a time")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of timed runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with LLM(
        args.model, engine="native", device="cpu", kv_memory="512MiB", max_model_len=512, max_num_seqs=args.running,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        found = measure(llm, args)
    print(json.dumps(found) if args.json else "\n".join(f"{k:34} {v}" for k, v in found.items()))
    counts = found["constrained"]
    return int(bool(counts["invalid"] or counts["failed"]) or found["ratio"] < 1 - _LOSS)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
