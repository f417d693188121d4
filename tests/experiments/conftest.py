"""Workers are new processes: they find the toy experiment by the path of the tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _tests_for_workers(monkeypatch):
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
