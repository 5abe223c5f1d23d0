"""The report's account of speculation: one definition, and a reason when there was none."""

from __future__ import annotations

import io

import pytest
from deepinfer_offline.engine.base import EngineStats
from deepinfer_offline.job.report import Facts, describe_speculation, make_report, print_summary
from rich.console import Console


def printed(report: dict) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, report)
    return console.file.getvalue()  # type: ignore[union-attr]


def test_accepted_length_counts_rows_and_the_bonus() -> None:
    """Three rows verified 4 drafts each and kept 4, 1 and 0: (5 + 2 + 1) / 3 tokens, whatever the number of steps."""
    facts = Facts("in", "out", stats=EngineStats(steps=1, drafted_tokens=12, accepted_tokens=5, verify_steps=3))
    found = make_report(facts)["speculation"]
    assert found["accepted_length"] == pytest.approx(8 / 3)
    assert found["acceptance_rate"] == pytest.approx(5 / 12)
    assert "2.67 tokens a verification step" in printed(make_report(facts))


def test_the_engines_own_account_is_reported_and_printed() -> None:
    own = {
        "drafter": "suffix",
        "reason": "suffix: needs no draft model",
        "outcome": "on in 40% of the decode steps",
        "on_share_of_steps": 0.4,
        "accepted_length": 2.5,
        "verified_tokens": 10,
        "accepted_share_by_position": [0.75, 0.5, None],
    }
    report = make_report(Facts("in", "out", stats=EngineStats(extra={"speculation": own})))
    assert report["speculation"].items() >= own.items()
    assert "speculation" not in report["engine_seconds"]
    line = (
        "suffix: needs no draft model; 2.50 tokens a verification step; accepted by position 75% 50%; "
        "on in 40% of the decode steps"
    )
    assert describe_speculation(report["speculation"]) == line
    assert line in printed(report)


def test_a_reason_stands_where_nothing_was_drafted() -> None:
    own = {
        "drafter": "ngram",
        "reason": "chosen by --speculative",
        "outcome": "off: at best x0.97",
        "verified_tokens": 0,
    }
    report = make_report(Facts("in", "out", stats=EngineStats(extra={"speculation": own})))
    assert "ngram, chosen by --speculative; off: at best x0.97" in printed(report)


def test_nothing_is_said_where_nothing_was_asked() -> None:
    report = make_report(Facts("in", "out", stats=EngineStats()))
    assert describe_speculation(report["speculation"]) == ""
    assert "speculation" not in printed(report)
    assert report["speculation"]["accepted_length"] is None
