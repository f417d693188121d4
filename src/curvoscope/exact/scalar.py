"""The scalar attention model of the slides and all eigenvalues of its Hessian in closed form.

Tokens are numbers x_i, f_i = w_V mu_i with mu_i the mean of x under row i of A, A_ij ~ exp(s x_i x_j + mask),
s = <w_Q, w_K>/sqrt(k). Row i is an exponential family in s x_i, so derivatives in s are its moments: with the
variance v and the third central moment k3 of x under the row,

    df/dw_V = mu    df/ds = w_V x v    d2f/dw_V ds = x v    d2f/ds2 = w_V x^2 k3

and for a loss with gradient g and Hessian S at f, f_s = df/ds,

    L_s  = g . f_s                   L_vs = mu^T S f_s + g . (x v)
    L_vv = mu^T S mu                 L_ss = f_s^T S f_s + w_V g . (x^2 k3)

The weights w_Q and w_K enter through s alone, which is bilinear. With b = L_s/sqrt(k),
P = |w_K + w_Q|/sqrt(2k) and M = |w_K - w_Q|/sqrt(2k) the 2k + 1 eigenvalues over (w_Q, w_K, w_V) are +|b| and
-|b|, k - 1 times each, and those of

    [ L_vv    P L_vs        M L_vs       ]
    [ .       P^2 L_ss + b  P M L_ss     ]
    [ .       .             M^2 L_ss - b ]
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import LossError, NonFiniteError, ShapeError
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.operators.eigenvalues import symmetric_eigenvalues


@dataclass(frozen=True)
class ScalarSpectrum:
    """The spectrum of the scalar model: k - 1 pairs +-`bulk`, and three `outliers`.

    Attributes:
        bulk: |b|: the eigenvalues +|b| and -|b| come `multiplicity` times each.
        multiplicity: k - 1.
        outliers: (3,), ascending.
        gauss_newton: (2,), ascending: the eigenvalues of H_o = J^T S J; its others are zero.
        trace: of the Hessian, to which the bulk adds nothing.
        determinant: the product of the outliers.
        mean: of x under each row of A, in the shape of x.
        variance: likewise.
        third_moment: likewise, central.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.ScalarAttention(torch.ones(3), torch.ones(3), 1.0)
        >>> spectrum = layer.spectrum(torch.tensor([0.0, 1.0]), torch.zeros(2))
        >>> spectrum.multiplicity, len(spectrum.eigenvalues)
        (2, 7)
    """

    bulk: float
    multiplicity: int
    outliers: Tensor
    gauss_newton: Tensor
    trace: float
    determinant: float
    mean: Tensor
    variance: Tensor
    third_moment: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        """All 2k + 1 of them, ascending."""
        pairs = self.outliers.new_tensor([-self.bulk, self.bulk]).repeat(self.multiplicity)
        return torch.cat([self.outliers, pairs]).sort().values


class ScalarAttention:
    """f = w_V A x, A = softmax(x x^T <w_Q, w_K>/sqrt(k)) by rows: attention on tokens that are numbers.

    It is `SelfAttention` with inputs and values of width 1.

    Args:
        w_Q: (k,).
        w_K: (k,).
        w_V: a number.
        causal: whether a query sees no later key.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.ScalarAttention(torch.zeros(3), torch.zeros(3), 2.0)
        >>> layer(torch.tensor([0.0, 1.0]))
        tensor([1., 1.])
    """

    def __init__(self, w_Q: Tensor, w_K: Tensor, w_V: Tensor | float, *, causal: bool = False) -> None:
        for name, weight in (("w_Q", w_Q), ("w_K", w_K)):
            checks.floating(name, weight, like=None if weight is w_Q else w_Q)
            if weight.shape != w_Q.shape or weight.ndim != 1:
                raise ShapeError(name, f"expected (k,), got {tuple(weight.shape)}")
        if not isinstance(w_V, Tensor):
            checks.real("w_V", w_V)
            w_V = torch.tensor(w_V, dtype=w_Q.dtype, device=w_Q.device)
        if checks.floating("w_V", w_V, like=w_Q).ndim:
            raise ShapeError("w_V", f"expected a number, got a tensor of shape {tuple(w_V.shape)}")
        self.w_Q, self.w_K, self.w_V = w_Q, w_K, w_V
        s = checks.floating("w_Q . w_K", w_Q @ w_K / math.sqrt(len(w_Q)))
        self._layer = SelfAttention.single_matrix(s[None, None], w_V[None, None], causal=causal)

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """f, in the shape of x, (L,) or (N, L)."""
        return self._layer(self._tokens(x), mask)[..., 0]

    @torch.no_grad()
    def spectrum(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        loss: losses.LossFunction | None = None,
        mask: Tensor | None = None,
    ) -> ScalarSpectrum:
        """All eigenvalues of the loss Hessian over (w_Q, w_K, w_V).

        Args:
            x: (L,) or (N, L).
            y: targets in the shape of x, for the mean of (f - y)^2.
            loss: instead of `y`: a function of f in the shape of x, or a loss of `cv.losses`, which sees outputs
                of width 1, (L, 1) or (N, L, 1).
            mask: as in `SelfAttention.hessian`; a sink is a floating-point mask with a large column.

        Returns:
            A `ScalarSpectrum`.
        """
        passed = self._layer.forward_pass(self._tokens(x), mask)
        found = losses.at(self._loss(x, y, loss), passed.F, passed.squeeze)
        tokens, A, g = passed.X[..., 0], passed.A[:, 0], found.gradient[..., 0]
        mean = (A @ tokens[..., None])[..., 0]
        deviation = tokens[:, None, :] - mean[:, :, None]
        variance, third = (A * deviation**2).sum(-1), (A * deviation**3).sum(-1)

        f_vs = tokens * variance
        tangents = torch.stack([mean, self.w_V * f_vs])  # df/dw_V and df/ds
        curved = found.curvature.apply(tangents[..., None])[..., 0]
        outer = tangents.flatten(1) @ curved.flatten(1).T
        L_s, L_vv = (g * tangents[1]).sum(), outer[0, 0]
        L_vs = (outer[0, 1] + outer[1, 0]) / 2 + (g * f_vs).sum()
        L_ss = outer[1, 1] + self.w_V * (g * tokens**2 * third).sum()

        k = len(self.w_Q)
        b = L_s / math.sqrt(k)
        P, M = ((self.w_K + sign * self.w_Q).norm() / math.sqrt(2 * k) for sign in (1, -1))
        matrix = torch.stack(
            [
                torch.stack([L_vv, P * L_vs, M * L_vs]),
                torch.stack([P * L_vs, P**2 * L_ss + b, P * M * L_ss]),
                torch.stack([M * L_vs, P * M * L_ss, M**2 * L_ss - b]),
            ]
        )
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError("x", "its moments or the loss overflow; scale the input or the weights down")
        reach = torch.stack([torch.ones_like(P), torch.hypot(P, M)])  # the norms of dw_V and ds in the weights
        # products of three eigenvalues, in float64: they leave the range of float32 long before the eigenvalues do
        vv, vs, ss, pair, difference = (float(n) for n in (L_vv, L_vs, L_ss, b, 2 * (self.w_Q @ self.w_K) / k))
        return ScalarSpectrum(
            bulk=float(b.abs()),
            multiplicity=k - 1,
            outliers=symmetric_eigenvalues(matrix),
            gauss_newton=symmetric_eigenvalues(outer * torch.outer(reach, reach)),
            trace=float(L_vv + L_ss * (P**2 + M**2)),
            determinant=(vs * vs - vv * ss) * difference * pair - vv * pair * pair,  # P^2 - M^2 is the difference
            mean=mean.view(x.shape),
            variance=variance.view(x.shape),
            third_moment=third.view(x.shape),
        )

    def _tokens(self, x: Tensor) -> Tensor:
        """x as inputs of width 1, (L, 1) or (N, L, 1)."""
        checks.floating("x", x, like=self.w_Q)
        if x.ndim not in (1, 2):
            raise ShapeError("x", f"expected (L,) or (N, L), got {tuple(x.shape)}")
        return x[..., None]

    def _loss(self, x: Tensor, y: Tensor | None, loss: losses.LossFunction | None) -> losses.LossFunction:
        """The loss as a function of outputs (..., L, 1)."""
        if loss is None:
            if y is None:
                raise LossError("y", "is missing; give targets y or a loss")
            if checks.floating("y", y, like=x).shape != x.shape:
                raise ShapeError("y", f"expected {tuple(x.shape)} like x, got {tuple(y.shape)}")
            return losses.MSE(y[..., None])
        if y is not None:
            raise LossError("loss", "is given together with targets y; leave out one of the two")
        if isinstance(loss, losses.Objective):
            return loss
        return lambda F: loss(F[..., 0])
