"""The papers' experiments: declared in `figures`, run by `runner`, kept in `store`."""

from curvoscope.experiments.figure import Figure, Row, Value, Verdict
from curvoscope.experiments.figures import NAMES, find
from curvoscope.experiments.runner import Task, WorkerError, missing, run
from curvoscope.experiments.store import Store, StoreError

__all__ = [
    "NAMES",
    "Figure",
    "Row",
    "Store",
    "StoreError",
    "Task",
    "Value",
    "Verdict",
    "WorkerError",
    "find",
    "missing",
    "run",
]
