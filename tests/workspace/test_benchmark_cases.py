"""Cases that need a GPU or a peer run seldom: what they take from each other and from the packages is there all the same."""

import ast
import importlib
from pathlib import Path

import pytest

CASES = Path(__file__).resolve().parents[2] / "benchmarks" / "cases"
OURS = "deepinfer_"


def defined(path: Path) -> set[str]:
    """Names that a file gives at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def imports(path: Path) -> list[tuple[str, str | None]]:
    """(module, name or None) of every import, wherever it stands."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("case", sorted(CASES.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_case_imports_is_there(case: Path) -> None:
    siblings = {path.stem: path for path in CASES.glob("*.py")}
    for module, name in imports(case):
        if module in siblings:
            assert name is None or name in defined(siblings[module]), f"{module} defines no {name}"
        elif module.startswith(OURS) and ".adapters." not in module:
            found = importlib.import_module(module)
            if name is not None and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        else:
            assert not (module.startswith(("gpu_", "sched_", "specdec_", "structured_"))), f"there is no case {module}"
