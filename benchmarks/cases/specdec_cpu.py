"""Speculation against plain decoding: SmolLM2 on the CPU, quote-style prompts and free chat, batches of 1, 4, 16, 64.

Every cell runs its own prompts in both engines, alternating, so neither sees an answer twice. Prints output tokens per
second, the ratio and whether the greedy tokens are equal (they are in float32; in bfloat16 a near-tie may fall
differently in another batch shape).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass

from deepinfer_offline import LLM, SamplingParams

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
    """One line of the table."""

    prompts: str
    batch: int
    off: float  # output tokens/s
    on: float
    equal: int  # answers with the same tokens
    answers: int
    accepted_length: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


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


def run(llm: LLM, prompts: list[str], tokens: int) -> tuple[float, list[list[int]]]:
    """(output tokens per second, answers)."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    begin = time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(max_tokens=tokens, temperature=0.0), use_tqdm=False)
    seconds = time.perf_counter() - begin
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, ids)) / seconds, ids


def measure(kind: str, batch: int, engines: dict[str, LLM], tokens: int, rounds: int) -> Cell:
    """Median over rounds; each round has fresh prompts and the order of the engines changes."""
    make = quote_prompt if kind == "quote" else free_prompt
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    equal = 0
    for number in range(rounds):
        rng = random.Random(f"{kind}/{batch}/{number}")
        prompts = [make(rng) for _ in range(batch)]
        answers = {}
        for name in sorted(engines, reverse=bool(number % 2)):
            speed, answers[name] = run(engines[name], prompts, tokens)
            speeds[name].append(speed)
        equal += sum(a == b for a, b in zip(*answers.values(), strict=True))
    stats = engines["on"].stats().extra["speculation"]
    off, on = (sorted(speeds[name])[rounds // 2] for name in ("off", "on"))
    return Cell(kind, batch, off, on, equal, batch * rounds, stats["accepted_length"])


def main() -> None:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", choices=("quote", "free"), nargs="+", default=["quote", "free"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative", default="auto")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engines = {
        name: LLM(speculative=args.speculative if name == "on" else "off", dtype=args.dtype) for name in ("off", "on")
    }
    for llm in engines.values():
        run(llm, [free_prompt(random.Random("warm"))], 8)
    if not args.json:
        print(f"{engines['off'].info.device}, {engines['off'].info.dtype}; output tokens/s")
        print("prompts  batch      off       on  ratio   equal  accepted length so far")
    for kind in args.prompts:
        for batch in args.batch:
            cell = measure(kind, batch, engines, args.tokens, args.rounds)
            if args.json:
                print(json.dumps(asdict(cell) | {"ratio": cell.ratio}), flush=True)
                continue
            numbers = f"{batch:5} {cell.off:8.1f} {cell.on:8.1f} {cell.ratio:6.2f} {cell.equal:4}/{cell.answers:<4}"
            print(f"{kind:8} {numbers} {cell.accepted_length:.2f}", flush=True)


if __name__ == "__main__":
    main()
