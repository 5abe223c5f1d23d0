"""The whole program, killed at random moments and run again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

DRIVER = Path(__file__).parent / "data" / "fake_engine.py"
LINES = 300


def write_input(path):
    lines = []
    for n in range(LINES):
        body = {"prompt": f"question {n % 280}", "max_tokens": 30, "temperature": (n // 280 + n) % 2, "n": 1 + n % 2}
        lines.append({"custom_id": f"line {n}", "method": "POST", "url": "/v1/completions", "body": body})
    lines[7] = {"custom_id": "line 7", "method": "POST", "url": "/v1/completions", "body": {}}
    lines[8]["custom_id"] = "line 5"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(folder, output, **environment):
    command = [sys.executable, str(DRIVER), "run", str(folder / "in.jsonl"), "-o", str(output), "-q"]
    command += ["--report", str(folder / "report.json")]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1", **environment}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE)


def finish(process):
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode()


def wait_for(journal, size, process):
    """Wait until the journal has `size` bytes, so that kills fall into the run and not into the start."""
    while process.poll() is None and not (journal.exists() and journal.stat().st_size >= size):
        time.sleep(0.002)


def test_killed_at_random_moments_and_run_again(tmp_path):
    write_input(tmp_path / "in.jsonl")
    whole = tmp_path / "whole.jsonl"
    assert finish(start(tmp_path, whole))[0] == 1, "two lines are bad"
    chance = random.Random(17)
    output, journal, log = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal", tmp_path / "log"
    total = whole.stat().st_size
    kills = 0
    for fraction in sorted(chance.uniform(0.0, 0.95) for _ in range(6)):
        process = start(tmp_path, output, FAKE_STEP_SECONDS="0.01", FAKE_LOG=str(log))
        wait_for(journal, int(total * fraction), process)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.stderr.close()
        if kills == 3:
            torn = journal.read_bytes()
            journal.write_bytes(torn[:-5])  # the last line is torn as by a power cut
    assert kills >= 4
    assert finish(start(tmp_path, output, FAKE_LOG=str(log)))[0] == 1
    assert output.read_bytes() == whole.read_bytes()
    assert not journal.exists()
    counts = json.loads((tmp_path / "report.json").read_bytes())["counts"]
    assert counts["resumed"] > 0
    assert counts["resumed"] + counts["computed"] + counts["deduplicated"] == counts["total"] == LINES
    computed = Counter(line.split()[1] for line in log.read_text().splitlines())
    assert counts["computed"] <= LINES * 0.7
    # a kill may catch a step (8 requests) between its computation and its journal entry; the torn line is one more
    assert sum(computed.values()) - len(computed) <= 8 * kills + 1


def test_interrupted_by_a_signal(tmp_path):
    write_input(tmp_path / "in.jsonl")
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(tmp_path, output, FAKE_STEP_SECONDS="0.05")
        before = journal.stat().st_size if journal.exists() else 0
        wait_for(journal, before + 3000, process)
        process.send_signal(number)
        status, errors = finish(process)
        assert status == 130
        assert errors.count("\n") == 1
        assert "interrupted" in errors
        assert "run the same command again" in errors
        assert json.loads((tmp_path / "report.json").read_bytes())["finished"] is False
    assert finish(start(tmp_path, output))[0] == 1
    assert len(output.read_bytes().splitlines()) == LINES


def test_a_second_run_on_the_same_output_is_told_to_wait(tmp_path):
    write_input(tmp_path / "in.jsonl")
    output = tmp_path / "out.jsonl"
    first = start(tmp_path, output, FAKE_STEP_SECONDS="1")
    wait_for(tmp_path / "out.jsonl.journal", 1000, first)
    status, errors = finish(start(tmp_path, output))
    assert status == 2
    assert "another run is writing" in errors
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == 130


def test_a_reader_of_messages_that_goes_away_does_not_end_the_job(tmp_path):
    """`deepinfer run ... 2>&1 | head -1`."""
    write_input(tmp_path / "in.jsonl")
    output, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    command = [sys.executable, str(DRIVER), "run", str(tmp_path / "in.jsonl"), "-o", str(output)]
    process = subprocess.Popen([*command, "--report", str(report)], stderr=subprocess.PIPE)
    process.stderr.close()
    assert process.wait(timeout=60) == 1, "two lines are bad"
    assert len(output.read_bytes().splitlines()) == LINES
    assert json.loads(report.read_bytes())["finished"] is True
    nowhere = subprocess.Popen([*command[:3], "nowhere", "-o", str(output)], stderr=subprocess.PIPE)
    nowhere.stderr.close()
    assert nowhere.wait(timeout=60) == 2
