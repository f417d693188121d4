"""The scalar attention model of the slides and its Hessian spectrum in closed form.

f_i = w_V μ_i with μ_i the mean of x under row i of A = softmax(s x xᵀ + bias), s = ⟨w_Q, w_K⟩/√k, x of shape (L,),
w_Q and w_K of shape (k,). The parameters are in the order w_V, w_Q, w_K.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

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
