"""Fixtures of the app's tests."""

import pytest
from job_kit import Runner


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path)
