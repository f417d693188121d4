"""Trace and Frobenius norm: traces of A = B and of A = B^T B from products with B."""

import math

from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.estimate.deflation import Sketch, leave_one_out
from curvoscope.estimate.products import (
    LEAST,
    MOST,
    Matrix,
    Probes,
    Products,
    budget_of,
    check_budget,
    check_square,
)
from curvoscope.estimate.result import Estimate
from curvoscope.estimate.sampling import Form, Sample, Tally, norm_form, pairs, trace_form

METHODS = ("auto", "hutchinson", "hutch++", "xtrace")
_LEAST_DEFLATED = 6  # products for which a sketch and its error bar make sense
_COPIES = 8  # of a sketch's columns, in memory at once
_ROUNDING = 8  # units of rounding in a sum of products


def trace(
    operator: Matrix,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    method: str = "auto",
) -> Estimate:
    """The trace of a square operator.

    `hutchinson` averages z^T B z over random signs z; `hutch++` and `xtrace` find the large eigenvectors first and
    sample the rest. `auto` spends half of its products on a sketch; if the sketch shows that few eigenvectors hold
    most of B it goes on with XTrace, otherwise the sketch's own columns are probes and it goes on with more of them.
    With as many products as B has columns, or when a tolerance would cost more, the answer is exact.

    Args:
        operator: (n, n), not necessarily symmetric.
        matvecs: the budget of products; 64 when neither this nor a tolerance is given.
        tolerance: the relative standard error at which to stop.
        seed: of the probes; by default that of `cv.settings`.
        method: "auto", "hutchinson", "hutch++" or "xtrace".

    Returns:
        The trace, with its standard error.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.trace(torch.eye(100).double(), matvecs=16)
        >>> print(found.method, found.matvecs, round(found, 6))
        hutchinson 16 100.0
    """
    check_square(operator, "a trace")
    question = _Question(operator, trace_form, "trace", signs=True)
    return question.answer(method, matvecs, tolerance, seed).scaled(question.unit).checked("trace")


def squared_frobenius_norm(
    operator: Matrix,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    method: str = "auto",
) -> Estimate:
    """|B|_F² = tr B^T B = E |B z|² of an operator of any shape, by the methods of `trace`.

    The sketches of `hutch++` and `xtrace` are of the range of B, and what is wanted is that of B^T. So they are for
    operators that say they are `symmetric`. `hutchinson` with a budget spends it on probes, however small B is.

    Args:
        operator: (m, n).
        matvecs, tolerance, seed, method: as for `trace`.

    Returns:
        |B|_F², with its standard error.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> print(estimate.squared_frobenius_norm(2 * torch.eye(10).double()))
        40.0
    """
    question = _Question(operator, norm_form, "Frobenius norm")
    square = question.answer(method, matvecs, tolerance, seed)
    return square.scaled(question.unit).scaled(question.unit).checked("squared_frobenius_norm")


def frobenius_norm(
    operator: Matrix,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    method: str = "auto",
) -> Estimate:
    """|B|_F, the root of `squared_frobenius_norm`, with the standard error of the delta method.

    Args:
        operator: (m, n).
        matvecs, tolerance, seed, method: as for `trace`.

    Returns:
        |B|_F, with its standard error.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> print(estimate.frobenius_norm(torch.ones(5, 5).double()))
        5.0
    """
    check_budget(matvecs, tolerance)
    square = None if tolerance is None else min(2 * tolerance, 1 - 1e-9)  # of the square, for `tolerance` of its root
    question = _Question(operator, norm_form, "Frobenius norm")
    return question.answer(method, matvecs, square, seed).root().scaled(question.unit).checked("frobenius_norm")


class _Question:
    """tr A for one operator: the same four methods whether A is B or B^T B."""

    def __init__(self, operator: Matrix, form: Form, label: str, signs: bool = False) -> None:
        self._operator, self._label, self._signs = operator, label, signs
        self._of_entries, self._of_trace = form, form is trace_form
        self._deflates = self._of_trace or getattr(operator, "symmetric", False)

    @property
    def unit(self) -> float:
        """That of the products: a trace is in units, the trace of B^T B in their squares."""
        return self._products.unit

    def answer(self, method: str, matvecs: int | None, tolerance: float | None, seed: int | None) -> Estimate:
        """The estimate, in units."""
        checks.choice("method", method, METHODS)
        budget = budget_of(matvecs, tolerance)
        deflated = method in ("hutch++", "xtrace")
        if deflated and not self._deflates:
            raise ShapeError("method", f"{method!r} needs an operator that says it is symmetric; use 'hutchinson'")
        with Products(self._operator, self._label, budget) as self._products:
            self._space = self._products.space
            self._probes = Probes(self._products, seed)
            self._sketch = Sketch(self._products, self._probes.normal)
            self._memory: tuple[Tensor, Tensor] | None = None  # for probes and their products
            literal = method == "hutchinson" and not self._of_trace and matvecs is not None
            if self._products.size <= (LEAST if budget is None else budget) and not literal:
                return self._exact()
            if deflated and budget is not None and budget < _LEAST_DEFLATED:
                raise RangeError("matvecs", f"got {budget}, expected at least {_LEAST_DEFLATED} for {method!r}")
            if deflated and budget is not None:
                checks.fits(
                    self._products.bytes(_COPIES * (budget // 2)),
                    self._products.budget(),
                    f"a sketch of {budget // 2} columns of length {self._space.longest}",
                    "give fewer matvecs, or method='hutchinson', which keeps none",
                )
            if method == "hutchinson" or not self._deflates:
                return self._sampled(budget, tolerance)
            if budget is None:
                return self._staged(method, tolerance or 0.0)
            return self._budgeted(method, budget)

    # ---- the methods

    def _exact(self) -> Estimate:
        """The form of all unit vectors."""
        total = 0.0
        for unit, columns in self._products.identity():
            total += float(self._form(unit, columns).trace())
        return Estimate(total, 0.0, self._products.matvecs, "exact")

    def _sampled(self, budget: int | None, tolerance: float | None) -> Estimate:
        """Hutchinson: the mean over probes, kept as Gram matrices only."""
        tally, look = Tally(self._products.size), LEAST
        most = MOST if budget is None else budget
        while tally.count < most:
            self._probe(tally, min(self._products.columns, most - tally.count), self._signs)
            if tolerance is not None and tally.count >= look:
                sample = tally.summary()
                if sample.meets(tolerance):
                    break
                if sample.needed(tally.count, tolerance) - tally.count > self._products.size <= MOST:
                    return self._exact()
                look = math.ceil(1.1 * tally.count)
        return self._estimate(tally.summary(), "hutchinson")

    def _budgeted(self, method: str, budget: int) -> Estimate:
        sketch = self._sketch
        if method == "hutch++":
            return self._hutch(budget // 3, budget - 2 * (budget // 3))
        if method == "auto" and (budget < LEAST or not self._products.fits(_COPIES * (budget // 2))):
            return self._sampled(budget, None)
        sketch.grow(budget // 2)
        if method == "xtrace" or self._pays():
            return self._exchanged()
        tally = self._tallied()
        columns = min(self._products.columns, sketch.columns)
        self._memory = sketch.W[:, :columns], sketch.Y[:, :columns]  # the sketch has said what it can
        while tally.count < budget:
            self._probe(tally, min(columns, budget - tally.count), signs=False)
        return self._estimate(tally.summary(), "hutchinson")

    def _staged(self, method: str, tolerance: float) -> Estimate:
        """Sketches of growing size, until the tolerance is met, the exact answer is cheaper, or memory is full."""
        sketch, size, columns = self._sketch, self._products.size, LEAST // 2
        while 4 * columns < min(size, MOST) and self._products.fits(_COPIES * columns):
            needed = 2 * columns
            if method == "hutch++":
                estimate = self._hutch(columns, columns)
            else:
                sketch.grow(columns)
                plain = self._tallied().summary()
                if method == "auto" and plain.meets(tolerance) and columns >= LEAST:
                    return self._estimate(plain, "hutchinson")
                if method == "xtrace" or self._pays():
                    estimate = self._exchanged()
                else:
                    estimate = self._estimate(plain, "hutchinson")
                    needed = plain.needed(columns, tolerance)
            if estimate.stderr <= tolerance * abs(estimate.value) and estimate.matvecs >= LEAST:
                return estimate
            if needed - columns > size <= MOST:
                return self._exact()
            columns = max(columns + LEAST // 2, min(2 * columns, needed))
        if 4 * columns >= size:
            return self._exact()
        return self._sampled(None, tolerance)

    def _hutch(self, columns: int, count: int) -> Estimate:
        """Hutch++: a sketch, and Hutchinson on what it leaves over."""
        sketch = self._sketch
        sketch.grow(columns)
        sketch.solve()
        if sketch.complete:
            return self._captured("hutch++")
        tally = Tally(self._products.size - sketch.Q.shape[1])
        while tally.count < count:
            z = sketch.outside(self._probes.normal(min(self._products.columns, count - tally.count)))
            product = self._products(z)
            tally.add(self._form(z, product), self._space.inner(z, z))
        return self._estimate(tally.summary().shifted(sketch.captured(self._of_entries)), "hutch++")

    def _exchanged(self) -> Estimate:
        self._sketch.solve()
        if self._sketch.complete:
            return self._captured("xtrace")
        return self._estimate(leave_one_out(self._sketch, self._of_entries), "xtrace")

    def _captured(self, method: str) -> Estimate:
        """The sketch holds the whole range: what is left over is rounding."""
        return self._estimate(Sample(self._sketch.captured(self._of_entries), 0.0, 0.0, math.inf), method)

    # ---- their parts

    def _form(self, x: Tensor, bx: Tensor) -> Tensor:
        return self._of_entries(self._space.inner, x, bx)

    def _probe(self, tally: Tally, count: int, signs: bool) -> None:
        if self._memory is None:
            products, columns = self._products, self._products.columns
            self._memory = products.memory(columns), products.memory(columns, products.row_space)
        z, product = (memory[:, :count] for memory in self._memory)
        (self._probes.signs if signs else self._probes.normal)(count, z)
        self._products(z, out=product)
        form, inner, on_diagonal = self._form(z, product), self._space.inner(z, z), None
        if signs:
            z *= product
            on_diagonal = self._space.inner(z, z)
        tally.add(form, inner, on_diagonal)

    def _tallied(self) -> Tally:
        """The columns of the sketch as probes."""
        W, Y = self._sketch.W, self._sketch.Y
        tally = Tally(self._products.size)
        tally.add(self._form(W, Y), self._space.inner(W, W))
        return tally

    def _pays(self) -> bool:
        """Whether XTrace with the k columns so far has a smaller variance than Hutchinson with 2k.

        For the trace the variance is the square of what is left over, relative to |B|_F². For |B|_F² it is |B²|_F², and
        few eigenvalues hold it when |B|_F⁴ / |B²|_F², their participation number, is below k: pairs of columns show it.
        """
        if self._of_trace:
            return self._sketch.left_over() < 0.5
        grams = self._space.inner(self._sketch.Y, self._sketch.Y)
        square, _, _ = pairs(grams[None])
        return square * self._sketch.columns > float(grams.diagonal().mean()) ** 2

    def _estimate(self, sample: Sample, method: str) -> Estimate:
        """With a standard error that is never below the rounding of the products."""
        captured = float(self._space.norm(self._sketch.Z, 0).sum()) if self._of_trace else 0.0
        rounding = _ROUNDING * self._products.epsilon * max(abs(sample.value), captured)
        stderr = max(sample.stderr, rounding)
        return Estimate(sample.value, stderr, self._products.matvecs, method, sample.degrees, sample.skewness)
