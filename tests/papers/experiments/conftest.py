"""Workers are new processes: they find the toy experiment by the path of the shared cases."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _tests_for_workers(monkeypatch):
    paths = [str(Path(__file__).parents[2] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
