"""Fixtures of the app's tests."""

import gc
from types import SimpleNamespace

import pytest
from deepinfer_offline.engine.native import engine
from job_kit import Runner


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(target, draft): folders of a tiny Llama and of a DSpark draft that was trained for it."""
    pytest.importorskip("transformers")
    from tiny_dspark import make_draft

    return make_draft(tmp_path_factory.mktemp("dspark"))


@pytest.fixture(scope="module", autouse=True)
def _settled_heap():
    """Freeze what is there before a file's tests, and nothing else.

    An engine looks all objects over when it starts, and freezes them until it is closed. Here a thousand engines start beside
    every library that a test needs, which took half of the tests' time. So they look over what came after this alone.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "gc", SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None))
        yield
    gc.collect()  # an engine that a failing step left open ends here, and not with the interpreter
