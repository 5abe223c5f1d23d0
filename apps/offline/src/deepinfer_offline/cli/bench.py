"""`deepinfer bench`: runs a case of the checkout's `benchmarks/cases`."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_offline.job.errors import JobError

WORKSPACE = "deepinfer-workspace"
"""`project.name` of the checkout's own pyproject.toml."""


def bench(
    context: typer.Context,
    case: Annotated[str | None, typer.Argument(help="The case; without one, the cases are listed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run a benchmark. Words after CASE go to the case; after `--` also `--help`.

    [bold]Examples[/bold]

      deepinfer bench

      deepinfer bench job-memory --json
    """
    runner = _load_runner()
    if case is None:
        for name, about in runner.cases().items():
            print(f"{name:<20} {about}")
        return 0
    try:
        return runner.run(case, [*context.args, *(["--json"] if as_json else [])])
    except runner.UnknownCaseError as error:
        raise JobError(str(error)) from error


def _load_runner() -> Any:
    """The module `benchmarks/run.py` of the checkout: benchmarks are not part of the wheel.

    The package's own checkout comes first, then one that the command is called in.
    """
    for folder in (*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents):
        file = folder / "benchmarks" / "run.py"
        if file.is_file() and _is_checkout(folder):
            spec = importlib.util.spec_from_file_location("deepinfer_benchmarks", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise JobError("benchmarks are in the repository's folder `benchmarks`; run this command inside a checkout")


def _is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of this repository: another project's `benchmarks/run.py` must not be executed."""
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(text).get("project", {}).get("name") == WORKSPACE
    except (OSError, ValueError):
        return False
