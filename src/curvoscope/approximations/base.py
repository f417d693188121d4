"""What every stand-in for a Hessian block can do: products, entries, trace, norm, and a damped solve."""

from abc import abstractmethod

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.approximations.factors import GradientFactors
from curvoscope.errors import RangeError, ShapeError
from curvoscope.operators.base import LinearOperator, Shape


class Approximation(LinearOperator):
    """A symmetric stand-in A for a block of the weight W (a, p), in the row-major order of W.

    A is a `LinearOperator`: `A @ v`, `A.trace()`, `A.frobenius_norm()`, `A.dense()`, `A.eigenvalues()`. Its `solve` is
    direct, by `damped_solve`, which uses its structure. It says how many floats it stores. Subclasses give `_matmat`,
    `_solve` and `_ends`.

    Args:
        name: of the approximation, such as "kfac" or "kronecker:4".
        shape: (a, p).
        like: a tensor of its dtype, on its device.
        floats: numbers that the structure stores.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> A = cv.approximations.kfac(H, "W1")
        >>> A.name, A.floats, A.shape
        ('kfac', 8, (4, 4))
        >>> b = torch.ones(4).double()
        >>> x = A.solve(b, damping=0.1)
        >>> x.method, x.converged, bool(torch.allclose(A @ x.value + 0.1 * x.value, b))
        ('direct', True, True)
    """

    structured = True

    def __init__(self, name: str, shape: Shape, like: Tensor, floats: int) -> None:
        super().__init__(shape, shape, like, symmetric=True)
        self.name, self.floats = name, floats

    @abstractmethod
    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        """(A + damping)^-1 columns, (n, k)."""

    @abstractmethod
    def _ends(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue."""

    def damped_solve(self, b: Tensor, damping: float) -> Tensor:
        """(A + damping I)^-1 b, in the structure of A: what `solve` returns as the value of its `Solution`.

        Args:
            b: (n,) or (n, k).
            damping: at least 0, and more than 0 if A is singular.

        Returns:
            The solution, of the shape of b.
        """
        if b.ndim not in (1, 2) or b.shape[0] != self.shape[0]:
            raise ShapeError("b", f"got shape {tuple(b.shape)}, expected ({self.shape[0]},) or ({self.shape[0]}, k)")
        checks.floating("b", b, like=self.like)
        damping = checks.damping(damping)
        smallest, largest = self._ends()
        rounding = 0.0 if damping else self.shape[0] * torch.finfo(self.dtype).eps * max(abs(smallest), abs(largest))
        if smallest + damping <= rounding:
            raise RangeError(
                "damping",
                f"got {damping:g}, but the smallest eigenvalue of {self.name!r} is {smallest:.3g}: the system is not "
                "positive definite; give a larger damping",
            )
        columns = b if b.ndim == 2 else b[:, None]
        found = checks.finite("solution", self._solve(columns, damping))
        return found if b.ndim == 2 else found[:, 0]

    def lower_bound(self) -> float:
        """The smallest eigenvalue."""
        return self._ends()[0]

    def quadratic(self, found: GradientFactors) -> Tensor:
        """gamma^T A gamma for each gradient; its mean over samples is <H, A>, if E[gamma gamma^T] = H.

        Args:
            found: n gradients of the shape (a, p) of the block.

        Returns:
            The values, (n,).
        """
        formed = (some.gradients().flatten(1) for some in found.pieces())
        return torch.cat([(gradients * self._matmat(gradients.mT).mT).sum(1) for gradients in formed])
