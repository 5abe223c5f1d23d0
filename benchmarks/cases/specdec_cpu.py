"""Speculation against plain decoding: SmolLM2 on the CPU, quote-style prompts, free chat and both, batches of 1, 4, 16, 64.

Every round has fresh prompts, and every engine runs them in turn, so none sees an answer twice; ratios are taken within a
round, and their median counts. `--waves 4` gives each place in the batch four answers to make, as in a job whose queue is
not empty. `--lengths 0 1 2 3 4 5 6 7` sweeps fixed draft lengths beside `auto`, each with a drafter of its own. Greedy; in
bfloat16 a near-tie may fall differently in another batch shape, so answers need not be equal (in float32 they are).

Bars: auto at least 0.98 of off in every cell and 1.5 for quotes at batch 1; at least 0.97 of the best fixed length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from deepinfer_offline import LLM, SamplingParams
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


@dataclass(frozen=True)
class Cell:
    """One line of the table; speeds are medians over rounds, output tokens a second."""

    prompts: str
    batch: int
    waves: int
    off: float
    auto: float
    ratio: float  # auto to off, median over rounds
    lowest: float
    highest: float
    equal: int  # answers with the same tokens
    answers: int
    on_share: float  # steps with speculation on
    accepted_length: float  # in those
    fixed: dict[int, float]  # length -> ratio to off, median over rounds

    @property
    def best_fixed(self) -> float | None:
        return max(self.fixed.values()) if self.fixed else None

    @property
    def kept(self) -> bool:
        """Whether the bars were met."""
        floor = 1.5 if (self.prompts, self.batch) == ("quote", 1) else 0.98
        return self.ratio >= floor and (self.best_fixed is None or self.ratio >= 0.97 * self.best_fixed)


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


def mixed_prompt(rng: random.Random) -> str:
    """One or the other."""
    return rng.choice((quote_prompt, free_prompt))(rng)


PROMPTS: dict[str, Callable[[random.Random], str]] = {"quote": quote_prompt, "free": free_prompt, "mixed": mixed_prompt}


class Engines:
    """Plain, automatic and forced decoding over one model, a batch size at a time. No prefix caching: the forced engine runs
    the same prompts once a length.
    """

    def __init__(self, batch: int, speculative: str, dtype: str, lengths: list[int]) -> None:
        def make(mode: str) -> LLM:
            return LLM(speculative=mode, dtype=dtype, max_num_seqs=batch, enable_prefix_caching=False)

        self.off, self.auto = make("off"), make(speculative)
        self._forced = make(speculative) if lengths else None
        self._drafters = {length: create_drafter("suffix") for length in lengths}
        self.names = ["off", "auto", *lengths]
        for name in self.names:
            self.run(name, [free_prompt(random.Random(f"warm {place}")) for place in range(batch)], 8)

    def run(self, name: str | int, prompts: list[str], tokens: int) -> tuple[float, list[list[int]]]:
        """(output tokens per second, answers) of an engine: `off`, `auto` or a draft length."""
        if isinstance(name, int):
            assert self._forced is not None
            llm = self._forced
            llm._engine._parts.speculation.force(name, self._drafters[name])  # type: ignore[union-attr]
        else:
            llm = self.off if name == "off" else self.auto
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        begin = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(max_tokens=tokens, temperature=0.0), use_tqdm=False)
        seconds = time.perf_counter() - begin
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return sum(map(len, ids)) / seconds, ids

    def counters(self) -> tuple[int, int, float]:
        """(emitted tokens, verification steps, steps that were on) of the automatic engine so far."""
        found = self.auto.stats().extra["speculation"]
        steps = self.auto.stats().steps
        return found["emitted_tokens"], found["verification_steps"], found["on_share_of_steps"] * steps

    def close(self) -> None:
        for llm in (self.off, self.auto, self._forced):
            if llm is not None:
                llm.close()


def measure(engines: Engines, kind: str, batch: int, args: argparse.Namespace) -> Cell:
    """All rounds of a cell. The order of the engines changes from round to round."""
    speeds: dict[str | int, list[float]] = {name: [] for name in engines.names}
    equal = 0
    emitted, rows, on = engines.counters()
    steps = engines.auto.stats().steps
    for number in range(args.first_round, args.first_round + args.rounds):
        rng = random.Random(f"{kind}/{batch}/{number}")
        prompts = [PROMPTS[kind](rng) for _ in range(batch * args.waves)]
        answers = {}
        order = engines.names if number % 2 else engines.names[::-1]
        for name in order:
            speed, answers[name] = engines.run(name, prompts, args.tokens)
            speeds[name].append(speed)
        equal += sum(a == b for a, b in zip(answers["off"], answers["auto"], strict=True))
    ratios = {name: [a / b for a, b in zip(found, speeds["off"], strict=True)] for name, found in speeds.items()}
    after = engines.counters()
    return Cell(
        kind,
        batch,
        args.waves,
        median(speeds["off"]),
        median(speeds["auto"]),
        median(ratios["auto"]),
        min(ratios["auto"]),
        max(ratios["auto"]),
        equal,
        batch * args.waves * args.rounds,
        (after[2] - on) / max(1, engines.auto.stats().steps - steps),
        (after[0] - emitted) / max(1, after[1] - rows),
        {name: median(found) for name, found in ratios.items() if isinstance(name, int)},
    )


def show(cell: Cell) -> None:
    """One line, and one more for the sweep."""
    speeds = f"{cell.off:8.1f} {cell.auto:8.1f} {cell.ratio:6.3f} ({cell.lowest:.2f} to {cell.highest:.2f})"
    counts = f"{cell.equal:4}/{cell.answers:<4} {cell.on_share:4.0%} {cell.accepted_length:5.2f}"
    print(f"{cell.prompts:7} {cell.batch:5} {cell.waves:5} {speeds} {counts}", flush=True)
    if cell.best_fixed:
        lengths = "  ".join(f"{length}: {ratio:.3f}" for length, ratio in cell.fixed.items())
        print(
            f"        fixed lengths to off: {lengths}; auto to the best {cell.ratio / cell.best_fixed:.3f}", flush=True
        )


def run(argv: list[str]) -> int:
    """Print the table, or JSON lines. 1 if a cell misses its bar."""
    parser = argparse.ArgumentParser(prog="specdec-cpu", description=__doc__)
    parser.add_argument("--prompts", choices=tuple(PROMPTS), nargs="+", default=["quote", "free"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--waves", type=int, default=1, help="answers for each place in the batch")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="fixed draft lengths to sweep")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=0, help="for a cell in several calls")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    kept = True
    for batch in args.batch:
        engines = Engines(batch, args.speculative, args.dtype, args.lengths)
        if not args.json and batch == args.batch[0]:
            print(f"{engines.off.info.device}, {engines.off.info.dtype}; output tokens/s, ratio of auto to off")
            print("prompts batch waves      off     auto  ratio                   equal      on  accepted length")
        for kind in args.prompts:
            cell = measure(engines, kind, batch, args)
            kept &= cell.kept
            if args.json:
                print(json.dumps(asdict(cell) | {"kept": cell.kept}), flush=True)
            else:
                show(cell)
        engines.close()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
