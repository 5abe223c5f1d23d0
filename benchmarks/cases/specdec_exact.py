"""Does speculation change answers? Greedy tokens one by one, and the distribution of sampled ones, SmolLM2 in float32.

Greedy: quote-style prompts and free chat at several batch sizes, with and without a JSON schema; every answer must have the
same tokens as plain decoding's. Speculation is forced, so drafts are verified whether or not they pay here.

Sampled: many answers to one prompt that invites repetition, drawn with other seeds than plain decoding's, so that the two
are independent samples. Two-sample chi-square tests of first tokens, of second tokens and of both pairs must not tell them
apart (p >= 0.001); a control, plain decoding at temperature 0.9, must be told apart with p < 1e-6, or the test has no power.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from random import Random
from typing import Any

import torch
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.sampling import StructuredOutputs

ECHO = "Repeat: red blue red green red blue red white red blue red green red blue red"
WORDS = ("harbour", "mill", "quarry", "museum", "bridge", "hall", "tower", "garden", "market", "station")
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": list(WORDS)}, "year": {"type": "integer", "minimum": 1000, "maximum": 1999}},
    "required": ["place", "year"],
    "additionalProperties": False,
}
LEAST = 10  # answers of a kind from which it has a cell of its own


def chi_square(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p) of the two-sample test that both were drawn from one distribution.

    Kinds seen fewer than `LEAST` times in both samples together share a cell.
    """
    counts = Counter(first), Counter(second)
    total = counts[0] + counts[1]
    kinds = [kind for kind, count in total.items() if count >= LEAST]
    table = torch.tensor([[float(count[kind]) for kind in kinds] for count in counts], dtype=torch.float64)
    rest = torch.tensor([[len(first)], [len(second)]], dtype=torch.float64) - table.sum(1, keepdim=True)
    if float(rest.sum()) >= LEAST:
        table = torch.cat([table, rest], 1)
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    statistic, freedom = float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1
    if not freedom:
        return statistic, 0, 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(half[0], half[1]))


def make(speculative: bool, batch: int) -> LLM:
    """An engine; with speculation it verifies whatever is drafted."""
    llm = LLM(speculative="suffix" if speculative else "off", dtype="float32", max_num_seqs=batch, kv_memory="1GiB")
    if speculative:
        llm._engine._parts.speculation.force(7)  # type: ignore[union-attr]
    return llm


def draw(llm: LLM, draws: int, seed: int, temperature: float = 1.0) -> list[tuple[int, ...]]:
    """The first three tokens of `draws` answers to the same prompt."""
    found: list[tuple[int, ...]] = []
    for place, start in enumerate(range(0, draws, 512)):
        count = min(512, draws - start)
        params = SamplingParams(n=count, max_tokens=3, temperature=temperature, seed=seed + place, ignore_eos=True)
        found += [tuple(answer.token_ids) for answer in llm.generate([ECHO], params)[0].outputs]
    return found


def sampled(draws: int) -> dict[str, Any]:
    """p-values of speculative against plain draws, and of the control."""
    plain, guessing = make(False, 64), make(True, 64)
    samples = {"plain": draw(plain, draws, 1), "drafts": draw(guessing, draws, 1_000_001)}
    samples["control"] = draw(plain, draws, 2_000_001, temperature=0.9)
    report = guessing.stats().extra["speculation"]
    plain.close()
    guessing.close()
    views = {"first": slice(0, 1), "second": slice(1, 2), "pair 1-2": slice(0, 2), "pair 2-3": slice(1, 3)}
    found: dict[str, Any] = {
        "draws": draws,
        "verified": report["verified_tokens"],
        "accepted": report["accepted_tokens"],
    }
    for name in ("drafts", "control"):
        for view, part in views.items():
            result = chi_square([t[part] for t in samples["plain"]], [t[part] for t in samples[name]])
            found[f"{name}, {view}"] = dict(zip(("chi2", "df", "p"), result, strict=True))
    return found


def prompts(count: int) -> list[str]:
    """Half ask for a text to be copied out, half are free."""
    rng = Random(0)
    made = []
    for number in range(count):
        text = " ".join(f"In {rng.randint(1600, 1990)} the {rng.choice(WORDS)} was sold." for _ in range(3))
        made.append(
            f"Repeat word for word: {text}" if number % 2 else f"Tell me about the {rng.choice(WORDS)} of {number}."
        )
    return made


def greedy(count: int, batch: int, tokens: int, grammar: bool) -> dict[str, Any]:
    """How many of `count` answers have equal tokens at a batch size."""
    form = StructuredOutputs(json=SCHEMA) if grammar else None
    params = SamplingParams(max_tokens=tokens, temperature=0.0, structured_outputs=form)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts(count)]
    answers, report = [], {}
    for speculative in (False, True):
        llm = make(speculative, batch)
        answers.append(
            [list(output.outputs[0].token_ids) for output in llm.chat(conversations, params, use_tqdm=False)]
        )
        report = llm.stats().extra.get("speculation", {})
        llm.close()
    equal = sum(a == b for a, b in zip(*answers, strict=True))
    return {
        "batch": batch,
        "grammar": grammar,
        "answers": count,
        "equal": equal,
        "tokens": sum(map(len, answers[0])),
        "verified": report["verified_tokens"],
        "accepted": report["accepted_tokens"],
    }


def run(argv: list[str]) -> int:
    """Print what was found; 1 if an answer differs, samples can be told apart or the control cannot."""
    parser = argparse.ArgumentParser(prog="specdec-exact", description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--grammar", choices=("off", "on", "both"), default="both")
    parser.add_argument("--draws", type=int, default=20_000, help="0 leaves the sampled part out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    forms = {"off": [False], "on": [True], "both": [False, True]}[args.grammar]
    found: dict[str, Any] = {"greedy": []}
    for grammar in forms:
        for batch in args.batch:
            cell = greedy(args.prompts, batch, args.tokens, grammar)
            found["greedy"].append(cell)
            if not args.json:
                print("greedy: " + ", ".join(f"{name} {value}" for name, value in cell.items()), flush=True)
    good = all(cell["equal"] == cell["answers"] for cell in found["greedy"])
    if args.draws:
        found["sampled"] = sampled(args.draws)
        tests = {name: value for name, value in found["sampled"].items() if isinstance(value, dict)}
        good &= all(test["p"] >= 1e-3 for name, test in tests.items() if name.startswith("drafts"))
        good &= min(test["p"] for name, test in tests.items() if name.startswith("control")) < 1e-6
        if not args.json:
            print(f"sampled: {args.draws} draws, {found['sampled']['verified']} drafts verified", end=", ")
            print(f"{found['sampled']['accepted']} accepted")
            for name, test in tests.items():
                print(f"  {name:18} chi2 {test['chi2']:9.1f}  df {test['df']:4}  p {test['p']:.3g}")
    if args.json:
        print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
