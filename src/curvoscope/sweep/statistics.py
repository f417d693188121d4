"""What Gram matrices of samples say: traces, norms, moments and ends of the spectrum, with error bars.

Samples gamma^i of all blocks b are independent, E[gamma_b gamma_c^T] = H_bc, and K_b[i, j] = <gamma_b^i, gamma_b^j>.
Over different i, j, k, ...

    tr H_b = E K_b[i, i]        |H_bc|_F^2 = E K_b[i, j] K_c[i, j]        tr H_b^3 = E K_b[i, j] K_b[j, k] K_b[k, i]

Each is the mean over all such tuples of a chunk of c samples (a U-statistic, unbiased), and the mean over chunks. With
h_ij = K_b[i, j] K_c[i, j], the variance of a mean over pairs is

    (4 (c - 2) z1 + 2 z2) / (c (c - 1))        z1 = Cov(h_12, h_13)        z2 = Var h_12

and has an unbiased estimate. The jackknife's is between one and two times as large: two times when z1 = 0. So the
unbiased one is used, held within these limits. Samples are sums over many tokens and nearly normal: if one eigenvalue
dominates, traces and norms are as skew as a chi-square variable.

The share of z1 in the variance says how |H_bc|_F is distributed: like a mean if z1 dominates, and like the root of one
if z2 does, as for two blocks whose true norm is 0. The interval is that of a power in between.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvoscope.estimate import Estimate
from curvoscope.estimate.sampling import pairs, skewness

METHOD = "sweep"
LEAST = 4  # samples of a chunk
_MANY = 64  # samples whose variance is known well


class Bracket(NamedTuple):
    """A number between two estimated bounds.

    Args:
        lower: an estimate of a lower bound.
        upper: an estimate of an upper bound.

    Example:
        >>> import curvoscope as cv
        >>> from curvoscope.sweep.statistics import Bracket
        >>> print(Bracket(cv.Estimate(1.0, 0.1, 8, "sweep"), cv.Estimate(2.0, 0.1, 8, "sweep")))
        between 1 ± 0.1 and 2 ± 0.1
    """

    lower: Estimate
    upper: Estimate

    def __str__(self) -> str:
        return f"between {self.lower} and {self.upper}"

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """From the lower end of the lower bound's interval to the upper end of the upper one's.

        Args:
            level: the confidence of each of the two intervals, between 0 and 1.

        Returns:
            The two ends.
        """
        return self.lower.interval(level)[0], self.upper.interval(level)[1]


def trace(grams: Sequence[Tensor]) -> Estimate:
    """tr H from the Gram matrices (c, c) of each chunk."""
    values = torch.cat([K.diagonal() for K in grams])
    m = len(values)
    square, cube = (sum(len(K) * pairs(K[None])[k] for K in grams) / m for k in range(2))
    variance = float(values.var())
    if m < _MANY:  # the variance of few values is known badly; of normal variables it is 2 |H|_F^2
        variance = max(variance, min(2 * square, 2 * variance))
    return Estimate(float(values.mean()), math.sqrt(variance / m), m, METHOD, m - 1, skewness(square, cube, m))


class SquaredNorms(NamedTuple):
    """Estimates of |H_bc|_F^2 of pairs of blocks, (...)."""

    value: Tensor
    variance: Tensor
    share: Tensor  # of one eigenvalue, between 0 and 1: how skew it is
    power: Tensor  # of the norm whose distribution is that of a mean, between 1 and 2


def squared_norms(first: Sequence[Tensor], second: Sequence[Tensor]) -> SquaredNorms:
    """|H_bc|_F^2 of pairs of blocks from Gram matrices (..., c, c) of each chunk."""
    m = sum(chunk.shape[-1] for chunk in first)
    value, variance, z1, linear, quadratic = (
        sum(terms)
        for terms in zip(
            *(
                (share * mean, share**2 * spread, share * z1, share**2 * of_z1, share**2 * of_z2)
                for one, other in zip(first, second, strict=True)
                for share, (mean, spread, z1, of_z1, of_z2) in [(one.shape[-1] / m, _pair_mean(one, other))]
            ),
            strict=True,
        )
    )
    share = (z1 / (2 * value.square())).nan_to_num(0.0).clamp(0, 1)
    quadratic = quadratic.clamp_min(0)
    power = 1 + (quadratic / (quadratic + linear.clamp_min(0))).nan_to_num(0.0)
    return SquaredNorms(value, variance, share, power)


def _pair_mean(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The mean of h_ij over i != j, its variance, z1, and the parts of the variance that are due to z1 and to z2."""
    c = one.shape[-1]
    h = one * other
    h = h - torch.diag_embed(h.diagonal(dim1=-2, dim2=-1))
    rows = h.sum(-1)
    total, squares, row_squares = rows.sum(-1), h.square().sum((-2, -1)), rows.square().sum(-1)
    count = c * (c - 1)
    left_out = 4 * (row_squares - total.square() / c) / (count * (c - 2) ** 2)  # the jackknife's variance
    alone = (total.square() - 4 * row_squares + 2 * squares) / (count * (c - 2) * (c - 3))  # E h_12 h_34
    z1 = (row_squares - squares) / (count * (c - 2)) - alone
    z2 = squares / count - alone
    linear, quadratic = 4 * (c - 2) * z1 / count, 2 * z2 / count
    return total / count, (linear + quadratic).clamp(left_out / 2, left_out), z1, linear, quadratic


def norm(square: SquaredNorms, m: int) -> Estimate:
    """|H_bc|_F from its square, of one pair of blocks."""
    value, variance, share, power = map(float, square)
    root = max(value, 0.0) ** 0.5
    stderr = math.sqrt(variance) / (2 * root) if root else variance**0.25
    # the standard error is a fourth moment: it is known as badly as a variance from a quarter of the samples
    return Estimate(root, stderr, m, METHOD, (m - 1) / 4, math.sqrt(8 * share / m), power)


def moment(grams: Sequence[Tensor], order: int) -> Estimate:
    """tr H^k for k = 1 to 4, from closed walks over different samples."""
    if order == 1:
        return trace(grams)
    shares = torch.cat([_walks(K, order) for K in grams])
    m = len(shares)
    value = sum(len(K) * _closed_walks(K, order).sum() / _tuples(len(K), order) for K in grams) / m
    return _root_interval(float(value), shares, 1 / order)


def _walks(K: Tensor, order: int) -> Tensor:
    """The jackknife's values of a mean over tuples, (c,): what each sample adds."""
    c, walks = len(K), _closed_walks(K, order)
    fewer = (walks.sum() - order * walks) / _tuples(c - 1, order)
    return c * walks.sum() / _tuples(c, order) - (c - 1) * fewer


def _tuples(c: int, order: int) -> int:
    return math.prod(range(c - order + 1, c + 1))


def _closed_walks(K: Tensor, order: int) -> Tensor:
    """Closed walks over `order` different samples that begin at each of them, (c,)."""
    zero = K - torch.diag(K.diagonal())
    squares = zero.square()
    if order == 2:
        return squares.sum(1)
    if order == 3:
        return (zero @ zero * zero).sum(1)
    rows = squares.sum(1)  # of all walks of four steps without those that are back after two, from here or from there
    return (zero @ zero).square().sum(1) - rows.square() - squares @ rows + squares.square().sum(1)


def effective_rank(grams: Sequence[Tensor]) -> Estimate:
    """(tr H)^2 / |H|_F^2, both as means over pairs of samples; 0 if H is 0."""
    lengths = [K.diagonal() for K in grams]
    m, seen = sum(map(len, lengths)), sum(int(some.count_nonzero()) for some in lengths)
    if seen < 2:  # one sample shows one direction, and there may be as many as samples
        return Estimate(float(seen), float(m * seen), m, METHOD)
    return jackknifed_ratio([torch.outer(some, some) for some in lengths], [K.square() for K in grams])


def jackknifed_ratio(above: Sequence[Tensor], below: Sequence[Tensor]) -> Estimate:
    """The ratio of the means of two numbers over pairs of samples, each (c, c) for each chunk; 0 / 0 is 0."""
    top, bottom = (torch.cat([_pair_values(some) for some in several]) for several in (above, below))
    if not top.any() and not bottom.any():
        return jackknifed(top)
    value = float(top.mean() / bottom.mean())
    return _root_interval(value, value * (1 + top / top.mean() - bottom / bottom.mean()), 1.0)


def _pair_values(h: Tensor) -> Tensor:
    """The jackknife's values (c,) of the mean of h_ij over i != j; their mean is that mean."""
    c, rows = len(h), h.sum(-1) - h.diagonal()
    return rows.sum() / (c - 1) - (rows.sum() - 2 * rows) / (c - 2)


def _root_interval(value: float, shares: Tensor, power: float) -> Estimate:
    """An estimate whose interval is that of its `power`, from the jackknife's values."""
    m, centred = len(shares), shares - shares.mean()
    deviation = float(centred.square().sum() / (m - 1)) ** 0.5
    skew = float((centred / deviation).pow(3).mean()) / math.sqrt(m) if deviation else 0.0
    limit = math.sqrt(8 / m)
    return Estimate(value, deviation / math.sqrt(m), m, METHOD, m - 1, max(-limit, min(skew, limit)), power)


def jackknifed(values: Tensor, power: float = 1.0) -> Estimate:
    """The mean of the jackknife's values of a number, or its root for `power` 2.

    The variance of m values of kurtosis k has a relative variance of (k - 1) / m, as that of a normal variable with
    2 m / (k - 1) degrees of freedom: a few large values leave few of them, and a wide interval.
    """
    found = _root_interval(float(values.mean()), values, 1.0)
    centred = values - values.mean()
    square = float(centred.square().mean())
    kurtosis = float(centred.pow(4).mean()) / square**2 if square else 3.0
    degrees = min(found.degrees, 2 * len(values) / max(kurtosis - 1, 1.0))
    found = Estimate(**found.facts() | {"degrees": degrees})
    return found if power == 1 else found.root()


def largest_eigenvalue(grams: Sequence[Tensor]) -> Bracket:
    """A bracket of the largest eigenvalue of H.

    Lower: u^T H u <= lambda_max for the top Ritz vector u of one half of the samples; on the other half the mean of
    <u, gamma>^2 is an unbiased estimate of it. Upper: the largest eigenvalue of the mean of gamma gamma^T, that of the
    Gram matrix over its size, is at least lambda_max in expectation.
    """
    below, above = [], []
    for K in grams:
        order = torch.arange(len(K))
        for half, rest in ((order[::2], order[1::2]), (order[1::2], order[::2])):
            values, vectors = torch.linalg.eigh(K[half[:, None], half])
            length = values[-1].clamp_min(torch.finfo(K.dtype).tiny)
            below.append((K[rest[:, None], half] @ vectors[:, -1]).square() / length)
        values, vectors = torch.linalg.eigh(K)
        above.append(values[-1] * vectors[:, -1].square())  # what each sample adds; the mean is lambda / c
    return Bracket(*(_square_mean(torch.cat(values)) for values in (below, above)))


def _square_mean(values: Tensor) -> Estimate:
    """The mean of squares of variables with normal tails or heavier ones, as if few batches see a direction: its
    standard error is at least sqrt(2 / m) of it."""
    m, value = len(values), float(values.mean())
    variance = max(2 * value**2, float(values.var()))
    return Estimate(value, math.sqrt(variance / m), m, METHOD, m - 1, math.sqrt(8 / m))
