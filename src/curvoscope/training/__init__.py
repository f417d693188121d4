"""Curvature while a model is trained: the monitor, and an optimizer that steps by it."""

from curvoscope.training.callbacks import lightning_callback, trainer_callback
from curvoscope.training.gauss_newton import GaussNewton
from curvoscope.training.monitor import CurvatureMonitor
from curvoscope.training.records import BlockNorms, Details, Incident, Record
from curvoscope.training.runs import RunStore, StoredRun

__all__ = [
    "BlockNorms",
    "CurvatureMonitor",
    "Details",
    "GaussNewton",
    "Incident",
    "Record",
    "RunStore",
    "StoredRun",
    "lightning_callback",
    "trainer_callback",
]
