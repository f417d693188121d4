"""Curvature while a model is trained: the monitor, and an optimizer that steps by it."""

from curvoscope.training.callbacks import callback, lightning_callback, trainer_callback
from curvoscope.training.gauss_newton import GaussNewton
from curvoscope.training.loggers import Logger
from curvoscope.training.monitor import CurvatureMonitor
from curvoscope.training.records import BlockNorms, Details, Incident, Record
from curvoscope.training.runs import RunStore, StoredRun
from curvoscope.training.updates import BlockUpdate, Update

__all__ = [
    "BlockNorms",
    "BlockUpdate",
    "CurvatureMonitor",
    "Details",
    "GaussNewton",
    "Incident",
    "Logger",
    "Record",
    "RunStore",
    "StoredRun",
    "Update",
    "callback",
    "lightning_callback",
    "trainer_callback",
]
