"""Sketches of the range of B, and trace estimates that need only sample what the sketch leaves over.

With Q (n, k) orthonormal, tr A = tr Q^T A Q + tr P A P, P = I - Q Q^T. The first term is exact after k products with Q,
the second is small when the columns of Q span the large eigenvectors. Here Q is a basis of B W for random W (n, k).

- Hutch++ (Meyer, Musco, Musco, Woodruff 2021) samples the second term with probes of its own.
- XTrace (Epperly, Tropp, Webber 2024) uses each column w_i of W as the probe of the sketch Q_i made from the others,
  and takes the mean of the k estimates t_i. They are exchangeable but not independent: see `leave_one_out`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvoscope.estimate.products import Products
from curvoscope.estimate.sampling import Form, Sample, pairs, skewness
from curvoscope.estimate.space import Space

_CAPTURED = 1e-13  # a sketch whose last column is this much smaller than its first holds the whole range


class _Columns:
    """Columns (n, k) that grow in place, in memory for twice as many."""

    def __init__(self, products: Products, space: Space) -> None:
        self._products, self._space = products, space
        self._memory = self.all = products.memory(0, space)

    def more(self, columns: int) -> Tensor:
        """Append so many columns, to be written by the caller."""
        count = self.all.shape[1]
        total = count + columns
        if total > self._memory.shape[1]:
            self._memory = self._products.memory(2 * total, self._space)
            self._memory.T[:count] = self.all.T
        self.all = self._memory[:, :total]
        return self.all[:, count:]


class Sketch:
    """Random columns W (n, k), Y = B W and, by `solve`, an orthonormal basis Q of Y and Z = B Q. It can grow; no
    product is made twice."""

    def __init__(self, products: Products, draw: Callable[[int, Tensor], Tensor]) -> None:
        self._products, self._draw, self.space = products, draw, products.space
        self._W, self._Q = (_Columns(products, products.space) for _ in range(2))
        self._Y, self._Z = (_Columns(products, products.row_space) for _ in range(2))
        self.W, self.Y, self.Q, self.Z = (one.all for one in (self._W, self._Y, self._Q, self._Z))

    @property
    def columns(self) -> int:
        """The number of columns of W."""
        return self.W.shape[1]

    def grow(self, columns: int) -> None:
        """W and Y with so many columns."""
        count = columns - self.columns
        self._products(self._draw(count, self._W.more(count)), out=self._Y.more(count))
        self.W, self.Y = self._W.all, self._Y.all

    def solve(self) -> None:
        """Q and Z for the columns of Y; fewer, when they already span the range of B to rounding."""
        fresh = basis_beyond(self.space, self.Q, self.Y[:, self.Q.shape[1] :])
        count = fresh.shape[1]
        if count:
            self._Q.more(count).T.copy_(fresh.T)
            self._products(fresh, out=self._Z.more(count))
            self.Q, self.Z = self._Q.all, self._Z.all

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
        return float(outside.mean() / R.square().sum(0).mean())

    def captured(self, form: Form) -> float:
        """tr Q^T A Q."""
        return float(form(self.space.inner, self.Q, self.Z).trace())

    def outside(self, columns: Tensor) -> Tensor:
        """P applied to columns (n, c), twice for rounding."""
        for _ in range(2):
            columns = projected(self.space, self.Q, columns)
        return columns


def _rank(R: Tensor) -> int:
    """Leading columns of R before the first that adds nothing beyond rounding."""
    sizes = R.diagonal().abs()
    small = (sizes <= _CAPTURED * sizes.max()).nonzero() if sizes.numel() else sizes
    return int(small[0]) if small.numel() else R.shape[1]


def projected(space: Space, Q: Tensor, columns: Tensor) -> Tensor:
    """(I - Q Q^T) applied to columns (n, c)."""
    if not Q.shape[1]:
        return columns
    inside = space.inner(Q, columns).to(Q.dtype)
    return torch.addmm(columns.T, inside.T, Q.T, alpha=-1).T


def basis_beyond(space: Space, Q: Tensor, columns: Tensor) -> Tensor:
    """An orthonormal basis of what columns (n, k) add to the span of Q."""
    fresh = columns
    for scale in (float(space.norm(columns, 0).max()), 1.0):  # the second time the columns are orthonormal already
        fresh, R = space.factor(projected(space, Q, fresh))
        if float(R.diagonal().abs().max()) <= _CAPTURED * scale:
            return fresh[:, :0]
        fresh = fresh[:, : _rank(R)]
    return fresh


def _joint_inner(space: Space, x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
    """<x_i, y_j> of groups of columns, as if those of each tuple stood side by side."""
    return torch.cat([torch.cat([space.inner(some, others) for others in y], 1) for some in x])


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
    n, k, space = sketch.space.size, sketch.columns, sketch.space
    eye = torch.eye(k, dtype=torch.float64, device=sketch.W.device)
    R = space.inner(sketch.Q, sketch.Y)  # where Y adds rounding alone to the range, its diagonal may be zero
    smallest = _CAPTURED * R.diagonal().abs().max()
    R = R + torch.diag(torch.where(R.diagonal().abs() < smallest, smallest, 0))
    S = torch.linalg.solve_triangular(R, eye, upper=True).T
    S = S / S.norm(dim=0)
    inside = space.inner(sketch.Q, sketch.W)
    kept = inside - S * (S * inside).sum(0)  # Q kept_i = Q_i Q_i^T w_i
    # columns of N: ν_i = w_i - Q kept_i; of E = Q S: the directions that are left out
    X, BX = (sketch.W, sketch.Q), (sketch.Y, sketch.Z)
    turn = torch.cat([torch.cat([eye, 0 * S], 1), torch.cat([-kept, S], 1)])  # X turn = [N, E]
    inner = partial(_joint_inner, space)
    a, i = (turn.T @ found @ turn for found in (form(inner, X, BX), inner(X, X)))
    whole = sketch.captured(form)

    aNN, aEN, aEE = a[:k, :k], a[k:, :k], a[k:, k:]
    iNN, iEN, iEE = i[:k, :k], i[k:, :k], S.T @ S
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
    return Sample(float(t.mean()), variance, skewness(square, cube, k), max(1.0, _holding(centred) - 1))


def _holding(matrix: Tensor) -> float:
    """How many columns hold the squares off the diagonal of (k, k): k if all alike, few if one direction is left over
    that few probes meet. The variance from these pairs is known no better than from so many values."""
    shares = matrix.square().sum(0) - matrix.diagonal().square()
    squares = float(shares.square().sum())
    return float(shares.sum()) ** 2 / squares if squares else float(len(matrix))
