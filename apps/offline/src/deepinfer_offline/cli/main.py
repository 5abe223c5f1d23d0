"""`deepinfer`: finds the command that is asked for and imports that one only."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from deepinfer_offline.cli.failure import COULD_NOT_START, INTERRUPTED, complain, explain
from deepinfer_offline.job.errors import JobStopped

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("deepinfer_offline.cli.run", "run"),
    "plan": ("deepinfer_offline.cli.plan", "plan"),
    "schema": ("deepinfer_offline.cli.schema", "app"),
    "doctor": ("deepinfer_offline.cli.doctor", "doctor"),
    "bench": ("deepinfer_offline.cli.bench", "bench"),
}
"""Command -> module and the function or Typer application in it."""

_SETTINGS = {"bench": {"allow_extra_args": True, "ignore_unknown_options": True}}

_UsageError: Any = typer.BadParameter.__base__  # typer gives the class no public name

_ABOUT = """Offline LLM inference: a batch file in, one answer a line out.

Start with  [bold]deepinfer run examples/quickstart.jsonl -o out.jsonl[/bold]"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end like Ctrl-C: keep what is done, say how to go on
    status = call(sys.argv[1:] if argv is None else argv)
    if status == INTERRUPTED:
        # a native thread may be in the middle of its work (compiling a grammar, a step); the interpreter's own end
        # would wait for it or abort, and the status would be the abort's
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def call(argv: Sequence[str]) -> int:
    """Run the command line.

    Args:
        argv: the words after `deepinfer`.

    Returns:
        The exit status.
    """
    try:
        status = _application(argv)(list(argv), prog_name="deepinfer", standalone_mode=False)
    except _UsageError as error:
        return _usage(error, argv)
    except (KeyboardInterrupt, JobStopped, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        return explain(error, traceback="--traceback" in argv)
    return status if isinstance(status, int) else 0


def _application(argv: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help=_ABOUT,
        rich_markup_mode="rich",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    word = next((word for word in argv if not word.startswith("-")), None)
    wanted = [word] if word in COMMANDS else [] if "--version" in argv else COMMANDS
    for name in wanted:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=_SETTINGS.get(name))(command)
    return app


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"deepinfer {importlib.metadata.version('deepinfer-offline')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _usage(error: Any, argv: Sequence[str]) -> int:
    command = f"deepinfer {argv[0]}" if argv and argv[0] in COMMANDS else "deepinfer"
    complain(f"{error.format_message().rstrip('.')}; see `{command} --help`")
    return COULD_NOT_START


if __name__ == "__main__":
    main()
