"""Sketches of the range of B, and trace estimates that need only sample what the sketch leaves over.

With Q (n, k) orthonormal, tr A = tr Q^T A Q + tr P A P, P = I - Q Q^T. The first term is exact after k products with Q,
the second is small when the columns of Q span the large eigenvectors. Here Q is a basis of B W for random W (n, k).

- Hutch++ (Meyer, Musco, Musco, Woodruff 2021) samples the second term with probes of its own.
- XTrace (Epperly, Tropp, Webber 2024) uses each column w_i of W as the probe of the sketch Q_i made from the others,
  and takes the mean of the k estimates t_i. They are exchangeable but not independent: see `leave_one_out`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope.estimate.products import Products
from curvoscope.estimate.sampling import Form, Sample, pairs, skewness
from curvoscope.estimate.space import Space

_CAPTURED = 1e-13  # a sketch whose last column is this much smaller than its first holds the whole range


class Sketch:
    """W, Y = B W, and on demand Q R = Y and Z = B Q. It can grow; no product is made twice."""

    def __init__(self, products: Products, draw: Callable[[int], Tensor]) -> None:
        self._products, self._draw = products, draw
        self.space, rows = products.space, products.row_space.length
        empty = torch.empty(max(rows, self.space.length), 0, dtype=torch.float64, device=products.device)
        self.W, self.Y = empty[: self.space.length], empty[:rows]
        self.Q, self.Z = self.W, self.Y

    @property
    def columns(self) -> int:
        """The number of columns of W."""
        return self.W.shape[1]

    def grow(self, columns: int) -> None:
        """W and Y with so many columns."""
        more = self._draw(columns - self.columns)
        self.W = torch.cat([self.W, more], 1)
        self.Y = torch.cat([self.Y, self._products(more)], 1)

    def solve(self) -> None:
        """Q and Z for the columns of Y; fewer, when they already span the range of B to rounding."""
        self.Q = _extended(self.space, self.Q, self.Y)
        fresh = self.Q[:, self.Z.shape[1] :]
        self.Z = torch.cat([self.Z, self._products(fresh)], 1)

    @property
    def complete(self) -> bool:
        """Whether Q holds the whole range of B: it has fewer columns than W."""
        return self.Q.shape[1] < self.columns

    def left_over(self) -> float:
        """|P_i B|_F², averaged over i, relative to |B|_F²: what the sketches without one column do not capture.

        The part of y_i outside the span of the others, of which w_i is independent, has the length 1 / |row i of R^-1|.
        """
        R = self.space.triangle(self.Y)
        if _rank(R) < self.columns:
            return 0.0
        inverse = torch.linalg.solve_triangular(R, torch.eye(self.columns, dtype=R.dtype, device=R.device), upper=True)
        outside = inverse.square().sum(1).reciprocal()
        return float(outside.mean() / self.space.total(self.Y.square().sum(0)).mean())

    def captured(self, form: Form) -> float:
        """tr Q^T A Q."""
        return float(form(self.Q, self.Z, self.Q, self.Z).trace())

    def outside(self, columns: Tensor) -> Tensor:
        """P applied to columns (n, c), twice for rounding, scaled to the sphere |z|² = n - k."""
        for _ in range(2):
            columns = columns - self.Q @ self.space.total(self.Q.T @ columns)
        dimension = self.space.size - self.Q.shape[1]
        return columns * (dimension**0.5 / self.space.norm(columns, 0))


def _rank(R: Tensor) -> int:
    """Leading columns of R before the first that adds nothing beyond rounding."""
    sizes = R.diagonal().abs()
    small = (sizes <= _CAPTURED * sizes.max()).nonzero() if sizes.numel() else sizes
    return int(small[0]) if small.numel() else R.shape[1]


def _extended(space: Space, Q: Tensor, Y: Tensor) -> Tensor:
    """An orthonormal basis of Y (n, k) whose first columns are Q, the basis of the first columns of Y."""
    known = Q.shape[1]
    fresh = Y[:, known:]
    for scale in (float(space.norm(Y, 0).max()), 1.0):  # the second time the columns are orthonormal already
        fresh = fresh - Q @ space.total(Q.T @ fresh)
        fresh, R = space.factor(fresh)
        if float(R.diagonal().abs().max()) <= _CAPTURED * scale:
            return Q
        fresh = fresh[:, : _rank(R)]
    return torch.cat([Q, fresh], 1)


def leave_one_out(sketch: Sketch, form: Form) -> Sample:
    """XTrace: the mean of t_i = tr Q_i^T A Q_i + m ν_i^T A ν_i / |ν_i|², ν_i = P_i w_i, m = n - k + 1 the rank of P_i.

    Q_i = Q without the direction s_i, the normalised column i of R^-T. Each t_i is unbiased, but t_i and t_j share
    the interaction of w_i and w_j, so that Var(mean) = Var(t)/k + (k-1)/k Cov(t_i, t_j), and the spread of the t_i
    among themselves, which knows only Var - Cov, is too small: its 95 % intervals cover 80 to 90 %.
    Both terms are had without a product from sketches without i and j, with projections P_ij:

    - t_i^(j), the estimate t_i made without w_j, gives E (t_i - t_i^(j)) (t_j - t_j^(i)) = Cov(t_i, t_j): what depends
      on w_i alone or on w_j alone averages out, since both have the mean tr A whatever the other columns are.
    - P_ij w_i and P_ij w_j are independent given P_ij: their pair matrix gives |P A P|_F², and so Var(t).
    """
    W, Y, Q, Z = sketch.W, sketch.Y, sketch.Q, sketch.Z
    n, k, total = sketch.space.size, sketch.columns, sketch.space.total
    eye = torch.eye(k, dtype=W.dtype, device=W.device)
    S = torch.linalg.solve_triangular(total(Q.T @ Y), eye, upper=True).T  # Q^T Y = R
    S = S / S.norm(dim=0)
    inside = total(Q.T @ W)
    kept = inside - S * (S * inside).sum(0)  # Q kept_i = Q_i Q_i^T w_i
    N, BN = W - Q @ kept, Y - Z @ kept  # columns ν_i and B ν_i
    E, BE = Q @ S, Z @ S  # columns: the directions that are left out
    whole = sketch.captured(form)

    aNN, aEN, aEE = form(N, BN, N, BN), form(E, BE, N, BN), form(E, BE, E, BE)
    iNN, iEN, iEE = total(N.T @ N), total(E.T @ N), S.T @ S
    lost, form_1, length_1 = aEE.diagonal(), aNN.diagonal(), iNN.diagonal()
    sampled = form_1 * (n - k + 1) / length_1
    t = whole - lost + sampled

    # [j, i]: without j too, ν_i gains step * (e_j - cosine e_i), and Q loses that direction
    cosine = iEE * (1 - eye)
    gap = (1 - cosine.square()).clamp_min(1e-12)
    step = S.T @ kept / gap * (1 - eye)
    across = aEN - cosine * aEN.diagonal()
    along = lost[:, None] - 2 * cosine * aEE + cosine.square() * lost
    form_2 = form_1 + 2 * step * across + step.square() * along
    length_2 = length_1 + step.square() * gap
    t_without = whole - lost - along / gap + form_2 * (n - k + 2) / length_2
    change = (t - t_without) * (1 - eye)
    covariance = float((change * change.T).sum()) / (k * (k - 1))

    def between(NN: Tensor, EN: Tensor, EE: Tensor) -> Tensor:
        """[i, j]: the form between ν_i without j and ν_j without i."""
        crossed = step * (EN.diagonal()[:, None] - cosine * EN.T)
        both = (1 + cosine.square()) * EE - cosine * (EE.diagonal()[:, None] + EE.diagonal())
        return NN + crossed + crossed.T + step * step.T * both

    radius = ((n - k + 2) / length_2.T).sqrt()
    mean = float(sampled.mean()) / (n - k + 1)
    centred = (between(aNN, aEN, aEE) - mean * between(iNN, iEN, iEE)) * radius * radius.T
    square, cube, _ = pairs(centred[None])
    single = 2 * (n - k + 1) / (n - k + 3) * square
    least = (0.15 + 1.5 / k) * single  # from few columns the covariance is noisy, and may be far below zero
    variance = max(single + (k - 1) * covariance, least) / k
    degrees = 1.5 * (k - 1)  # there are more pairs than columns, and the variance is known better than from k values
    return Sample(float(t.mean()), variance, skewness(square, cube, k), degrees)
