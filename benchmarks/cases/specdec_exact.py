"""Does speculation change answers? Greedy tokens one by one, and the distribution of sampled ones, SmolLM2 in float32.

Greedy: quote-style prompts and free chat at several batch sizes, with and without a JSON schema; every answer must have the
same tokens as plain decoding's. Speculation is forced, so drafts are verified whether or not they pay here.

Sampled: many answers to one prompt that invites repetition, drawn with other seeds than plain decoding's, so that the two
are independent samples. Two-sample chi-square tests of first tokens, of second tokens and of both pairs must not tell them
apart (p >= 0.001); a control, a quarter as many plain answers at temperature 0.9, must be told apart with p < 1e-6, or the
test has no power.
With `--tally DIR` every 512 answers are kept there, so a call that was ended goes on where it stopped, and `--samples`
draws the three samples in several processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
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
SAMPLES = ("plain", "drafts", "control")
CHUNK = 512  # answers to one request
LEAST = 10  # answers of a kind from which it has a cell of its own


def chi_square(first: Counter[Hashable], second: Counter[Hashable]) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p) of the two-sample test that both were drawn from one distribution.

    Kinds seen fewer than `LEAST` times in both samples together share a cell.
    """
    counts = first, second
    total = first + second
    kinds = [kind for kind, count in total.items() if count >= LEAST]
    table = torch.tensor([[float(count[kind]) for kind in kinds] for count in counts], dtype=torch.float64)
    rest = torch.tensor([[first.total()], [second.total()]], dtype=torch.float64) - table.sum(1, keepdim=True)
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


class Tally:
    """How often each answer of three tokens came up in one sample, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: dict[str, Any] = {"draws": 0, "counts": {}, "verified": 0, "accepted": 0}
        if path is not None and path.exists():
            self._kept = json.loads(path.read_text())

    @property
    def draws(self) -> int:
        return self._kept["draws"]

    @property
    def speculation(self) -> tuple[int, int]:
        """Drafts verified and accepted."""
        return self._kept["verified"], self._kept["accepted"]

    def add(self, answers: list[tuple[int, ...]], verified: int, accepted: int) -> None:
        """Take in the next answers, and write the file."""
        for answer in answers:
            key = " ".join(map(str, answer))
            self._kept["counts"][key] = self._kept["counts"].get(key, 0) + 1
        self._kept["draws"] += len(answers)
        self._kept["verified"] += verified
        self._kept["accepted"] += accepted
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._kept))

    def view(self, part: slice) -> Counter[Hashable]:
        """Counts of a part of the answers."""
        found: Counter[Hashable] = Counter()
        for key, count in self._kept["counts"].items():
            found[tuple(key.split())[part]] += count
        return found


def fill(tally: Tally, name: str, draws: int) -> None:
    """Draw until the tally of a sample has `draws` answers. Where it stopped gives the seed."""
    if tally.draws >= draws:
        return
    llm = make(name == "drafts", 64)
    verified = accepted = 0
    while (start := tally.draws) < draws:
        params = SamplingParams(
            n=min(CHUNK, draws - start),
            max_tokens=3,
            temperature=0.9 if name == "control" else 1.0,
            seed=SAMPLES.index(name) * 1_000_000 + start,
            ignore_eos=True,
        )
        answers = [tuple(answer.token_ids) for answer in llm.generate([ECHO], params, use_tqdm=False)[0].outputs]
        report = llm.stats().extra.get("speculation", {"verified_tokens": 0, "accepted_tokens": 0})
        seen = report["verified_tokens"], report["accepted_tokens"]
        tally.add(answers, seen[0] - verified, seen[1] - accepted)
        verified, accepted = seen
    llm.close()


def sampled(draws: int, folder: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Draw what is missing of the samples `names`; tests of those that are complete against plain ones."""
    tallies = {name: Tally(None if folder is None else folder / f"{name}.json") for name in SAMPLES}
    wanted = {"plain": draws, "drafts": draws, "control": draws // 4}
    for name in names:
        fill(tallies[name], name, wanted[name])
    verified, accepted = tallies["drafts"].speculation
    found: dict[str, Any] = {"draws": draws, "verified": verified, "accepted": accepted, "complete": True}
    views = {"first": slice(0, 1), "second": slice(1, 2), "pair 1-2": slice(0, 2), "pair 2-3": slice(1, 3)}
    for name in SAMPLES[1:]:
        if tallies[name].draws < wanted[name] or tallies["plain"].draws < draws:
            found["complete"] = False
            continue
        for view, part in views.items():
            result = chi_square(tallies["plain"].view(part), tallies[name].view(part))
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
    parser.add_argument("--tally", type=Path, help="folder of the samples' counts")
    parser.add_argument("--samples", choices=SAMPLES, nargs="+", default=list(SAMPLES), help="to draw in this call")
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
        found["sampled"] = sampled(args.draws, args.tally, args.samples)
        tests = {name: value for name, value in found["sampled"].items() if isinstance(value, dict)}
        good &= all(test["p"] >= 1e-3 for name, test in tests.items() if name.startswith("drafts"))
        powers = [test["p"] for name, test in tests.items() if name.startswith("control")]
        good &= found["sampled"]["complete"] and min(powers, default=1.0) < 1e-6
        if not args.json:
            print(f"sampled: {args.draws} draws, {found['sampled']['verified']} drafts verified", end=", ")
            print(
                f"{found['sampled']['accepted']} accepted" + ("" if found["sampled"]["complete"] else "; not complete")
            )
            for name, test in tests.items():
                print(f"  {name:18} chi2 {test['chi2']:9.1f}  df {test['df']:4}  p {test['p']:.3g}")
    if args.json:
        print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
