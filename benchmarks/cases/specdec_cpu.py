"""Speculation against plain decoding and against fixed draft lengths: SmolLM2 on the CPU, batches of 1, 4, 16, 64.

One engine in one process; `off` (plain), `auto` and each fixed draft length are arms of it, each with a drafter, costs and
switch of its own. Every round has fresh prompts that all arms answer in turn, in an order drawn for the round, so what
slows the machine slows them alike, and no arm sees an answer twice. A rate is all tokens over all seconds; beside the wall
clock the process's CPU time counts, which other programs hardly move. Brackets hold 90 % of 1,000 resamplings of rounds.

`--lengths 1 2 3 4 5 6 7` compares with fixed lengths: `--screen` rounds run them all, later ones the `--near` best of those.
The best length is chosen on the even later rounds and compared on the odd ones, and the reverse: the best of several noisy
figures on the rounds that it is compared on would be too high by about the noise. `off` is one of the lengths: 0.

Prompts: `quote` asks for a passage to be copied out, `free` is open chat, `mixed` is half and half in drawn order. `--waves 3`
gives each place in the batch three answers to make, as in a job whose queue is not empty: a freed place is taken at once.
`--first N` numbers the rounds from N on: other numbers, other prompts, as where constants were chosen by looking at some.
`--keep FILE` adds every round to a file, and a later call goes on from there; `--seconds` ends a call in time.

Greedy; in bfloat16 a near-tie may fall differently in another batch shape, so answers need not be equal (in float32 they are).
Bars: auto at least 0.98 of off in every cell and 1.5 for quotes at batch 1; at least 0.97 of the best fixed length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.engine.native.speculation import Speculation
from deepinfer_specdec import create_drafter

NAMES = ("Tobias Wren", "Anna Holt", "Mirela Sand", "Jonas Pike", "Elif Kaya", "Ruth Amsel", "Carl Voss", "Ines Roca")
PLACES = (
    "the harbour",
    "the old mill",
    "the northern quarry",
    "the museum",
    "Fisher Street",
    "the iron bridge",
    "the town hall",
)
DEEDS = ("rebuilt", "painted", "measured", "sold", "guarded", "described", "inherited", "opened")
THINGS = (
    "a story about a fox",
    "three tips for sleep",
    "how rain forms",
    "a poem about tin",
    "why bread rises",
    "what a lens does",
)
KINDS = ("quote", "free", "mixed")
WALL, CPU = 1, 2  # columns of a run: tokens, seconds, seconds of processors
RESAMPLINGS = 1000

Run = tuple[int, float, float]


def quote_prompt(rng: random.Random) -> str:
    """Asks for a passage to be copied out, as summaries, edits and extractions largely do."""
    sentences = []
    for _ in range(6):
        year, others = rng.randint(1600, 1990), rng.randint(2, 90)
        who, did, what = rng.choice(NAMES), rng.choice(DEEDS), rng.choice(PLACES)
        sentences.append(f"In {year} {who} {did} {what} with {others} others.")
    return "Repeat the following text exactly, word for word.\n\n" + " ".join(sentences)


def free_prompt(rng: random.Random) -> str:
    """Open chat: nothing of the answer is in the prompt."""
    who, age, what, where = rng.choice(NAMES), rng.randint(9, 90), rng.choice(THINGS), rng.choice(PLACES)
    return f"My name is {who} and I am {age}. Tell me {what}, near {where}."


def make_prompts(kind: str, batch: int, count: int, number: int) -> list[str]:
    """Prompts of a round. Mixed ones are half and half in every two rounds, in drawn order."""
    rng = random.Random(f"{kind}/{batch}/{number}")
    makers: list[Callable[[random.Random], str]] = [quote_prompt if kind == "quote" else free_prompt] * count
    if kind == "mixed":
        both: list[Callable[[random.Random], str]] = [quote_prompt, free_prompt] * count
        random.Random(f"{kind}/{batch}/pair {number // 2}").shuffle(both)
        makers = both[count * (number % 2) :][:count]
    return [make(rng) for make in makers]


@dataclass
class Round:
    """What the arms that ran in one round took."""

    number: int
    runs: dict[str, Run]
    equal: int  # answers of auto with the tokens of off
    answers: int
    emitted: int  # by auto's verification steps
    rows: int  # those steps, one a row that verified a draft
    on: int  # steps of auto that were on
    steps: int


@dataclass
class Cell:
    """The rounds of one line of the table."""

    prompts: str
    batch: int
    waves: int
    tokens: int
    first: int = 0
    rounds: list[Round] = field(default_factory=list)

    def table(self, arms: Sequence[str], rounds: Sequence[Round] | None = None) -> np.ndarray:
        """float64 [rounds, arms, 3] of the rounds that ran all of `arms`."""
        found = [r for r in (self.rounds if rounds is None else rounds) if all(arm in r.runs for arm in arms)]
        return np.array([[r.runs[arm] for arm in arms] for r in found]).reshape(-1, len(arms), 3)


def rates(table: np.ndarray, clock: int) -> np.ndarray:
    """Tokens a second of every arm, float64 [arms]."""
    sums = table.sum(0)
    return sums[:, 0] / sums[:, clock]


def to_first(table: np.ndarray, clock: int = WALL) -> float:
    """Rate of the second arm over that of the first."""
    first, second = rates(table[:, :2], clock)
    return float(second / first)


def to_best(table: np.ndarray, clock: int = WALL) -> tuple[float, list[int]]:
    """Arm 0 against the best of the others: chosen by `clock` on every second round and compared on the rest, and the
    reverse. (Geometric mean of the two ratios, the choices as places in the arms.)
    """
    halves = table[0::2], table[1::2]
    chosen = [1 + int(rates(half, clock)[1:].argmax()) for half in halves]
    found = [rates(half, clock) for half in halves[::-1]]
    ratios = [speeds[0] / speeds[best] for speeds, best in zip(found, chosen, strict=True)]
    return float(np.sqrt(ratios[0] * ratios[1])), chosen


def interval(table: np.ndarray, statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """5th and 95th percentile of a statistic over resampled rounds; each half of the rounds is drawn from itself."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(RESAMPLINGS):
        drawn = np.empty_like(table)
        for half in (0, 1):
            own = table[half::2]
            drawn[half::2] = own[rng.integers(len(own), size=len(own))]
        values.append(statistic(drawn))
    return float(np.quantile(values, 0.05)), float(np.quantile(values, 0.95))


class Arms:
    """Plain, automatic and forced decoding with one engine. No prefix caching: every arm runs the same prompts."""

    def __init__(self, batch: int, speculative: str, dtype: str, lengths: Sequence[int]) -> None:
        self.llm = LLM(speculative=speculative, dtype=dtype, max_num_seqs=batch, enable_prefix_caching=False)
        self._engine: Any = self.llm.engine
        self._parts: Any = self._engine._parts  # pyrefly: ignore
        self.auto: Speculation = self._parts.speculation
        self._arms: dict[str, Speculation | None] = {"off": None, "auto": self.auto}
        for length in lengths:
            forced = Speculation(create_drafter("suffix"), self._parts.scheduler, self._parts.runner)
            forced.force(length)
            self._arms[str(length)] = forced
        self.lengths = [str(length) for length in lengths]

    def run(self, arm: str, prompts: list[str], tokens: int) -> tuple[Run, list[list[int]]]:
        """((tokens, seconds, processor seconds), answers). A step that was launched ahead for nothing is waited for."""
        self._engine._parts = replace(self._parts, speculation=self._arms[arm])
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        begin, worked = time.perf_counter(), time.process_time()
        outputs = self.llm.chat(conversations, SamplingParams(max_tokens=tokens, temperature=0.0), use_tqdm=False)
        self._engine._land_all()
        seconds, worked = time.perf_counter() - begin, time.process_time() - worked
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return (sum(map(len, ids)), seconds, worked), ids

    def close(self) -> None:
        self.llm.close()


def run_round(arms: Arms, cell: Cell, number: int, names: Sequence[str]) -> Round:
    """One round: the same prompts for every arm, in an order of the round's own."""
    prompts = make_prompts(cell.prompts, cell.batch, cell.batch * cell.waves, number)
    order = list(names)
    random.Random(f"order {cell.prompts}/{cell.batch}/{number}").shuffle(order)
    before = _counters(arms.auto)
    runs, answers = {}, {}
    for name in order:
        runs[name], answers[name] = arms.run(name, prompts, cell.tokens)
    after = _counters(arms.auto)
    equal = sum(a == b for a, b in zip(answers["off"], answers["auto"], strict=True))
    return Round(number, runs, equal, len(prompts), *(b - a for a, b in zip(before, after, strict=True)))


def _counters(auto: Speculation) -> tuple[int, int, int, int]:
    """(emitted tokens and rows while on, steps that were on, steps) so far."""
    account = auto.account
    return (
        account.statistics.emitted,
        account.statistics.verifications,
        account.steps[True],
        sum(account.steps.values()),
    )


def near_lengths(cell: Cell, lengths: Sequence[str], screen: int, near: int) -> list[str]:
    """The lengths that the next round runs: all while screening, then those that were best in it."""
    if not (lengths and screen) or len(cell.rounds) < screen:
        return list(lengths)
    speeds = rates(cell.table(lengths, cell.rounds[:screen]), WALL)
    return sorted((lengths[place] for place in np.argsort(-speeds)[:near]), key=int)


def measure(arms: Arms, cell: Cell, args: argparse.Namespace, until: float) -> Iterator[Round]:
    """Run what is missing of a cell's rounds, after one that does not count; ends early at the clock `until`."""
    done = len(cell.rounds)
    if done >= args.rounds:
        return
    names = ["off", "auto", *near_lengths(cell, arms.lengths, args.screen, args.near)]
    run_round(arms, cell, -1 - cell.first - done, names)
    longest = 0.0
    for number in range(cell.first + done, cell.first + args.rounds):
        begin = time.perf_counter()
        if begin + longest > until:
            return
        names = ["off", "auto", *near_lengths(cell, arms.lengths, args.screen, args.near)]
        cell.rounds.append(run_round(arms, cell, number, names))
        longest = max(longest, time.perf_counter() - begin)
        yield cell.rounds[-1]


def summary(cell: Cell, lengths: Sequence[str], screen: int, near: int) -> dict[str, Any]:
    """What a cell says; `kept` is whether it kept the bars."""
    both = cell.table(("off", "auto"))
    floor = 1.5 if (cell.prompts, cell.batch) == ("quote", 1) else 0.98
    found: dict[str, Any] = {
        "prompts": cell.prompts,
        "batch": cell.batch,
        "waves": cell.waves,
        "rounds": len(both),
        "off": float(rates(both, WALL)[0]),
        "auto": float(rates(both, WALL)[1]),
        "ratio": to_first(both),
        "interval": interval(both, to_first),
        "rounds' ratios": np.quantile(
            both[:, 1, 0] * both[:, 0, 1] / (both[:, 0, 0] * both[:, 1, 1]), [0, 0.5, 1]
        ).tolist(),
        "ratio of processor time": to_first(both, CPU),
        "equal": sum(r.equal for r in cell.rounds),
        "answers": sum(r.answers for r in cell.rounds),
        "on": sum(r.on for r in cell.rounds) / max(1, sum(r.steps for r in cell.rounds)),
        "accepted length": sum(r.emitted for r in cell.rounds) / max(1, sum(r.rows for r in cell.rounds)),
    }
    found["kept"] = found["ratio"] >= floor
    if lengths and len(cell.rounds) >= screen:
        everything = cell.table(("off", *lengths), cell.rounds[:screen])
        if len(everything):
            speeds = rates(everything, WALL)
            found["screened"] = dict(zip(lengths, (speeds[1:] / speeds[0]).tolist(), strict=True))
        found |= _against_fixed(cell, near_lengths(cell, lengths, screen, near), screen)
        found["kept"] &= found.get("to best", 1.0) >= 0.97
    return found


def _against_fixed(cell: Cell, near: Sequence[str], screen: int) -> dict[str, Any]:
    """The comparison with the best fixed length on the rounds after the screening; empty with fewer than four."""
    arms = ("auto", "off", *near)
    table = cell.table(arms, cell.rounds[screen:])
    if len(table) < 4:
        return {}
    speeds = rates(table, WALL)
    ratio, chosen = to_best(table)
    return {
        "compared rounds": len(table),
        "fixed": dict(zip(near, (speeds[2:] / speeds[1]).tolist(), strict=True)),
        "best": ["0" if arms[place] == "off" else arms[place] for place in chosen],
        "to best": ratio,
        "to best interval": interval(table, lambda drawn: to_best(drawn)[0]),
        "to best of processor time": to_best(table, CPU)[0],
    }


def show(found: dict[str, Any]) -> None:
    """A line, and two more for fixed lengths."""
    low, high = found["interval"]
    least, middle, most = found["rounds' ratios"]
    print(
        f"{found['prompts']:6} {found['batch']:5} {found['waves']:5} {found['rounds']:6} {found['off']:8.1f} {found['auto']:8.1f}"
        f" {found['ratio']:6.3f} ({low:.3f} to {high:.3f}) {least:5.2f} {middle:5.2f} {most:5.2f}"
        f" {found['ratio of processor time']:6.3f} {found['equal']:4}/{found['answers']:<4} {found['on']:4.0%}"
        f" {found['accepted length']:5.2f}",
        flush=True,
    )
    if "screened" in found:
        lengths = "  ".join(f"{length}: {ratio:.3f}" for length, ratio in found["screened"].items())
        print(f"       screening, lengths to off: {lengths}")
    if "to best" in found:
        lengths = "  ".join(f"{length}: {ratio:.3f}" for length, ratio in found["fixed"].items())
        low, high = found["to best interval"]
        best = " and ".join(found["best"])
        print(
            f"       {found['compared rounds']} rounds more, lengths to off: {lengths}; auto to the best ({best},"
            f" chosen on the other half) {found['to best']:.3f} ({low:.3f} to {high:.3f}),"
            f" processor time {found['to best of processor time']:.3f}",
            flush=True,
        )


def load(path: Path | None, cell: Cell) -> None:
    """Take the cell's rounds from the file, in their order."""
    if path is None or not path.exists():
        return
    name = _name(cell)
    for line in path.read_text().splitlines():
        kept = json.loads(line)
        if kept.pop("cell") == name:
            cell.rounds.append(Round(**kept))


def _name(cell: Cell) -> str:
    return f"{cell.prompts}/{cell.batch}/{cell.waves}/{cell.tokens}/{cell.first}"


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments of a call."""
    parser = argparse.ArgumentParser(
        prog="specdec-cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", choices=KINDS, nargs="+", default=["quote", "free"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--waves", type=int, default=1, help="answers for each place in the batch")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="fixed draft lengths to compare with")
    parser.add_argument("--screen", type=int, default=2, help="rounds that run every length")
    parser.add_argument("--near", type=int, default=3, help="lengths that later rounds run")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=8, help="of every cell, those in --keep included")
    parser.add_argument("--first", type=int, default=0, help="number of the first round; it decides the prompts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round that would end later")
    parser.add_argument("--keep", type=Path, help="file of rounds, read first and added to")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative", default="auto")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def run(argv: list[str]) -> int:
    """Print the table, or JSON lines. 1 if a cell misses its bar."""
    args = parse(argv)
    until = time.perf_counter() + args.seconds
    kept = True
    for batch in args.batch:
        arms = Arms(batch, args.speculative, args.dtype, args.lengths)
        if not args.json and batch == args.batch[0]:
            info = arms.llm.info
            print(
                f"{info.device}, {info.dtype}; output tokens/s; ratios of auto to off: all rounds, then of single ones"
            )
            print(
                "prompt batch waves rounds      off     auto  ratio (of resampled)   least median most   CPU   equal",
                end="",
            )
            print("      on accepted length")
        for kind in args.prompts:
            cell = Cell(kind, batch, args.waves, args.tokens, args.first)
            load(args.keep, cell)
            for made in measure(arms, cell, args, until):
                if args.keep is not None:
                    with args.keep.open("a") as file:
                        file.write(json.dumps({"cell": _name(cell)} | asdict(made)) + "\n")
            if not cell.rounds:
                continue
            found = summary(cell, arms.lengths, args.screen, args.near)
            kept &= found["kept"]
            print(json.dumps(found), flush=True) if args.json else show(found)
        arms.close()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
