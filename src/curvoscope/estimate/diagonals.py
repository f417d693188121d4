"""The diagonal of an operator: E[z * B z] = diag B for random signs z."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.estimate.deflation import Sketch, projected
from curvoscope.estimate.products import (
    COLUMNS,
    LEAST,
    MOST,
    Matrix,
    Probes,
    Products,
    budget_of,
    check_square,
)
from curvoscope.estimate.result import DiagonalEstimate

METHODS = ("auto", "hutchinson", "deflated")
_LEAST_DEFLATED = 6  # products for which a sketch makes sense
_COPIES = 6  # of a sketch's columns, in memory at once


def diagonal(
    operator: Matrix,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    method: str = "auto",
) -> DiagonalEstimate:
    """The diagonal (n,) of a square operator, unbiased, with a standard error for each entry.

    `hutchinson` (Bekas, Kokiopoulou, Saad 2007) averages z * B z over random signs z; entry i has the variance
    sum_{j≠i} B_ij², whose own estimate is the sample variance. `deflated`, for symmetric operators, takes a third of
    its products for a sketch Q of the range and another for Z = B Q, and with P = I - Q Q^T

        diag B = diag(Z Q^T + Q Z^T - Q (Q^T Z) Q^T) + E[z * P B P z],

    so that only P B P is sampled. `auto` deflates a symmetric operator if the sketch shows that it pays. With as
    many products as B has columns, or when a tolerance would cost more, the answer is exact.

    Args:
        operator: (n, n).
        matvecs: the budget of products; 64 when neither this nor a tolerance is given.
        tolerance: the relative standard error of the diagonal as a whole, |stderr| / |value|, at which to stop.
        seed: of the probes; by default that of `cv.settings`.
        method: "auto", "hutchinson" or "deflated".

    Returns:
        The diagonal (n,), a tensor whose entries are Estimates.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.diagonal(torch.diag(torch.arange(100.0)), matvecs=16)
        >>> print(found[99], found.method)
        99 ± 0 hutchinson
    """
    check_square(operator, "a diagonal")
    checks.choice("method", method, METHODS)
    budget = budget_of(matvecs, tolerance)
    symmetric = getattr(operator, "symmetric", False)
    if method == "deflated" and not symmetric:
        raise ShapeError("method", "'deflated' needs an operator that says it is symmetric; use 'hutchinson'")
    if method == "deflated" and budget is not None and budget < _LEAST_DEFLATED:
        raise RangeError("matvecs", f"got {budget}, expected at least {_LEAST_DEFLATED} for {method!r}")
    with Products(operator, "diagonal", budget) as products:
        if products.size <= (LEAST if budget is None else budget):
            return _exact(products)
        probes = Probes(products, seed)
        columns = LEAST if budget is None else budget // 3
        samples = DiagonalSamples(products)
        outside: Callable[[Tensor], Tensor] | None = None
        if method == "deflated" or (
            method == "auto" and symmetric and columns >= COLUMNS and products.fits(_COPIES * columns)
        ):
            sketch = Sketch(products, probes.signs)
            sketch.grow(columns)
            if method == "deflated" or sketch.left_over() < 1 / 3:  # a third of the probes, a third of the variance
                sketch.solve()
                samples = DiagonalSamples(products, sketch.Q, sketch.Z)
                outside = partial(projected, products.space, sketch.Q)
            else:
                samples.add(sketch.W.mul_(sketch.Y))
        return _collected(products, samples, outside, probes, budget, tolerance)


class DiagonalSamples:
    """The mean and spread of z * P B P z by Welford's updates, on top of what is known from Q and Z = B Q."""

    def __init__(self, products: Products, Q: Tensor | None = None, Z: Tensor | None = None) -> None:
        self._products = products
        self._known = torch.zeros(products.size, dtype=products.dtype, device=products.device)
        self._method = "hutchinson"
        if Q is not None and Z is not None:
            self._known = (Q * (2 * Z - Q @ products.space.inner(Q, Z).to(Q.dtype))).sum(1)
            self._method = "deflated"
        self._mean, self._spread, self._change = (torch.zeros_like(self._known) for _ in range(3))
        self.count = 0

    def add(self, samples: Tensor) -> None:
        """(n, c) more."""
        for sample in samples.T:
            self.count += 1
            change = torch.sub(sample, self._mean, out=self._change)
            self._mean.add_(change, alpha=1 / self.count)
            self._spread.addcmul_(change, change, value=(self.count - 1) / self.count)

    def error(self) -> float:
        """The relative standard error of the diagonal as a whole."""
        lengths = [float(part.double().norm()) for part in (self._stderr(), self._known + self._mean)]
        return lengths[0] / max(lengths[1], 1e-300)

    def result(self) -> DiagonalEstimate:
        """The diagonal from the samples so far."""
        return diagonal_of(self._products, self._known + self._mean, self._stderr(), self._method, self.count - 1.0)

    def _stderr(self) -> Tensor:
        stderr = (self._spread / (self.count * (self.count - 1))).sqrt()
        return torch.maximum(stderr, self._products.epsilon * self._known.abs())  # never below rounding


def _collected(
    products: Products,
    samples: DiagonalSamples,
    outside: Callable[[Tensor], Tensor] | None,
    probes: Probes,
    budget: int | None,
    tolerance: float | None,
) -> DiagonalEstimate:
    """Sample until the budget is spent, the tolerance met, or the exact answer cheaper; `outside` is P."""
    look, most = LEAST, budget or MOST
    memory = products.memory(products.columns), products.memory(products.columns, products.row_space)
    while products.matvecs < most:
        z, product = (columns[:, : most - products.matvecs] for columns in memory)
        probes.signs(z.shape[1], z)
        products(z if outside is None else outside(z), out=product)
        samples.add(z.mul_(product if outside is None else outside(product)))
        if tolerance is not None and samples.count >= look:
            error = samples.error()
            if error <= tolerance:
                break
            if samples.count * (min(1e6, error / tolerance) ** 2 - 1) > products.size <= MOST:
                return _exact(products)
            look = math.ceil(1.1 * samples.count)
    return samples.result()


def _exact(products: Products) -> DiagonalEstimate:
    values = torch.zeros(products.size, dtype=torch.float64, device=products.device)
    for unit, columns in products.identity():
        values += (unit * columns).sum(1)
    return diagonal_of(products, values, torch.zeros_like(values), "exact", math.inf)


def diagonal_of(products: Products, values: Tensor, stderr: Tensor, method: str, degrees: float) -> DiagonalEstimate:
    """The diagonal in the operator's precision, from values and errors in the unit of its products."""
    device, dtype = products.operator.device, products.operator.dtype
    values, stderr = (checks.finite("diagonal", (part * products.unit).to(device, dtype)) for part in (values, stderr))
    return DiagonalEstimate(values, stderr, products.matvecs, method, degrees)
