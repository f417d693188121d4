"""Losses: the same objects serve a layer, `layer.hessian(X, loss)`, and a model, `cv.hessian(model, loss, batches)`."""

from curvoscope.losses.any_loss import at
from curvoscope.losses.cross_entropy import CrossEntropy, SoftmaxCurvature
from curvoscope.losses.curvatures import (
    Curvature,
    LossAt,
    PairCurvature,
    ScalarCurvature,
    TokenCurvature,
)
from curvoscope.losses.curvatures import PerToken as PerToken
from curvoscope.losses.curvatures import Port as Port
from curvoscope.losses.curvatures import curvature_of as curvature_of
from curvoscope.losses.curvatures import group_size as group_size
from curvoscope.losses.curvatures import through as through
from curvoscope.losses.mse import MSE
from curvoscope.losses.objectives import Contrastive, MeanLoss
from curvoscope.losses.objectives import LossFunction as LossFunction
from curvoscope.losses.objectives import Objective as Objective
from curvoscope.losses.objectives import objective_of as objective_of
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
