import math

import numpy as np
import pytest

from curvoscope.papers.experiments import MeasuredValue, Row
from curvoscope.papers.experiments.fits import Growth, slope, verdicts


def rows(exponent, depth=1, noise=0.0, block="Q", part="outer", seeds=4):
    draws = np.random.default_rng(0)
    return [
        Row(
            {"sigma": float(sigma), "depth": depth},
            seed,
            MeasuredValue(layer, block, part, float(3 * sigma**exponent * math.exp(noise * draws.normal()))),
        )
        for sigma in 10 ** np.linspace(-2, 1, 20)
        for seed in range(seeds)
        for layer in range(1, depth + 1)
    ]


def test_slope_of_a_power_is_exact():
    sigma = [0.01, 0.1, 0.5]
    fitted, low, high = slope(sigma, [[2 * s**6, 5 * s**6] for s in sigma])
    assert fitted == pytest.approx(6, abs=1e-12) and low == pytest.approx(6, abs=1e-9) == high


def test_the_interval_covers_the_truth_nineteen_times_in_twenty():
    draws = np.random.default_rng(1)
    sigma = 10 ** np.linspace(-2, 0, 10)
    inside = 0
    for _ in range(400):
        fitted, low, high = slope(
            sigma.tolist(), [np.exp(5 * np.log(s) + draws.normal(size=3)).tolist() for s in sigma]
        )
        assert low < fitted < high
        inside += low < 5 < high
    assert 0.91 < inside / 400 < 0.985


def test_two_points_have_no_interval():
    assert slope([0.1, 1.0], [[1.0], [10.0]])[1:] == (-math.inf, math.inf)


def test_verdicts_by_depth_and_layer():
    measured = rows(6.0, depth=1) + rows(6.05, depth=2)
    found = verdicts(measured, [Growth("Q", "outer", 6)])
    assert [(v.depth, v.layer, v.agrees) for v in found] == [(1, 1, True), (2, 1, True), (2, 2, True)]
    assert [(v.depth, v.layer) for v in verdicts(measured, [Growth("Q", "outer", 6, layers="lower")])] == [(2, 1)]
    assert verdicts(rows(6.2), [Growth("Q", "outer", 6)])[0].agrees is False
    assert verdicts(measured, [Growth("V", "outer", 2)]) == []


def test_only_small_sigma_counts():
    bent = [
        Row(row.point, row.seed, MeasuredValue(1, "Q", "outer", 1.0)) if row.point["sigma"] > 0.3 else row
        for row in rows(6.0)
    ]
    assert verdicts(bent, [Growth("Q", "outer", 6)])[0].agrees
    assert not verdicts(bent, [Growth("Q", "outer", 6, largest=10.0)])[0].agrees


def test_zero_means_exactly_zero():
    zero = [Row({"sigma": s}, 0, MeasuredValue(1, "V", "functional", 0.0)) for s in (0.1, 0.2, 0.3)]
    almost = [*zero, Row({"sigma": 0.15}, 0, MeasuredValue(1, "V", "functional", 1e-300))]
    assert verdicts(zero, [Growth("V", "functional", zero=True)])[0].agrees is True
    assert verdicts(almost, [Growth("V", "functional", zero=True)])[0].agrees is False
    assert verdicts(zero, [Growth("V", "functional", 3)])[0].agrees is None  # no slope


def test_a_slope_without_a_prediction():
    found = verdicts(rows(-1.5), [Growth("Q", "outer")])[0]
    assert found.agrees is None and found.fitted == pytest.approx(-1.5) and found.predicted is None
