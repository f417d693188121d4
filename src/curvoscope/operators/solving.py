"""What a symmetric operator answers about its damped inverse: solves, log-determinants, effective dimensions."""

import math
from functools import cached_property
from typing import TYPE_CHECKING, cast

from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.errors import DtypeError
from curvoscope.estimate import DiagonalEstimate
from curvoscope.solve import Eigenbasis, Solution, Solver, functions
from curvoscope.solve.preconditioning import Candidate, Diagonal, Preconditioner

if TYPE_CHECKING:
    from curvoscope.operators.base import LinearOperator
    from curvoscope.operators.inverse import Inverse

DENSE = 1024  # rows up to which all eigenvectors cost less than the products of a Krylov method
DENSE_FROM_PRODUCTS = 256  # the same if every entry costs a product


class Solvable:
    """The questions about (B + damping)^-1 that every symmetric `LinearOperator` answers.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> x = H.outer.solve(torch.ones(4).double(), damping=0.5)
        >>> x.converged, H.outer.effective_dimension(0.5).exact
        (True, True)
        >>> round(H.outer.logdet(0.5), 6) == round(float(torch.logdet(H.outer.dense() + 0.5 * torch.eye(4))), 6)
        True
    """

    structured = False  # whether `damped_solve` is direct, by the structure of the operator

    def lower_bound(self) -> float:
        """A number not above the smallest eigenvalue, if one is known without computing eigenvalues; -inf if not.

        Gauss-Newton matrices of convex losses have 0: it makes the error bound of a solve rigorous.
        """
        return -math.inf

    @property
    def _whole(self) -> "LinearOperator":
        """The operator: this class is mixed into nothing else."""
        return cast("LinearOperator", self)

    @cached_property
    def eigenbasis(self) -> Eigenbasis | None:
        """All eigenvalues and eigenvectors, kept for the next question; None if they are not cheap."""
        return self._eigenbasis() if self._whole.symmetric else None

    def _eigenbasis(self) -> Eigenbasis | None:
        operator, budget = self._whole, checks.memory_budget()
        small = operator.shape[0] <= (DENSE_FROM_PRODUCTS if operator.estimated else DENSE)
        return Eigenbasis.dense(operator.dense()) if small and 4 * operator._bytes(2, budget) <= budget else None

    def solve(
        self,
        b: Tensor,
        damping: float = 1e-3,
        tolerance: float = 1e-6,
        *,
        method: str = "auto",
        preconditioner: str | Preconditioner | None = "auto",
        start: Tensor | None = None,
        matvecs: int | None = None,
        seed: int | None = None,
    ) -> Solution:
        """x = (B + damping)^-1 b for a symmetric B, with a bound on its error.

        Direct if all eigenvectors are cheap: up to 1,024 rows (256 if B is known by products alone), Kronecker
        products, and sums over few tokens. Otherwise conjugate gradients (the iterate with the least residual) if a
        lower bound on the spectrum shows that B + damping is positive definite, and MINRES if not. Every residual is
        recomputed from a product with the final x, unless rounding cannot change it noticeably.

        Args:
            b: (n,), or (n, c) for several right-hand sides, which advance together.
            damping: a number ≥ 0, in the units of B.
            tolerance: the relative residual |b - (B + damping) x| / |b| at which to stop.
            method: "auto", "direct", "cg" or "minres".
            preconditioner: None; "diagonal"; for a model any name of `cv.approximations`, such as "kfac" or
                "kronecker:2", made of the exact gradients of each block, or of 8 random ones if those cost more than
                65,536 backward passes (2,048 for "auto"); or something positive semidefinite with
                `damped_solve(b, damping)`, such as an approximation from a sweep. "auto": if eight plain steps do not
                reach the tolerance, they predict how many products are left. The diagonal of a closed form, or KFAC
                and EKFAC of a model, then take eight steps each, if that costs less than a quarter of these products.
                The one that predicts the fewest is used, unless as many plain steps are enough.
            start: approximate solutions of the shape of b, to continue an earlier solve.
            matvecs: the budget of products per right-hand side; None: ten times n, at least 200, at most 10,000. A
                certificate by Lanczos takes up to three quarters of as many products more, or 192.
            seed: of the Lanczos runs that bound the error; by default that of `cv.settings`.

        Returns:
            A `Solution`: `value`, `residual`, `error_bound`, `converged`, `iterations`, `matvecs`, `preconditioner` and
            the `reason` for it. Ctrl-C ends the iterations and returns the best so far.
        """
        return self._solver(damping, tolerance, method, preconditioner, matvecs, seed)(b, start)

    def _solver(
        self,
        damping: float,
        tolerance: float,
        method: str,
        preconditioner: str | Preconditioner | None,
        matvecs: int | None,
        seed: int | None,
    ) -> Solver:
        candidates: tuple[Candidate, ...] = ()
        if preconditioner == "auto":
            candidates = self._compared()
        elif isinstance(preconditioner, str):
            candidates = (self._stand_in(preconditioner),)
        elif isinstance(preconditioner, Preconditioner):
            given = preconditioner
            candidates = (Candidate(str(getattr(given, "name", "given")), lambda: given),)
        elif preconditioner is not None:
            kind = type(preconditioner).__name__
            raise DtypeError(
                "preconditioner", f"got {kind}, expected a name or something with damped_solve(b, damping)"
            )
        return Solver(self._whole, damping, tolerance, method, candidates, preconditioner == "auto", matvecs, seed)

    def _compared(self) -> tuple[Candidate, ...]:
        """Preconditioners to compare if none is asked for."""
        return () if self._whole.estimated else (self._stand_in("diagonal"),)

    def _stand_in(self, name: str) -> Candidate:
        """The preconditioner of a name."""
        checks.choice("preconditioner", name, ("auto", "diagonal"))
        return Candidate(name, lambda: Diagonal(self._whole.diagonal().value))

    def damped_solve(self, b: Tensor, damping: float) -> Tensor:
        """(B + damping)^-1 b as a plain tensor, which lets any operator precondition another one.

        Args:
            b: (n,) or (n, c).
            damping: a number ≥ 0.

        Returns:
            The solution; `ConvergenceError` if it did not converge.
        """
        return self.inverse(damping) @ b

    def inverse(
        self,
        damping: float = 1e-3,
        tolerance: float = 1e-6,
        *,
        method: str = "auto",
        preconditioner: str | Preconditioner | None = "auto",
        matvecs: int | None = None,
        seed: int | None = None,
    ) -> "Inverse":
        """(B + damping)^-1 as an operator, whose products are solves. A product that does not converge raises.

        Args:
            damping, tolerance, method, preconditioner, matvecs, seed: as for `solve`.

        Returns:
            A symmetric `LinearOperator`.
        """
        from curvoscope.operators.inverse import Inverse

        return Inverse(self._whole, self._solver(damping, tolerance, method, preconditioner, matvecs, seed))

    logdet = functions.logdet
    effective_dimension = functions.effective_dimension

    def inverse_diagonal(
        self,
        damping: float = 1e-3,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> DiagonalEstimate:
        """The diagonal (n,) of (B + damping)^-1: exact if all eigenvectors are cheap, otherwise from random signs.

        Args:
            damping: a number ≥ 0.
            matvecs: the number of solves.
            tolerance: the relative standard error of the diagonal as a whole at which to stop.
            seed: of the random signs; by default that of `cv.settings`.

        Returns:
            A tensor whose entries are Estimates; its `matvecs` are products with B.
        """
        inverse = self.inverse(damping)
        if matvecs is None and tolerance is None and inverse.solver.basis is not None:
            return inverse.diagonal()
        found = estimate.diagonal(inverse, matvecs=matvecs, tolerance=tolerance, seed=seed)
        return DiagonalEstimate(found.value, found.stderr, inverse.solver.matvecs, found.method, found.degrees)
