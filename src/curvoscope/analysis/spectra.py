"""Spectral densities of the blocks of a Hessian, and the distances between them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.curvature import ModelHessian
from curvoscope.estimate import Density, Estimate, LogSpectrum
from curvoscope.operators import LinearOperator

BINS_A_DECADE = 2
_MOST_BINS = 24  # of each sign: twelve decades below the largest eigenvalue
_MOST_EXACT = 2048  # size of a closed form up to which all its eigenvalues are computed
_ROUNDING = 1e-12  # of a sum of shares
_LEAST_STEPS = 8  # of Lanczos, below which a density shows nothing
_BESIDE = 5  # vectors that a probe needs beside its Lanczos vectors


@dataclass(frozen=True, eq=False)
class BlockSpectrum:
    """The eigenvalues of one block of the total, (n, n): their density, and what is read off it."""

    block: str
    size: int
    method: str
    density: Density
    log: LogSpectrum

    @property
    def largest(self) -> Estimate:
        """The largest eigenvalue, from the probes of the density."""
        return self.density.largest

    @property
    def smallest(self) -> Estimate:
        """The smallest eigenvalue, from the probes of the density."""
        return self.density.smallest

    @property
    def negative(self) -> Estimate:
        """The share of eigenvalues that are known to be negative."""
        return self.log.negative.moment(0)

    @property
    def near_zero(self) -> Estimate:
        """The share that is zero, or too small for its sign to be known: below `log.reach` in size."""
        zero, left = self.log.zero, self.log.unresolved
        stderr = (zero.stderr**2 + left.stderr**2) ** 0.5  # not independent, but one of them is 0 as a rule
        return Estimate(zero.value + left.value, stderr, zero.matvecs, zero.method, zero.degrees)

    def quantile(self, share: float) -> float | None:
        """The eigenvalue below which this share of them lies; None if it is among those too small to be resolved."""
        nodes, order = self.density.nodes.flatten().sort()
        total = self.density.weights.flatten()[order].cumsum(0)
        index = int(torch.searchsorted(total, share * total[-1] * (1 - _ROUNDING)))
        value = float(nodes[min(index, len(nodes) - 1)])
        return None if self.log.reach and abs(value) <= self.log.reach else value


def spectra(H: ModelHessian, matvecs: int, seed: int | None = None) -> Iterator[BlockSpectrum]:
    """The spectra of the diagonal blocks of the total, as they are computed.

    All eigenvalues if n is within the budget, or if the entries have a closed form and n is moderate.
    """
    for name in H.names:
        yield _spectrum(H.total[name], name, H.method_of(name), matvecs, seed, None)


def whole_spectrum(H: ModelHessian, matvecs: int, seed: int | None = None) -> BlockSpectrum | None:
    """The spectrum of the total over all blocks of `H`; None if not even short Lanczos runs fit in memory."""
    size = H.shape[0]
    room = checks.memory_budget() // (H.total.dtype.itemsize * size) - _BESIDE
    if room < min(size, _LEAST_STEPS):
        return None
    steps = min(room, matvecs // 4) if room < 64 else None
    return _spectrum(H.total, "whole Hessian", "autodiff", matvecs, seed, steps)


def _spectrum(
    operator: LinearOperator, name: str, method: str, matvecs: int, seed: int | None, steps: int | None
) -> BlockSpectrum:
    if method == "exact" and operator.shape[0] <= _MOST_EXACT:
        density = Density.exact(operator.eigenvalues())
    else:
        density = operator.density(matvecs=matvecs, seed=seed, steps=steps)
    return BlockSpectrum(name, operator.shape[0], method, density, density.log_spectrum())


# ---- distances


@dataclass(frozen=True, eq=False)
class Distances:
    """Jensen-Shannon distances (k, k) between the spectra of k blocks, in [0, 1]: lower bounds, except for the noise of
    estimated densities.

    The spectra are compared as shares in bins: half a decade each in |λ| on one grid for all, negative and positive
    apart, and for each pair one bin for |λ| ≤ `threshold`, below which one of the two is not resolved. Joining bins
    makes a distance smaller, never larger.
    """

    names: tuple[str, ...]
    values: Tensor
    threshold: Tensor


def distances(found: Sequence[BlockSpectrum]) -> Distances:
    """sqrt((KL(p, m) + KL(q, m)) / 2) with m = (p + q)/2 and logarithms to the base 2, for all pairs."""
    count = len(found)
    most = max(max(abs(end) for end in one.density.support) for one in found) or 1.0
    top = math.ceil(BINS_A_DECADE * math.log10(most))
    edges = [min(top, max(top - _MOST_BINS, _edge(one.log.reach, top))) for one in found]  # in units of a bin
    tables = [_shares(one.density, top) for one in found]
    values, threshold = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            edge = max(edges[i], edges[j])
            p, q = (_joined(tables[k], top - edge) for k in (i, j))
            m = (p + q) / 2
            divergence = float((_relative_entropy(p, m) + _relative_entropy(q, m)) / 2)
            values[i, j] = min(1.0, max(0.0, divergence)) ** 0.5
            threshold[i, j] = 10.0 ** (edge / BINS_A_DECADE)
    return Distances(tuple(one.block for one in found), values, threshold)


def _edge(reach: float, top: int) -> int:
    """The first edge of the grid above what is not resolved."""
    return math.ceil(BINS_A_DECADE * math.log10(reach)) if reach else top - _MOST_BINS


def _shares(density: Density, top: int) -> Tensor:
    """Mean masses (2 m + 1,) of the probes in m negative bins, the one around zero, m positive bins, outwards."""
    nodes, weights = density.nodes.flatten(), density.weights.flatten()
    place = (BINS_A_DECADE * nodes.abs().clamp_min(1e-300).log10()).ceil().long() - (top - _MOST_BINS)
    bins = nodes.sign().long() * place.clamp(0, _MOST_BINS) + _MOST_BINS
    empty = torch.zeros(2 * _MOST_BINS + 1, dtype=weights.dtype)
    return empty.index_add_(0, bins.cpu(), weights.cpu()) / weights.sum().cpu()


def _joined(shares: Tensor, kept: int) -> Tensor:
    """The outer `kept` bins of each sign, and all others as one."""
    middle = shares[kept : len(shares) - kept].sum()[None]
    return torch.cat([shares[:kept], middle, shares[len(shares) - kept :]])


def _relative_entropy(p: Tensor, m: Tensor) -> Tensor:
    """sum p log2(p/m), with 0 log 0 = 0."""
    return torch.special.xlogy(p, p / m.clamp_min(1e-300)).sum() / math.log(2)
