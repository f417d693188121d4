"""Mean, variance and skewness of random quadratic forms, from all pairs of probes and not from single values.

A quadratic form q = z^T A z of independent probes z_1 ... z_l shows more than its l values. The off-diagonal entries
of the Gram matrix M_ij = z_i^T A z_j have E M_ij² = |A|_F² and E M_ij M_jk M_ki = tr A³, and with them, for probes that
are uniform on the sphere |z|² = n, and the centred C = A - (tr A / n) I,

    E q = tr A,    Var q = 2n/(n+2) |C|_F²,    third cumulant ≈ 8 tr C³.

There are l(l-1)/2 pairs, so that a variance from them is much steadier than the sample variance of l values, above all
when one eigenvalue dominates and the values are as skew as χ². For random signs, Var q = 2 (|C|_F² - sum_i C_ii²),
where sum_i C_ii² is the mean over pairs of the inner products of z_i * C z_i and z_j * C z_j.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inner = Callable[[Any, Any], Tensor]
"""(x, y) -> x^T y, for columns x (n, c) and y (n, c'), or several groups of them: (c, c'), in float64."""

Form = Callable[[Inner, Any, Any], Tensor]
"""(inner, x, Bx) -> x^T A x, for columns x (n, c): (c, c)."""


def trace_form(inner: Inner, x: Any, bx: Any) -> Tensor:
    """A = (B + B^T) / 2, whose trace is that of B."""
    found = inner(x, bx)
    return (found + found.T) / 2


def norm_form(inner: Inner, x: Any, bx: Any) -> Tensor:
    """A = B^T B, whose trace is |B|_F²."""
    return inner(bx, bx)


@dataclass(frozen=True)
class Sample:
    """The mean of a quadratic form over probes: its value, and the variance and skewness of that mean."""

    value: float
    variance: float
    skewness: float
    degrees: float

    @property
    def stderr(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(self.variance)

    @property
    def relative(self) -> float:
        """The relative standard error."""
        return self.stderr / abs(self.value) if self.value else math.inf * bool(self.stderr)

    def shifted(self, amount: float) -> "Sample":
        """The same with a known number added."""
        return Sample(self.value + amount, self.variance, self.skewness, self.degrees)

    def needed(self, count: int, tolerance: float) -> int:
        """How many probes the tolerance will need, from the error of the first `count`."""
        if not self.value:
            return 2 * count
        return math.ceil(count * min(1e6, (self.stderr / (tolerance * abs(self.value))) ** 2))

    def meets(self, tolerance: float | None) -> bool:
        """Whether the relative standard error is at most `tolerance`."""
        return tolerance is not None and self.stderr <= tolerance * abs(self.value)


def pairs(matrices: Tensor) -> tuple[float, float, int]:
    """Mean of M_ij² over pairs and of M_ij M_jk M_ki over triples of (groups, c, c), and the number of pairs."""
    groups, c = matrices.shape[:2]
    off = matrices * (1 - torch.eye(c, dtype=matrices.dtype, device=matrices.device))
    count, triples = groups * c * (c - 1), groups * c * (c - 1) * (c - 2)
    square = float(off.square().sum()) / count if count else 0.0
    cube = float((off @ off * off).sum()) / triples if triples else 0.0
    return square, cube, count


def skewness(square: float, cube: float, count: int) -> float:
    """That of the mean of `count` forms with tr C² = `square` and tr C³ = `cube`: of one form it is at most sqrt(8)."""
    if square <= 0:
        return 0.0
    single = math.sqrt(8) * cube / square**1.5
    return max(-math.sqrt(8), min(math.sqrt(8), single)) / math.sqrt(count)


class Tally:
    """Collects the Gram matrices of groups of probes, and summarises them.

    `dimension` is that of the space that the probes are drawn from. With `diagonals`, the Gram matrices of z * Az, the
    probes are signs; without, their directions are uniform, and they are scaled to the sphere |z|² = dimension.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._groups: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.count = 0

    def add(self, grams: Tensor, inner: Tensor, diagonals: Tensor | None = None) -> None:
        """A group: z_i^T A z_j, z_i^T z_j and, for signs, sum (z_i * Az_i)(z_j * Az_j), each (c, c)."""
        if diagonals is None:
            scale = (self.dimension / inner.diagonal()).sqrt()
            grams, inner = (found * scale * scale[:, None] for found in (grams, inner))
        self._groups.append((grams, inner, diagonals))
        self.count += grams.shape[0]

    def halves(self) -> "tuple[Tally, Tally]":
        """The groups that came first, and the others: what is decided by the former says nothing of the latter."""
        first, rest = Tally(self.dimension), Tally(self.dimension)
        for group in self._groups:
            half = first if 2 * first.count < self.count else rest
            half._groups.append(group)
            half.count += len(group[0])
        return first, rest

    def _by_size(self) -> dict[int, list[tuple[Tensor, Tensor, Tensor | None]]]:
        found: dict[int, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        for group in self._groups:
            found.setdefault(len(group[0]), []).append(group)
        return found

    def participation(self) -> float:
        """(tr A)² / |A|_F²: how many eigenvalues hold the trace of a positive form."""
        stacks = [torch.stack([gram for gram, _, _ in group]) for size, group in self._by_size().items() if size > 1]
        found = [pairs(grams) for grams in stacks]
        square = sum(one * count for one, _, count in found) / max(1, sum(count for _, _, count in found))
        mean = (
            float(torch.cat([grams.diagonal(dim1=1, dim2=2).flatten() for grams in stacks]).mean()) if stacks else 0.0
        )
        return mean**2 / square if square else math.inf

    def summary(self) -> Sample:
        """The mean over the probes so far."""
        values = torch.cat([gram.diagonal() for gram, _, _ in self._groups])
        mean, n = float(values.mean()), self.dimension
        square = cube = fixed = weight = 0.0
        for size, group in self._by_size().items():
            if size == 1:
                continue
            grams = torch.stack([gram for gram, _, _ in group])
            centred = grams - mean / n * torch.stack([inner for _, inner, _ in group])
            some, other, count = pairs(centred)
            square, cube, weight = square + count * some, cube + count * other, weight + count
            for gram, _, diagonals in group:
                if diagonals is not None:
                    q = gram.diagonal()
                    same = diagonals - mean / n * (q[:, None] + q) + mean**2 / n
                    fixed += float(same.sum() - same.diagonal().sum())
        signs = any(diagonals is not None for _, _, diagonals in self._groups)
        if weight == 0 or (signs and fixed > square / 2):
            # a matrix near its diagonal: for signs nearly all of |C|_F² is not variance, and the difference is noise
            return Sample(mean, float(values.var()) / self.count, 0.0, self.count - 1.0)
        square, cube, fixed = square / weight, cube / weight, fixed / weight
        variance = 2 * (square - fixed) if signs else 2 * n / (n + 2) * square
        return Sample(mean, max(variance, 0.0) / self.count, skewness(square, cube, self.count), self.count - 1.0)
