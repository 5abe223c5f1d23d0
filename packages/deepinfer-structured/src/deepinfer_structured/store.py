"""Lowered grammars on disk, so that a job's schemas are analysed once and not once a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance
from deepinfer_structured.lowering import Lowered
from deepinfer_structured.spec import Spec

MOST_BYTES = 256 << 20
"""Size of a folder of grammars unless said otherwise."""


def _package_version() -> str:
    try:
        return version("deepinfer-structured")
    except PackageNotFoundError:
        return "source"


class GrammarStore:
    """A folder of lowered grammars, keyed by specification, options and library versions.

    Files are written whole and renamed, so several processes may share the folder; a damaged file counts as absent.

    Args:
        folder: where the files are; made when the first is written.
        most_bytes: size of the folder's grammars; the oldest go when a new one exceeds it.
    """

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = Path(folder), most_bytes

    def _path(self, spec: Spec, options: Options) -> Path:
        key = repr((spec, options, _package_version(), llguidance.version))
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}.json"

    def get(self, spec: Spec, options: Options) -> Lowered | None:
        """The stored grammar, or None."""
        try:
            value = json.loads(self._path(spec, options).read_text(encoding="utf-8"))
            pairs = {name: tuple(value[name]) for name in ("notes", "most_rules", "longest_terminals")}
            fields: dict[str, Any] = {**value, **pairs}
            return Lowered(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, spec: Spec, options: Options, found: Lowered) -> None:
        """Store a grammar; a folder that cannot be written to is no error."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(found), file)
            os.replace(name, self._path(spec, options))
            self._trim()

    def _trim(self) -> None:
        """Delete the oldest grammars beyond the size; one that another process deletes meanwhile is no error."""
        found = [
            (status.st_mtime_ns, status.st_size, path)
            for path in self.folder.glob("*.json")
            if (status := _status(path))
        ]
        excess = sum(size for _, size, _ in found) - self.most_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def _status(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None
