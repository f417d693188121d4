"""Spectra of blocks and their distances, against all eigenvalues and scipy's Jensen-Shannon distance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from autodiff_cases import GPT, cross_entropy, tokens, truth
from curvoscope import checks
from curvoscope.analysis.measurements import Effort, Extremes, extremes, headline_of, measurements, rounding_of
from curvoscope.analysis.spectra import BlockSpectrum, distances, spectra, whole_spectrum
from curvoscope.curvature import blocks_of, hessian
from curvoscope.errors import RangeError
from curvoscope.estimate import Density, Estimate, density

LENGTH, VOCABULARY = 5, 6


def given_spectrum(eigenvalues, name="B"):
    found = Density.exact(torch.as_tensor(eigenvalues, dtype=torch.float64))
    return BlockSpectrum(name, found.size, "exact", found, found.log_spectrum())


def matrix(eigenvalues, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64))
    return (Q * eigenvalues) @ Q.T


def estimated_spectrum(eigenvalues, name, matvecs=512):
    found = density(matrix(eigenvalues), matvecs=matvecs, steps=64)
    return BlockSpectrum(name, len(eigenvalues), "autodiff", found, found.log_spectrum())


@pytest.fixture(scope="module")
def network():
    """A small GPT-2, its Hessian over all blocks, and the dense truth."""
    model, (inputs, targets) = GPT().eval(), tokens()
    H = hessian(model, cross_entropy, [(inputs, targets)], method="autodiff")
    return H, truth(model, inputs, lambda F: cross_entropy(F, targets), blocks_of(model))


class TestDistances:
    def test_against_scipy_on_bins_made_by_hand(self):
        generator = np.random.default_rng(0)
        spectra_ = [
            np.concatenate([10.0 ** generator.uniform(low, 0, 60), -(10.0 ** generator.uniform(low, -1, 40))])
            for low in (-4, -2, -1)
        ]
        edges = 10.0 ** np.arange(-12, 0.5, 0.5)
        bins = np.concatenate([-edges[::-1], edges])
        histograms = [np.histogram(values, bins)[0] for values in spectra_]
        found = distances([given_spectrum(values, str(i)) for i, values in enumerate(spectra_)])
        for i in range(3):
            for j in range(3):
                expected = jensenshannon(histograms[i], histograms[j], base=2)
                assert abs(float(found.values[i, j]) - expected) < 1e-12

    def test_the_same_and_the_opposite(self):
        one, other = given_spectrum([1.0, 2.0]), given_spectrum([-1.0, -2.0])
        found = distances([one, one, other]).values
        assert float(found[0, 1]) == 0 and float(found[0, 2]) == 1
        assert float(distances([given_spectrum([0.0, 0.0]), one]).values[0, 1]) == 1

    def test_blocks_of_zeros(self):
        assert float(distances([given_spectrum([0.0, 0.0])] * 2).values.max()) == 0

    @given(st.integers(0, 100))
    def test_a_metric(self, seed):
        generator = np.random.default_rng(seed)
        found = distances([given_spectrum(generator.standard_normal(9) ** 3) for _ in range(3)]).values
        assert torch.equal(found, found.T) and float(found.diagonal().abs().max()) == 0
        assert float(found[0, 2]) <= float(found[0, 1] + found[1, 2]) + 1e-12

    def test_estimates_are_near_the_truth_and_never_claim_more(self):
        n = 600
        generator = torch.Generator().manual_seed(1)
        families = [
            torch.randn(n, generator=generator, dtype=torch.float64),
            torch.randn(n, generator=generator, dtype=torch.float64).square(),
            0.1 * torch.randn(n, generator=generator, dtype=torch.float64),
            10 ** torch.empty(n, dtype=torch.float64).uniform_(-6, 0, generator=generator),
        ]
        exact = distances([given_spectrum(values, str(i)) for i, values in enumerate(families)]).values
        found = distances([estimated_spectrum(values, str(i)) for i, values in enumerate(families)])
        # joined bins: the truth in the same bins
        for i, first in enumerate(families):
            for j, second in enumerate(families):
                edge = float(found.threshold[i, j])
                edges = edge * 10.0 ** np.arange(0, 12, 0.5)
                bins = np.concatenate([-edges[::-1], edges])
                here = jensenshannon(np.histogram(first, bins)[0], np.histogram(second, bins)[0], base=2)
                assert abs(float(found.values[i, j]) - here) < 0.05
                assert float(found.values[i, j]) <= float(exact[i, j]) + 0.05


class TestSpectra:
    def test_against_all_eigenvalues(self, network):
        H, dense = network
        start = 0
        for one in spectra(H, matvecs=64):
            size = H.shapes[one.block][0] * H.shapes[one.block][1]
            values = torch.linalg.eigvalsh(dense.total[start : start + size, start : start + size])
            start += size
            assert one.size == size and one.method == "autodiff"
            scale = float(values.abs().max())
            if scale < 1e-12:  # the key bias, which does nothing
                continue
            assert abs(one.largest.value - float(values[-1])) <= one.largest.stderr + 1e-9 * scale
            assert abs(one.smallest.value - float(values[0])) <= one.smallest.stderr + 1e-9 * scale
            if size <= 64:
                share = float((values < -1e-12 * scale).double().mean())
                assert abs(one.negative.value - share) < 1e-9
                assert abs(one.near_zero.value - float((values.abs() < 1e-12 * scale).double().mean())) < 1e-9
                for quantile in (0.25, 0.75):
                    expected = float(values[max(0, int(np.ceil(quantile * size - 1e-9)) - 1)])
                    assert abs(one.quantile(quantile) - expected) < 1e-9 * scale

    def test_what_is_not_resolved_has_no_quantile(self):
        values = 10 ** torch.linspace(-9, 0, 600, dtype=torch.float64)
        one = estimated_spectrum(values, "B", matvecs=256)
        below = float((values <= one.log.reach).double().mean())
        assert 0.3 < below < 0.8 and abs(one.near_zero.value - below) < 0.1
        assert one.quantile(0.1) is None and abs(float((values <= one.quantile(0.9)).double().mean()) - 0.9) < 0.05

    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_ends_of_few_eigenvalues(self, sign):
        """The Krylov space ends after three steps; zero is no eigenvalue."""
        values = sign * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).repeat_interleave(50)
        one = estimated_spectrum(values, "B", matvecs=256)
        assert one.density.method == "slq"
        assert one.smallest.value == pytest.approx(float(values.min()))
        assert one.largest.value == pytest.approx(float(values.max()))

    def test_the_whole(self, network):
        H, dense = network
        values = torch.linalg.eigvalsh(dense.total)
        one = whole_spectrum(H, matvecs=256)
        assert one.block == "whole Hessian" and one.size == len(values)
        assert one.density.wasserstein(values) < 0.02 * float(values[-1] - values[0])

    def test_the_whole_where_memory_is_short(self, network, monkeypatch):
        H, _ = network
        H @ torch.zeros(H.shape[0], dtype=H.total.dtype)  # its graphs are kept, and need no memory any more
        monkeypatch.setattr(checks, "memory_budget", lambda: 8 * H.shape[0] * 25)
        one = whole_spectrum(H, matvecs=64)
        assert one is not None and one.density.nodes.shape[1] <= 20
        monkeypatch.setattr(checks, "memory_budget", lambda: 8 * H.shape[0] * 10)
        assert whole_spectrum(H, matvecs=64) is None


class TestMeasurements:
    def test_norms_are_within_their_tolerance(self, network):
        H, dense = network
        rows = list(measurements(H, Effort(tolerance=0.03), seed=1))
        assert [(row.block, row.part) for row in rows[:3]] == [
            (H.names[0], part) for part in ("outer", "functional", "total")
        ]
        ranges = H.total.ranges
        for row in rows:
            block = getattr(dense, row.part)[ranges[row.block], ranges[row.block]]
            norm = row.frobenius_norm
            assert norm.stderr <= 0.03 * norm.value + 1e-12
            assert abs(norm.value - float(block.norm())) <= 6 * norm.stderr + 1e-9

    def test_the_ends(self, network):
        H, dense = network
        values, found = torch.linalg.eigvalsh(dense.total), extremes(H, Effort())
        assert abs(found.largest.value - float(values[-1])) <= found.largest.stderr + 1e-9
        assert abs(found.smallest.value - float(values[0])) <= found.smallest.stderr + 1e-9

    def test_the_critical_learning_rate(self):
        end = Extremes(3, Estimate(4.0, 0.1, 7, "lanczos"), Estimate(-1.0, 0.1, 7, "lanczos"))
        rate = end.critical_learning_rate
        assert rate.value == 0.5 and abs(rate.stderr - 2 * 0.1 / 16) < 1e-15
        assert Extremes(3, end.smallest, end.smallest).critical_learning_rate is None

    def test_the_headline_names_the_ends(self, network):
        H, _ = network
        rows = list(measurements(H, Effort(matvecs=4)))
        total = {row.block: row.frobenius_norm.value for row in rows if row.part == "total"}
        words = headline_of(rows, 0.0)
        assert words.startswith(max(total, key=total.get)) and min(total, key=total.get) in words
        assert headline_of(rows[:3], 0.0) == "Norms of the Hessian's blocks"
        rounding = rounding_of(rows, torch.float64)
        assert "attn.b_K" in words and "attn.b_K" not in headline_of(rows, rounding)  # it does nothing: rounding
        assert rounding == pytest.approx(2.0**-52 * max(row.frobenius_norm.value for row in rows))

    @pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1.0}, {"matvecs": 1}])
    def test_efforts_out_of_range(self, options):
        with pytest.raises(RangeError, match=f"{next(iter(options))}: got"):
            Effort(**options)
