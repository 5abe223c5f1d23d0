"""The command line in this process: exit statuses, one sentence a failure, help that teaches."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from deepinfer_offline.cli.main import COMMANDS, call

spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parent / "data" / "fake_engine.py")
fake_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_engine)


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs `deepinfer` in a folder of its own; returns status, standard output and standard error."""
    factory = types.ModuleType("deepinfer_offline.engine.factory")
    factory.build_engine = fake_engine.create_engine
    factory.check_start = lambda options: None
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")

    def run(*argv):
        status = call(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def one_sentence(errors):
    """The failure's sentence, which is all that standard error has."""
    assert errors.startswith("deepinfer: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    return errors


def test_a_good_run(cli, tmp_path):
    status, out, err = cli("run", "in.jsonl", "-o", "out.jsonl", "--report", "report.json")
    assert (status, out) == (0, "")
    for phase in ("reading", "loading model", "running: 1 lines", "writing: 1 lines", "1 of 1 lines", "peak memory"):
        assert phase in err
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert report["finished"] is True
    assert report["counts"]["answered"] == 1
    assert set(report["seconds"]) == {"checking", "reading", "loading", "running", "writing", "total"}
    assert cli("run", "in.jsonl", "-o", "out.jsonl")[0] == 0


def test_quiet_prints_nothing(cli):
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "--quiet") == (0, "", "")


def test_failed_lines_are_status_1(cli, tmp_path):
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("garbage\n")
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl")
    assert status == 1
    assert "1 (their lines say why)" in err
    assert cli("run", "in.jsonl", "-o", "out.jsonl")[0] == 1, "still, when it is done already"


def test_standard_input(cli, tmp_path, monkeypatch):
    with (tmp_path / "in.jsonl").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli("run", "-", "-o", "out.jsonl", "-q") == (0, "", "")
    assert json.loads((tmp_path / "out.jsonl").read_bytes())["custom_id"] == "a"


@pytest.mark.parametrize("name", ["out.partial", "out.journal"])
def test_an_input_where_output_keeps_its_own_files_is_not_overwritten(cli, tmp_path, name):
    """OUTPUT grows in a file beside it and is moved from there: an input of that name would be lost."""
    content = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").rename(tmp_path / name)
    status, _, errors = cli("run", name, "-o", "out")
    assert status == 2
    assert f"are the same file, {name}" in one_sentence(errors)
    assert (tmp_path / name).read_bytes() == content
    assert not (tmp_path / "out").exists()


def test_a_job_that_may_not_go_on_is_not_told_to_run_again(cli, tmp_path):
    answers = '{"custom_id": "a"}\n'
    (tmp_path / "out.journal").write_text(answers)
    status, _, errors = cli("run", "in.jsonl", "-o", "out")
    assert status == 2
    assert "is not a journal" in errors
    assert "run the same command again" not in errors
    assert (tmp_path / "out.journal").read_text() == answers


def test_no_requests(cli, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n \n")
    status, _, errors = cli("run", "in.jsonl", "-o", "out")
    assert status == 0
    assert "in.jsonl holds no requests" in errors
    assert (tmp_path / "out").read_bytes() == b""


START_ERRORS = {
    "no such file": (["nowhere.jsonl", "-o", "out"], ["INPUT nowhere.jsonl does not exist"]),
    "a folder": ([".", "-o", "out"], ["INPUT . is a folder"]),
    "same file": (["in.jsonl", "-o", "in.jsonl"], ["INPUT and OUTPUT are the same file", "in.jsonl"]),
    "same file by another name": (["in.jsonl", "-o", "./sub/../in.jsonl"], ["are the same file"]),
    "no such folder": (["in.jsonl", "-o", "no/out.jsonl"], ["the folder no does not exist"]),
    "output is a folder": (["in.jsonl", "-o", "sub"], ["sub is a folder"]),
    "standard output": (["in.jsonl", "-o", "-"], ["OUTPUT cannot be standard output"]),
    "standard output by name": (["in.jsonl", "-o", "/dev/stdout"], ["OUTPUT cannot be standard output"]),
    "output is a device": (["in.jsonl", "-o", "/dev/null"], ["/dev/null is not a regular file"]),
    "report over input": (
        ["in.jsonl", "-o", "out", "--report", "in.jsonl"],
        ["INPUT and the report are the same file"],
    ),
    "report over OUTPUT's own files": (
        ["in.jsonl", "-o", "out", "--report", "out.partial"],
        ["OUTPUT's partial file and the report are the same file"],
    ),
    "report in no folder": (
        ["in.jsonl", "-o", "out", "--report", "no/r.json"],
        ["the report no/r.json", "does not exist"],
    ),
    "no input": (["-o", "out"], ["Missing argument 'INPUT'", "deepinfer run --help"]),
    "no output": (["in.jsonl"], ["Missing option '--output'"]),
    "unknown flag": (["in.jsonl", "-o", "out", "--frsh"], ["--frsh", "--fresh"]),
    "bad engine": (["in.jsonl", "-o", "out", "--engine", "tgi"], ["--engine 'tgi'", "auto, native, vllm"]),
    "bad device": (["in.jsonl", "-o", "out", "--device", "tpu"], ["--device 'tpu'", "npu"]),
    "bad dtype": (["in.jsonl", "-o", "out", "--dtype", "int8"], ["--dtype 'int8'", "bfloat16"]),
    "bad order": (["in.jsonl", "-o", "out", "--order", "random"], ["--order 'random'", "prefix, input"]),
    "bad drafts": (["in.jsonl", "-o", "out", "--speculative", "on"], ["--speculative 'on'", "dspark"]),
    "bad memory": (["in.jsonl", "-o", "out", "--kv-memory", "lots"], ["--kv-memory 'lots'", "4GiB"]),
    "no memory": (["in.jsonl", "-o", "out", "--kv-memory", "0"], ["--kv-memory must be at least 1"]),
    "no folder for a size": (
        ["in.jsonl", "-o", "out", "--kv-store-size", "1GiB"],
        ["--kv-store-size 1 GiB", "--kv-store"],
    ),
    "bad number": (["in.jsonl", "-o", "out", "--max-running", "many"], ["--max-running", "many"]),
    "a power of ten": (
        ["in.jsonl", "-o", "out", "--max-running", "1e8"],
        ["--max-running", "'1e8' is not a whole number written in digits, like 64"],
    ),
    "zero": (["in.jsonl", "-o", "out", "--max-running", "0"], ["--max-running must be at least 1, got 0"]),
    "seed of over 64 bits": (["in.jsonl", "-o", "out", "--seed", str(1 << 130)], ["--seed must be", str(1 << 130)]),
    "no devices": (
        ["in.jsonl", "-o", "out", "--tensor-parallel", "0"],
        ["--tensor-parallel must be at least 1, got 0"],
    ),
    "empty model": (["in.jsonl", "-o", "out", "--model", ""], ["--model is empty"]),
    "retry and fresh": (
        ["in.jsonl", "-o", "out", "--fresh", "--retry-errors"],
        ["--retry-errors", "--fresh", "one of them"],
    ),
    "bad engine argument": (["in.jsonl", "-o", "out", "--engine-arg", "x"], ["--engine-arg 'x' is not KEY=VALUE"]),
    "utf-16": (["utf16.jsonl", "-o", "out"], ["UTF-16"]),
}


@pytest.mark.parametrize("case", START_ERRORS)
def test_a_run_that_cannot_start_says_why_in_one_sentence(cli, tmp_path, case):
    (tmp_path / "sub").mkdir()
    (tmp_path / "utf16.jsonl").write_bytes("{}".encode("utf-16"))
    argv, words = START_ERRORS[case]
    before = (tmp_path / "in.jsonl").read_bytes()
    status, out, err = cli("run", *argv, "-q")
    assert (status, out) == (2, "")
    for word in words:
        assert word in one_sentence(err)
    assert (tmp_path / "in.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "sub", "utf16.jsonl"]


FLAGS = {
    "devices": (["--tensor-parallel", "2"], ["--tensor-parallel 2", "one device", "--engine vllm"]),
    "copies": (["--data-parallel", "2"], ["--data-parallel 2"]),
    "experts": (["--expert-parallel"], ["--expert-parallel"]),
    "vLLM's arguments": (["--engine-arg", "a=b"], ["--engine-arg a", "takes none"]),
    "a store without prefixes": (["--kv-store", "kv", "--no-prefix-caching"], ["--kv-store", "--prefix-caching"]),
    "a draft that is not there": (
        ["--speculative", "dspark", "--draft-model", "nowhere"],
        ["--draft-model nowhere", "config.json"],
    ),
    "no draft": (["--speculative", "dspark"], ["brings no draft of its own", "--draft-model"]),
    "no model": (["--model", "nowhere"], ["no model 'nowhere'"]),
    "no checkpoint": (["--model", "sub"], ["sub has no config.json"]),
    "a model of vLLM's": (["--model", "gemma"], ["does not run model_type 'gemma3'", "llama"]),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_are_checked_before_anything_is_read_or_imported(tmp_path, case):
    """In a process of its own: neither the input, which is damaged, nor torch is looked at."""
    flags, words = FLAGS[case]
    for name, kind in (("llama", "llama"), ("gemma", "gemma3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "sub").mkdir()
    (tmp_path / "in.jsonl").write_bytes("{}".encode("utf-16"))
    code = (
        "import sys; from deepinfer_offline.cli.main import call; status = call(sys.argv[1:]); "
        "print(status, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    argv = ["run", "in.jsonl", "-o", "out", "--engine", "native", "--model", "llama", "-q", *flags]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "2 False False\n", done.stderr
    for word in words:
        assert word in one_sentence(done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma", "in.jsonl", "llama", "sub"]


def test_what_needs_the_configuration_is_checked_before_the_input_is_read(cli, tmp_path, monkeypatch):
    """Bars of the machine and the model; a finished OUTPUT needs no engine, and so no check."""
    from deepinfer_offline.engine.base import EngineStartError

    def refuse(options):
        raise EngineStartError("too little memory")

    factory = sys.modules["deepinfer_offline.engine.factory"]
    monkeypatch.setattr(factory, "check_start", refuse)
    (tmp_path / "damaged.jsonl").write_bytes("{}".encode("utf-16"))
    assert one_sentence(cli("run", "damaged.jsonl", "-o", "out", "-q")[2]) == "deepinfer: too little memory\n"
    monkeypatch.setattr(factory, "check_start", lambda options: None)
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q")[0] == 0
    monkeypatch.setattr(factory, "check_start", refuse)
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q")[0] == 0
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q", "--fresh")[0] == 2


def test_an_output_without_permission(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path.relative_to(tmp_path))  # root may all
    assert "no permission to write" in one_sentence(cli("run", "in.jsonl", "-o", "out.jsonl")[2])


def test_an_engine_that_cannot_start(cli, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "start")
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q")
    assert status == 2
    assert one_sentence(err) == "deepinfer: the KV cache of 8.00 GiB does not fit the 4.00 GiB of free memory\n"


def test_an_internal_error_is_one_sentence_and_a_file(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(fake_engine.FakeEngine, "step", lambda self: 1 / 0)
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q")
    assert status == 2
    assert "internal error, ZeroDivisionError: division by zero" in one_sentence(err)
    file = Path(err.split("traceback is in ")[1].split(";")[0].strip())
    assert "ZeroDivisionError" in file.read_text()
    file.unlink()
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q", "--traceback")
    assert status == 2
    assert "Traceback" in err


def test_ctrl_c_while_the_model_loads(cli, monkeypatch):
    def build(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["deepinfer_offline.engine.factory"], "build_engine", build)
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q")
    assert (status, one_sentence(err)) == (130, "deepinfer: interrupted\n")


def test_a_fresh_run_that_is_interrupted_goes_on_without_fresh(cli, monkeypatch, tmp_path):
    line = (tmp_path / "in.jsonl").read_text()
    (tmp_path / "in.jsonl").write_text("".join(line.replace('"a"', f'"{n}"') for n in range(30)))
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q")[0] == 0
    real = fake_engine.FakeEngine.step

    def step(engine):
        if engine.stats().steps == 2:
            signal.raise_signal(signal.SIGINT)
        return real(engine)

    monkeypatch.setattr(fake_engine.FakeEngine, "step", step)
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q", "--fresh")
    assert status == 130
    assert "run the same command again without --fresh to go on" in one_sentence(err)
    monkeypatch.setattr(fake_engine.FakeEngine, "step", real)
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q", "--report", "r.json")[0] == 0
    assert json.loads((tmp_path / "r.json").read_bytes())["counts"]["resumed"] > 0


def test_ctrl_c_before_a_fresh_run_began_does_not_offer_what_it_was_to_throw_away(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_FAIL", "step")
    line = (tmp_path / "in.jsonl").read_text()
    (tmp_path / "in.jsonl").write_text("".join(line.replace('"a"', f'"{n}"') for n in range(60)))
    assert "run the same command again to go on" in cli("run", "in.jsonl", "-o", "out.jsonl", "-q")[2]

    def build(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["deepinfer_offline.engine.factory"], "build_engine", build)
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "-q", "--fresh")
    assert (status, one_sentence(err)) == (130, "deepinfer: interrupted\n")
    assert (tmp_path / "out.jsonl.journal").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_report_that_cannot_be_written_costs_neither_output_nor_summary(cli, monkeypatch, tmp_path, quiet):
    (tmp_path / "r.json").write_text("an earlier one")
    real = Path.open

    def full(path, *args, **kwargs):
        stream = real(path, *args, **kwargs)
        return real(Path("/dev/full"), "wb") if path.name.startswith("r.json") else stream

    monkeypatch.setattr(Path, "open", full)
    status, _, err = cli("run", "in.jsonl", "-o", "out.jsonl", "--report", "r.json", *(["-q"] if quiet else []))
    assert status == 3
    assert ("1 of 1 lines" in err) is not quiet
    said = err.splitlines()[-1]
    assert said == "deepinfer: cannot write the report r.json: No space left on device; out.jsonl is complete"
    monkeypatch.undo()
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 1
    assert (tmp_path / "r.json").read_text() == "an earlier one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "r.json"]


def test_a_report_that_is_a_link_stays_one(cli, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "r.json").symlink_to("there/report.json")
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "--report", "r.json", "-q")[0] == 0
    assert (tmp_path / "r.json").is_symlink()
    assert json.loads((tmp_path / "there" / "report.json").read_bytes())["finished"] is True
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["report.json"]


def test_help_teaches(cli):
    status, out, _ = cli("run", "--help")
    assert status == 0
    for words in (
        "deepinfer run examples/quickstart.jsonl -o out.jsonl",
        '"custom_id"',
        "Run the same command again",
        "Exit status",
        "--retry-errors",
        "--max-tokens-per-step",
        "auto|native|vllm",
    ):
        assert words in out, words


def test_help_names_flags_in_full_on_a_narrow_terminal(cli, monkeypatch):
    """80 columns: a name that is cut could not be typed. Of the pairs, `--no-...` follows from the other one."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("run", "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert all(cut.startswith("--no-") for cut in re.findall(r"--\S*…", out))


def test_commands_are_listed_and_misspelt_ones_named(cli):
    status, out, _ = cli()
    assert status == 0
    assert all(name in out for name in COMMANDS)
    status, _, err = cli("rum")
    assert status == 2
    assert "'rum'" in one_sentence(err)


def test_a_run_imports_no_other_command(cli, monkeypatch):
    for module, _ in COMMANDS.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert cli("run", "in.jsonl", "-o", "out.jsonl", "-q")[0] == 0
    assert "deepinfer_offline.cli.run" in sys.modules
    assert "deepinfer_offline.cli.doctor" not in sys.modules


def test_version(cli):
    status, out, _ = cli("--version")
    assert status == 0
    assert out.startswith("deepinfer ")
