"""The numbers of one measurement, from the loss near the present weights (`analysis.surface.Surface`)."""

import math

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.analysis.attention_heads import AttentionMoments
from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.analysis.scaling import condition, effective_rank
from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.engine import Autodiff
from curvoscope.curvature import ModelHessian
from curvoscope.estimate import Estimate, density, frobenius_norm, lanczos, trace
from curvoscope.operators import LinearOperator
from curvoscope.training.records import BlockNorms, Details

TOLERANCE = 1e-3  # of λ_max, relative
_DOUBLINGS = 12  # of the step, up or down, in which its critical length is sought
_REFINEMENTS = 3


def largest(H: ModelHessian, start: Tensor | None, seed: int) -> tuple[Estimate, Tensor]:
    """λ_max and its eigenvector (P,), starting from an approximate one.

    The approximation saves few products: most of them check that no other eigenvalue has become larger.
    """
    found = lanczos(H.total, 1, "LA", tolerance=TOLERANCE, seed=seed, start=start, vectors=True)
    assert found.vectors is not None
    return found[0], found.vectors[:, 0]


def smallest(H: ModelHessian, start: Tensor | None, matvecs: int, seed: int) -> tuple[Estimate, Tensor]:
    """λ_min and its eigenvector (P,), starting from an approximate one.

    With a budget: an error relative to λ_max says little about a λ_min near zero. The error bar covers what the
    products do not rule out below the value.
    """
    found = lanczos(H.total, 1, "SA", matvecs=matvecs, seed=seed, start=start, vectors=True)
    assert found.vectors is not None
    return found[0], found.vectors[:, 0]


class _Remembered:
    """A symmetric operator that caches its products, as far as memory allows."""

    symmetric = True

    def __init__(self, operator: LinearOperator) -> None:
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self._operator = operator
        self._room = checks.memory_budget()
        self._made: list[tuple[Tensor, Tensor]] = []

    def __matmul__(self, other: Tensor) -> Tensor:
        for vectors, product in self._made:
            if torch.equal(vectors, other):
                return product
        product = self._operator @ other
        self._room -= 2 * product.nbytes
        if self._room >= 0:
            self._made.append((other.clone(), product))
        return product


def details(H: ModelHessian, top: Estimate, bottom: Estimate, ends: Tensor, matvecs: int, seed: int) -> Details:
    """Measure what takes many products: `matvecs` per number, twice as many for the share of negative curvature.

    `ends` (P, 2) are the eigenvectors of `top` and `bottom`.
    """
    whole = _Remembered(H.total)  # trace and norm begin with the same vectors
    norm = frobenius_norm(whole, matvecs=matvecs, seed=seed)
    blocks = {
        name: BlockNorms(*(frobenius_norm(part[name], matvecs=matvecs, seed=seed) for part in (H.outer, H.functional)))
        for name in H.names
    }
    return Details(
        bottom,
        trace(whole, matvecs=matvecs, seed=seed),
        norm,
        effective_rank(norm, max((top, bottom), key=lambda end: abs(end.value))),
        condition(H),
        negative_curvature_share(H, ends, 2 * matvecs, seed),
        blocks,
    )


def negative_curvature_share(H: ModelHessian, ends: Tensor, matvecs: int, seed: int) -> Estimate | None:
    """tr H₋ / tr |H| = Σ_{λ<0} |λ| / Σ |λ|: exact in the span of `ends` (P, k), Lanczos quadrature outside of it.

    With approximate eigenvectors of both ends of the spectrum as `ends`, probes miss little. The standard error, by the
    delta method, is that of the probes alone. The quadrature has an error of its own, which is not in it: a bulk around
    zero that few steps do not resolve counts with the sign of its mean. On matrices of known spectra it was up to 0.04
    with 32 products (four probes of eight steps) and up to 0.11 with 16, mostly downwards.
    """
    V = torch.linalg.qr(ends.double())[0]
    projection = V.T @ (H.total @ V.to(H.total.dtype)).double()
    known = torch.linalg.eigvalsh((projection + projection.T) / 2)
    found = density(_Outside(H.total, V), matvecs=matvecs, seed=seed)
    masses = found.weights * found.size  # (probes, m)
    below = (masses * found.nodes.clamp(max=0).abs()).sum(1) + float(known.clamp(max=0).abs().sum())  # (probes,)
    both = (masses * found.nodes.abs()).sum(1) + float(known.abs().sum())
    mean = float(both.mean())
    if not mean:
        return None
    share = float(below.mean()) / mean
    stderr = float((below - share * both).std()) / (mean * found.probes**0.5) if found.probes > 1 else 0.0
    degrees = found.probes - 1.0 if found.probes > 1 else math.inf
    return Estimate(share, stderr, found.matvecs + V.shape[1], found.method, degrees)


class _Outside:
    """(1 - V Vᵀ) B (1 - V Vᵀ) for a symmetric B (n, n) and orthonormal columns V (n, k)."""

    symmetric = True

    def __init__(self, operator: LinearOperator, V: Tensor) -> None:
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self._operator, self._V = operator, V.to(operator.dtype)

    def __matmul__(self, other: Tensor) -> Tensor:
        product = self._operator @ (other - self._V @ (self._V.T @ other))
        return product - self._V @ (self._V.T @ product)


def gradient_curvature(H: ModelHessian, gradient: Tensor) -> tuple[float, float | None]:
    """|g| and g·Hg/g·g for a gradient (P,)."""
    length = float(gradient.norm())
    if not length:
        return 0.0, None
    unit = gradient / length
    return length, float(unit @ (H.total @ unit.to(H.total.dtype)).double())


def critical_sharpness(surface: Surface, step: Tensor, lr: float) -> Estimate | None:
    """2/η_c along the step δ (P,) by which an optimizer with learning rate `lr` arrived at the weights of the surface.

    With w the weights before the step, s_c is the smallest factor s > 0 found with L(w + s δ) ≥ L(w), and η_c = s_c lr.
    Compare 2/η_c with 2/lr; for gradient descent on a quadratic it is g·Hg/g·g. The slope
    f(s) = (L(w + s δ) - L(w))/s, linear in s on a quadratic, has its root bracketed by doubling s from 1 up or down,
    then refined by the secant. The error is the difference of the last two secants. None: no root within 2^±12.
    """
    if not bool(step.any()):
        return None
    step = step.to(torch.float64).cpu()
    passes = 0

    def loss(factor: float) -> float:  # w + s δ is (s - 1) δ from the present weights
        nonlocal passes
        passes += 1
        return float(surface.losses((factor - 1) * step[None])[0])

    start = loss(0.0)

    def slope(factor: float) -> float:
        value = (loss(factor) - start) / factor
        return value if math.isfinite(value) else math.inf

    inner = outer = 1.0
    low = high = slope(1.0)
    for _ in range(_DOUBLINGS):
        if low < 0 <= high:
            break
        if high < 0:
            inner, low, outer = outer, high, 2 * outer
            high = slope(outer)
        else:
            outer, high, inner = inner, low, inner / 2
            low = slope(inner)
    if not low < 0 <= high:
        return None
    guesses = [_secant(inner, low, outer, high)]
    for _ in range(_REFINEMENTS):
        value = slope(guesses[-1])
        if value < 0:
            inner, low = guesses[-1], value
        else:
            outer, high = guesses[-1], value
        guesses.append(_secant(inner, low, outer, high))
    found = [2 / (guess * lr) for guess in guesses]
    return Estimate(found[-1], abs(found[-1] - found[-2]), 0, f"{passes} forward passes")


def _secant(inner: float, low: float, outer: float, high: float) -> float:
    """The root of the line through two points on both sides of zero; their middle if one of them is infinite."""
    if not math.isfinite(high):
        return (inner + outer) / 2
    return inner + (outer - inner) * low / (low - high)


# ---- the rows of attention


def attention_summaries(attention: AttentionMoments, engine: Autodiff) -> dict[str, AttentionSummary]:
    """Entropy and spread of the rows of each layer: means over the batches of the engine, weighted by loss terms."""
    if not attention.layers:
        return {}
    found: dict[str, list[tuple[float, AttentionSummary]]] = {}
    snapshot = engine.snapshot
    weights = snapshot.parameters(snapshot.weights)

    def visit(weight: float, batch: Batch) -> None:
        with torch.no_grad():
            for name, moments in attention(weights, lambda: snapshot(snapshot.weights, batch)):
                found.setdefault(name, []).append((weight, AttentionSummary.of(moments)))

    engine.walk(visit)
    return {name: _mean(parts) for name, parts in found.items()}


def _mean(parts: list[tuple[float, AttentionSummary]]) -> AttentionSummary:
    """The weighted mean; the entropy is None if that of any part is."""
    entropies = [weight * one.entropy for weight, one in parts if one.entropy is not None]
    variance = sum(weight * one.variance for weight, one in parts)
    return AttentionSummary(sum(entropies) if len(entropies) == len(parts) else None, variance)
