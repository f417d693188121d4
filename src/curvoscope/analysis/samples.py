"""Per-sample losses, gradients and curvature: how much the samples differ at a point and around it.

A sample is one row of a batch, a sequence: k is a number of independent samples, not of tokens. Sample i has n_i loss
terms and the mean loss ℓ_i; L = Σ n_i ℓ_i / Σ n_i. With c_i = n_i / mean(n), 1 if all n_i are equal, the deviations
c_i (ℓ_i - L) have mean zero and their variance is k times that of L_k (exactly for equal n_i, otherwise to first order
in 1/k).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.graph import Graph
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.errors import EmptyError, LossError, NonFiniteError, RangeError
from curvoscope.settings import chosen_seed

_AGREE = 1e4  # units of rounding between a row in its batch and the same row alone
_LEAST_PROBES = 3  # a squared trace takes pairs of probes, its error bar one probe less


@dataclass(frozen=True, eq=False)
class Samples:
    """Losses (D, N) of N samples at D points, and their numbers of terms (N,), in float64."""

    losses: Tensor
    terms: Tensor

    @property
    def shares(self) -> Tensor:
        """c_i = n_i / mean(n), (N,)."""
        return self.terms / self.terms.mean()

    @property
    def means(self) -> Tensor:
        """L at each point, (D,)."""
        return self.losses @ self.terms / self.terms.sum()

    @property
    def deviations(self) -> Tensor:
        """c_i (ℓ_i - L), (D, N)."""
        return self.shares * (self.losses - self.means[:, None])

    @property
    def variances(self) -> Tensor:
        """The unbiased variance of the deviations at each point, (D,)."""
        return self.deviations.square().sum(1) / (self.losses.shape[1] - 1)


def sample_losses(surface: Surface, displacements: Tensor, argument: str = "distances") -> Samples:
    """ℓ_i(w + δ) for displacements (D, P); samples without loss terms are left out.

    `argument` is the name for the error if a loss is not finite.
    """
    losses: list[Tensor] = []
    terms: list[float] = []
    objective = surface.objective_of_rows()

    def visit(weight: float, batch: Batch) -> None:
        rows = batch.split(1)
        with torch.no_grad():
            outputs = surface.engine.snapshot(surface.engine.snapshot.weights, batch)
        counts = [float(objective.terms(_row(outputs, i, len(rows)), row.targets)) for i, row in enumerate(rows)]
        counted = [i for i, count in enumerate(counts) if count]

        def row_losses(outputs: Any) -> Tensor:
            return torch.stack([objective(_row(outputs, i, len(rows)), rows[i].targets) for i in counted])

        with torch.no_grad():
            _check(surface, batch, rows, outputs, row_losses(outputs).double(), counts)
        losses.append(surface.evaluate(displacements, batch, row_losses))
        terms.extend(counts[i] for i in counted)

    surface.engine.walk(visit)
    found = torch.cat(losses, 1)
    if found.shape[1] < 2:
        raise EmptyError("batches", f"{found.shape[1]} sample with loss terms; a variance needs at least 2")
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteError(argument, "a loss is NaN or infinite at this distance; use a smaller one")
    return Samples(found, torch.tensor(terms, dtype=torch.float64))


def _row(outputs: Any, index: int, rows: int) -> Any:
    """One row of everything that has rows."""

    def cut(leaf: Any) -> Any:
        is_row = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
        return leaf[index : index + 1] if is_row else leaf

    return tree_map(cut, outputs)


def _check(
    surface: Surface, batch: Batch, rows: list[Batch], outputs: Any, losses: Tensor, counts: list[float]
) -> None:
    """At the weights, the rows' losses must make up that of the batch, and the first be that of the row alone."""
    objective = surface.engine.objective
    limit = _AGREE * surface.epsilon * float(losses.abs().max())
    together = float(objective(outputs, batch.targets))
    terms = torch.tensor([count for count in counts if count], dtype=torch.float64)
    apart = float(losses.cpu() @ terms / terms.sum())
    if abs(together - apart) > limit:
        raise LossError(
            "loss_fn",
            f"is {together:.8g} on batch {batch.index} and {apart:.8g} as the mean of its rows by their terms; it must "
            "be a mean over terms: give MeanLoss(function, terms)",
        )
    first = rows[next(i for i, count in enumerate(counts) if count)]
    alone = float(objective(surface.engine.snapshot(surface.engine.snapshot.weights, first), first.targets))
    if abs(alone - float(losses[0])) > limit:
        raise LossError(
            "model",
            f"gives a row the loss {float(losses[0]):.8g} in batch {batch.index} and {alone:.8g} alone: rows are not "
            "independent samples",
        )


# ---- the second-order law


@dataclass(frozen=True)
class VarianceLaw:
    """V(τ) = E Var_i ℓ_i(w + τξ) for ξ ~ N(0, I), to second order in the displacement:

        V(τ) = Var ℓ + τ² [tr Cov g + Cov(ℓ, tr H)] + τ⁴/4 mean_i [2 |H_i - H|_F² + (tr (H_i - H))²]

    exact for losses that are quadratic in w. Variances are unbiased (N - 1). `method` is "exact" if products with
    all unit vectors were taken, otherwise "hutchinson": then `stderr` are those of `coupling`, `frobenius` and `trace`.
    """

    losses: float  # Var ℓ
    gradients: float  # tr Cov g
    coupling: float  # Cov(ℓ, tr H)
    frobenius: float  # mean |H_i - H|_F²
    trace: float  # mean (tr (H_i - H))²
    stderr: tuple[float, float, float]
    samples: int
    method: str

    def __call__(self, tau: float) -> float:
        """V(τ)."""
        quartic = (2 * self.frobenius + self.trace) / 4
        return self.losses + tau**2 * (self.gradients + self.coupling) + tau**4 * quartic

    def error(self, tau: float) -> float:
        """The standard error of V(τ) from the probes: the sum of the three terms, as if fully correlated."""
        coupling, frobenius, trace = self.stderr
        return tau**2 * coupling + tau**4 / 4 * (2 * frobenius + trace)


def variance_law(surface: Surface, probes: int = 16, seed: int | None = None) -> VarianceLaw:
    """The coefficients of V(τ): a gradient and `probes` products with the Hessian for each sample.

    With at least as many probes as weights all unit vectors are used, and nothing is random.
    """
    if probes < _LEAST_PROBES:
        raise RangeError("probes", f"got {probes}, expected at least {_LEAST_PROBES}")
    exact = surface.size <= probes
    vectors = _probes(surface, surface.size if exact else probes, exact, seed)
    sums = _Sums(surface, vectors)
    surface.engine.walk(sums.add)
    terms = torch.tensor(sums.terms, dtype=torch.float64)
    if len(terms) < 2:
        raise EmptyError("batches", f"{len(terms)} sample with loss terms; a variance needs at least 2")
    losses = Samples(torch.tensor([sums.losses], dtype=torch.float64), terms)
    gradients = sums.spread(sums.gradient)
    frobenius = sums.spread(sums.products)
    traces = torch.stack(sums.traces)  # (N, m): z·H_i z
    traces = losses.shares[:, None] * (traces - terms @ traces / terms.sum())
    unbiased = len(terms) / (len(terms) - 1)
    deviations = losses.deviations[0]

    def coefficients(chosen: Tensor) -> Tensor:
        count = 1 if exact else len(chosen)
        t = traces[:, chosen]
        coupling = (deviations[:, None] * t).mean(0).sum() / count
        # the square of an expectation: products of different probes
        square = t.sum(1).square() if exact else (t.sum(1).square() - t.square().sum(1)) / (count * (count - 1))
        return unbiased * torch.stack([coupling, frobenius[chosen].sum() / count, square.mean()])

    every = torch.arange(len(vectors))
    found, stderr = coefficients(every), torch.zeros(3, dtype=torch.float64)
    if not exact:
        left_out = torch.stack([coefficients(every[every != i]) for i in every])
        stderr = ((len(every) - 1) * left_out.var(0, correction=0)).sqrt()
    method = "exact" if exact else "hutchinson"
    return VarianceLaw(
        float(losses.variances),
        unbiased * float(gradients[0]),
        float(found[0]),
        float(found[1]),
        float(found[2]),
        (float(stderr[0]), float(stderr[1]), float(stderr[2])),
        len(terms),
        method,
    )


def _probes(surface: Surface, count: int, exact: bool, seed: int | None) -> Tensor:
    if exact:
        return torch.eye(count, dtype=torch.float64, device=surface.engine.device)
    generator = torch.Generator().manual_seed(chosen_seed(seed))
    signs = torch.randint(0, 2, (count, surface.size), generator=generator)
    return (2 * signs - 1).to(surface.engine.device, torch.float64)


class _Moments:
    """Σ n_i x_i, Σ n_i² x_i and Σ n_i² |x_i|² of vectors x_i (m, P), added one sample at a time."""

    def __init__(self, like: Tensor) -> None:
        self.mean, self.weighted = torch.zeros_like(like), torch.zeros_like(like)
        self.square = like.new_zeros(len(like))

    def add(self, x: Tensor, count: float) -> None:
        self.mean.add_(x, alpha=count)
        self.weighted.add_(x, alpha=count**2)
        self.square.add_(x.square().sum(1), alpha=count**2)


class _Sums:
    """What is kept of all samples: never more than a few vectors for each probe."""

    def __init__(self, surface: Surface, vectors: Tensor) -> None:
        self._surface, self._vectors, self._objective = surface, vectors, surface.objective_of_rows()
        shapes = {name: surface.engine.snapshot.weight(name).shape for name in surface.names}
        self._spread = {name: vectors.new_zeros(len(vectors), *shape) for name, shape in shapes.items()}
        surface.blocks.scatter(vectors, self._spread)
        self._spread = {name: tensor.to(surface.engine.dtype) for name, tensor in self._spread.items()}
        self.losses: list[float] = []
        self.terms: list[float] = []
        self.traces: list[Tensor] = []
        self.gradient, self.products = _Moments(vectors[:1]), _Moments(vectors)

    def add(self, weight: float, batch: Batch) -> None:
        """One batch, row by row."""
        engine = self._surface.engine
        for row in batch.split(1):
            weights, leaves = engine.snapshot.leaves(self._surface.names)
            with kept_derivatives(engine.model):
                outputs = engine.snapshot(weights, row)
            count = float(self._objective.terms(outputs, row.targets))
            if not count:
                continue
            value = self._objective(outputs, row.targets)
            found = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
            gradient = self._surface.blocks.gather(dict(zip(leaves, found, strict=True))).double()
            products = self._products(Graph(leaves, *self._objective.gradient(outputs, row.targets)))
            self.losses.append(float(value.detach()))
            self.terms.append(count)
            self.traces.append((products * self._vectors).sum(1).cpu())
            self.gradient.add(gradient[None], count)
            self.products.add(products, count)

    def _products(self, graph: Graph) -> Tensor:
        """H_i z for all probes, (m, P), one after the other: every operation has a plain double backward pass."""
        surface, rows = self._surface, []
        for i in range(len(self._vectors)):
            one = {name: tensor[i] for name, tensor in self._spread.items()}
            found = graph.product("total", one, surface.names, many=False)
            for name in surface.names:
                found.setdefault(name, torch.zeros_like(one[name]))
            rows.append(surface.blocks.gather(found).double())
        return torch.stack(rows)

    def spread(self, moments: _Moments) -> Tensor:
        """mean_i c_i² |x_i - x|², x the mean by terms, for each probe, (m,)."""
        terms = torch.tensor(self.terms, dtype=torch.float64)
        mean = moments.mean / terms.sum()
        squares = terms.square().sum() * mean.square().sum(1)
        total = moments.square - 2 * (moments.weighted * mean).sum(1) + squares
        return total.clamp_min(0).cpu() / (len(terms) * terms.mean() ** 2)
