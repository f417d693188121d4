"""Laplace's method: a Gaussian around trained weights, its evidence and the variance of its predictions."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvoscope.curvature import ModelHessian
from curvoscope.errors import DtypeError, LossError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.losses import MSE


@dataclass(frozen=True, eq=False)
class Laplace:
    """The Gaussian N(w, (c n H + prior)^-1) around the weights w, H the Gauss-Newton matrix of the mean loss.

    n is the number of loss terms. The loss is taken as the mean of -log p(data | w): c = 1. The mean squared error is
    that of Gaussian noise of variance σ²: c = 1 / (2 σ²), and the constants of its density are counted.

    Args:
        hessian: of the mean loss over the training data.
        prior: precision of the Gaussian prior on the weights, around 0.
        scale: c n.
        log_likelihood: of the training data, at the weights.
        log_marginal_likelihood: log p(data | prior), see `laplace`.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model, X, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> found = cv.analysis.laplace(cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, y)]), prior=1.0)
        >>> found.predictive_variance(X[:2]).shape, found.log_marginal_likelihood.exact
        (torch.Size([2, 2, 2]), True)
    """

    hessian: ModelHessian
    prior: float
    scale: float
    log_likelihood: float
    log_marginal_likelihood: Estimate

    @property
    def damping(self) -> float:
        """prior / (c n): the posterior covariance is (H + damping)^-1 / (c n)."""
        return self.prior / self.scale

    def predictive_variance(self, inputs: Any, tolerance: float = 1e-6) -> Tensor:
        """J (c n H + prior)^-1 J^T: the covariance of the outputs of a linearised model, (rows, outputs, outputs).

        Args:
            inputs: what the model is called with.
            tolerance: the relative residual of the solves; one that does not converge raises.

        Returns:
            The covariance of the outputs of each row, J being their Jacobian in the weights.
        """
        J = self.hessian.output_jacobian(inputs)  # (rows, outputs, P)
        inverse = self.hessian.outer.inverse(self.damping, tolerance)
        solved = (inverse @ J.flatten(0, 1).T).T.view_as(J)
        return J @ solved.mT / self.scale


def laplace(
    H: ModelHessian,
    prior: float,
    noise: float = 1.0,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
) -> Laplace:
    """Laplace's method with the Gauss-Newton matrix: the log marginal likelihood, and predictive variances.

        log p(data | prior) ≈ log p(data | w) - prior/2 |w|² + P/2 log prior - 1/2 log det(c n H + prior)

    The weights should minimise the training loss with the weight decay that the prior stands for.

    Args:
        H: of the mean loss over the training data, as `cv.hessian` gives it, with a loss that is known to be convex.
        prior: precision of the prior, one number for all weights.
        noise: σ², the variance of the noise; for the mean squared error only.
        matvecs: the budget of products for the log-determinant, if it is not exact.
        tolerance: its standard error relative to P, instead of a budget.
        seed: of its probes; by default that of `cv.settings`.

    Returns:
        The posterior; its evidence has the error bar of the log-determinant.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model, X, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> H = cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, y)])
        >>> cv.analysis.laplace(H, prior=1.0).log_marginal_likelihood < 0
        True
    """
    if not isinstance(H, ModelHessian):
        raise DtypeError("H", f"expected the Hessian of a model from cv.hessian, got {type(H).__name__}")
    for name, value in (("prior", prior), ("noise", noise)):
        if not (value > 0 and math.isfinite(value)):
            raise RangeError(name, f"got {value}, expected a positive number")
    if math.isinf(H.outer.lower_bound()):
        raise LossError(
            "H", "its loss is not known to be convex in the outputs; use cross-entropy or the mean squared error"
        )
    terms, likelihood = H.terms, -H.terms * H.loss
    scale = terms
    if isinstance(H.objective, MSE):
        scale = terms / (2 * noise)
        likelihood = likelihood / (2 * noise) - terms / 2 * math.log(2 * math.pi * noise)
    elif noise != 1.0:
        raise RangeError("noise", f"got {noise}, but the loss is {type(H.objective).__name__}; only MSE has a noise")
    size, weights = H.shape[0], H.weights.double()
    logdet = H.outer.logdet(prior / scale, matvecs=matvecs, tolerance=tolerance, seed=seed)
    known = likelihood - prior / 2 * float(weights.square().sum()) + size / 2 * math.log(prior / scale)
    facts = logdet.facts() | {"value": known - logdet / 2, "stderr": logdet.stderr / 2, "skewness": -logdet.skewness}
    return Laplace(H, prior, scale, likelihood, Estimate(**facts))
