"""What a job did: one JSON object for machines, one table for people."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer_offline.engine.base import EngineInfo, EngineStats
from deepinfer_offline.engine.options import format_bytes
from deepinfer_offline.job.codec import dumps
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.loop import Tally
from deepinfer_offline.job.progress import clock
from deepinfer_offline.job.window import PrefixBound

_PACKAGES = ("deepinfer-offline", "deepinfer-sched", "deepinfer-cache", "deepinfer-specdec", "deepinfer-structured")
_LIBRARIES = ("torch", "transformers", "numpy", "vllm", "xgrammar", "llguidance", "triton")


@dataclass(slots=True)
class Facts:
    """What the job collects on its way; `report` arranges it.

    `records` are the lines that are not blank; `resumed` of them were answered by an earlier run, `deduplicated` copy
    another line's answer.
    """

    input: str
    output: str
    records: int = 0
    resumed: int = 0
    deduplicated: int = 0
    answered: int = 0
    failed: int = 0
    finished: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    bound: PrefixBound = field(default_factory=PrefixBound)
    info: EngineInfo | None = None
    stats: EngineStats | None = None
    options: dict[str, Any] = field(default_factory=dict)


def make_report(facts: Facts) -> dict[str, Any]:
    """Arrange the report. Rates of things that did not happen are null."""
    tally, stats = facts.tally, facts.stats or EngineStats()
    return {
        "input": facts.input,
        "output": facts.output,
        "finished": facts.finished,
        "counts": _counts(facts),
        "tokens": {
            "input": tally.prompt_tokens,
            "input_cached": tally.cached_tokens,
            "input_computed": stats.computed_prompt_tokens,
            "output": tally.completion_tokens,
        },
        **_speed(facts, stats),
        "speculation": _speculation(stats),
        "structured_output": {
            "answers": tally.constrained,
            "complete": tally.constrained_complete,
            "cut_by_length": tally.constrained - tally.constrained_complete,
            "tool_calls": tally.tool_calls,
            "notes": stats.extra.get("grammar_notes", {}),
        },
        "answers_cut_by_length": tally.by_length,
        "engine": asdict(facts.info) if facts.info else None,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "seconds": {**facts.seconds, "total": sum(facts.seconds.values())},
        "peak_memory_bytes": {"process": peak_memory(), "device": _device_peak(facts.info)},
        "options": facts.options,
        "versions": versions(),
    }


def _counts(facts: Facts) -> dict[str, int]:
    tally = facts.tally
    return {
        "total": facts.records,
        "answered": facts.answered,
        "failed": facts.failed,
        "resumed": facts.resumed,
        "computed": tally.answered + tally.refused + tally.failed,
        "deduplicated": facts.deduplicated,
        "refused": tally.refused,
        "engine_failures": tally.failed,
    }


def _speculation(stats: EngineStats) -> dict[str, Any]:
    """What drafts did. `accepted_length`: tokens emitted per verification step, the bonus included; a verification step is one
    sequence's row in one step that verified at least one draft. None where nothing was verified: speculation was off.
    """
    counted = {
        "drafter": None,
        "reason": None,
        "accepted_length": _ratio(stats.accepted_tokens + stats.verify_steps, stats.verify_steps),
        "acceptance_rate": _ratio(stats.accepted_tokens, stats.drafted_tokens),
        "verified_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }
    return counted | stats.extra.get("speculation", {})


def _speed(facts: Facts, stats: EngineStats) -> dict[str, Any]:
    tally, running = facts.tally, facts.seconds.get("running", 0.0)
    hit_rate = _ratio(stats.cached_tokens, stats.prompt_tokens)
    return {
        "tokens_per_second": {
            "total": _ratio(tally.prompt_tokens + tally.completion_tokens, running),
            "output": _ratio(tally.completion_tokens, running),
            "prefill": _ratio(stats.computed_prompt_tokens, stats.prefill_seconds),
            "decode": _ratio(stats.generated_tokens, stats.decode_seconds),
        },
        "prefix_cache": {
            "hit_rate": hit_rate,
            "bound": facts.bound.rate if facts.bound.tokens else None,
            "of_bound": _ratio(hit_rate or 0.0, facts.bound.rate),
            "windows": facts.bound.windows,
        },
        "kv_store": stats.extra.get("kv_store"),
        "engine_seconds": {"prefill": stats.prefill_seconds, "decode": stats.decode_seconds},
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report beside its place and move it there: it is whole, or what was there before stays.

    Raises:
        JobError: the file cannot be written.
    """
    place = Path(os.path.realpath(path))  # a link stays a link
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as stream:  # never over a file of somebody else's
            stream.write(dumps(report) + b"\n")
        partial.replace(place)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            partial.unlink(missing_ok=True)
        raise JobError(f"cannot write the report {path}: {error.strerror}") from error


def print_summary(console: Console, report: dict[str, Any]) -> None:
    """Print the table at a run's end."""
    counts, tokens, speed = report["counts"], report["tokens"], report["tokens_per_second"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("answered", f"{counts['answered']:,} of {counts['total']:,} lines" + _aside(counts))
    if counts["failed"]:
        table.add_row("failed", f"{counts['failed']:,} (their lines say why)", style="red")
    if tokens["output"]:
        table.add_row("tokens", f"{tokens['input']:,} in, {tokens['output']:,} out")
        table.add_row("speed", f"{speed['output']:,.1f} new tokens/s, {speed['total']:,.1f} with the prompts'")
        cache = report["prefix_cache"]
        if cache["bound"] is not None and cache["hit_rate"] is not None:
            table.add_row("prefix cache", f"{cache['hit_rate']:.1%} of prompt tokens (at best {cache['bound']:.1%})")
    store = report["kv_store"]
    if store:
        table.add_row("KV store", f"{store['loaded_pages']:,} pages read, {store['saved_pages']:,} written")
    if draft := describe_speculation(report["speculation"]):
        table.add_row("speculation", escape(draft))
    form = report["structured_output"]
    if form["answers"]:
        table.add_row("structured", f"{form['complete']:,} of {form['answers']:,} complete")
    phases = ", ".join(f"{name} {clock(value)}" for name, value in report["seconds"].items() if name != "total")
    table.add_row("time", f"{clock(report['seconds']['total'])} ({phases})")
    table.add_row("peak memory", format_bytes(report["peak_memory_bytes"]["process"]))
    table.add_row("results", escape(report["output"]))
    console.print(table)


def describe_speculation(found: dict[str, Any]) -> str:
    """One line on what drafts did and why, of the report's field; empty if nothing was asked for and nothing was done."""
    said = []
    if found["drafter"]:
        said.append(
            found["reason"]
            if found["reason"].startswith(found["drafter"])
            else f"{found['drafter']}, {found['reason']}"
        )
    if found["verified_tokens"]:
        said.append(f"{found['accepted_length']:.2f} tokens a verification step")
    shares = [f"{share:.0%}" for share in found.get("accepted_share_by_position", ()) if share is not None]
    if shares:
        said.append(f"accepted by position {' '.join(shares)}")
    if "outcome" in found:
        said.append(found["outcome"])
    return "; ".join(said)


def peak_memory() -> int:
    """Most bytes of memory this process held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def versions() -> dict[str, str]:
    """Versions of what took part, by package; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *_LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _aside(counts: dict[str, int]) -> str:
    parts = [
        f"{counts[name]:,} {word}"
        for name, word in (("resumed", "from before"), ("deduplicated", "repeats"))
        if counts[name]
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _device_peak(info: EngineInfo | None) -> int | None:
    torch = sys.modules.get("torch")
    if info is None or torch is None or not info.device.startswith("cuda") or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())
