"""Helpers that several of these tests share are modules in `kit`."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "kit"))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    name = request.node.name
    pytest.importorskip("torch").manual_seed(len(name) * 7919 + sum(map(ord, name)))
