"""A job on a fake engine, for the tests of the job layer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from deepinfer_offline.job.options import JobOptions
from deepinfer_offline.job.progress import SilentReporter
from deepinfer_offline.job.report import make_report
from deepinfer_offline.job.run import Job

spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parents[1] / "data" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_engine)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id, url=TEXT, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, content, **body):
    return line(custom_id, CHAT, messages=[{"role": "user", "content": content}], **body)


def jobs(count, **body):
    return [line(f"id-{n}", prompt=f"prompt number {n}", max_tokens=20, **body) for n in range(count)]


def write(path, lines):
    entries = [entry if isinstance(entry, str | bytes) else json.dumps(entry) for entry in lines]
    path.write_bytes(b"".join((entry if isinstance(entry, bytes) else entry.encode()) + b"\n" for entry in entries))
    return path


class Notes(SilentReporter):
    def __init__(self):
        self.notes = []
        self.updates = []
        self.stop_at = None

    def note(self, text):
        self.notes.append(text)

    def update(self, done, **facts):
        self.updates.append(done)


class Runner:
    """Runs jobs in a folder; `engines` are those that were started."""

    def __init__(self, folder):
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.engines = []
        self.check_engine = None
        self.notes = Notes()

    def __call__(self, lines, **options):
        source = lines if isinstance(lines, str | Path) else write(self.folder / "in.jsonl", lines)
        options.setdefault("output", self.output)
        self.notes = Notes()
        job = Job(JobOptions(str(source), **options), self.make_engine, self.notes, self.check_engine)
        self.facts = job.facts
        job.run()
        self.report = make_report(self.facts)
        return [json.loads(raw) for raw in options["output"].read_bytes().split(b"\n")[:-1]]

    def make_engine(self, options):
        self.engines.append(fake_engine.FakeEngine(options))
        return self.engines[-1]

    def leftovers(self):
        return sorted(
            path.name for path in self.folder.iterdir() if path.name not in ("in.jsonl", "out.jsonl", "other")
        )


def without_created(results):
    return [
        {
            **entry,
            "response": entry["response"]
            and {**entry["response"], "body": {**entry["response"]["body"], "created": 0}},
        }
        for entry in results
    ]


def error_of(result):
    return result["response"]["body"]["error"]
