"""The papers' experiments: declared in `figures`, run by `runner`, kept in `store`."""

from curvoscope.database import StoreError
from curvoscope.experiments.figure import Figure, Row, Value, Verdict
from curvoscope.experiments.figures import NAMES, find, left_out
from curvoscope.experiments.runner import Task, WorkerError, missing, run
from curvoscope.experiments.store import Store

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
    "left_out",
    "missing",
    "run",
]
