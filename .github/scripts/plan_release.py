"""Check a release tag against the tree: `<dist>-v<version>` names a member at that version with a dated changelog section.

Prints `dist=<name>` for the workflow's outputs. Exits with one sentence on the first mismatch.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAG = re.compile(r"(?P<dist>deepinfer-[a-z-]+)-v(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")


def plan(tag: str, root: Path = ROOT) -> str:
    """Return the distribution that `tag` releases. Raises SystemExit with the reason when the tree disagrees."""
    match = TAG.fullmatch(tag)
    if not match:
        raise SystemExit(f"tag {tag!r} is not <dist>-v<version>, e.g. deepinfer-sched-v0.1.0")
    for path in (*root.glob("packages/*/pyproject.toml"), *root.glob("apps/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        if project["name"] != match["dist"]:
            continue
        if project["version"] != match["version"]:
            raise SystemExit(f"tag says {match['version']}, {path.relative_to(root)} says {project['version']}")
        heading = re.compile(rf"^## {re.escape(match['version'])} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)
        if not heading.search((path.parent / "CHANGELOG.md").read_text()):
            raise SystemExit(
                f"{path.parent.name}/CHANGELOG.md has no dated section '## {match['version']} (YYYY-MM-DD)'"
            )
        return project["name"]
    raise SystemExit(f"{match['dist']} is not a member of this workspace")


if __name__ == "__main__":
    print(f"dist={plan(sys.argv[1])}")
