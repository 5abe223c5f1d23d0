"""Providers: imports answer with reasons; the measured choice takes the faster one, once."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from deepinfer_kernels_cuda.providers import MeasuredChoice, find_library  # noqa: E402

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
