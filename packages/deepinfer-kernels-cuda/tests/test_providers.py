"""Providers: imports answer with reasons; the measured choice takes the faster one, once."""

from __future__ import annotations

import contextlib
import time

import pytest

torch = pytest.importorskip("torch")

from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from deepinfer_kernels_cuda.providers import MeasuredChoice, _microseconds, find_library  # noqa: E402

CPU = torch.device("cpu")


def test_missing_library_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deep_ep", None)
    find_library.cache_clear()
    library = find_library("deep_ep")
    assert library.module is None
    assert "deep_ep: ModuleNotFoundError" in library.reason
    with pytest.raises(ArgumentError, match="is not one of deep_gemm"):
        find_library("cutlass")


def test_the_faster_one_wins_and_is_not_measured_again() -> None:
    calls = {"slow": 0, "fast": 0}

    def run(name: str, seconds: float):
        def call() -> None:
            calls[name] += 1
            time.sleep(seconds)

        return call

    def broken() -> None:
        raise RuntimeError("no such instruction")

    choice = MeasuredChoice()
    candidates = {"slow": run("slow", 0.01), "broken": broken, "fast": run("fast", 0.0)}
    assert choice.choose(("op", 64), candidates, CPU) == "fast"
    assert choice.failures["op", 64] == {"broken": "RuntimeError: no such instruction"}
    before = dict(calls)
    assert choice.choose(("op", 64), candidates, CPU) == "fast"
    assert calls == before
    with pytest.raises(ArgumentError, match="no such instruction"):
        choice.choose("other", {"broken": broken}, CPU)


def test_on_a_device_its_own_work_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy until the host has queued a call: what a call takes the host does not count."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 0.25 if order.count("call") == 3 else 0.5  # milliseconds; the third call is the fastest

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("busy") if cycles > 1_000_000 else None)
    assert _microseconds(lambda: order.append("call"), torch.device("cuda:1"), repeats=4) == 250
    assert order == ["call"] + ["idle", "busy", "record", "call", "record", "wait"] * 4
