"""Finds and runs benchmark cases: every `benchmarks/cases/NAME.py` with a function `run(argv) -> int` is one.

Those named `gpu_...` need a CUDA device.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CASES = Path(__file__).resolve().parent / "cases"
CANNOT_RUN = 2


class UnknownCaseError(ValueError):
    """There is no such case."""


def cases() -> dict[str, str]:
    """Names of the cases and the first line of each one's docstring. No case is imported."""
    found = {}
    for file in sorted(CASES.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(map(_is_entry, tree.body)):
            about = ast.get_docstring(tree) or ""
            found[file.stem.replace("_", "-")] = about.partition("\n")[0]
    return found


def run(name: str, argv: list[str]) -> int:
    """Run a case.

    Args:
        name: the case; `-` and `_` are the same.
        argv: its arguments. `--json` asks for one JSON object on standard output and nothing else there.

    Returns:
        The exit status: 0 if the case ran and kept its bars, 1 if it missed one, 2 if this machine cannot run it: a
        line on standard error says what it lacks.

    Raises:
        UnknownCaseError: no such case; the message lists what there is.
    """
    known = cases()
    wanted = name.replace("_", "-")
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownCaseError(f"there is no benchmark {name!r}; {hint}there are {', '.join(known)}")
    lacking = None if {"-h", "--help"} & set(argv) else _lacks(wanted)
    if lacking is None:
        try:
            return _load(CASES / f"{wanted.replace('-', '_')}.py").run(argv)
        except ModuleNotFoundError as error:
            lacking = f"the module {error.name} is not installed here"
    print(f"cannot run: {lacking}", file=sys.stderr)
    return CANNOT_RUN


def _is_entry(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "run" and [a.arg for a in node.args.args] == ["argv"]


def _lacks(case: str) -> str | None:
    """What this machine lacks for a case, as far as its name tells."""
    if not case.startswith("gpu-"):
        return None
    try:
        import torch
    except ModuleNotFoundError:
        return "the module torch is not installed here"
    return None if torch.cuda.is_available() else "no CUDA device is visible here"


def _load(file: Path) -> ModuleType:
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))  # cases may share helper modules beside them
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("\n".join(f"{name:<20} {about}" for name, about in cases().items()))
        sys.exit(0)
    sys.exit(run(sys.argv[1], sys.argv[2:]))
