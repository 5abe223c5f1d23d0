"""Jobs through `deepinfer run --engine vllm`: planned order, several workers, several copies."""

import json
import random

import pytest
from deepinfer_offline.cli.main import call

pytestmark = pytest.mark.vllm

GROUPS, REQUESTS, SHARED, OWN, BLOCK = 8, 48, 320, 32, 16
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers x (key, value) x KV heads x head size x float32


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """48 prompts of bytes over 8 shared prefixes, shuffled."""
    rng = random.Random(3)

    def text(count):
        return "".join(rng.choice("abcdefgh") for _ in range(count))

    prefixes = [text(SHARED) for _ in range(GROUPS)]
    prompts = [prefixes[i % GROUPS] + text(OWN) for i in range(REQUESTS)]
    rng.shuffle(prompts)
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]
    path = tmp_path_factory.mktemp("job") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run(job, byte_model, tmp_path):
    """Run the job and return its answers and the share of prompt tokens that vLLM found in its cache."""

    def start(*options, kv_memory=8 << 20):
        target, report = tmp_path / "out.jsonl", tmp_path / "report.json"
        target.unlink(missing_ok=True)
        arguments = [
            "run",
            str(job),
            "-o",
            str(target),
            "-m",
            str(byte_model),
            "--engine",
            "vllm",
            "--dtype",
            "float32",
        ]
        arguments += ["--max-model-len", "512", "--block-size", str(BLOCK), "--kv-memory", str(kv_memory)]
        arguments += ["--max-running", "4", "--quiet", "--report", str(report), *options]
        assert call(arguments) == 0
        rows = [json.loads(line)["response"]["body"] for line in target.read_text().splitlines()]
        cached = sum(row["usage"]["prompt_tokens_details"]["cached_tokens"] for row in rows)
        answers = [row["choices"][0]["text"] for row in rows]
        return answers, cached / sum(row["usage"]["prompt_tokens"] for row in rows)

    return start


@pytest.fixture(scope="module")
def shared():
    """What one test leaves for the next: the answers of one worker."""
    return {}


def test_planned_order_is_worth_what_the_job_allows(run, shared):
    # Room for the four running requests and about one prefix more: the eight of the job do not fit.
    memory = KV_BYTES_PER_TOKEN * (4 * (SHARED + OWN + 2 * BLOCK) + SHARED)
    bound = (REQUESTS - GROUPS) * SHARED / (REQUESTS * (SHARED + OWN))
    planned, planned_rate = run("--order", "prefix", kv_memory=memory)
    stock, stock_rate = run("--order", "input", kv_memory=memory)
    print(f"prefix hits by vLLM's count: input order {stock_rate:.1%}, planned {planned_rate:.1%}, bound {bound:.1%}")
    shared["answers"] = planned
    assert planned == stock
    assert len(set(planned)) > 10  # answers depend on what was read, though most of their tokens are no text
    assert planned_rate >= bound - 0.02
    assert stock_rate < bound - 0.2


@pytest.mark.parametrize("option", ["--tensor-parallel", "--data-parallel"])
def test_two_workers_give_the_answers_of_one(run, shared, option, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    answers, _ = run(option, "2")
    assert answers == shared["answers"]
