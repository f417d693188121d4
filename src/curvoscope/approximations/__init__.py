"""Stand-ins for a Hessian block: each is an operator with a damped solve in its own structure."""

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.diagonal import diagonal
from curvoscope.approximations.ekfac import ekfac
from curvoscope.approximations.empirical import empirical
from curvoscope.approximations.factor_files import read_factors
from curvoscope.approximations.factors import GradientFactors
from curvoscope.approximations.gradients import GradientSource, joined
from curvoscope.approximations.heads import heads
from curvoscope.approximations.input import input
from curvoscope.approximations.kfac import kfac
from curvoscope.approximations.kl_shampoo import kl_shampoo
from curvoscope.approximations.kronecker import kronecker
from curvoscope.approximations.layers import layers
from curvoscope.approximations.names import approximation
from curvoscope.approximations.neurons import neurons
from curvoscope.approximations.shampoo import shampoo
from curvoscope.approximations.source import source_of
from curvoscope.approximations.tkfac import tkfac

__all__ = [
    "Approximation",
    "GradientFactors",
    "GradientSource",
    "approximation",
    "diagonal",
    "ekfac",
    "empirical",
    "heads",
    "input",
    "joined",
    "kfac",
    "kl_shampoo",
    "kronecker",
    "layers",
    "neurons",
    "read_factors",
    "shampoo",
    "source_of",
    "tkfac",
]
