"""The mean squared error."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.losses.curvatures import ScalarCurvature
from curvoscope.losses.objectives import ClosedLoss, LossFunction, Objective, logits_of


class MSE(ClosedLoss):
    """Mean over all n entries of (F - Y)^2, so that G = 2/n (F - Y) and S = 2/n I.

    With targets Y it is a loss for a layer, without for a model.

    Args:
        Y: (N, L, m) or (L, m), the targets of a layer's output F. None: they come with the batches of a model.
        squeeze: axes of length one do not matter.

    Example:
        >>> import torch, curvoscope as cv
        >>> X, Y = torch.ones(1, 3, 2).double(), torch.zeros(1, 3, 2).double()
        >>> cv.hessian(torch.nn.Linear(2, 2).double(), cv.losses.MSE(), [(X, Y)]).terms
        6.0
        >>> layer = cv.exact.LinearMLP([torch.eye(2).double()])
        >>> round(float(layer.hessian(X, cv.losses.MSE(Y))["W1"].trace()), 12)
        4.0
    """

    convex = True

    def __init__(self, Y: Tensor | None = None, squeeze: bool = False) -> None:
        super().__init__(None if Y is None else checks.floating("Y", Y))
        self.squeeze = squeeze

    @property
    def Y(self) -> Tensor | None:
        """The targets of a layer's output, None for a model."""
        return self.targets

    @classmethod
    def of_torch(cls, loss_fn: LossFunction) -> Objective | None:
        """The same loss as a function of torch that is a mean: `mse_loss` or an `MSELoss`.

        Args:
            loss_fn: any loss function.

        Returns:
            An `MSE`; None for another function, or if the reduction is not "mean".
        """
        known = type(loss_fn) is nn.MSELoss and loss_fn.reduction == "mean"
        return cls() if known or loss_fn is functional.mse_loss else None

    def bound(self, targets: Tensor) -> "MSE":
        """The same loss for a layer, with targets of its own.

        Args:
            targets: Y, (N, L, m) or (L, m).

        Returns:
            The loss, a function of F alone.
        """
        return MSE(targets, self.squeeze)

    def __call__(self, outputs: Any, targets: Any = None) -> Tensor:
        """The mean over the entries."""
        return self._residual(logits_of(outputs), targets).square().mean()

    def terms(self, outputs: Any, targets: Any) -> int:
        """The number n of entries of the output.

        Args:
            outputs: F, or a model's output that has it as `logits` or as its first entry.
            targets: are not read.

        Returns:
            The number that the mean divides by.
        """
        return logits_of(outputs).numel()

    def gradient(self, outputs: Any, targets: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        """G = 2/n (F - Y), so S = 2/n I.

        Args:
            outputs: F, or a model's output that has it as `logits` or as its first entry.
            targets: Y of the batch; None for the loss's own.

        Returns:
            The lists [F] and [G].
        """
        F = logits_of(outputs)
        return [F], [self._residual(F, targets) * (2.0 / F.numel())]

    def curvature(self, F: Tensor) -> ScalarCurvature:
        """S = 2/n I.

        Args:
            F: the output of a layer, (N, L, m).

        Returns:
            S, with n the number of entries of F.
        """
        return ScalarCurvature(2.0 / F.numel())

    def _residual(self, F: Tensor, given: Any) -> Tensor:
        targets = self.wanted(given, F)
        if given is None:
            checks.floating("Y", targets, like=F)
        if self.squeeze and F.squeeze().shape == targets.squeeze().shape:
            targets = targets.reshape(F.shape)
        if F.shape != targets.shape:
            argument = "Y" if given is None else "targets"
            raise ShapeError(argument, f"got {tuple(targets.shape)} for outputs {tuple(F.shape)}")
        return F - targets
