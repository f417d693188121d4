"""The slides: the scalar attention model with its spectrum in closed form, the attention sink, and pruning.

f_i = w_V μ_i with μ_i the mean of x under row i of A = softmax(s x xᵀ + bias), s = ⟨w_Q, w_K⟩/√k, x of shape (L,),
w_Q and w_K of shape (k,). The parameters are in the order w_V, w_Q, w_K.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.autodiff import Loss, hessian, jacobian, mean_square
from curvoscope.papers.theorems.registry import OWN, SLIDES, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import Draw

Scalar = Float[Tensor, ""]


class ScalarMoments(NamedTuple):
    """Mean, variance and third central moment of x under each row of A."""

    mean: Float[Tensor, "L"]
    variance: Float[Tensor, "L"]
    third: Float[Tensor, "L"]


class LogitDerivatives(NamedTuple):
    """Derivatives of the loss in (w_V, s); a batch adds them up."""

    s: Scalar
    vv: Scalar
    vs: Scalar
    ss: Scalar


class ScalarEigenvalues(NamedTuple):
    """The 2k + 1 eigenvalues: k − 1 pairs ±bulk, and three outliers in ascending order."""

    bulk: Scalar
    outliers: Float[Tensor, "3"]
    k: int

    def eigenvalues(self) -> Float[Tensor, "n"]:
        """All of them, ascending."""
        pairs = torch.stack([self.bulk, -self.bulk]).repeat(self.k - 1)
        return torch.cat([self.outliers, pairs]).sort().values


def logit(w_Q: Float[Tensor, "k"], w_K: Float[Tensor, "k"]) -> Scalar:
    """s = ⟨w_Q, w_K⟩ / √k."""
    return w_Q @ w_K / math.sqrt(len(w_Q))


def moments(x: Float[Tensor, "L"], s: Scalar, bias: Float[Tensor, "L"] | None = None) -> ScalarMoments:
    """Row moments of x under softmax(s x xᵀ + bias), the bias added to every row."""
    logits = s * torch.outer(x, x)
    A = torch.softmax(logits if bias is None else logits + bias, dim=-1)
    mean = A @ x
    deviation = x - mean[:, None]
    return ScalarMoments(mean, (A * deviation**2).sum(1), (A * deviation**3).sum(1))


def derivatives(
    x: Float[Tensor, "L"],
    w_V: Scalar,
    rows: ScalarMoments,
    loss_gradient: Float[Tensor, "L"],
    loss_hessian: Float[Tensor, "L L"],
) -> LogitDerivatives:
    """L_s, L_vv, L_vs and L_ss for any loss, from f_v = μ, f_s = w_V x v, f_vs = x v, f_ss = w_V x² κ₃."""
    f_v, f_s = rows.mean, w_V * x * rows.variance
    f_vs, f_ss = x * rows.variance, w_V * x**2 * rows.third
    return LogitDerivatives(
        s=loss_gradient @ f_s,
        vv=f_v @ loss_hessian @ f_v,
        vs=f_v @ loss_hessian @ f_s + loss_gradient @ f_vs,
        ss=f_s @ loss_hessian @ f_s + loss_gradient @ f_ss,
    )


def mean_square_derivatives(
    x: Float[Tensor, "L"], w_V: Scalar, rows: ScalarMoments, y: Float[Tensor, "L"]
) -> LogitDerivatives:
    """The same for the loss mean (f − y)², written out in the row moments."""
    L, residual, spread = len(x), w_V * rows.mean - y, x * rows.variance
    return LogitDerivatives(
        s=2 / L * w_V * (residual * spread).sum(),
        vv=2 / L * rows.mean.square().sum(),
        vs=2 / L * ((w_V * rows.mean + residual) * spread).sum(),
        ss=2 / L * (w_V**2 * spread**2 + w_V * residual * x**2 * rows.third).sum(),
    )


def outlier_matrix(loss: LogitDerivatives, w_Q: Float[Tensor, "k"], w_K: Float[Tensor, "k"]) -> Float[Tensor, "3 3"]:
    """H on the span of e_V, (p; p)/(√2|p|) and (m; −m)/(√2|m|), with p = w_K + w_Q and m = w_K − w_Q.

    With P = |p|/√(2k), M = |m|/√(2k) and b = L_s/√k it is
    [[L_vv, P L_vs, M L_vs], [·, P² L_ss + b, P M L_ss], [·, ·, M² L_ss − b]].
    """
    k = len(w_Q)
    lengths = torch.stack([torch.linalg.norm(w_K + w_Q), torch.linalg.norm(w_K - w_Q)]) / math.sqrt(2 * k)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    corner = loss.ss * torch.outer(lengths, lengths) + torch.diag(signs * loss.s / math.sqrt(k))
    border = (loss.vs * lengths)[None, :]
    return torch.cat([torch.cat([loss.vv.reshape(1, 1), border], dim=1), torch.cat([border.T, corner], dim=1)])


def spectrum(loss: LogitDerivatives, w_Q: Float[Tensor, "k"], w_K: Float[Tensor, "k"]) -> ScalarEigenvalues:
    """All eigenvalues of the loss Hessian over (w_V, w_Q, w_K), of any loss, mask and batch."""
    k = len(w_Q)
    outliers = torch.linalg.eigvalsh(outlier_matrix(loss, w_Q, w_K))
    return ScalarEigenvalues((loss.s / math.sqrt(k)).abs(), outliers, k)


def gauss_newton_matrix(
    x: Float[Tensor, "L"],
    w_V: Scalar,
    rows: ScalarMoments,
    loss_hessian: Float[Tensor, "L L"],
    gamma: Scalar,
) -> Float[Tensor, "2 2"]:
    """The 2 × 2 matrix with the nonzero eigenvalues of H_o: [[μᵀSμ, γ μᵀS f_s], [·, γ² f_sᵀS f_s]].

    γ² = (|w_Q|² + |w_K|²)/k.
    """
    directions = torch.stack([rows.mean, gamma * w_V * x * rows.variance])
    return directions @ loss_hessian @ directions.T


def sink_limit(x: Float[Tensor, "L"], k: int) -> Float[Tensor, "n"]:
    """Eigenvalues for the loss mean (f − y)² when a bias on the logit of token 1 grows without bound.

    Every row attends to token 1 alone: variance and third moment vanish and with them the bulk and two
    outliers; L_vv → 2 x_1² remains.
    """
    return torch.cat([torch.zeros(2 * k, dtype=torch.float64), 2 * x[:1] ** 2])


# ---- checks


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
        yield from (
            Fails(
                float((after.bulk - before.bulk) / widest),
                "“a larger bias shrinks the bulk” at every step, worst of 40 draws, relative to the widest bulk,",
            )
            for before, after in pairwise(found)
        )
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
