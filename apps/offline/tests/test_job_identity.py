"""What a job takes for the same model: content, wherever it lies; and at what cost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job import identity
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.identity import model_identity
from hypothesis import given, settings
from hypothesis import strategies as st
from job_kit import jobs, line


def change(file, place, data=b"\xff"):
    """Overwrite bytes, as a download over the old file would: same name, same size."""
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(data)
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # a clock may be too coarse to see two writes


def model_folder(folder):
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model"):
        (folder / name).write_bytes(name.encode() * 10)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes((64).to_bytes(8, "little") + bytes(64) + os.urandom(5000))
    (folder / "README.md").write_text("not a part of the model")
    return folder


def test_a_folder_is_known_by_content_wherever_it_lies_and_whatever_its_date(tmp_path):
    first = model_folder(tmp_path / "a" / "m")
    shutil.copytree(first, tmp_path / "b" / "m")
    second = tmp_path / "b" / "m"
    (second / "README.md").write_text("other words")
    os.utime(second / "config.json", (1, 1))
    (tmp_path / "link").symlink_to(first)
    same = {model_identity(str(path)) for path in (first, f"{first}/", second, tmp_path / "link")}
    assert len(same) == 1
    before = same.pop()
    assert before.startswith("m#")
    for file in sorted(first.iterdir()):
        if file.name != "README.md":
            change(file, file.stat().st_size - 1)
            after = model_identity(str(first))
            assert after != before, file.name
            before = after


def test_files_that_change_places_are_another_model(tmp_path):
    folder = model_folder(tmp_path / "m")
    before = model_identity(str(folder))
    one, two = folder / "model-1.safetensors", folder / "model-2.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    change(one, 0, second)
    change(two, 0, first)
    assert model_identity(str(folder)) != before


def test_a_name_that_is_no_file_is_itself():
    assert model_identity("SmolLM2-135M-Instruct") == "SmolLM2-135M-Instruct"


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(JobError, match=r"cannot read the model's file .*m\.gguf: Permission denied"):
        model_identity(str(tmp_path / "m.gguf"))


def test_weights_changed_in_place_end_a_finished_and_an_interrupted_job(run, tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100_000))
    engine = EngineOptions(model=str(file))
    run(jobs(3), engine=engine, served_names=("fake-model",))
    change(file, 70_001)
    with pytest.raises(JobError, match=r"is not this job's result; line 1 differs in .*the model's files"):
        run(jobs(3), engine=engine, served_names=("fake-model",))
    monkeypatch.setenv("FAKE_FAIL", "step")
    with pytest.raises(RuntimeError):
        run(jobs(60), engine=engine, fresh=True)
    run.output.unlink()
    change(file, 70_001, b"\xfe")
    with pytest.raises(JobError, match=r"the files of --model .*m\.gguf changed since .*out\.jsonl\.journal was begun"):
        run(jobs(60), engine=engine)


def test_a_model_that_goes_while_it_runs_leaves_one_job(run, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(1000))
    engine = EngineOptions(model=str(file))
    real = run.make_engine

    def make_engine(options):
        file.rename(tmp_path / "other")
        return real(options)

    run.make_engine = make_engine
    same = [line(str(n), prompt="x", temperature=0) for n in range(3)]
    results = run(same, engine=engine)
    (tmp_path / "other").rename(file)
    assert run(same, engine=engine) == results
    assert len(run.engines) == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data(), suffix=st.sampled_from(["safetensors", "gguf"]))
def test_of_large_weights_any_long_stretch_and_the_header_are_seen(tmp_path_factory, data, suffix):
    """Fine-tunes change whole tensors: here any stretch that is longer than the share of one piece."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WHOLE": 1000, "PIECES": 50, "_PIECE": 16, "_HEAD": 512, "_CHUNK": 128}.items():
            patch.setattr(identity, name, value)
        folder = tmp_path_factory.mktemp("large")
        sizes = data.draw(st.lists(st.integers(600, 9000), min_size=1, max_size=4))
        for n, size in enumerate(sizes):
            (folder / f"{n}.{suffix}").write_bytes((504).to_bytes(8, "little") + bytes(size - 8))
        before = model_identity(str(folder))
        chosen = data.draw(st.integers(0, len(sizes) - 1))
        stretch = max(1, sum(sizes) // 50) + 1
        in_header = data.draw(st.booleans())
        length = 1 if in_header else min(stretch, sizes[chosen] - 8)
        last = 511 if in_header else sizes[chosen] - length
        change(folder / f"{chosen}.{suffix}", data.draw(st.integers(8, last)), b"\x01" * length)
        assert model_identity(str(folder)) != before


def test_a_large_checkpoint_costs_some_megabytes_to_know(tmp_path, monkeypatch):
    folder = tmp_path / "m"
    folder.mkdir()
    for n in range(20):
        with (folder / f"model-{n}.safetensors").open("wb") as stream:
            stream.write((100_000).to_bytes(8, "little"))
            stream.truncate(8 << 30)  # holes: 160 GiB that take no room
    read = []
    real = os.pread

    def pread(fd, length, offset):
        read.append(length)
        return real(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    model_identity(str(folder))
    once = sum(read)
    assert once < 40 << 20
    assert len(read) < 4000
    model_identity(str(folder))
    assert sum(read) == once, "a job asks several times"


def test_a_job_goes_on_with_another_draft_and_says_so(run, monkeypatch):
    """Drafts shape no answer of the native engine: a run that they slowed down, or for which they took too much memory, goes on
    with another draft or none. `--speculative` is another matter, because vLLM's verification draws other tokens.
    """
    first = EngineOptions(model="fake-model", speculative="auto", draft_model=Path("drafts/one"))
    monkeypatch.setenv("FAKE_FAIL", "step")
    with pytest.raises(RuntimeError):
        run(jobs(60), engine=first)
    begun = run.notes.notes
    monkeypatch.delenv("FAKE_FAIL")
    with pytest.raises(JobError, match=r"was begun with --speculative auto and this is off"):
        run(jobs(60), engine=EngineOptions(model="fake-model"))
    assert len(run(jobs(60), engine=EngineOptions(model="fake-model", speculative="auto"))) == 60
    said = "--draft-model was drafts/one and is not given: answers are the model's own with any draft, up to rounding"
    assert said in run.notes.notes
    assert not any("--draft-model" in note for note in begun)
    before = run.output.stat().st_mtime_ns
    run(jobs(60), engine=first)
    assert run.output.stat().st_mtime_ns == before, "done, whatever drafted it"
    assert len(run.engines) == 2
