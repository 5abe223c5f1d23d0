"""The asynchronous loop against the synchronous one on the CPU engine: same prompts, a fresh process each, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from cpu_work import CASES, workload

TURNS = ("async", "sync", "sync", "async")  # a machine that drifts drifts for both
NOISE = 0.05  # two runs of one loop differ by so much


def run(argv: list[str]) -> int:
    """Measure and print; returns 1 if the asynchronous loop is slower by more than two runs of one loop differ."""
    parser = argparse.ArgumentParser(prog="deepinfer bench loop-async", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each case in each process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=("async", "sync"), help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.one:
        print(json.dumps(measure(asked.one, asked.cases.split(","), asked.rounds)))
        return 0
    found: dict[str, dict[str, list[float]]] = {"async": {}, "sync": {}}
    for mode in TURNS:
        command = [sys.executable, __file__, "--one", mode, "--cases", asked.cases, "--rounds", str(asked.rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for case, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            found[mode].setdefault(case, []).extend(seconds)
    rows = []
    for case in asked.cases.split(","):
        medians = {mode: statistics.median(found[mode][case]) for mode in found}
        spread = max((max(f[case]) - min(f[case])) / medians[mode] for mode, f in found.items())
        rows.append({"case": case, **medians, "ratio": medians["sync"] / medians["async"], "spread": spread})
    slower = [row["case"] for row in rows if row["ratio"] < 1 - max(NOISE, row["spread"])]
    if asked.json:
        print(json.dumps({"rows": rows, "met": not slower}))
        return 1 if slower else 0
    print("case       async s   sync s   sync/async  spread")
    for row in rows:
        print(f"{row['case']:8} {row['async']:9.2f} {row['sync']:8.2f} {row['ratio']:11.3f} {row['spread']:7.1%}")
    print(f"slower than the spread in: {', '.join(slower)}" if slower else "met: not slower than two runs differ")
    return 1 if slower else 0


def measure(mode: str, cases: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case under one loop; other prompts every round, so that the prefix cache does not answer."""
    from deepinfer_offline import LLM, SamplingParams

    shape = {"engine": "native", "device": "cpu", "dtype": "bfloat16", "max_model_len": 1024, "kv_memory": 1 << 30}
    llm = LLM(async_scheduling=mode == "async", **shape)
    seconds: dict[str, list[float]] = {}
    for case in cases:
        for turn in range(rounds + 1):
            prompts, new = workload(case, seed=turn)
            begin = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True), use_tqdm=False)
            if turn:  # the first warms the processor, the allocator and the kernels' threads
                seconds.setdefault(case, []).append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
