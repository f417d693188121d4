"""Any loss: at a layer's output, and as the objective of a model."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvoscope.errors import LossError, NonFiniteError
from curvoscope.losses.counting import measure
from curvoscope.losses.cross_entropy import CrossEntropy
from curvoscope.losses.curvatures import LossAt, curvature_of, group_size
from curvoscope.losses.mse import MSE
from curvoscope.losses.objectives import LossFunction, MeanLoss, Objective, scalar, takes

_REDUCTIONS = ("mean", "sum", "batchmean")


def at(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """Value, gradient G and Hessian S of any loss at a layer's output.

    Args:
        loss: a loss of this package with its targets, or any function of the output that returns a scalar tensor.
        F: the output, (N, L, m).
        squeeze: whether the function expects (L, m).

    Returns:
        The loss around F, S in its sparsest form.

    Example:
        >>> import torch, curvoscope as cv
        >>> found = cv.losses.at(lambda F: F.pow(3).sum(), torch.ones(1, 2, 2), squeeze=False)
        >>> found.value, found.gradient[0, 0], type(found.curvature).__name__
        (4.0, tensor([3., 3.]), 'TokenCurvature')
    """
    found = loss.at(F) if isinstance(loss, Objective) else _by_autodiff(loss, F, squeeze)
    if not math.isfinite(found.value):
        raise NonFiniteError("loss", f"is {found.value} at this input")
    return found


def _by_autodiff(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """G and S by double backward, which is right also when nested torch.func transforms are not."""
    if not takes(loss, 1):
        raise LossError("loss", "must be a function of the layer's output alone; give lambda F: loss(F, targets)")
    leaf = F.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = scalar("loss", loss(leaf[0] if squeeze else leaf))
        if not value.requires_grad:
            raise LossError("loss", "does not depend on the layer's output, or detaches it")
        gradient = torch.autograd.grad(value, leaf, create_graph=True)[0]

    def product(direction: Tensor) -> Tensor:
        if not gradient.requires_grad:  # a loss linear in F
            return torch.zeros_like(leaf)
        found = torch.autograd.grad(gradient, leaf, direction, retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(leaf) if found is None else found

    def products(directions: Tensor) -> Tensor:
        return torch.stack([product(direction) for direction in directions])

    return LossAt(float(value.detach()), gradient.detach(), curvature_of(products, F, group_size(product, F)))


def objective_of(loss_fn: LossFunction | None) -> Objective | None:
    """The objective behind a loss function; torch's own cross-entropy and squared error are recognised."""
    if loss_fn is None or isinstance(loss_fn, Objective):
        return loss_fn
    reduction = getattr(loss_fn, "reduction", "mean")
    if reduction not in _REDUCTIONS:
        raise LossError("loss_fn", f"has reduction={reduction!r}; expected {' or '.join(map(repr, _REDUCTIONS))}")
    if loss_fn is functional.mse_loss or (type(loss_fn) is nn.MSELoss and reduction == "mean"):
        return MSE()
    if loss_fn is functional.cross_entropy:
        return CrossEntropy(axis=1)
    if type(loss_fn) is nn.CrossEntropyLoss and reduction == "mean":
        if loss_fn.weight is None and loss_fn.label_smoothing == 0:
            return CrossEntropy(ignore_index=loss_fn.ignore_index, axis=1)
        return MeanLoss(loss_fn, partial(_weights, loss_fn))
    return MeanLoss(loss_fn, getattr(loss_fn, "terms", None))


def _weights(loss: nn.CrossEntropyLoss, outputs: Any, targets: Tensor) -> float:
    """The mean divides by the sum of the targets' class weights; with probabilities as targets, by the positions."""
    found = measure(loss, outputs, targets).tally
    return found.outputs / outputs.shape[1 if outputs.ndim > 1 else 0] if found.observed is None else found.observed
