"""The report as text for a person."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_offline.planning.report import PlanReport


def render(report: PlanReport) -> str:
    """Lines of plain text, at most 100 characters wide where numbers allow."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: PlanReport) -> Iterator[str]:
    saved = report.bound * report.blocks * report.block_size
    yield (
        f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, {report.blocks:,} blocks of "
        f"{report.block_size} tokens{f' (engine {report.engine})' if report.engine else ''}"
    )
    yield f"endless cache: {report.bound:.1%} of the blocks are found, {saved:,.0f} prompt tokens need no prefill"
    yield ""
    yield "                            hit rate                      prefill tokens"
    yield "cache blocks     tokens  as it comes  planned  next-use      planning saves"
    for size in report.sizes:
        gain = (max(size.planned_lru, size.planned_next_use) - size.arrival_lru) * report.blocks * report.block_size
        yield (
            f"{size.cache_blocks:>12,} {size.cache_blocks * report.block_size:>10,} {size.arrival_lru:>12.1%} "
            f"{size.planned_lru:>8.1%} {size.planned_next_use:>9.1%} {gain:>19,.0f}"
        )
    if report.shared:
        yield ""
        yield "largest shared prefixes"
        yield "    tokens  requests  saves tokens  first seen in"
        for prefix in report.shared:
            yield (
                f"{prefix.tokens:>10,} {prefix.requests:>9,} {prefix.saved_tokens:>13,}  request {prefix.example + 1:,}"
            )
    if report.advice:
        yield ""
        yield "advice"
        for sentence in report.advice:
            yield f"- {sentence}"
