"""Losses: of a layer's output (`at_layer`), and of a model's outputs and targets (`objectives`)."""

from curvoscope.losses.at_layer import (
    MSE,
    CrossEntropy,
    Curvature,
    LossAt,
    LossFunction,
    PairCurvature,
    PerToken,
    Port,
    ScalarCurvature,
    SoftmaxCurvature,
    TokenCurvature,
    at,
    curvature_of,
    group_size,
    through,
)
from curvoscope.losses.contrastive import Contrastive
from curvoscope.losses.objectives import MeanLoss
from curvoscope.losses.regularised import Regularised

__all__ = [
    "MSE",
    "Contrastive",
    "CrossEntropy",
    "Curvature",
    "LossAt",
    "LossFunction",
    "MeanLoss",
    "PairCurvature",
    "PerToken",
    "Port",
    "Regularised",
    "ScalarCurvature",
    "SoftmaxCurvature",
    "TokenCurvature",
    "at",
    "curvature_of",
    "group_size",
    "through",
]
