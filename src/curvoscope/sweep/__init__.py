"""The Gauss-Newton part of all blocks from sampled backward passes."""

from curvoscope.sweep.plan import SweepPlan
from curvoscope.sweep.result import PairNorms, Sweep
from curvoscope.sweep.run import sweep
from curvoscope.sweep.statistics import Bracket

__all__ = ["Bracket", "PairNorms", "Sweep", "SweepPlan", "sweep"]
