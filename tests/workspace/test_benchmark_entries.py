"""The entry of every benchmark case: `run(argv) -> int`, and one plain sentence where the machine cannot run it."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
HELPERS = {"cpu_work", "gpu_bench", "gpu_engine_idle", "gpu_engine_ops", "gpu_ways"}


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_runner", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, on any machine."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("file", sorted((FOLDER / "cases").glob("*.py")), ids=lambda path: path.stem)
def test_every_file_is_a_case_with_the_one_signature_or_a_helper(file: Path) -> None:
    if file.stem in HELPERS:
        return
    tree = ast.parse(file.read_text())
    entries = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert [ast.unparse(node.args) for node in entries] == ["argv: list[str]"]
    assert [ast.unparse(node.returns) for node in entries if node.returns] == ["int"]
    assert ast.get_docstring(tree), "the list of cases shows the docstring's first line"


def test_the_list_has_every_case(runner: ModuleType) -> None:
    files = {path.stem for path in (FOLDER / "cases").glob("*.py")} - HELPERS
    assert {name.replace("-", "_") for name in runner.cases()} == files
    assert {"gpu-libraries", "gpu-rows"} <= set(runner.cases())


@pytest.mark.usefixtures("no_device")
def test_gpu_cases_say_that_there_is_no_device(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = [name for name in runner.cases() if name.startswith("gpu-")]
    assert len(found) > 8
    for name in found:
        assert runner.run(name, ["--json"]) == 2
        seen = capsys.readouterr()
        assert (seen.out, seen.err) == ("", "cannot run: no CUDA device is visible here\n")


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    "name", ["gpu-all", "gpu-attention", "gpu-experts", "gpu-libraries", "gpu-ops", "gpu-parallel", "gpu-rows"]
)
def test_gpu_cases_explain_their_words_without_a_device(
    runner: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    with pytest.raises(SystemExit) as ended:
        runner.run(name, ["--help"])
    assert ended.value.code == 0
    assert f"usage: deepinfer bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [("sched-vllm", "vllm", "vLLM"), ("vllm-cpu", "vllm", "vLLM"), ("structured-masks", "xgrammar", "xgrammar")],
)
def test_a_case_whose_library_is_missing_says_so(
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    module: str,
    words: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert runner.run(name, []) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("cannot run: ")
    assert words in seen.err
    assert "Traceback" not in seen.err


def test_a_module_that_a_case_imports_and_is_not_there_is_named(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needy.py").write_text('"""Needs much."""\nimport surely_not_there\ndef run(argv): return 0\n')
    monkeypatch.setattr(runner, "CASES", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert runner.run("needy", []) == 2
    assert capsys.readouterr().err == "cannot run: the module surely_not_there is not installed here\n"


def test_recorded_lines_are_printed_as_one_object_and_a_failure_is_the_status(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the clock and the card replaced: what is tested is the report around them."""
    pytest.importorskip("torch")
    bench = runner._load(FOLDER / "cases" / "gpu_bench.py")
    monkeypatch.setattr(
        bench, "measure_ceilings", lambda: bench.Ceilings(4000.0, 800.0, bench.Floor(5.0, 1.5), bench.Floor(6.0, 2.0))
    )
    monkeypatch.setattr(bench, "time_cold", lambda call: call() or 8.0)
    monkeypatch.setattr(bench, "time_warm", lambda call: 4.0)
    monkeypatch.setattr(bench, "time_copy", lambda nbytes: (4.0, 2.0))
    monkeypatch.setattr(bench.Recorder, "header", lambda self: {"device": "none"})

    def measure(recorder: Any, broken: bool) -> None:
        recorder.record("add", "t=1", "ours", (lambda: 1 / 0) if broken else (lambda: None), nbytes=8e6)

    assert bench.record_case("adding", measure, ["--json"], broken="divide by nothing") == 0
    (line,) = json.loads(capsys.readouterr().out)["results"]
    # 8 MB at 4,000 GB/s take 2 us, a quarter of the 8 us measured
    assert (line["op"], line["us_cold"], line["ceiling_us"], line["share"]) == ("add", 8.0, 2.0, 0.25)
    assert bench.record_case("adding", measure, ["--json", "--broken"], broken="divide by nothing") == 1
    seen = capsys.readouterr()
    assert json.loads(seen.out) == {"device": "none", "results": []}
    assert "FAILED ZeroDivisionError" in seen.err


@pytest.fixture
def rows(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """gpu-rows on the CPU, whose kernels find what a test says."""
    pytest.importorskip("triton")
    case = runner._load(FOLDER / "cases" / "gpu_rows.py")
    monkeypatch.setattr(case, "DEVICE", "cpu")
    monkeypatch.setattr(case.mhc, "_ROW_TOKENS", case.mhc._ROW_TOKENS)  # as it was, after the test
    monkeypatch.setattr(case, "use_warps", lambda blocks: setattr(case, "warps", blocks))
    return case


@pytest.mark.parametrize("name", [None, "streams", "x", "pre", "post", "comb", "bits"])
def test_a_check_of_the_seam_fails_where_an_error_is_above_its_tolerance(
    rows: ModuleType, name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors at their tolerances pass; one above, in the last size alone, or runs that differ, do not."""
    torch = pytest.importorskip("torch")
    runs = []

    def step(streams: Any, *rest: Any, **options: Any) -> SimpleNamespace:
        runs.append(len(streams))
        value = torch.full((1,), float(len(runs)) if name == "bits" and len(streams) == 300 else 0.0)
        return SimpleNamespace(streams=value, mix=(value,), x=value)

    def errors(step: Any, tensors: tuple, options: dict) -> dict[str, float]:
        return {
            key: most * (1.1 if key == name and len(tensors[0]) == 300 else 1) for key, most in rows.TOLERANCES.items()
        }

    monkeypatch.setattr(rows.kernels, "mhc_step", step)
    monkeypatch.setattr(rows, "mhc_errors", errors)
    assert rows.run(["mhc", "--way", "triton", "--tokens", "2", "--check"]) == (name is not None)
    seen = capsys.readouterr()
    assert set(runs) == {2, 77, 300}
    assert seen.out.count("WRONG") == (name is not None)
    assert seen.err == ("" if name is None else "WRONG: 1 of 3 checks failed\n")
    if name is not None:
        assert ("runs differ" if name == "bits" else f"WRONG: {name} ") in seen.out


@pytest.mark.parametrize("wrong", [None, "run", "gather"])
def test_a_check_of_records_fails_where_they_differ(
    rows: ModuleType, wrong: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")

    class Insert:
        def __init__(self, fmt: str, t: int, **options: Any) -> None:
            self.pool, self.slots, self.last = torch.zeros(4, dtype=torch.uint8), torch.arange(t), t == 5000

        def run(self, pool: Any) -> Any:
            return pool + (wrong == "run" and self.last and rows.warps > 0)

        def gather(self, pool: Any, slots: Any) -> Any:
            return torch.full((2,), float(wrong == "gather" and self.last and rows.warps > 0), dtype=torch.bfloat16)

    monkeypatch.setattr(rows, "Insert", Insert)
    assert rows.run(["records", "--way", "2", "--check"]) == (wrong is not None)
    seen = capsys.readouterr()
    assert f"{12 if wrong else 0} differ" in seen.out
    assert seen.err == ("" if wrong is None else "WRONG: 1 of 1 checks failed\n")


def test_idle_time_is_what_no_kernel_covers(runner: ModuleType) -> None:
    pytest.importorskip("torch")
    idle = runner._load(FOLDER / "cases" / "gpu_engine_idle.py")
    ran = [
        (0, 1000, "first"), (500, 2000, "void (anonymous namespace)::second<int>(int)"), (2200, 3000, "third(float*)"),
        (2400, 2600, "within"), (3100, 4000, "first"),
    ]  # fmt: skip
    assert list(idle.gaps(ran)) == [(200, ran[1][2], "third(float*)"), (100, "third(float*)", "first")]
    assert idle.idle_share(ran) == 300 / 4000
    longest, other = idle.by_gap(ran, steps=1)
    assert longest.split() == ["0.20", "us", "a", "step", "idle", "1.0", "gaps", "second", "->", "third"]
    assert other.split()[-3:] == ["third", "->", "first"]
    assert next(idle.by_kernel(ran, steps=2)).split() == ["0.9", "us", "a", "step", "1.0", "calls", "first"]
