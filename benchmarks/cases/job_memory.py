"""Memory of the job layer: a file of 1,000,000 lines through an engine that computes nothing.

The bar: under 1 GB beside the model, from the first line read to the last one written. The engine here answers at once
and holds no weights, so what the process holds above its size after imports is the job layer's. One line in ten repeats
an earlier request and one in a thousand is wrong; `--words` sets how long prompts are.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

BAR_BYTES = 1 << 30


def run(argv: list[str]) -> int:
    """Run the case; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(prog="deepinfer bench job-memory", description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=40, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=20, help="tokens of an answer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the files go; the default is a temporary folder")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = _measure(Path(folder), options)
    result["ok"] = result["peak_above_start_bytes"] < BAR_BYTES
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['lines']:,} lines ({result['input_bytes'] / 1e6:,.0f} MB in, {result['output_bytes'] / 1e6:,.0f} MB out): "
            f"peak {result['peak_above_start_bytes'] / 2**20:,.0f} MiB above the {result['start_bytes'] / 2**20:,.0f} MiB after "
            f"imports (bar {BAR_BYTES / 2**20:,.0f} MiB), {result['lines_per_second']:,.0f} lines/s, "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["seconds"].items())
        )
    return 0 if result["ok"] else 1


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from deepinfer_offline.job.options import JobOptions
    from deepinfer_offline.job.progress import SilentReporter
    from deepinfer_offline.job.run import Job

    source, output = folder / "in.jsonl", folder / "out.jsonl"
    _write_input(source, options.lines, options.words)
    start = _resident()
    watch = _Watch()
    begin = time.monotonic()
    facts = Job(JobOptions(str(source), output), lambda _: InstantEngine(options.tokens), SilentReporter()).run()
    seconds = time.monotonic() - begin
    peak = max(watch.stop(), _resident())
    with output.open("rb") as stream:
        written = sum(1 for _ in stream)
    assert written == options.lines, f"{written} lines of output for {options.lines} of input"
    return {
        "case": "job-memory",
        "lines": options.lines,
        "start_bytes": start,
        "peak_above_start_bytes": peak - start,
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "input_bytes": source.stat().st_size,
        "output_bytes": output.stat().st_size,
        "lines_per_second": options.lines / seconds,
        "seconds": facts.seconds,
        "deduplicated": facts.deduplicated,
        "failed": facts.failed,
    }


def _write_input(path: Path, lines: int, words: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for n in range(lines):
            topic = n - n % 10 if n % 10 == 9 else n  # one in ten repeats
            prompt = f"request {topic}: " + " ".join(f"w{(topic * 7919 + i * 104729) % 50021}" for i in range(words))
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": 64,
            }
            if n % 1000 == 500:
                body["max_tokens"] = 0
            line = {"custom_id": f"request-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


class InstantEngine:
    """Answers whatever waits at once, with a fixed text. One token is four bytes of the prompt."""

    def __init__(self, tokens: int) -> None:
        from deepinfer_offline.engine.base import EngineInfo, EngineStats

        self.info = EngineInfo("native", "instant", "cpu", "float32", 1 << 20, 1 << 17, 0, 0, 0, 16)
        self.tokenizer = _Tokenizer()
        self._stats = EngineStats()
        self._ids = list(range(tokens))
        self._waiting: deque[Any] = deque()

    def add_request(self, request: Any) -> None:
        """See Engine."""
        self._waiting.append(request)

    def step(self) -> list[Any]:
        """See Engine."""
        from deepinfer_offline.engine.base import Completion, RequestOutput

        done = [
            RequestOutput(
                r.request_id, r.prompt_token_ids, [Completion(0, "word " * len(self._ids), self._ids, "stop")]
            )
            for r in self._waiting
        ]
        self._waiting.clear()
        return done

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._waiting)

    def stats(self) -> Any:
        """See Engine."""
        return self._stats

    def close(self) -> None:
        """See Engine."""


class _Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        data = text.encode()
        return [int.from_bytes(data[i : i + 4], "little") % (1 << 17) for i in range(0, len(data), 4)]

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


class _Watch:
    """Samples the process's resident memory, file mappings not counted."""

    def __init__(self) -> None:
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The highest sample in bytes."""
        self._stop.set()
        self._thread.join()
        return self._peak

    def _work(self) -> None:
        while not self._stop.wait(0.02):
            self._peak = max(self._peak, _resident())


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: only the peak is known
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
