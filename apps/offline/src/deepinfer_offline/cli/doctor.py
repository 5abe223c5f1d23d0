"""`deepinfer doctor`: what this machine has, which op is served by what, and why not by something faster."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer_offline.cli.examine import examine
from deepinfer_offline.engine.options import format_bytes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|npu", help="The device to ask about.")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32", help="The type to ask about.")] = "bfloat16",
) -> int:
    """Show devices, packages, and which op is served by what and why not by something faster.

    [bold]Examples[/bold]

      deepinfer doctor

      deepinfer doctor --device cuda --json
    """
    facts = examine(device, dtype)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    console = Console()
    machine = facts["machine"]
    free = "" if machine["free_memory_bytes"] is None else f", {format_bytes(machine['free_memory_bytes'])} free"
    memory = f"{format_bytes(machine['memory_bytes'])} memory{free}"
    console.print(f"[bold]machine[/bold]  {machine['system']}, Python {machine['python']}", highlight=False)
    console.print(f"         {machine['processor']}, {machine['threads']} threads, {memory}", highlight=False)
    for title, columns, rows in _tables(facts):
        console.print()
        console.print(_table(title, columns, rows))


def _tables(facts: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    word = {True: "yes", False: "no"}
    devices: list[tuple[str, ...]] = [
        (row["kind"], row["name"] or "", word[row["usable"]], row["detail"]) for row in facts["devices"]
    ]
    engines: list[tuple[str, ...]] = [
        (row["name"], word[row["usable"]], "takes it" if row["chosen"] else "", row["reason"] or "")
        for row in facts["engines"]
    ]
    packages: list[tuple[str, ...]] = [
        (row["name"], row["version"] or "missing", row["for"]) for row in facts["packages"]
    ]
    ops: list[tuple[str, ...]] = [
        (row["op"], row["provider"], "yes" if row["chosen"] else "", row["reason"] or "") for row in facts["ops"]
    ]
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
        ("devices", ("kind", "name", "usable", ""), devices),
        ("engines", ("name", "usable", "--engine auto", ""), engines),
        ("packages", ("name", "version", "for"), packages),
        (f"ops on {facts['device']} in {facts['dtype']}", ("op", "provider", "serves", "why not"), ops),
    ]
    return tables


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))  # reasons name extras in brackets
    return made
