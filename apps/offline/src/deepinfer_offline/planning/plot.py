"""Hit rate over cache size, as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from deepinfer_offline.job.errors import JobError
from deepinfer_offline.planning.report import PlanReport

_SERIES = (
    ("arrival_lru", "as it comes, LRU", "#b3561d"),
    ("planned_lru", "planned, LRU", "#1d6fb3"),
    ("planned_next_use", "planned, next-use", "#2a8f4d"),
)
_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 44, 60


def write_plot(report: PlanReport, path: Path) -> None:
    """Write the plot.

    Args:
        report: what to draw.
        path: ends in `.svg` (needs nothing) or `.png` (needs matplotlib).

    Raises:
        JobError: another ending, a folder that is not there, or matplotlib is missing.
    """
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise JobError(f"--plot {path} must end in .svg or .png")
    try:
        if kind == ".svg":
            path.write_text(_svg(report), encoding="utf-8")
        else:
            _write_png(report, path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from error


def _write_png(report: PlanReport, path: Path) -> None:
    try:
        from matplotlib.figure import Figure  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise JobError("a PNG needs matplotlib: pip install matplotlib (an .svg needs nothing)") from error
    figure = Figure(figsize=(_WIDTH / 100, _HEIGHT / 100), dpi=150)
    axes = figure.add_subplot()
    sizes = [size.cache_blocks for size in report.sizes]
    for field, label, color in _SERIES:
        rates = [100 * getattr(size, field) for size in report.sizes]
        axes.plot(sizes, rates, marker="o", color=color, label=label, linestyle=(_dash(field) and "--") or "-")
    axes.axhline(100 * report.bound, color="#666666", linestyle=":", label=f"bound {report.bound:.1%}")
    axes.set(
        xscale="log",
        ylim=(0, _top(report)),
        xlabel=_axis(report),
        ylabel="hit rate (% of blocks)",
        title=_title(report),
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def _svg(report: PlanReport) -> str:
    scale = _Scale(report)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{_title(report)}</text>',
        f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{_axis(report)}</text>',
    ]
    for step in range(6):
        y, rate = scale.y(scale.top * step / 5), scale.top * step / 5
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate:.0f} %</text>')
    for size in report.sizes:
        x = scale.x(size.cache_blocks)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{size.cache_blocks:,}</text>'
        )
    bound = scale.y(100 * report.bound)
    parts.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bound:.1f}" y2="{bound:.1f}" stroke="#666666" stroke-dasharray="2 3"/>'
    )
    parts.append(f'<text x="{_LEFT + 6}" y="{bound - 6:.1f}" fill="#666666">bound {report.bound:.1%}</text>')
    for place, (field, label, color) in enumerate(_SERIES):
        points = " ".join(
            f"{scale.x(size.cache_blocks):.1f},{scale.y(100 * getattr(size, field)):.1f}" for size in report.sizes
        )
        dash = _dash(field)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts.extend(
            f'<circle cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="3" fill="{color}"/>'
            for point in points.split()
        )
        y = _HEIGHT - _BOTTOM - 14 - 18 * place
        parts.append(f'<text x="{_WIDTH - _RIGHT - 8}" y="{y}" text-anchor="end" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Data to picture coordinates: cache size logarithmic, rate linear."""

    def __init__(self, report: PlanReport) -> None:
        sizes = [math.log(size.cache_blocks) for size in report.sizes]
        self.low, self.high = min(sizes), max(sizes)
        self.top = _top(report)

    def x(self, blocks: int) -> float:
        span = _WIDTH - _LEFT - _RIGHT - 40
        share = 0.5 if self.high == self.low else (math.log(blocks) - self.low) / (self.high - self.low)
        return _LEFT + 20 + span * share

    def y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / self.top


def _dash(field: str) -> str:
    """Planned LRU and next-use often coincide: the second is dashed so that both are seen."""
    return ' stroke-dasharray="6 5"' if field == "planned_next_use" else ""


def _top(report: PlanReport) -> float:
    return max(10.0, math.ceil(100 * report.bound / 10 + 0.5) * 10)


def _axis(report: PlanReport) -> str:
    return f"cache size (blocks of {report.block_size} tokens)"


def _title(report: PlanReport) -> str:
    return f"Prefix hit rate: {report.requests:,} requests, {report.blocks:,} blocks"
