"""Error bars that are true: the 95 % interval holds the truth in 92 to 98 % of cases.

The share over some seeds has an error of its own, 1.3 % for 300: it may lie three standard errors outside."""

import math

import pytest
import torch

from curvoscope import estimate
from matrices import SPECTRA, Dense, rotated
from reference import normal

SEEDS = 300
SIZE = 100
CELLS = [
    ("auto", 16),
    ("auto", 64),
    ("hutchinson", 16),
    ("hutchinson", 64),
    ("hutch++", 48),
    ("xtrace", 48),
]


def calibrated(held):
    """Whether the shares of truths held, one for each seed, are those of 92 to 98 %, to three standard errors."""
    shares = torch.as_tensor(held, dtype=torch.float64)
    error = 3 * float(shares.std()) / math.sqrt(len(shares))
    return 0.92 - error <= float(shares.mean()) <= 0.98 + error


def holding(estimates, truth):
    """Which intervals hold the truth."""
    return [low <= truth <= high for low, high in (e.interval() for e in estimates)]


def _ratio(estimates, truth):
    """The root mean square of the errors over that of the standard errors."""
    return math.sqrt(sum((e.value - truth) ** 2 for e in estimates) / sum(e.stderr**2 for e in estimates))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "decaying" else [pytest.mark.slow]) for name in SPECTRA],
)
def known(request):
    eigenvalues = SPECTRA[request.param](SIZE)
    return Dense(rotated(eigenvalues)), eigenvalues


@pytest.mark.parametrize(("method", "matvecs"), CELLS)
class TestCoverage:
    def test_trace(self, known, method, matvecs):
        operator, eigenvalues = known
        found = [estimate.trace(operator, matvecs=matvecs, seed=seed, method=method) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(eigenvalues.sum())))
        assert 0.8 < _ratio(found, float(eigenvalues.sum())) < 1.15
        assert max(e.matvecs for e in found) <= matvecs

    def test_frobenius_norm(self, known, method, matvecs):
        operator, eigenvalues = known
        found = [estimate.frobenius_norm(operator, matvecs=matvecs, seed=seed, method=method) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(eigenvalues.norm())))
        assert 0.5 < _ratio(found, float(eigenvalues.norm())) < 1.15
        assert max(e.matvecs for e in found) <= matvecs


class TestOtherMatrices:
    """Those for which a rule made for the first three might fail."""

    def _check(self, matrix, symmetric):
        operator = Dense(matrix, symmetric)
        for method in ("auto", "hutchinson"):
            found = [estimate.trace(operator, matvecs=32, seed=seed, method=method) for seed in range(SEEDS)]
            assert calibrated(holding(found, float(matrix.trace()))), method
        found = [estimate.frobenius_norm(operator, matvecs=32, seed=seed) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(matrix.norm())))

    def test_not_symmetric(self):
        self._check(normal(1)(SIZE, SIZE) + 0.5 * torch.eye(SIZE).double(), False)

    def test_near_its_diagonal(self):
        """Random signs see only what is off the diagonal; their error bar must know."""
        noise = normal(2)(SIZE, SIZE)
        self._check(torch.linspace(1, 9, SIZE).double().diag() + 0.01 * (noise + noise.T), True)

    def test_one_eigenvalue(self):
        """z^T B z is χ²: the most skew that a quadratic form can be, at the least budget."""
        operator = Dense(rotated(torch.tensor([1.0] + [1e-3] * (SIZE - 1), dtype=torch.float64)))
        found = [estimate.trace(operator, matvecs=16, seed=seed, method="hutchinson") for seed in range(SEEDS)]
        assert calibrated(holding(found, 1 + 1e-3 * (SIZE - 1)))

    @pytest.mark.slow
    def test_above_a_floor(self):
        """What a small sketch leaves of the one large eigenvalue is a single direction, which few probes meet."""
        held = []
        for size, matvecs in ((60, 16), (60, 24), (100, 16)):
            operator = Dense(rotated(torch.tensor([30.0] + [1.0] * (size - 1), dtype=torch.float64)))
            found = [estimate.trace(operator, matvecs=matvecs, seed=seed, method="xtrace") for seed in range(4 * SEEDS)]
            held += holding(found, size + 29.0)
        assert calibrated(held)

    def test_larger(self):
        eigenvalues = SPECTRA["decaying"](400)
        operator = Dense(rotated(eigenvalues))
        found = [estimate.trace(operator, matvecs=48, seed=seed) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(eigenvalues.sum())))

    def test_single_precision(self):
        operator = Dense(rotated(SPECTRA["decaying"](SIZE)).float())
        found = [estimate.trace(operator, matvecs=32, seed=seed) for seed in range(SEEDS)]
        assert calibrated(holding(found, float(SPECTRA["decaying"](SIZE).sum())))


@pytest.mark.parametrize("method", ["hutchinson", "deflated"])
def test_diagonal(known, method):
    """All entries together, over fewer seeds."""
    operator, eigenvalues = known
    truth = rotated(eigenvalues).diagonal()
    held = []
    for seed in range(30):
        low, high = estimate.diagonal(operator, matvecs=48, seed=seed, method=method).interval()
        held.append(((low <= truth) & (truth <= high)).double().mean())
    assert calibrated(held)


class TestDensity:
    @pytest.mark.parametrize("spectrum", SPECTRA)
    def test_distance_to_the_true_density(self, spectrum):
        eigenvalues = SPECTRA[spectrum](800)
        operator = Dense(rotated(eigenvalues))
        spread = float(eigenvalues.max() - eigenvalues.min())
        for seed in range(4):
            density = estimate.density(operator, seed=seed)
            assert density.matvecs <= 512 < operator.shape[0]
            assert density.method == "slq"
            assert density.wasserstein(eigenvalues) < 0.01 * spread

    def test_band_of_the_cumulative_function(self):
        """Pointwise, over probes and beyond the true quadrature error: never below its level."""
        eigenvalues = SPECTRA["flat"](400)
        operator = Dense(rotated(eigenvalues))
        x = torch.linspace(0.45, 1.55, 23, dtype=torch.float64)
        truth = (eigenvalues[:, None] <= x).double().mean(0)
        held = []
        for seed in range(40):
            band = estimate.density(operator, matvecs=120, steps=20, seed=seed).cdf(x)
            held.append((band.low <= truth) & (truth <= band.high))
        assert float(torch.stack(held).double().mean()) >= 0.92
