"""`deepinfer schema`: is a JSON schema enforceable, and how well does enforcement do on a set of schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from deepinfer_structured import Options, Spec, StructuredError, UnsupportedSchema, Vocabulary, compile_spec
from deepinfer_structured.config import OnUnsupported, PropertyOrder

from deepinfer_offline.schema.score import CaseError, Score
from deepinfer_offline.schema.score import score as score_file

app = typer.Typer(no_args_is_help=True, help="Check a JSON schema, or score schema enforcement on a set of schemas.")

_REFUSED = 1
_FILE = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The file to read.")]
_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command()
def check(
    file: _FILE,
    as_json: _JSON = False,
    on_unsupported: Annotated[
        OnUnsupported, typer.Option(help="What to do with a keyword that nothing enforces.")
    ] = "error",
) -> None:
    """Say whether a JSON schema can be enforced; if not, which keyword at which place stands against it.

    Example: deepinfer schema check invoice.schema.json
    """
    found = _check(file, Options(on_unsupported=on_unsupported))
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    elif found["enforced"]:
        typer.echo(f"{file}: enforced {'in full' if found['in_full'] else 'but for what the notes name'}")
        for note in found["notes"]:
            typer.echo(f"  note: {note}")
    else:
        typer.echo(f"{file}: refused: {found['message']}")
    raise typer.Exit(0 if found["enforced"] else _REFUSED)


def _check(file: Path, options: Options) -> dict[str, Any]:
    try:
        spec = Spec.json_schema(file.read_text(encoding="utf-8-sig"))
        grammar = compile_spec(spec, Vocabulary.bytewise(), options)
    except (StructuredError, UnicodeDecodeError) as error:
        kind = "unsupported" if isinstance(error, UnsupportedSchema) else type(error).__name__
        named = ("pointer", "keyword", "reason", "way_out") if getattr(error, "keyword", "") else ()
        return {"enforced": False, "error": kind, "message": str(error), **{n: getattr(error, n) for n in named}}
    in_full = not any(note.startswith("not enforced") for note in grammar.notes)
    return {"enforced": True, "in_full": in_full, "engine": grammar.engine, "notes": list(grammar.notes)}


@app.command()
def score(
    file: _FILE,
    as_json: _JSON = False,
    property_order: Annotated[
        PropertyOrder,
        typer.Option(help="`any` judges instances as a validator does; `schema` as generation writes them."),
    ] = "any",
    processes: Annotated[int, typer.Option(min=1, help="Schemas at a time.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of one schema.")] = 60.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first schemas of the file.")] = None,
    failures: Annotated[bool, typer.Option(help="List the schemas that do not pass.")] = True,
) -> None:
    """Score enforcement on schemas with valid and invalid instances: JSON lines `{name, schema, tests: [{valid, data}]}`.

    Example: deepinfer schema score maskbench.jsonl.gz --json
    """
    options = Options(property_order=property_order)
    try:
        found = score_file(file, options, processes=processes, seconds=seconds, limit=limit)
    except (CaseError, UnicodeDecodeError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    if not found.total:
        raise typer.BadParameter(f"{file} holds no cases", param_hint="FILE")
    report = found.report()
    if not failures:
        del report["failures"]
    typer.echo(json.dumps(report, ensure_ascii=False) if as_json else _text(found, failures))


def _text(found: Score, failures: bool) -> str:
    share = 100 * found.passed / max(found.total, 1)
    lines = [
        f"schemas          {found.total}",
        f"pass             {found.passed} ({share:.1f} %)",
        f"compile error    {found.compile_error}",
        f"accepts invalid  {found.accepts_invalid}",
        f"refuses valid    {found.refuses_valid}",
        f"compile          median {found.compile_ms_median:.2f} ms, p99 {found.compile_ms_p99:.1f} ms",
        f"mask             median {found.mask_us_median:.1f} us, p99 {found.mask_us_p99:.1f} us",
        f"vocabulary       {found.vocabulary}; property order {found.property_order}",
    ]
    if failures:
        lines += [f"  {f['status']}: {f['name']}: {f['reason'][:160]}" for f in found.failures]
    return "\n".join(lines)
