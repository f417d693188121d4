"""Damped inverses as operators."""

from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ConvergenceError
from curvoscope.operators.base import LinearOperator
from curvoscope.solve import Solver


class Inverse(LinearOperator):
    """(B + damping)^-1: every product is a solve, and one that does not converge raises a `ConvergenceError`.

    Args:
        operator: B, symmetric.
        solver: solves with it; `solver.matvecs` counts the products with B.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> inverse = H.outer.inverse(damping=1.0)
        >>> v = torch.ones(4).double()
        >>> bool(torch.allclose(H.outer @ (inverse @ v) + inverse @ v, v))
        True
    """

    def __init__(self, operator: LinearOperator, solver: Solver) -> None:
        super().__init__(operator.row_shape, operator.column_shape, operator.like, symmetric=True)
        self.operator, self.solver = operator, solver

    @property
    def estimated(self) -> bool:
        """Whether products need iterations."""
        return self.solver.basis is None

    def _matmat(self, columns: Tensor) -> Tensor:
        found = self.solver(columns)
        if not found.converged:
            raise ConvergenceError("inverse", f"{found}; give a larger damping, tolerance or budget", found)
        return found.value

    def _diagonal(self) -> Tensor:
        basis, damping = self.solver.basis, self.solver.damping
        if basis is None:
            return super()._diagonal()
        self.solver.check_regular()
        return checks.finite("diagonal", basis.diagonal(lambda values: 1 / (values + damping)).to(self.like))

    def _trace(self) -> float:
        return float(self._diagonal().sum())
