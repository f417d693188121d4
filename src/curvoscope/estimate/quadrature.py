"""Spectral densities by stochastic Lanczos quadrature."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError
from curvoscope.estimate.missed import quadrature_bars
from curvoscope.estimate.products import MOST, Matrix, Probes, Products, budget_of, check_symmetric
from curvoscope.estimate.spectrum import Density, gauss

DENSITY_MATVECS = 512
DEFAULT_STEPS = 64
MOST_EXACT = 4096  # size up to which all eigenvalues are computed when the budget allows
LEAST_PROBES = 4
_BESIDE = 4  # vectors of a probe in addition to its Lanczos vectors
_ROUNDING = 16  # units of rounding below which a vector is not a new direction


def density(
    operator: Matrix,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    steps: int | None = None,
) -> Density:
    """The density of the eigenvalues of a symmetric operator.

    For a random unit vector z, E z^T f(B) z = (1/n) sum_i f(λ_i), and m steps of Lanczos from z give the Gauss
    quadrature z^T f(B) z ≈ sum_j w_j f(θ_j), exact for polynomials below degree 2m: θ are the eigenvalues of the
    tridiagonal matrix, w the squared first entries of its eigenvectors. Several probes advance side by side, each
    re-orthogonalised twice against all of its own vectors, so that no eigenvalue appears as a ghost of another; the
    tridiagonal is float64. When the budget reaches n (and n ≤ 4096, and `steps` is not given), all eigenvalues are
    computed instead.

    Args:
        operator: (n, n), symmetric.
        matvecs: the budget of products, probes times steps; 512 when neither this nor a tolerance is given.
        tolerance: the standard error of the cumulative function, averaged over the spread, at which to stop.
        seed: of the probes; by default that of `cv.settings`.
        steps: of Lanczos a probe; 64, or a quarter of a smaller budget. Details finer than spread/steps need more.

    Returns:
        The density, a sum of point masses for each probe.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.density(torch.diag(torch.arange(100.0)).double(), matvecs=40)
        >>> found.probes, found.matvecs, 90 < found.largest < 99
        (4, 40, True)
    """
    budget, size = quadrature_budget(operator, "a spectral density", matvecs, tolerance, steps), operator.shape[0]
    if steps is not None and budget is not None and budget < 2 * steps:
        raise RangeError("matvecs", f"got {budget}, expected at least two probes of {steps} steps")
    with Products(operator, "density", budget) as products:
        if steps is None and size <= min(MOST_EXACT, budget or LEAST_PROBES * DEFAULT_STEPS):
            return _exact(products)
        steps = steps or min(size, DEFAULT_STEPS, max(1, (budget or DENSITY_MATVECS) // LEAST_PROBES))
        most = (budget or MOST) // steps
        return _collect(products, Probes(products, seed), steps, most, tolerance)


def quadrature_budget(
    operator: Matrix, question: str, matvecs: int | None, tolerance: float | None, steps: int | None
) -> int | None:
    """The products to spend on a question to a symmetric operator, once all is checked; None: see `budget_of`."""
    check_symmetric(operator, question)
    budget, size = budget_of(matvecs, tolerance, DENSITY_MATVECS), operator.shape[0]
    checks.at_least(1, steps=steps)
    if steps is not None and steps > size:
        raise RangeError("steps", f"got {steps}, expected 1 to {size}")
    return budget


def _collect(products: Products, probes: Probes, steps: int, most: int, tolerance: float | None) -> Density:
    """Probes, until there are enough or the tolerance is met."""
    for rule in gauss_rules(products, probes, steps, most):
        nodes, residuals = (
            checks.finite("density", part * products.unit) for part in (rule.nodes, rule.coupling.abs())
        )
        found = gauss(nodes, rule.first.square(), residuals, products.size, products.matvecs, products.epsilon)
        if tolerance is not None and len(rule.nodes) >= LEAST_PROBES and found.error() <= tolerance:
            break
    low, high = (rule.missed(sign, products.size, products.epsilon) for sign in (-1, 1))
    return replace(found, missed=(low * products.unit, high * products.unit))


def gauss_rules(products: Products, probes: Probes, steps: int, most: int) -> "Iterator[GaussRule]":
    """Rules of more and more probes, at most `most`, as many at a time as fit in memory."""
    together, dtype = _lanczos_room(products, steps, most)
    rule: GaussRule | None = None
    while rule is None or len(rule.nodes) < most:
        left = most - (0 if rule is None else len(rule.nodes))
        new = _gauss_rule(products, probes.signs(min(together, left)).double(), steps, dtype)
        rule = new if rule is None else rule.joined(new)
        yield rule


def _lanczos_room(products: Products, steps: int, most: int) -> tuple[int, torch.dtype]:
    """How many probes of so many steps fit side by side, at most `most`, and in which precision."""
    room, length = products.budget(), products.space.longest * (steps + _BESIDE)
    short = products.operator.dtype != torch.float64 and 8 * length > room
    dtype = torch.float32 if short else torch.float64
    what = f"{steps} Lanczos vectors of length {products.space.longest}"
    checks.fits(dtype.itemsize * length, room, what, "give fewer steps, or a larger memory_limit")
    together = min(products.columns, most, room // (dtype.itemsize * length))
    checks.predict(together * dtype.itemsize * length)
    return together, dtype


@dataclass(frozen=True, eq=False)
class GaussRule:
    """Gauss quadratures of p probes."""

    nodes: Tensor  # (p, m), ascending
    first: Tensor  # (p, m), first entries of their vectors: the roots of the weights, with a sign
    coupling: Tensor  # (p, m), of their vectors with the next Lanczos vector: the residuals, with a sign
    lost: Tensor  # (p,), the length of what was dropped as rounding

    def joined(self, other: "GaussRule") -> "GaussRule":
        """With the probes of another."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return GaussRule(*(torch.cat(pair) for pair in pairs))

    def missed(self, sign: int, size: int, epsilon: float) -> float:
        """The error bar of the largest (1) or smallest (-1) node for an eigenvalue beyond it."""
        return quadrature_bars(self.nodes, self.first, self.coupling, self.lost, size, sign, _ROUNDING * epsilon)

    def radau(self, node: float) -> tuple[Tensor, Tensor]:
        """Nodes and first entries (p, m + 1) of the rules of Gauss and Radau, one node being given, below all others.

        In the eigenbasis of the tridiagonal matrix, its extension by the row (β e_m, ω) is diag(θ) bordered by the
        coupling c; with ω = a + sum_j c_j² / (θ_j - a) it has the eigenvalue a.
        """
        count, m = self.nodes.shape
        c = self.coupling
        ratio = torch.where(c == 0, 0.0, c.square() / (self.nodes - node))
        bordered = self.nodes.new_zeros(count, m + 1, m + 1)
        bordered[:, :m, :m] = torch.diag_embed(self.nodes)
        bordered[:, :m, m] = bordered[:, m, :m] = c
        bordered[:, m, m] = node + ratio.sum(1)
        nodes, vectors = torch.linalg.eigh(bordered)
        return nodes, torch.einsum("pm,pmk->pk", self.first, vectors[:, :m])


def _gauss_rule(products: Products, start: Tensor, steps: int, dtype: torch.dtype) -> GaussRule:
    """The quadratures that start from the columns (n, p).

    The Lanczos vectors are kept in `dtype`, the recurrence and the tridiagonal matrix are float64.
    A probe whose Krylov space ends early goes on with zero vectors: its further nodes have the weight zero.
    """
    space, (length, count) = products.space, start.shape
    V = start.new_zeros(count, steps, length, dtype=dtype)
    V[:, 0] = (start / space.norm(start, 0)).T
    diagonal, beside = start.new_zeros(count, steps), start.new_zeros(count, steps)
    lost = start.new_zeros(count)
    scale = 0.0
    for j in range(steps):
        w = products(V[:, j].T).T.double()  # (p, n)
        scale = max(scale, float(space.norm(w, 1).max()))
        diagonal[:, j] = space.total((V[:, j] * w).sum(1))
        past = V[:, : j + 1]
        for _ in range(2):
            inside = space.total(torch.einsum("pjn,pn->pj", past, w.to(dtype)))
            w = w - torch.einsum("pj,pjn->pn", inside, past)
        sizes = space.norm(w, 1)
        alive = sizes > _ROUNDING * products.epsilon * scale
        beside[:, j] = sizes * alive
        lost = torch.hypot(lost, sizes * ~alive)
        if j + 1 == steps or not bool(alive.any()):
            break
        V[:, j + 1] = torch.where(alive[:, None], w / sizes.clamp_min(1e-300)[:, None], 0.0)
    tridiagonal = torch.diag_embed(diagonal)
    tridiagonal += torch.diag_embed(beside[:, :-1], 1) + torch.diag_embed(beside[:, :-1], -1)
    theta, vectors = torch.linalg.eigh(tridiagonal)
    return GaussRule(theta, vectors[:, 0], beside[:, -1:] * vectors[:, -1], lost)


def _exact(products: Products) -> Density:
    return Density.exact(all_eigenvalues(products), products.matvecs)


def all_eigenvalues(products: Products) -> Tensor:
    """All eigenvalues, from all entries."""
    dense = products.space.whole(torch.cat([columns for _, columns in products.identity()], 1))
    values = torch.linalg.eigvalsh((dense + dense.T) / 2) * products.unit
    return checks.finite("density", values)
