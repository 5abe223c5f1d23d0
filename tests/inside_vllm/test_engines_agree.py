"""One job through both engines and through transformers: equal greedy tokens in float32."""

import json

import pytest
import torch

pytestmark = pytest.mark.vllm

STARTS = ["The capital of {} is", "A short poem about {}:", "List three facts about {}.", "{} is famous for"]
TOPICS = ["France", "rain", "prime numbers", "coffee", "the Moon", "Python", "bees", "Rome", "salt", "chess", "glass",
          "Kenya", "music", "bread", "light", "the sea"]  # fmt: skip
NEW = 12


@pytest.fixture(scope="module")
def lines():
    prompts = [start.format(topic) for start in STARTS for topic in TOPICS]
    body = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    return [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]


def answers(engine, lines, folder):
    from deepinfer_offline.cli.main import call

    source, target = folder / "in.jsonl", folder / f"{engine}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["run", str(source), "-o", str(target), "--engine", engine, "--dtype", "float32", "--quiet"]
    assert call([*arguments, "--max-model-len", "512", "--kv-memory", "512MiB", "--max-running", "32"]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    return [row["response"]["body"]["choices"][0]["text"] for row in rows]


def transformers_answers(lines, folder):
    from deepinfer_offline.engine.vllm.export import exported_folder
    from deepinfer_offline.weights.source import resolve_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = exported_folder(resolve_model("smollm2-135m-instruct"), torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    found = []
    for line in lines:  # one at a time: no padding, no doubt
        ids = tokenizer(line["body"]["prompt"], return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
    return found


def test_the_engines_and_transformers_give_the_same_answers(lines, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    native = answers("native", lines, tmp_path)
    vllm = answers("vllm", lines, tmp_path)
    assert vllm == native
    assert transformers_answers(lines, tmp_path) == native
