import math

import pytest
import torch

from curvoscope import estimate
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate.diagonals import METHODS
from matrices import SPECTRA, Dense, decaying, flat, rotated
from reference import normal


class TestExactness:
    @pytest.mark.parametrize("method", METHODS)
    def test_with_as_many_products_as_columns(self, method):
        matrix = rotated(flat(30))
        e = estimate.diagonal(Dense(matrix), matvecs=30, method=method)
        assert (e.matvecs, e.method) == (30, "exact")
        assert torch.allclose(e.value, matrix.diagonal(), atol=1e-14)
        assert not e.stderr.any()

    def test_diagonal_matrix(self):
        matrix = flat(40).diag()
        e = estimate.diagonal(Dense(matrix), matvecs=16, method="hutchinson")
        assert torch.allclose(e.value, matrix.diagonal(), atol=1e-14)
        assert float(e.stderr.max()) < 1e-14

    @pytest.mark.parametrize("rank", [0, 1, 4])
    def test_low_rank(self, rank):
        half = normal(rank)(120, rank)
        e = estimate.diagonal(Dense(half @ half.T), matvecs=30)
        assert e.matvecs <= 30
        assert torch.allclose(e.value, half.square().sum(1), atol=1e-12)
        assert float(e.stderr.max()) < 1e-12

    def test_one_by_one(self):
        e = estimate.diagonal(Dense(torch.full((1, 1), -2.0).double()))
        assert (float(e.value), float(e.stderr), e.matvecs) == (-2, 0, 1)


class TestSampling:
    def test_variance_of_each_entry(self):
        """sum_{j≠i} B_ij² over the number of probes."""
        matrix = rotated(flat(100))
        e = estimate.diagonal(Dense(matrix), matvecs=96, method="hutchinson")
        truth = ((matrix.square().sum(1) - matrix.diagonal().square()) / 96).sqrt()
        assert torch.allclose(e.stderr, truth, rtol=0.4)
        assert abs(float((e.stderr / truth).mean()) - 1) < 0.05

    def test_deflation_pays(self):
        matrix = rotated(decaying(200))
        errors = {
            method: float(
                (estimate.diagonal(Dense(matrix), matvecs=60, method=method).value - matrix.diagonal()).norm()
            )
            for method in METHODS
        }
        assert errors["auto"] == errors["deflated"] < 0.5 * errors["hutchinson"]
        assert estimate.diagonal(Dense(rotated(flat(200))), matvecs=60).method == "hutchinson"

    def test_not_symmetric(self):
        matrix = normal(1)(90, 90)
        e = estimate.diagonal(Dense(matrix, False), matvecs=80)
        assert e.method == "hutchinson"
        assert float(((e.value - matrix.diagonal()) / e.stderr).abs().max()) < 5

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("matvecs", [6, 7, 25, 50])
    def test_any_budget(self, method, matvecs):
        operator = Dense(rotated(decaying(60)))
        e = estimate.diagonal(operator, matvecs=matvecs, method=method)
        assert e.matvecs == operator.products == matvecs
        assert bool(e.stderr.isfinite().all())

    def test_single_precision(self):
        matrix = rotated(decaying(60)).float()
        e = estimate.diagonal(Dense(matrix), matvecs=48)
        assert e.value.dtype == e.stderr.dtype == torch.float32
        assert float(((e.value - matrix.diagonal()) / e.stderr).abs().max()) < 6


class TestTolerance:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("spectrum", SPECTRA)
    def test_stops_early(self, spectrum, method):
        operator = Dense(rotated(SPECTRA[spectrum](300)))
        e = estimate.diagonal(operator, tolerance=0.2, method=method)
        assert float(e.stderr.norm() / e.value.norm()) <= 0.2
        assert e.matvecs == operator.products

    def test_stops_at_once(self):
        assert estimate.diagonal(Dense(rotated(flat(300))), tolerance=0.2).matvecs <= 32

    def test_exact_where_that_is_cheaper(self):
        matrix = rotated(SPECTRA["indefinite with outliers"](80))
        e = estimate.diagonal(Dense(matrix), tolerance=1e-3)
        assert e.method == "exact"
        assert torch.allclose(e.value, matrix.diagonal(), atol=1e-13)

    def test_zero_diagonal(self):
        matrix = normal(2)(40, 40)
        matrix = matrix - matrix.diagonal().diag()
        assert estimate.diagonal(Dense(matrix, False), tolerance=0.1).method == "exact"


def test_seeds():
    operator = Dense(rotated(decaying(80)))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = estimate.diagonal(operator, matvecs=32, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(estimate.diagonal(operator, matvecs=32, seed=7).value, first.value)
    assert not torch.equal(estimate.diagonal(operator, matvecs=32, seed=8).value, first.value)


def test_bad_input():
    operator = Dense(rotated(flat(40)))
    with pytest.raises(RangeError, match="matvecs"):
        estimate.diagonal(operator, matvecs=1)
    with pytest.raises(RangeError, match="matvecs: got 5"):
        estimate.diagonal(operator, matvecs=5, method="deflated")
    with pytest.raises(RangeError, match="tolerance"):
        estimate.diagonal(operator, tolerance=1.5)
    with pytest.raises(RangeError, match="tolerance: got both"):
        estimate.diagonal(operator, matvecs=8, tolerance=0.1)
    with pytest.raises(RangeError, match="method: got 'xdiag'"):
        estimate.diagonal(operator, method="xdiag")
    with pytest.raises(ShapeError, match="method"):
        estimate.diagonal(Dense(normal(0)(9, 9), False), method="deflated")
    with pytest.raises(ShapeError, match="operator"):
        estimate.diagonal(Dense(normal(0)(9, 8), False))
    with pytest.raises(NonFiniteError, match="operator"):
        estimate.diagonal(Dense(torch.full((70, 70), math.nan).double()))
