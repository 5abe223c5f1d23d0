"""`deepinfer plan`: how cache-friendly is this job. No model is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import DEFAULT_MODEL, EngineOptions, OptionsError
from deepinfer_offline.job.errors import JobError

if TYPE_CHECKING:
    from deepinfer_offline.planning.report import PlanReport

_EXAMPLE = "try `deepinfer plan requests.jsonl` or `deepinfer plan --trace trace.jsonl.gz`"


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Batch file: OpenAI batch lines, Parquet or CSV; - reads standard input."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace instead: one {hash_ids, input_length, output_length} a line, plain or .gz."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a cache block (what the engine takes; for a trace 512).", show_default=False
        ),
    ] = None,
    cache_blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N ...", help="Cache sizes to look at, in blocks (chosen from the job)."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose tokenizer, chat template and cache blocks to use.")
    ] = DEFAULT_MODEL,
    engine: Annotated[str, typer.Option(metavar="auto|native|vllm", help="What would run the model.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate over cache size (.svg, or .png with matplotlib).")
    ] = None,
) -> None:
    """Tell how much of a job's prompts a prefix cache can save, as it comes and planned, by cache size.

    Example: deepinfer plan requests.jsonl --cache-blocks 500 2000 10000
    """
    try:
        name, sizes = _split(arguments or [], list(cache_blocks or []))
        report = _analyse(name, trace, EngineOptions(model=model, engine=engine, block_size=block_size), sizes)
        if plot is not None:
            from deepinfer_offline.planning.plot import write_plot

            write_plot(report, plot)
    except (JobError, EngineStartError, OptionsError) as error:
        typer.echo(f"deepinfer plan: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report.to_json()))
        return
    from deepinfer_offline.planning.text import render

    typer.echo(render(report), nl=False)


def _analyse(name: str | None, trace: Path | None, options: EngineOptions, sizes: list[int]) -> PlanReport:
    from deepinfer_offline.planning import analysis  # numpy and the tokenizer, only when they are needed

    if (name is None) == (trace is None):
        raise JobError(f"give one of INPUT and --trace; {_EXAMPLE}")
    if trace is not None:
        return analysis.analyse_trace(trace, options.block_size, sizes)
    assert name is not None
    return analysis.analyse_file(name, options, sizes)


def _split(arguments: list[str], sizes: list[int]) -> tuple[str | None, list[int]]:
    """INPUT and the cache sizes.

    `--cache-blocks 500 2000` is one option with several values, which option parsers read as one value and an argument:
    after `--cache-blocks`, arguments that are numbers are sizes.
    """
    names = []
    for word in arguments:
        if sizes and word.isdecimal() and int(word) > 0:
            sizes.append(int(word))
        else:
            names.append(word)
    if len(names) > 1:
        raise JobError(f"give one INPUT, got {', '.join(names)}")
    return (names[0] if names else None), sizes
