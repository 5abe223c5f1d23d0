"""`deepinfer bench`: runs a case of the checkout's `benchmarks/cases`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_offline.job.errors import JobError


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
    """The module `benchmarks/run.py` of the checkout: benchmarks are not part of the wheel."""
    for folder in (Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents):
        file = folder / "benchmarks" / "run.py"
        if file.is_file() and (folder / "benchmarks" / "cases").is_dir():
            spec = importlib.util.spec_from_file_location("deepinfer_benchmarks", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise JobError("benchmarks are in the repository's folder `benchmarks`; run this command inside a checkout")
