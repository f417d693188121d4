"""The papers' experiments: declared in `figures`, run by `runner`, kept in `store`."""

from curvoscope.database import StoreError
from curvoscope.papers.experiments.figure import Figure, MeasuredValue, Row, Verdict
from curvoscope.papers.experiments.figures import NAMES, find, left_out
from curvoscope.papers.experiments.runner import Task, WorkerError, missing, run
from curvoscope.papers.experiments.store import Store

__all__ = [
    "NAMES",
    "Figure",
    "MeasuredValue",
    "Row",
    "Store",
    "StoreError",
    "Task",
    "Verdict",
    "WorkerError",
    "find",
    "left_out",
    "missing",
    "run",
]
