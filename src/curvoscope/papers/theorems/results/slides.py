"""The slides: the spectrum of the scalar model, the attention sink, and pruning."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import Loss, hessian, jacobian, mean_square
from curvoscope.papers.theorems.registry import OWN, SLIDES, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import Draw
from curvoscope.papers.theorems.scalar import (
    LogitDerivatives,
    derivatives,
    gauss_newton_matrix,
    logit,
    mean_square_derivatives,
    moments,
    outlier_matrix,
    sink_limit,
    spectrum,
)


class ScalarModel:
    """A draw of x, y, w_V, w_Q, w_K, and of a bias on the logits."""

    def __init__(self, draw: Draw, L: int, k: int, biased: bool = False) -> None:
        self.x, self.y = draw.normal(L), draw.normal(L)
        self.w_V, self.w_Q, self.w_K = draw.normal(1)[0], draw.normal(k), draw.normal(k)
        self.bias = draw.normal(L) if biased else None

    @property
    def weights(self) -> Tensor:
        """w_V, w_Q, w_K in one vector."""
        return torch.cat([self.w_V[None], self.w_Q, self.w_K])

    def output(self, weights: Tensor) -> Tensor:
        """f as a function of the weights."""
        w_Q, w_K = weights[1:].chunk(2)
        return weights[0] * moments(self.x, logit(w_Q, w_K), self.bias).mean

    def derivatives(self, loss: Loss) -> LogitDerivatives:
        """L_s, L_vv, L_vs, L_ss from the closed form."""
        output = self.output(self.weights)
        rows = moments(self.x, logit(self.w_Q, self.w_K), self.bias)
        gradient = torch.func.grad(loss)(output)
        return derivatives(self.x, self.w_V, rows, gradient, hessian(loss, output))

    def hessian(self, loss: Loss) -> Tensor:
        """The dense Hessian by automatic differentiation."""
        return hessian(lambda weights: loss(self.output(weights)), self.weights)


@SLIDES.holds("Slides, scalar model", "d_K − 1 pairs ±bulk and 3 outliers are all 2d_K + 1 eigenvalues")
def scalar_spectrum(seed: int) -> Iterator[float]:
    """The spectrum for the square loss, from the row moments of x."""
    for model in _models(seed):
        rows = moments(model.x, logit(model.w_Q, model.w_K))
        loss = mean_square_derivatives(model.x, model.w_V, rows, model.y)
        found = torch.linalg.eigvalsh(model.hessian(mean_square(model.y)))
        yield relative_error(spectrum(loss, model.w_Q, model.w_K).eigenvalues(), found)


@OWN.holds("Scalar model, any loss", "logistic and non-separable losses, a bias on the logits")
def scalar_spectrum_of_any_loss(seed: int) -> Iterator[float]:
    """The closed form needs of the loss only its gradient and Hessian at the output."""
    for model in _models(seed, biased=True):
        for loss in (_logistic(model.y), _not_separable(model.y)):
            closed = spectrum(model.derivatives(loss), model.w_Q, model.w_K).eigenvalues()
            yield relative_error(closed, torch.linalg.eigvalsh(model.hessian(loss)))


@OWN.holds("Scalar model, degenerate weights", "w_Q = ±w_K, w_Q = 0, both 0, d_K = 1")
def scalar_spectrum_degenerate(seed: int) -> Iterator[float]:
    """The closed form needs no special cases."""
    for model in _models(seed):
        for w_Q, w_K in (
            (model.w_K, model.w_K),
            (-model.w_K, model.w_K),
            (0 * model.w_Q, model.w_K),
            (0 * model.w_Q, 0 * model.w_K),
        ):
            model.w_Q, model.w_K = w_Q, w_K
            loss = mean_square(model.y)
            closed = spectrum(model.derivatives(loss), w_Q, w_K).eigenvalues()
            yield relative_error(closed, torch.linalg.eigvalsh(model.hessian(loss)))


@OWN.holds("Scalar model, batch", "the derivatives in (w_V, s) of the sequences add up")
def scalar_spectrum_of_batch(seed: int) -> Iterator[float]:
    """Only w_V and s matter, whatever the sequences."""
    models = _batch(seed)
    found = torch.linalg.eigvalsh(torch.stack([model.hessian(mean_square(model.y)) for model in models]).sum(0))
    closed = spectrum(_sum(models), models[0].w_Q, models[0].w_K).eigenvalues()
    yield relative_error(closed, found)


@OWN.holds("Scalar model, outlier subspace", "H on span{e_V, (p; p), (m; −m)}; trace and determinant")
def scalar_outlier_subspace(seed: int) -> Iterator[float]:
    """H maps the three directions into their span by the 3 × 3 matrix; its invariants in closed form."""
    for model in _models(seed):
        k = len(model.w_Q)
        loss = mean_square(model.y)
        parts, dense = model.derivatives(loss), model.hessian(loss)
        matrix = outlier_matrix(parts, model.w_Q, model.w_K)
        plus, minus = model.w_K + model.w_Q, model.w_K - model.w_Q
        basis = torch.zeros(2 * k + 1, 3, dtype=torch.float64)
        basis[0, 0] = 1
        basis[1:, 1] = torch.cat([plus, plus]) / (math.sqrt(2) * torch.linalg.norm(plus))
        basis[1:, 2] = torch.cat([minus, -minus]) / (math.sqrt(2) * torch.linalg.norm(minus))
        b, s = parts.s / math.sqrt(k), logit(model.w_Q, model.w_K)
        determinant = -(parts.vv * parts.ss - parts.vs**2) * 2 * s * b / math.sqrt(k) - parts.vv * b**2
        length = (model.w_Q.square().sum() + model.w_K.square().sum()) / k
        yield relative_error(dense @ basis, basis @ matrix)
        yield relative_error(parts.vv + parts.ss * length, torch.trace(dense), dense)
        yield relative_error(determinant, torch.linalg.det(matrix), matrix.abs().max() ** 3)


@OWN.holds("Scalar model, Gauss-Newton", "rank 2: eigenvalues of a 2 × 2 matrix, the others zero")
def scalar_gauss_newton(seed: int) -> Iterator[float]:
    """H_o sees w_Q and w_K through one direction only."""
    for model in _models(seed):
        loss, output = mean_square(model.y), model.output(model.weights)
        J, S = jacobian(model.output, model.weights), hessian(loss, output)
        found = torch.linalg.eigvalsh(J.T @ S @ J)
        rows = moments(model.x, logit(model.w_Q, model.w_K))
        gamma = ((model.w_Q.square().sum() + model.w_K.square().sum()) / len(model.w_Q)).sqrt()
        closed = torch.linalg.eigvalsh(gauss_newton_matrix(model.x, model.w_V, rows, S, gamma))
        yield relative_error(closed, found[-2:])
        yield relative_size(found[:-2], found)


@SLIDES.corrected(
    "Slides, attention sink",
    "as the logit bias on token 1 grows without bound: bulk → 0, outliers → 2x_1², 0, 0",
    contrast="“a larger bias shrinks the bulk” at every step, worst of 40 draws, relative to the widest bulk,",
    somewhere=True,
)
def attention_sink(seed: int) -> Iterator[float]:
    """A larger sink shrinks the bulk in the end, not at every step."""
    for number in range(40):
        model = ScalarModel(Draw(seed, 21, number), L=6, k=4)
        model.x[0] = 1.1 * model.x.abs().max()  # the sink is the outlier among the activations
        loss = mean_square(model.y)
        token = torch.zeros(6, dtype=torch.float64)
        token[0] = 1
        found = []
        for strength in (0.0, 1.0, 2.0, 4.0, 8.0):
            model.bias = strength * token
            found.append(spectrum(model.derivatives(loss), model.w_Q, model.w_K))
        widest = max(one.bulk for one in found)
        yield from (Fails(float((after.bulk - before.bulk) / widest)) for before, after in pairwise(found))
        model.bias = 200 * token
        limit = sink_limit(model.x, len(model.w_Q))
        yield relative_error(torch.linalg.eigvalsh(model.hessian(loss)), limit)


@SLIDES.corrected(
    "Slides, Optimal Brain Surgeon", "δw = −w_q/[H⁻¹]_qq H⁻¹e_q: the slides have w_q² for w_q", somewhere=True
)
def optimal_brain_surgeon(seed: int) -> Iterator[float]:
    """The step that removes weight q at the least increase of ½ δwᵀHδw, against the constrained minimum."""
    draw = Draw(seed, 22)
    root, weight = draw.normal(5, 5), draw.normal(5) + 3
    curvature = root @ root.T + torch.eye(5, dtype=torch.float64)
    for q in range(5):
        # Stationary point of ½ δᵀHδ + λ(δ_q + w_q).
        unit = torch.zeros(5, 1, dtype=torch.float64)
        unit[q] = 1
        system = torch.cat(
            [
                torch.cat([curvature, unit], dim=1),
                torch.cat([unit.T, torch.zeros(1, 1, dtype=torch.float64)], dim=1),
            ]
        )
        right = torch.zeros(6, dtype=torch.float64)
        right[5] = -weight[q]
        reference = torch.linalg.solve(system, right)[:5]
        yield relative_error(_pruning_step(curvature, weight, q, 1), reference)
        yield Fails(relative_error(_pruning_step(curvature, weight, q, 2), reference))


def _logistic(labels: Tensor) -> Loss:
    return lambda output: torch.nn.functional.softplus(-output * labels.sign()).mean()


def _not_separable(weights: Tensor) -> Loss:
    """A loss that couples the tokens."""
    return lambda output: torch.logsumexp(output * weights, dim=0) + (output.sum() - 1) ** 4


def _models(seed: int, biased: bool = False) -> Iterator[ScalarModel]:
    for number, (L, k) in enumerate(((2, 3), (5, 1), (4, 2), (7, 6), (3, 5))):
        yield ScalarModel(Draw(seed, 23, number), L, k, biased)


def _batch(seed: int) -> list[ScalarModel]:
    models = [ScalarModel(Draw(seed, 24, number), L=5, k=4) for number in range(3)]
    for model in models[1:]:
        model.w_V, model.w_Q, model.w_K = models[0].w_V, models[0].w_Q, models[0].w_K
    return models


def _sum(models: list[ScalarModel]) -> LogitDerivatives:
    parts = [model.derivatives(mean_square(model.y)) for model in models]
    return LogitDerivatives(*(torch.stack(terms).sum(0) for terms in zip(*parts, strict=True)))


def _pruning_step(curvature: Tensor, weight: Tensor, q: int, power: int) -> Tensor:
    """δw = −w_q / [H⁻¹]_qq · H⁻¹ e_q removes weight q at the least cost; the slides print w_q², power 2."""
    column = torch.linalg.inv(curvature)[:, q]
    return -(weight[q] ** power) / column[q] * column
