"""`Solver`: (B + damping) x = b, by the cheapest method that fits the operator, with a certificate."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError, SingularError
from curvoscope.estimate.products import Matrix, Products, check_symmetric
from curvoscope.solve.certificate import Margin, check_null_direction, margin_from_eigenvalues, margin_from_products
from curvoscope.solve.choice import PreconditionerChoice
from curvoscope.solve.eigenbasis import Eigenbasis
from curvoscope.solve.iterations import KrylovIterations
from curvoscope.solve.preconditioning import Candidate
from curvoscope.solve.solution import Solution

METHODS = ("auto", "direct", "cg", "minres")
_MOST = 10_000  # products without a budget, or ten times the size if that is less; at least _LEAST
_LEAST = 200
_ROUNDING = 16  # units of rounding of a product, and sqrt(n) more
_AGAIN = 2  # runs with what a run leaves over


class Solver:
    """Solves (B + damping) x = b for one symmetric operator and one damping; what is found is kept for the next b.

    Args:
        operator: B (n, n), symmetric. Solves are direct if it is `structured`, with a `damped_solve(b, damping)` of its
            own, or if its `eigenbasis` is not None.
        damping: a number ≥ 0, added to the diagonal.
        tolerance: the relative residual |b - (B + damping) x| / |b| at which to stop.
        method: "direct", "cg", "minres"; "auto": direct if the eigenbasis is cheap, cg if a lower bound on the spectrum
            shows that B + damping is positive definite, otherwise minres.
        preconditioners: stand-ins for B, which are made when they are needed.
        race: whether to compare them, as `PreconditionerChoice` says; otherwise the first is used.
        matvecs: the budget of products of one solve, without those of the certificate; None: ten times the size, but at
            least 200 and at most 10,000.
        seed: of the Lanczos runs of the certificate; by default that of `cv.settings`.

    Example:
        >>> import torch
        >>> from curvoscope.solve import Solver
        >>> solver = Solver(torch.diag(torch.arange(1.0, 101.0)).double(), damping=1.0, tolerance=1e-10)
        >>> x = solver(torch.ones(100).double())
        >>> x.converged, x.method, round(float(x.value[0]), 6), round(float(x.value[-1]) * 101, 6)
        (True, 'minres', 0.5, 1.0)
    """

    def __init__(
        self,
        operator: Matrix,
        damping: float,
        tolerance: float = 1e-6,
        method: str = "auto",
        preconditioners: Sequence[Candidate] = (),
        race: bool = False,
        matvecs: int | None = None,
        seed: int | None = None,
    ) -> None:
        check_symmetric(operator, "a solve")
        checks.choice("method", method, METHODS)
        checks.real("tolerance", tolerance)
        if not 0 < tolerance < 1:
            raise RangeError("tolerance", f"got {tolerance}, expected a relative residual between 0 and 1")
        checks.at_least(2, matvecs=matvecs)
        self.operator, self.damping, self.tolerance = operator, checks.damping(damping), tolerance
        self._asked, self._matvecs, self._seed = method, matvecs, seed
        self._choice = PreconditionerChoice(tuple(preconditioners), race)
        self.matvecs = 0  # of all solves so far
        self._margin: Margin | None = None

    @cached_property
    def basis(self) -> Eigenbasis | None:
        """The eigenbasis, if solves are direct."""
        found: Eigenbasis | None = None
        if self._asked in ("auto", "direct"):
            found = getattr(self.operator, "eigenbasis", None)
        if found is None and self._asked == "direct":
            raise RangeError("method", "got 'direct', but no eigendecomposition of this operator is cheap; use 'auto'")
        return None if found is None else found.at_least(self._floor)

    @cached_property
    def _structured(self) -> bool:
        """Whether the operator solves in its own structure."""
        structured: bool = getattr(self.operator, "structured", False)  # for positive definite systems
        return structured and (self._asked == "direct" or (self._asked == "auto" and self._definite))

    @cached_property
    def _floor(self) -> float:
        """A number not above the eigenvalues of B."""
        return float(getattr(self.operator, "lower_bound", lambda: -math.inf)())

    @cached_property
    def method(self) -> str:
        """The method of every solve."""
        if self._asked != "auto":
            return self._asked
        if self._structured or self.basis is not None:
            return "direct"
        return "cg" if self._definite else "minres"

    @property
    def _definite(self) -> bool:
        """Whether B + damping is known to be positive definite."""
        return self._floor + self.damping > 0

    def __call__(self, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve for b (n,), or for the columns of b (n, c).

        Args:
            b: the right-hand sides.
            start: approximate solutions of the same shape; None: 0.

        Returns:
            A `Solution`. Ctrl-C ends the iterations, and returns the best so far.
        """
        with Products(self.operator, "solve") as products:
            columns = self._checked("b", b, products)
            first = None if start is None else self._checked("start", start, products)
            if start is not None and start.shape != b.shape:
                raise ShapeError("start", f"got {tuple(start.shape)}, expected the shape {tuple(b.shape)} of b")
            if first is not None:  # no start is as good as the exact solution 0
                first = torch.where(products.space.norm(columns, 0) > 0, first, 0.0)
            limit = self._matvecs or max(_LEAST, min(_MOST, 10 * self.operator.shape[0]))
            recurrence = self.method if self.method != "direct" else "minres"
            run = KrylovIterations(products, self.damping, recurrence, self._choice, self.tolerance, limit)
            x = self._direct(columns) if self.method == "direct" else run.solve(columns, first)
            return self._finished(products, columns, x, run, b.ndim)

    def _checked(self, argument: str, b: Tensor, products: Products) -> Tensor:
        """Columns (n, c)."""
        operator, length = self.operator, products.space.length
        like = torch.empty(0, dtype=operator.dtype, device=operator.device)
        checks.floating(argument, b, like)
        if b.ndim not in (1, 2) or b.shape[0] != length:
            raise ShapeError(argument, f"got shape {tuple(b.shape)}, expected ({length},) or ({length}, c)")
        columns = b.detach().reshape(length, -1)
        sizes = products.space.norm(columns, 0)
        if not bool((sizes.isfinite() & ((sizes > 0) | (columns == 0).all(0))).all()):
            raise RangeError(argument, f"its norm, {float(sizes.max()):g}, is out of range; scale it")
        return columns

    def _direct(self, columns: Tensor) -> Tensor:
        if self._structured:
            solved: Tensor = self.operator.damped_solve(columns, self.damping)  # type: ignore[attr-defined]
            return solved
        assert self.basis is not None
        try:
            self.check_regular()
        except SingularError:
            if not self._definite:
                raise
        found = self.basis.apply(lambda values: 1 / (values + self.damping), columns.double())
        return checks.finite("solve", found.to(columns.dtype))

    def check_regular(self) -> None:
        """Raise `SingularError` if known eigenvalues show that B + damping has no inverse."""
        if self._margin is None and self.basis is not None:
            epsilon = torch.finfo(self.operator.dtype).eps
            self._margin = margin_from_eigenvalues(self.basis, self.damping, epsilon)

    def _certified(self, matvecs: int) -> Margin:
        """The margin: as found before, or with a budget of products now."""
        if self._margin is not None:
            return replace(self._margin, matvecs=0)
        found = margin_from_products(self.operator, self.damping, matvecs, self._seed)
        if matvecs:
            self._margin = found
        return found

    def _finished(self, products: Products, b: Tensor, x: Tensor, run: KrylovIterations, ndim: int) -> Solution:
        """The solution with its true residuals and their certificate."""
        space, size = products.space, products.size
        residual = run.left_over(b, x)
        residuals, sizes, lengths = (space.norm(part, 0).double().cpu() for part in (residual, b, x))
        converged = bool((residuals <= self.tolerance * sizes).all())
        scale = self._scale(run)
        stuck = not (converged or run.interrupted or self._definite)
        try:
            if stuck and self.method != "direct" and space.length == size:
                worst = int((residuals / sizes.clamp_min(1e-300)).argmax())
                self._check_left_over(products, residual[:, worst : worst + 1], run)
            margin = self._certified(0 if run.interrupted else max(1, run.steps // 4))
        except KeyboardInterrupt:
            run.interrupted, margin = True, Margin(0.0, "none")
        bounds = torch.full_like(residuals, math.inf)
        if margin.value > 0:
            rounding = (_ROUNDING + size**0.5) * products.epsilon * (scale * lengths + sizes)
            bounds = ((residuals + rounding) / margin.value).nan_to_num(nan=math.inf, posinf=math.inf)
        self.matvecs += products.matvecs + margin.matvecs
        return Solution(
            checks.finite("solve", x if ndim == 2 else x[:, 0]),
            residuals,
            sizes,
            bounds,
            run.steps,
            products.matvecs + margin.matvecs,
            converged,
            self.tolerance,
            self.method,
            margin.source,
            margin.value,
            self.damping,
            self._choice.used,
            self._choice.reason,
            run.interrupted,
        )

    def _check_left_over(self, products: Products, residual: Tensor, run: KrylovIterations) -> None:
        """Raise `SingularError` if a residual (n, 1) that no step reduces is an eigenvector with eigenvalue -damping.

        Steps along nearly singular directions cost digits along the others, so what a run leaves over is taken as the
        right-hand side of another one, once or twice.
        """
        for again in range(1 + _AGAIN):
            if not bool(residual.any()):
                return
            direction = run.candidate(residual)
            image = run.residual(torch.zeros_like(direction), direction)
            check_null_direction(direction[:, 0], image[:, 0], self.damping, self._scale(run))
            if not run.ended or again == _AGAIN:
                return
            more = KrylovIterations(products, self.damping, self.method, self._choice, self.tolerance, run.steps)
            residual = more.left_over(residual, more.solve(residual, None))
            run.interrupted = more.interrupted
            if run.interrupted:
                return

    def _scale(self, run: KrylovIterations) -> float:
        """|B + damping|, as far as it is known."""
        if self.method != "direct":
            return run.norm()
        if self._structured:
            return float(self.operator.spectral_norm()) + self.damping  # type: ignore[attr-defined]
        assert self.basis is not None
        return float(self.basis.values.abs().max()) + self.damping
