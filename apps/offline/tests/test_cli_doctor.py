from __future__ import annotations

import json

import pytest
from deepinfer_offline.cli.examine import examine
from deepinfer_offline.cli.main import call
from deepinfer_offline.ops.registry import Provider, registry


@pytest.fixture(scope="module")
def facts():
    return examine("cpu", "float32")


def test_the_machine_and_its_devices(facts):
    assert facts["machine"]["memory_bytes"] > 1 << 28
    assert facts["machine"]["threads"] >= 1
    kinds = {row["kind"]: row for row in facts["devices"]}
    assert kinds["cpu"]["usable"]
    assert set(kinds) >= {"cpu", "cuda", "npu"}
    assert all(row["usable"] or row["detail"] for row in facts["devices"]), "what cannot be used says why"


def test_every_op_is_served_by_one_provider_and_the_others_say_why_not(facts):
    rows = [row for row in facts["ops"] if not row["provider"].startswith("deepinfer-kernels")]
    ops = {row["op"] for row in rows}
    assert {"linear", "rms_norm", "paged_attention"} <= ops
    for op in ops:
        assert sum(row["chosen"] for row in rows if row["op"] == op) == 1, op
    assert all(row["chosen"] is False and row["reason"] for row in facts["ops"] if "kernels-cuda" in row["provider"])


def test_a_reason_reaches_the_table():
    registry.register(
        Provider("rms_norm", "test-only", "plugin", lambda device, dtype: "made for a test", lambda: None)
    )
    try:
        rows = [row for row in examine("cpu", "bfloat16")["ops"] if row["provider"] == "test-only"]
    finally:
        registry._providers["rms_norm"] = [p for p in registry._providers["rms_norm"] if p.name != "test-only"]
    assert rows == [{"op": "rms_norm", "provider": "test-only", "chosen": False, "reason": "made for a test"}]


def test_packages_and_engines(facts):
    versions = {row["name"]: row["version"] for row in facts["packages"]}
    assert versions["deepinfer-offline"]
    assert versions["torch"]
    assert sum(row["chosen"] for row in facts["engines"]) == 1


def test_it_prints_json_and_a_table(capsys):
    assert call(["doctor", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"
    assert call(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "paged_attention" in shown
    assert "devices" in shown


def test_brackets_in_reasons_are_shown(capsys, monkeypatch):
    registry.register(Provider("rms_norm", "test-only", "plugin", lambda *_: "pip install x[y]", lambda: None))
    try:
        assert call(["doctor", "--device", "cpu"]) == 0
    finally:
        registry._providers["rms_norm"] = [p for p in registry._providers["rms_norm"] if p.name != "test-only"]
    assert "x[y]" in capsys.readouterr().out


def test_a_device_that_does_not_exist(capsys):
    assert call(["doctor", "--device", "tpu"]) == 2
    assert "--device 'tpu' is not one of auto, cpu, cuda, npu" in capsys.readouterr().err
