"""What a solve returns: the solution with its residual, its cost and a bound on its error."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    """x with (B + damping) x ≈ b, and a bound on its error.

    The residual is |b - (B + damping) x|, from a product with the final x. Conjugate gradients need no such product if
    rounding cannot change the residual by more than a tenth of the tolerance: then it comes from the products with the
    vectors that make up x. With m a lower bound on the smallest |λ + damping| over the eigenvalues λ of B, the error
    obeys

        |x - x*| ≤ (residual + rounding) / m = error_bound,

    where rounding = c ε (|B| |x| + |b|) covers the product that the residual comes from. `certificate` says where m
    comes from: "eigenvalues" (all are known), "lower bound" (such as 0, for a Gauss-Newton matrix of a convex loss),
    "lanczos" (holds with a probability of 99.99 %), or "none": then `margin` is 0 and `error_bound` infinite.

    Args:
        value: x (n,), or (n, c) for several right-hand sides.
        residuals: |b - (B + damping) x| for each column (c,), in float64.
        sizes: |b| for each column (c,).
        error_bounds: bounds on |x - x*| for each column (c,).
        iterations: Krylov steps, of the column that took the most.
        matvecs: products with B, those of the certificate among them.
        converged: whether every residual is at most tolerance · |b|.
        tolerance: what was asked for.
        method: "direct", "cg" or "minres".
        certificate: where the margin comes from.
        margin: m.
        damping: that of the system.
        preconditioner: the name of the preconditioner of the last steps, or "none".
        reason: why this preconditioner: requested, or the products predicted from eight steps of each candidate.
        interrupted: whether Ctrl-C ended it.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> x = H.outer.solve(torch.ones(4).double(), damping=0.1)
        >>> x.converged, x.method, x.error_bound < 1e-12
        (True, 'direct', True)
    """

    value: Tensor
    residuals: Tensor
    sizes: Tensor
    error_bounds: Tensor
    iterations: int
    matvecs: int
    converged: bool
    tolerance: float
    method: str
    certificate: str
    margin: float
    damping: float
    preconditioner: str = "none"
    reason: str = ""
    interrupted: bool = False

    @property
    def residual(self) -> float:
        """The largest residual of all columns."""
        return float(self.residuals.max())

    @property
    def relative_residual(self) -> float:
        """The largest residual / |b| of all columns; 0 for b = 0."""
        return float((self.residuals / torch.where(self.sizes == 0, 1.0, self.sizes)).max())

    @property
    def error_bound(self) -> float:
        """The largest bound on |x - x*| of all columns; infinite if none is known."""
        return float(self.error_bounds.max())

    def __str__(self) -> str:
        state = "converged" if self.converged else f"NOT CONVERGED to {self.tolerance:.1g}"
        if self.interrupted:
            state += ", interrupted"
        used = "" if self.preconditioner == "none" else f" preconditioned by {self.preconditioner}"
        return (
            f"{state}: relative residual {self.relative_residual:.2g}, error ≤ {self.error_bound:.2g} "
            f"({self.certificate}); {self.method}{used}, {self.iterations} iterations, {self.matvecs} products"
        )

    def __repr__(self) -> str:
        return f"Solution({tuple(self.value.shape)}, {self})"
