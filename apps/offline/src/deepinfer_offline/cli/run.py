"""`deepinfer run`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_offline.cli.failure import ALL_ANSWERED, INTERRUPTED, NO_REPORT, SOME_FAILED, complain, explain
from deepinfer_offline.engine.options import DEFAULT_MODEL, EngineOptions, OptionsError, parse_bytes
from deepinfer_offline.job.errors import JobError, JobStopped
from deepinfer_offline.job.options import JobOptions

if TYPE_CHECKING:
    from deepinfer_offline.engine.base import Engine
    from deepinfer_offline.job.run import Job


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number written in digits, like 64") from None


_MODEL, _SPEED, _OUTPUT, _DEVICES = "Model", "Speed and memory", "Results", "Several devices"


def run(
    input: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="A batch file: .jsonl (also .gz, .zst), .parquet, .csv, or - for stdin."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the results go: one JSON line for each input line.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder, a GGUF file or a known name.", rich_help_panel=_MODEL)
    ] = DEFAULT_MODEL,
    engine: Annotated[
        str, typer.Option(metavar="auto|native|vllm", help="What runs the model.", rich_help_panel=_MODEL)
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda|npu", help="Where the model runs.", rich_help_panel=_MODEL)
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|float32", help="Type of the weights.", rich_help_panel=_MODEL)
    ] = "auto",
    seed: Annotated[
        int,
        typer.Option(
            parser=_whole,
            metavar="N",
            help="Random numbers of sampled lines without a seed start here.",
            rich_help_panel=_MODEL,
        ),
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            parser=_whole, metavar="N", help="Longest prompt and answer together, in tokens.", rich_help_panel=_MODEL
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Another model name that lines may ask for; may be given again.", rich_help_panel=_MODEL),
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="prefix runs lines that share the start of their prompts together, input runs them as they come. Results keep "
            "input order.",
            rich_help_panel=_SPEED,
        ),
    ] = "prefix",
    speculative: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="How draft tokens are guessed: off, auto, dspark, ngram or suffix.",
            rich_help_panel=_SPEED,
        ),
    ] = "off",
    on_unsupported: Annotated[
        str,
        typer.Option(
            metavar="error|warn|ignore",
            help="A schema keyword that no grammar can enforce: refuse its line, or leave it out (warn: and say so).",
            rich_help_panel=_OUTPUT,
        ),
    ] = "error",
    draft_model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A DSpark draft that was trained for the model.", rich_help_panel=_SPEED),
    ] = None,
    max_tokens_per_step: Annotated[
        int | None,
        typer.Option(parser=_whole, metavar="N", help="Most tokens in one forward pass.", rich_help_panel=_SPEED),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(parser=_whole, metavar="N", help="Most sequences that run at once.", rich_help_panel=_SPEED),
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the KV cache, e.g. 4GiB.", rich_help_panel=_SPEED)
    ] = None,
    kv_store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep KV blocks here for later runs.", rich_help_panel=_SPEED)
    ] = None,
    kv_store_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most that DIR may hold, e.g. 200GiB; the oldest go first.", rich_help_panel=_SPEED
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=_whole,
            metavar="N",
            help="Tokens in a KV block. Fast attention wants a multiple of 32 on a CPU, a power of two on a GPU.",
            rich_help_panel=_SPEED,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(metavar=" ", help="Compute equal starts of prompts once.", rich_help_panel=_SPEED)
    ] = True,
    window_strategy: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="What a hit in the prefix cache means for sliding windows: auto, bounded, full, exact, or periodic(N), which "
            "keeps one every N tokens.",
            rich_help_panel=_SPEED,
        ),
    ] = "auto",
    decoder_replay: Annotated[
        bool,
        typer.Option(
            metavar=" ",
            help="V4.1: prompts pass the decoder layers with their last window only.",
            rich_help_panel=_SPEED,
        ),
    ] = True,
    async_scheduling: Annotated[
        bool, typer.Option(metavar=" ", help="Plan the next step while this one runs.", rich_help_panel=_SPEED)
    ] = True,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JSON report of the run.", rich_help_panel=_OUTPUT)
    ] = None,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Keep good answers, run failed and corrected lines.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw away what an earlier run answered.", rich_help_panel=_OUTPUT)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=_OUTPUT)] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show tracebacks of errors.", rich_help_panel=_OUTPUT)
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Devices that share each layer.", rich_help_panel=_DEVICES)
    ] = 1,
    data_parallel: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Copies of the model.", rich_help_panel=_DEVICES)
    ] = 1,
    ray: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Run N engines on a Ray cluster.", rich_help_panel=_DEVICES)
    ] = 0,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Spread a mixture's experts.", rich_help_panel=_DEVICES)
    ] = False,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Passed on to vLLM; may be given again.", rich_help_panel=_DEVICES),
    ] = None,
) -> int:
    """Answer every line of a batch file.

    [bold]Examples[/bold]

      deepinfer run examples/quickstart.jsonl -o out.jsonl

      deepinfer run big.jsonl.gz -o out.jsonl -m ./model --report report.json

      deepinfer run prompts.csv -o out.jsonl

      cat requests.jsonl | deepinfer run - -o out.jsonl

    [bold]A line of INPUT[/bold]

      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hello"}]}}

    or with "url": "/v1/completions" and a "prompt" in the body. Tables
    (CSV, Parquet) have a column "prompt" or "messages", and if they like
    "custom_id", "max_tokens", "temperature" and other parameters.
    A wrong line is answered with an error that says what is wrong with
    it; the others are answered all the same.

    [bold]Interrupted?[/bold] Run the same command again, but without
    --fresh: it does exactly the rest. Every answer is kept in
    OUTPUT.journal from the moment it is there, and OUTPUT appears when
    it is whole.

    [bold]Exit status[/bold]
    0 all lines answered, 1 some lines failed, 130 interrupted,
    2 no output: the run could not start or could not go on,
    3 OUTPUT is complete, but the report could not be written.
    """
    options = JobOptions(
        input=input,
        output=output,
        engine=EngineOptions(
            model=model,
            engine=engine,
            device=device,
            dtype=dtype,
            kv_memory=_bytes("--kv-memory", kv_memory),
            kv_store=kv_store,
            kv_store_size=_bytes("--kv-store-size", kv_store_size),
            max_tokens_per_step=max_tokens_per_step,
            max_running=max_running,
            max_model_len=max_model_len,
            speculative=speculative,
            draft_model=draft_model,
            on_unsupported=on_unsupported,
            async_scheduling=async_scheduling,
            enable_prefix_caching=prefix_caching,
            block_size=block_size,
            window_strategy=window_strategy,
            decoder_replay=decoder_replay,
            seed=seed,
            tensor_parallel_size=tensor_parallel,
            data_parallel_size=data_parallel,
            expert_parallel=expert_parallel,
            engine_args=tuple(_pair(text) for text in engine_arg or ()),
        ),
        order=order,
        report=report,
        retry_errors=retry_errors,
        fresh=fresh,
        quiet=quiet,
        served_names=tuple(served_model_name or ()),
        ray=ray,
    )
    return _run(options, traceback)


def _run(options: JobOptions, traceback: bool) -> int:
    from deepinfer_offline.job.progress import Messages, open_reporter
    from deepinfer_offline.job.report import make_report, print_summary, write_report
    from deepinfer_offline.job.run import Job

    with open_reporter(options.quiet) as reporter:
        if options.ray:  # the engines' machines are not this one
            job = Job(options, partial(_make_fleet, options.ray), reporter)
        else:
            job = Job(options, _make_engine, reporter, _check_engine)
        status = _attempt(job, options, traceback, reporter.close)
    report = make_report(job.facts)
    if not options.quiet and job.facts.finished and job.facts.stats is not None:
        print_summary(Messages(), report)
    if options.report is not None and (job.facts.finished or job.facts.records):
        try:
            write_report(options.report, report)
        except JobError as error:
            complain(f"{error}; {options.output} is complete" if job.facts.finished else str(error))
            return NO_REPORT if job.facts.finished else status
    return status


def _attempt(job: Job, options: JobOptions, traceback: bool, end_progress: Callable[[], None]) -> int:
    try:
        job.run()
    except (JobStopped, KeyboardInterrupt):
        end_progress()
        complain(f"interrupted{_kept(options, job)}")
        return INTERRUPTED
    except Exception as error:
        end_progress()
        begun = "running" in job.facts.seconds
        return explain(error, traceback=traceback, kept=_kept(options, job) if begun else "")
    return SOME_FAILED if job.facts.failed else ALL_ANSWERED


def _make_engine(options: EngineOptions) -> Engine:
    from deepinfer_offline.engine.factory import build_engine

    return build_engine(options)


def _check_engine(options: EngineOptions) -> None:
    from deepinfer_offline.engine.factory import check_start

    check_start(options)


def _make_fleet(count: int, options: EngineOptions) -> Engine:
    from deepinfer_offline.job.fleet import open_fleet

    return open_fleet(options, count, _make_engine)


def _kept(options: JobOptions, job: Job) -> str:
    """Where the answers of a run that ended too early are; of one that was to start afresh, only those that it made."""
    if not options.journal.exists() or (options.fresh and "running" not in job.facts.seconds):
        return ""
    again = "the same command again" + (" without --fresh" if options.fresh else "")
    return f"; what was answered is kept in {options.journal}, run {again} to go on"


def _bytes(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except OptionsError as error:
        raise OptionsError(f"{flag} {error}") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise OptionsError(f"--engine-arg {text!r} is not KEY=VALUE")
    return name, value
