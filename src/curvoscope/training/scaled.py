"""A symmetric matrix between two diagonal ones: step sizes and preconditioners around a Hessian."""

from torch import Tensor

from curvoscope.operators.base import LinearOperator


class DiagonallyScaled:
    """D B D for a symmetric B (n, n) and a diagonal D (n,)."""

    symmetric = True

    def __init__(self, operator: LinearOperator, diagonal: Tensor) -> None:
        self._operator, self._diagonal = operator, diagonal.to(operator.dtype)
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def __matmul__(self, other: Tensor) -> Tensor:
        D = self._diagonal if other.ndim == 1 else self._diagonal[:, None]
        return D * (self._operator @ (D * other))
