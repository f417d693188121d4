"""A loss with a penalty on the parameters themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvoscope.errors import LossError
from curvoscope.losses.counting import Count, Inquiry
from curvoscope.losses.objectives import LossFunction, Objective, described, objective_of, scalar, takes

Penalty = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class _WithParameters:
    """What a regularised loss reads: the model's outputs and its parameters by name."""

    outputs: Any
    parameters: Mapping[str, Tensor]


class Regularised(Objective):
    """loss(outputs, targets) + penalty(parameters), the penalty counted once, whatever the number of batches.

    The parameters are a second output of the model, whose Jacobian is the identity: the Hessian of the penalty belongs
    to the outer part, and H = H_o + H_f holds.

    Args:
        loss: a mean over terms, as `cv.hessian` takes it.
        penalty: takes a dict of all parameters by name and returns a scalar.

    Example:
        >>> import torch, curvoscope as cv
        >>> def decay(parameters):
        ...     return 0.5 * sum(weight.square().sum() for weight in parameters.values())
        >>> model, zeros = torch.nn.Linear(2, 1).double(), torch.zeros(4, 2).double()
        >>> H = cv.hessian(model, cv.losses.Regularised(cv.losses.MSE(), decay), [(zeros, zeros[:, :1])])
        >>> H.dense().diagonal()
        tensor([1., 1., 3.], dtype=torch.float64)
    """

    reads_parameters = True

    def __init__(self, loss: LossFunction, penalty: Penalty) -> None:
        found = objective_of(loss)
        if found is None:
            raise LossError("loss", "is None; give the loss of the outputs and targets")
        if found.couples_rows or found.reads_parameters:
            raise LossError("loss", f"is {type(found).__name__}, which takes no penalty; write it into one function")
        if not takes(penalty, 1):
            raise LossError("penalty", f"must accept a dict of parameters, got {described(penalty)}")
        self._loss, self._penalty = found, penalty

    def seen(self, outputs: Any, parameters: Mapping[str, Tensor]) -> Any:
        """What this loss reads: the model's outputs together with its parameters.

        Args:
            outputs: what the model returned.
            parameters: all parameters of the model by name.

        Returns:
            One object with both, as `terms`, `gradient` and a call of the loss take it.
        """
        return _WithParameters(outputs, parameters)

    def inquiry(self) -> Inquiry | None:
        """That of the loss."""
        return self._loss.inquiry()

    def counted_by(self, count: Count) -> Objective:
        """The same with a known way to count the terms of the loss without its penalty.

        Args:
            count: the way, as an inquiry finds it on the data.

        Returns:
            The loss with its penalty; raises `LossError` if the loss was found to be a sum, not a mean.
        """
        found = Regularised(self._loss.counted_by(count), self._penalty)
        if found._loss.summed:
            raise LossError("loss", "is a sum over rows, and with a penalty must be a mean; divide it by the rows")
        return found

    def __call__(self, outputs: _WithParameters, targets: Any) -> Tensor:
        """Loss and penalty."""
        return self._loss(outputs.outputs, targets) + scalar("penalty", self._penalty(outputs.parameters))

    def terms(self, outputs: _WithParameters, targets: Any) -> int | float:
        """The number of terms of the loss without its penalty.

        Args:
            outputs: from `seen`.
            targets: those of the batch.

        Returns:
            The number of terms of the batch.
        """
        return self._loss.terms(outputs.outputs, targets)

    def gradient(self, outputs: _WithParameters, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        """G at the outputs, and the gradient of the penalty at the parameters.

        Args:
            outputs: from `seen`.
            targets: those of the batch.

        Returns:
            The tensors that loss and penalty depend on, outputs first, and the gradient in each of them.
        """
        cut, gradient = self._loss.gradient(outputs.outputs, targets)
        aliases = {name: w.view_as(w) for name, w in outputs.parameters.items() if w.requires_grad}
        value = scalar("penalty", self._penalty({**outputs.parameters, **aliases}))
        if not value.requires_grad:  # the penalty is of other parameters
            return cut, gradient
        found = torch.autograd.grad(value, list(aliases.values()), create_graph=True, allow_unused=True)
        pairs = [(w, G) for w, G in zip(aliases.values(), found, strict=True) if G is not None]
        return [*cut, *(w for w, _ in pairs)], [*gradient, *(G for _, G in pairs)]
