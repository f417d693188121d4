"""Losses: of a layer's output (`at_layer`), and of a model's outputs and targets (`objectives`)."""

from curvoscope.losses.at_layer import (
    MSE,
    CrossEntropy,
    Curvature,
    LossAt,
    PairCurvature,
    ScalarCurvature,
    SoftmaxCurvature,
    TokenCurvature,
    at,
)
from curvoscope.losses.at_layer import LossFunction as LossFunction
from curvoscope.losses.at_layer import PerToken as PerToken
from curvoscope.losses.at_layer import Port as Port
from curvoscope.losses.at_layer import curvature_of as curvature_of
from curvoscope.losses.at_layer import group_size as group_size
from curvoscope.losses.at_layer import through as through
from curvoscope.losses.contrastive import Contrastive
from curvoscope.losses.objectives import MeanLoss
from curvoscope.losses.regularised import Regularised

__all__ = [
    "MSE",
    "Contrastive",
    "CrossEntropy",
    "Curvature",
    "LossAt",
    "MeanLoss",
    "PairCurvature",
    "Regularised",
    "ScalarCurvature",
    "SoftmaxCurvature",
    "TokenCurvature",
    "at",
]
