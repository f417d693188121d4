"""Damped solves with certificates, and log-determinants; knows an operator by its products and its eigenbasis."""

from curvoscope.solve.eigenbasis import Eigenbasis
from curvoscope.solve.functions import effective_dimension, logdet
from curvoscope.solve.solution import Solution
from curvoscope.solve.solver import Solver

__all__ = ["Eigenbasis", "Solution", "Solver", "effective_dimension", "logdet"]
