"""Building the C kernels: once, into a folder nobody else writes, and never a reason not to start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deepinfer_offline.ops.cpu import build

fresh = build.cpu_kernels.__wrapped__  # without the memory of the process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.OFF_VARIABLE, raising=False)
    if build._unsupported() is not None:
        pytest.skip(str(build._unsupported()))
    return tmp_path


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.OFF_VARIABLE, "0")
    assert fresh() == build.Build(None, f"switched off by {build.OFF_VARIABLE}=0")


def test_without_a_compiler_the_reason_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert "no C compiler (cc, gcc, clang)" in str(fresh().reason)


def test_a_compiler_that_fails_is_quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "cc"
    script.write_text("#!/bin/sh\necho 'kernels.c:1: error: no such header' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(script))
    found = fresh()
    assert found.library is None
    assert found.reason == "they could not be built: kernels.c:1: error: no such header"
    assert not list((folder / "cache" / "kernels").iterdir()), "nothing half-made is left"


def test_a_folder_that_others_can_write_is_not_trusted(folder: Path) -> None:
    kernels = folder / "cache" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    assert "can be written by others" in str(fresh().reason)


def test_they_are_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fresh()
    if first.library is None:
        pytest.skip(str(first.reason))
    (file,) = (folder / "cache" / "kernels").iterdir()
    assert file.suffix == ".so"
    assert not os.stat(file.parent).st_mode & 0o022
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert fresh().library is not None
