"""SmolLM2-135M on the CPU in bfloat16: shared, unique and single prompts, beside vLLM and transformers if they are there.

Peers need an environment of their own: a folder with `venv/` (vLLM's CPU build and transformers) and `smollm2/` (the model
as a Hugging Face folder). Every engine runs in a fresh process on the same ids, DeepInfer before and after the peers, so
that a machine that speeds up or slows down meanwhile is seen in the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cpu_work import CASES

_WORK = Path(__file__).with_name("cpu_work.py")
_BARS = {("shared", "vllm"): 1.0, ("unique", "vllm"): 1.0, ("single", "vllm"): 1.0, ("shared", "transformers"): 6.0}
_START_BAR = 10.0  # seconds from the start of the process to the end of the first step
_TIMEOUT = 1800  # seconds of one engine


def run(argv: list[str]) -> int:
    """Measure, print, and compare with the bars. Returns 1 if a bar that could be measured is missed."""
    parser = argparse.ArgumentParser(prog="deepinfer bench cpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="model of DeepInfer (name, folder or GGUF file)"
    )
    parser.add_argument("--peers", type=Path, help="folder with the peers' venv/ and smollm2/")
    parser.add_argument("--peer", default="vllm,transformers", help="which peers to run")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each case (DeepInfer: twice as many)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    lines = _engine_lines("deepinfer", asked, Path(sys.executable), asked.model)
    for peer in asked.peer.split(",") if asked.peers else ():
        lines += _engine_lines(peer, asked, asked.peers / "venv" / "bin" / "python", str(asked.peers / "smollm2"))
    if asked.peers:
        lines += _engine_lines("deepinfer", asked, Path(sys.executable), asked.model)
    report = _report(lines, asked.cases.split(","))
    print(json.dumps(report) if asked.json else _text(report, measured=asked.peers is not None))
    return 0 if all(bar["met"] for bar in report["bars"]) else 1


def _engine_lines(engine: str, asked: argparse.Namespace, python: Path, model: str) -> list[dict[str, Any]]:
    command = [str(python), str(_WORK), "--engine", engine, "--model", model, "--cases", asked.cases]
    command += ["--rounds", str(asked.rounds), "--spawned", str(time.time())]
    environment = dict(os.environ)
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if engine == "vllm" and openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)  # as vLLM's own instructions say
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{engine} ended with status {done.returncode}: {done.stderr.strip()[-800:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]


def _report(lines: list[dict[str, Any]], cases: list[str]) -> dict[str, Any]:
    engines = list(dict.fromkeys(line["engine"] for line in lines))
    results = []
    for case in cases:
        for engine in engines:
            found = [line for line in lines if line["engine"] == engine and line.get("case") == case]
            seconds = statistics.median(line["s"] for line in found)
            spread = [min(line["s"] for line in found), max(line["s"] for line in found)]
            row = {"case": case, "engine": engine, "s": seconds, "spread_s": spread, "rounds": len(found)}
            results.append({**row, "tok_s": round(found[0]["tokens_out"] / seconds, 1)})
    starts = {e: max(line["start_s"] for line in lines if line["engine"] == e and "start_s" in line) for e in engines}
    return {"machine": _machine(), "start_s": starts, "results": results, "bars": _bars(results, starts)}


def _bars(results: list[dict[str, Any]], starts: dict[str, float]) -> list[dict[str, Any]]:
    seconds = {(row["case"], row["engine"]): row["s"] for row in results}
    bars = []
    for (case, peer), least in _BARS.items():
        if (case, peer) in seconds:
            ratio = seconds[case, peer] / seconds[case, "deepinfer"]
            bars.append({"bar": f"{case}: {least:g} x {peer}", "value": round(ratio, 2), "met": ratio >= least})
    start = starts["deepinfer"]
    bars.append({"bar": f"first step within {_START_BAR:g} s", "value": start, "met": start <= _START_BAR})
    return bars


def _text(report: dict[str, Any], *, measured: bool) -> str:
    lines = [report["machine"], f"{'case':<8} {'engine':<13} {'seconds':>8} {'spread':>15} {'tok/s':>8}"]
    for row in report["results"]:
        spread = f"{row['spread_s'][0]:.2f}-{row['spread_s'][1]:.2f}"
        lines.append(f"{row['case']:<8} {row['engine']:<13} {row['s']:>8.2f} {spread:>15} {row['tok_s']:>8.0f}")
    lines += [f"start to first step: {engine} {seconds:.1f} s" for engine, seconds in report["start_s"].items()]
    for bar in report["bars"]:
        lines.append(f"{'met   ' if bar['met'] else 'MISSED'} {bar['bar']}: {bar['value']}")
    if not measured:
        lines.append("peers were not measured: give their folder with --peers")
    return "\n".join(lines)


def _machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = found[0].partition(":")[2].strip() if found else name
    return f"{name}, {os.cpu_count()} processors, bfloat16, greedy, end-of-sequence ignored"
