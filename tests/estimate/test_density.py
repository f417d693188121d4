import math

import pytest
import torch

from curvoscope.errors import MemoryLimitError, NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import Density, density
from curvoscope.operators.compositions import Product
from matrices import SPECTRA, Dense, flat, outliers, rotated, within
from reference import normal


class TestQuadrature:
    def test_moments_below_twice_the_steps(self):
        """Gauss: each probe's moments are z^T B^j z / n up to j = 2m - 1, so their mean is Hutchinson's."""
        matrix = rotated(outliers(300))
        found = density(Dense(matrix), matvecs=40, steps=5)
        assert found.nodes.shape == found.weights.shape == (8, 5)
        assert torch.allclose(found.weights.sum(1), torch.ones(8).double(), atol=1e-13)
        for order, moment in enumerate(found.moments(2), 1):
            truth = float(torch.linalg.matrix_power(matrix, order).trace()) / 300
            assert abs(moment.value - truth) < 4 * moment.stderr
            assert moment.degrees == 7

    def test_against_the_probes_themselves(self):
        matrix = rotated(flat(60))
        found = density(Dense(matrix), matvecs=120, steps=60)  # a full Krylov space: the measure of each probe
        values = torch.linalg.eigvalsh(matrix)
        for p in range(found.probes):
            total = torch.stack([found.weights[p][(found.nodes[p] - v).abs() < 1e-6].sum() for v in values])
            assert abs(float(total.sum()) - 1) < 1e-8
            assert torch.all(total >= 0)

    def test_no_ghosts(self):
        """Each outlier is one node, with the weight of one eigenvector, also long after it has converged."""
        eigenvalues = outliers(200)
        found = density(Dense(rotated(eigenvalues)), matvecs=200, steps=100)
        for outlier in (-8.0, 6.0, 10.0, 20.0):
            near = (found.nodes - outlier).abs() < 0.5
            assert torch.equal(near.sum(1), torch.ones(2, dtype=torch.int64))
            assert float((found.nodes[near] - outlier).abs().max()) < 1e-10
            assert float(found.residuals[near].max()) == 0

    def test_zero_and_tiny_matrices(self):
        for size in (1, 2, 3):
            assert float(density(Dense(torch.full((size, size), 2.0).double())).support[1]) == pytest.approx(2 * size)
        zero = density(Dense(torch.zeros(40, 40).double()), matvecs=20, steps=5)
        assert zero.support == (0, 0) and zero.spread == 0 and zero.error() == 0
        assert zero.wasserstein(torch.zeros(40)) == 0
        assert zero.matvecs == 4  # four probes, which end at the first step
        spectrum = zero.log_spectrum()
        assert spectrum.zero.value == 1 and spectrum.unresolved.value == 0
        band = zero.cdf(torch.tensor([-1.0, 0.0, 1.0]))
        assert band.value.tolist() == [0, 1, 1]

    def test_low_rank(self):
        u = normal(0)(300, 2)
        found = density(Dense(u @ u.T), matvecs=160, steps=20)
        assert found.matvecs <= 4 * 8  # the Krylov space has three dimensions
        spectrum = found.log_spectrum()
        assert abs(spectrum.zero.value - 298 / 300) < 4 * spectrum.zero.stderr + 1e-6
        assert not spectrum.negative.weights.any()
        truth = torch.linalg.eigvalsh(u.T @ u).log10()
        assert abs(spectrum.positive.support[0] - float(truth[0])) < 1e-9
        assert abs(spectrum.positive.support[1] - float(truth[1])) < 1e-9


class TestExactness:
    @pytest.mark.parametrize("matvecs", [90, 200])
    def test_when_the_budget_reaches_the_size(self, matvecs):
        eigenvalues = outliers(90)
        found = density(Dense(rotated(eigenvalues)), matvecs=matvecs)
        assert (found.method, found.matvecs, found.probes) == ("exact", 90, 1)
        assert found.wasserstein(eigenvalues) < 1e-12
        band = found.cdf(torch.tensor([-5.0, 0.5, 30.0]))
        assert torch.equal(band.low, band.value) and torch.equal(band.high, band.value)
        assert band.value[0] == pytest.approx(1 / 90) and band.value[2] == pytest.approx(1)
        assert found.moment(1).value == pytest.approx(float(eigenvalues.mean()))
        assert found.moment(1).stderr == 0

    def test_of_known_eigenvalues(self):
        values = torch.tensor([3.0, -1.0, 0.0, 1e-18, 100.0])
        spectrum = Density.exact(values).log_spectrum()
        assert spectrum.zero.value == pytest.approx(0.4)
        assert spectrum.negative.support == (0, 0)
        assert spectrum.positive.support == pytest.approx((math.log10(3), 2))
        assert spectrum.unresolved.value == 0 and spectrum.reach == 0


class TestFunctions:
    @pytest.fixture
    def found(self):
        return density(Dense(rotated(outliers(600))), matvecs=320, steps=40, seed=1)

    def test_cumulative_function(self, found):
        x = torch.linspace(-10, 25, 71)
        band = found.cdf(x)
        assert torch.all(band.value.diff() >= -1e-15)
        assert float(band.value[0]) == 0 and float(band.value[-1]) == pytest.approx(1)
        assert torch.all((band.low <= band.value) & (band.value <= band.high))
        assert torch.all((band.low >= 0) & (band.high <= 1 + 1e-12))
        wide, narrow = found.cdf(x, 0.99), found.cdf(x, 0.5)
        assert float((wide.high - wide.low).sum()) > float((narrow.high - narrow.low).sum())
        assert found.cdf(x.reshape(71, 1)).value.shape == (71, 1)

    def test_smooth_density(self, found):
        x = torch.linspace(-15, 30, 4501).double()
        band = found.smooth(x)
        assert float(torch.trapezoid(band.value, x)) == pytest.approx(1, abs=1e-6)
        assert torch.all((band.low <= band.value) & (band.value <= band.high))
        narrow = found.smooth(x, width=0.05)
        assert float(narrow.value.max()) > float(band.value.max())
        peak = x[(x - 20).abs() < 1][narrow.value[(x - 20).abs() < 1].argmax()]
        assert abs(float(peak) - 20) < 0.02

    def test_wasserstein_by_hand(self):
        here = Density.exact(torch.tensor([0.0, 1.0]))
        assert here.wasserstein(torch.tensor([0.0, 1.0])) == 0
        assert here.wasserstein(torch.tensor([1.0, 2.0])) == pytest.approx(1)
        assert here.wasserstein(torch.tensor([0.5])) == pytest.approx(0.5)

    def test_error_falls_with_probes(self):
        operator = Dense(rotated(flat(600)))
        few, many = (density(operator, matvecs=20 * probes, steps=20).error() for probes in (16, 96))
        assert 1.8 < few / many < 3.2

    def test_bad_arguments(self, found):
        for bad in (0.0, 1.0):
            with pytest.raises(RangeError, match="level"):
                found.cdf(torch.zeros(1), bad)
        for bad in (0.0, -1.0):
            with pytest.raises(RangeError, match="width"):
                found.smooth(torch.zeros(1), bad)
        with pytest.raises(RangeError, match="count"):
            found.moments(0)
        with pytest.raises(RangeError, match="order"):
            density(Dense(rotated(outliers(300))), matvecs=40, steps=5).moment(10)
        with pytest.raises(NonFiniteError, match="x"):
            found.cdf(torch.tensor([math.nan]))
        with pytest.raises(NonFiniteError, match="eigenvalues"):
            found.wasserstein(torch.tensor([math.inf]))


class TestLogSpectrum:
    def test_parts_add_to_one(self):
        for spectrum in SPECTRA.values():
            parts = density(Dense(rotated(spectrum(600)))).log_spectrum()
            sides = sum(float(side.weights.sum(1).mean()) for side in (parts.positive, parts.negative))
            assert sides + parts.zero.value + parts.unresolved.value == pytest.approx(1)

    def test_many_decades(self):
        """What is claimed to be known is right; what cannot be known is called so, and lies where it is said to."""
        n = 800
        eigenvalues = torch.cat(
            [
                10.0 ** torch.linspace(-6, 0, n // 2).double(),
                -(10.0 ** torch.linspace(-4, -1, n // 4).double()),
                torch.zeros(n // 4).double(),
            ]
        )
        found = density(Dense(rotated(eigenvalues)), matvecs=700, steps=70).log_spectrum()
        assert 0 < found.reach < 0.05
        assert found.zero.value == 0  # zeros among so many small eigenvalues cannot be told
        inside = float((eigenvalues.abs() <= found.reach).double().mean())
        assert found.unresolved.value <= inside + 4 * found.unresolved.stderr
        for side, values in ((found.positive, eigenvalues), (found.negative, -eigenvalues)):
            above = torch.linspace(math.log10(found.reach), 0, 12)
            truth = (values[:, None] > 10**above).double().mean(0)
            mass = float(side.weights.sum(1).mean()) - side.cdf(above).value
            assert float((mass - truth).abs().max()) < 0.02

    def test_smooth(self):
        side = Density.exact(10.0 ** torch.linspace(-9, 0, 500).double()).log_spectrum().positive
        x = torch.linspace(-8, -1, 50)
        assert torch.allclose(side.smooth(x, 0.3).value, torch.full((50,), 1 / 9).double(), rtol=0.05)


class TestBudget:
    def test_tolerance(self):
        operator = Dense(rotated(flat(1000)))
        loose, tight = (density(operator, tolerance=tolerance) for tolerance in (0.02, 0.004))
        assert loose.error() <= 0.02 and tight.error() <= 0.004
        assert loose.matvecs < tight.matvecs == tight.nodes.numel()

    @pytest.mark.parametrize("matvecs", [2, 3, 7, 30, 100, 255])
    def test_is_kept(self, matvecs):
        operator = Dense(rotated(flat(300)))
        found = density(operator, matvecs=matvecs)
        assert found.matvecs == operator.products <= matvecs
        assert found.probes >= 2

    def test_memory(self):
        operator = Dense(rotated(flat(300)))
        whole, little = (within(m, density, operator, matvecs=80, steps=10) for m in (None, 8 * 300 * 14))
        assert whole.probes == little.probes == 8
        assert abs(whole.moment(1).value - little.moment(1).value) < 4 * (whole.moment(1).stderr)
        with pytest.raises(MemoryLimitError, match=r"10 Lanczos vectors of length 300.*fewer steps"):
            within(8 * 300 * 13, density, operator, matvecs=80, steps=10)

    def test_bad_input(self):
        operator = Dense(rotated(flat(40)))
        with pytest.raises(RangeError, match="matvecs: got 1"):
            density(operator, matvecs=1)
        with pytest.raises(RangeError, match="matvecs: got 15"):
            density(operator, matvecs=15, steps=10)
        for bad in (0, 41):
            with pytest.raises(RangeError, match="steps"):
                density(operator, steps=bad)
        with pytest.raises(RangeError, match="tolerance"):
            density(operator, tolerance=2.0)
        with pytest.raises(RangeError, match="tolerance: got both"):
            density(operator, matvecs=100, tolerance=0.1)
        with pytest.raises(ShapeError, match="operator: a spectral density needs a symmetric operator"):
            density(Dense(normal(0)(9, 9), False))
        with pytest.raises(NonFiniteError, match="operator"):
            density(Dense(torch.full((600, 600), math.nan).double()))


def test_seeds():
    operator = Dense(rotated(flat(100)))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = density(operator, matvecs=40, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(density(operator, matvecs=40, seed=7).weights, first.weights)
    assert not torch.equal(density(operator, matvecs=40, seed=8).weights, first.weights)


@pytest.mark.parametrize("memory", [None, 4 * 600 * 44])
def test_single_precision(memory):
    """Also with the Lanczos vectors in single precision, when double does not fit."""
    eigenvalues = outliers(600)
    found = within(memory, density, Dense(rotated(eigenvalues).float()), matvecs=320, steps=40)
    assert found.nodes.dtype == torch.float64
    assert found.wasserstein(eigenvalues) < 0.005 * 28
    assert torch.equal(((found.nodes - 20).abs() < 0.5).sum(1), torch.ones(8, dtype=torch.int64))


def test_operators_have_it():
    matrix = rotated(outliers(64))
    operator = Product((lambda v: matrix @ v,) * 2, (8, 8), (8, 8), matrix, symmetric=True)
    assert operator.density().method == "exact"
    assert operator.density(matvecs=40, seed=2).matvecs <= 40
