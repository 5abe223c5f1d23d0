"""vLLM's stock CUDA wheel on a CPU, through DeepInfer's platform, beside vLLM's own CPU build.

Both run case `unique` of `cpu_work.py` on SmolLM2-135M in bfloat16, each in fresh processes on the same ids. The stock wheel
runs in the environment of this case, before and after the peer, so that a machine that changes its speed meanwhile shows
in the spread. The peer needs an environment of its own: a folder with `venv/` (vLLM's CPU build) and `smollm2/` (the model).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu

_WORK = Path(__file__).with_name("cpu_work.py")
_CASE, _BAR = "unique", 0.5
_TIMEOUT = 1800  # seconds of one engine


def run(argv: list[str]) -> int:
    """Measure both, print the ratio. Returns 1 if it is below the bar, 2 without vLLM's wheel or without the peer."""
    parser = argparse.ArgumentParser(prog="deepinfer bench vllm-cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder with the peer's venv/ and smollm2/")
    parser.add_argument("--rounds", type=int, default=2, help="measurements in each process")
    parser.add_argument("--only", choices=("stock", "peer"), help="measure one of the two, to be joined with --stock-s")
    parser.add_argument("--stock-s", type=float, nargs="*", help="seconds measured with --only stock a moment ago")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    if asked.peers is None or importlib.util.find_spec("vllm") is None:
        sys.stderr.write(
            "cannot run: it needs --peers DIR and vLLM's wheel (uv run --extra vllm deepinfer bench vllm-cpu)\n"
        )
        return 2
    model = str(asked.peers / "smollm2")
    pythons = {"stock": Path(sys.executable), "peer": asked.peers / "venv" / "bin" / "python"}
    lines: dict[str, list[dict[str, Any]]] = {"stock": [], "peer": []}
    for name in (asked.only,) if asked.only else ("stock", "peer", "stock"):
        lines[name] += measure(pythons[name], model, asked.rounds)
    report = _report(lines, asked.stock_s or [])
    sys.stdout.write((json.dumps(report) if asked.json else _text(report)) + "\n")
    return 0 if report["ratio"] is None or report["ratio"] >= _BAR else 1


def measure(python: Path, model: str, rounds: int) -> list[dict[str, Any]]:
    """Run the case in a fresh process; one line for its start and one for each round."""
    command = [str(python), str(_WORK), "--engine", "vllm", "--model", model, "--cases", _CASE, "--rounds", str(rounds)]
    environment = dict(os.environ) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)  # as vLLM's own instructions say
    done = subprocess.run(
        [*command, "--spawned", str(time.time())], env=environment, capture_output=True, text=True, timeout=_TIMEOUT
    )
    if done.returncode:
        raise RuntimeError(f"{python} ended with status {done.returncode}: {done.stderr.strip()[-800:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]


def _report(lines: dict[str, list[dict[str, Any]]], stock_seconds: list[float]) -> dict[str, Any]:
    seconds = {name: [line["s"] for line in found if "s" in line] for name, found in lines.items()}
    seconds["stock"] += stock_seconds
    starts = {name: [line["start_s"] for line in found if "start_s" in line] for name, found in lines.items()}
    medians = {name: statistics.median(found) if found else None for name, found in seconds.items()}
    ratio = medians["peer"] / medians["stock"] if medians["peer"] and medians["stock"] else None
    return {"machine": cpu._machine(), "seconds": seconds, "start_s": starts, "median_s": medians, "ratio": ratio}


def _text(report: dict[str, Any]) -> str:
    names = {"stock": "stock wheel, DeepInfer's platform", "peer": "vLLM's own CPU build"}
    lines = [report["machine"]]
    for name, about in names.items():
        if report["seconds"][name]:
            spread = " ".join(f"{s:.2f}" for s in report["seconds"][name])
            starts = " ".join(f"{s:.0f}" for s in report["start_s"][name]) or "-"
            lines.append(f"{about:<34} {report['median_s'][name]:6.2f} s (of {spread}), start {starts} s")
    if report["ratio"] is not None:
        verdict = "met" if report["ratio"] >= _BAR else "MISSED"
        lines.append(f"{_CASE}: x{report['ratio']:.2f} of the CPU build's speed, bar {_BAR}: {verdict}")
    return "\n".join(lines)
