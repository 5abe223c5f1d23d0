"""What planning is worth in the engine: one job, `--order input` and `--order prefix`, KV memory for three groups."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # SmolLM2-135M in bfloat16: layers, K and V, KV heads, width, bytes
BAR_POINTS, BAR_RATIO = 0.01, 1.5


def write_job(path: Path, groups: int, members: int, shared: int, own: int, output: int) -> None:
    """A shuffled batch file of token ids: each group shares `shared` tokens, each request has `own` more."""
    rng = random.Random(0)
    lines = []
    for group in range(groups):
        prefix = [rng.randrange(1_000, 49_000) for _ in range(shared)]
        for member in range(members):
            prompt = prefix + [rng.randrange(1_000, 49_000) for _ in range(own)]
            body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
            name = f"{group}-{member}"
            lines.append(json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}))
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n")


def run_job(job: Path, order: str, kv_bytes: int, dtype: str, model: list[str]) -> dict[str, Any]:
    """Run the job in a process of its own; its report."""
    report = job.with_name(f"report-{order}.json")
    words = [
        sys.executable,
        "-m",
        "deepinfer_offline.cli.main",
        "run",
        str(job),
        "-o",
        str(job.with_name(f"out-{order}.jsonl")),
    ]
    words += ["--engine", "native", "--device", "cpu", "--dtype", dtype, "--order", order, "--kv-memory", str(kv_bytes)]
    words += ["--report", str(report), "--quiet", "--fresh", *model]
    subprocess.run(words, check=True)
    return json.loads(report.read_text())


def run(argv: list[str]) -> int:
    """Print hit rate against the bound and wall seconds of both orders. Returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="cache-order", description=__doc__)
    parser.add_argument("--groups", type=int, default=40)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--shared", type=int, default=600)
    parser.add_argument("--own", type=int, default=40)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", help="instead of the default model; its KV bytes a token are taken as SmolLM2's")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    tokens = 3 * (args.shared + args.members * (args.own + args.output + 16))
    kv_bytes = tokens * KV_BYTES_PER_TOKEN * (2 if args.dtype == "float32" else 1)
    model = ["--model", args.model] if args.model else []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.jsonl"
        write_job(job, args.groups, args.members, args.shared, args.own, args.output)
        reports = {order: run_job(job, order, kv_bytes, args.dtype, model) for order in ("input", "prefix")}
    rows = {
        order: {
            "hit_rate": report["prefix_cache"]["hit_rate"],
            "bound": report["prefix_cache"]["bound"],
            "seconds": report["seconds"]["total"],
        }
        for order, report in reports.items()
    }
    ratio = rows["input"]["seconds"] / rows["prefix"]["seconds"]
    gap = rows["prefix"]["bound"] - rows["prefix"]["hit_rate"]
    if args.json:
        print(json.dumps({**rows, "ratio": ratio, "kv_bytes": kv_bytes}))
    else:
        count = args.groups * args.members
        print(f"{count} requests in {args.groups} groups, {args.shared} + {args.own} tokens, KV for {tokens:,}")
        for order, row in rows.items():
            print(
                f"  --order {order:7} hits {row['hit_rate']:.1%} of {row['bound']:.1%} possible   {row['seconds']:.1f} s"
            )
        print(f"  planned is x{ratio:.2f} as fast (bar x{BAR_RATIO}), {100 * gap:.2f} points below the bound (bar 1)")
    return int(gap > BAR_POINTS or ratio < BAR_RATIO)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
