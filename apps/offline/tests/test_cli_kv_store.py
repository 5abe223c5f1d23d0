"""`deepinfer run --kv-store`: a later run of the same job takes its prompts' KV from the folder."""

import json

from deepinfer_offline.cli.main import call


def job(folder, name, *options):
    report = folder / f"{name}.json"
    arguments = [
        "run",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / f"{name}.jsonl"),
        "--report",
        str(report),
        "--quiet",
    ]
    assert call([*arguments, "--kv-memory", "64MiB", "--max-model-len", "512", *options]) == 0
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [row["response"]["body"]["choices"][0]["text"] for row in rows], json.loads(report.read_text())


def test_a_second_run_reads_what_the_first_one_kept(tmp_path):
    shared = "The quick brown fox jumps over the lazy dog. " * 16
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions",
         "body": {"prompt": shared + f"Number {i}:", "max_tokens": 3, "temperature": 0}}
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    store = ("--kv-store", str(tmp_path / "kv"), "--kv-store-size", "64MiB")
    first, _ = job(tmp_path, "first", *store)
    second, report = job(tmp_path, "second", *store)
    assert second == first
    assert report["tokens"]["input_computed"] < 0.5 * report["tokens"]["input"]
    assert report["kv_store"] is not None


def test_a_size_that_is_none_is_named(tmp_path, capsys):
    assert call(["run", "x.jsonl", "-o", str(tmp_path / "o.jsonl"), "--kv-store-size", "lots"]) == 2
    assert "--kv-store-size" in capsys.readouterr().err
