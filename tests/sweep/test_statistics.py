"""Estimators from Gram matrices: unbiased, and with intervals that hold the truth, for samples of known covariance."""

import math

import pytest
import torch

from curvoscope.sweep import statistics

DRAWS = 400
SPECTRA = {
    "one eigenvalue": torch.tensor([1.0]),
    "two": torch.tensor([1.0, 0.5]),
    "geometric": 0.8 ** torch.arange(60.0),
    "power law": 1 / torch.arange(1.0, 300.0),
    "flat": torch.ones(500),
    "a spike": torch.cat([torch.tensor([5.0]), torch.full((400,), 0.1)]),
}


def grams(spectrum, chunks, seed):
    """Gram matrices (DRAWS, chunk, c, c) of normal samples with the covariance diag(spectrum)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for c in chunks:
        gamma = (
            torch.randn(DRAWS, c, len(spectrum), generator=generator, dtype=torch.float64) * spectrum.double().sqrt()
        )
        found.append(gamma @ gamma.mT)
    return [[K[i] for K in found] for i in range(DRAWS)]


def held(estimates, truth):
    """Share of 95 % intervals that hold the truth."""
    return sum(low <= truth <= high for low, high in (found.interval() for found in estimates)) / len(estimates)


def norms(found):
    for some in found:
        yield statistics.norm(statistics.squared_norms(some, some), sum(map(len, some)))


# the share of 400 intervals of 92 to 98 % lies within this of them in all but one of 10,000 cases
SLACK = 4 * math.sqrt(0.05 * 0.95 / DRAWS)


@pytest.mark.parametrize(("name", "chunks"), [*((name, (64,)) for name in SPECTRA), ("two", (64, 40))])
def test_intervals(name, chunks):
    spectrum = SPECTRA[name].double()
    found = grams(spectrum, chunks, 1)
    assert held([statistics.trace(some) for some in found], float(spectrum.sum())) >= 0.92 - SLACK
    assert held(list(norms(found)), float(spectrum.norm())) >= 0.92 - SLACK
    assert held([statistics.moment(some, 3) for some in found], float(spectrum.pow(3).sum())) >= 0.9 - SLACK
    assert held([statistics.largest_eigenvalue(some) for some in found], float(spectrum.max())) >= 0.9


@pytest.mark.parametrize("name", SPECTRA)
def test_unbiased(name):
    spectrum = SPECTRA[name].double()
    found = grams(spectrum, (12, 7), 2)
    expected = [float(spectrum.pow(k).sum()) for k in range(1, 5)]
    for order, truth in enumerate(expected, 1):
        values = torch.tensor([float(statistics.moment(some, order)) for some in found]).double()
        assert abs(float(values.mean()) - truth) <= 5 * float(values.std()) / DRAWS**0.5 + 1e-12 * truth
    squares = torch.stack([statistics.squared_norms(some, some)[0] for some in found])
    assert abs(float(squares.mean()) - expected[1]) <= 5 * float(squares.std()) / DRAWS**0.5
    variances = torch.stack([statistics.squared_norms(some, some)[1] for some in found])
    assert 0.6 <= float(variances.mean() / squares.var()) <= 1.8


@pytest.mark.parametrize("c", [16, 64])
def test_a_norm_of_zero_is_in_its_interval(c):
    """Two blocks whose gradients are independent."""
    torch.manual_seed(1)
    root = torch.arange(1.0, 31).double().rsqrt()
    first, second = (torch.randn(DRAWS, c, len(root)).double() * root for _ in range(2))
    first, second = first @ first.mT, second @ second.mT
    found = [statistics.norm(statistics.squared_norms([a], [b]), c) for a, b in zip(first, second, strict=True)]
    assert held(found, 0.0) >= 0.94 - SLACK


def test_the_largest_eigenvalue_if_few_batches_see_its_direction():
    """A quarter of the samples is not zero: squares have more than a normal variable's variance."""
    torch.manual_seed(1)
    gamma = torch.randn(DRAWS, 64, 1).double() * 2 * (torch.rand(DRAWS, 64, 1) < 0.25)
    found = [statistics.largest_eigenvalue([one @ one.T]) for one in gamma]
    assert held(found, 1.0) >= 0.93 - SLACK


def test_one_sample_alone_shows_no_norm():
    K = torch.zeros(8, 8).double()
    K[2, 2] = 4.0
    assert statistics.effective_rank([K]) == 1.0 and statistics.effective_rank([K]).stderr == 8.0


def test_moments_by_hand():
    torch.manual_seed(0)
    K = torch.randn(6, 6).double()
    K = K + K.T
    places = range(6)
    cubes = [K[i, j] * K[j, k] * K[k, i] for i in places for j in places for k in places if len({i, j, k}) == 3]
    fourths = [
        K[i, j] * K[j, k] * K[k, m] * K[m, i]
        for i in places
        for j in places
        for k in places
        for m in places
        if len({i, j, k, m}) == 4
    ]
    assert float(statistics.moment([K], 3)) == pytest.approx(float(torch.stack(cubes).mean()), rel=1e-12)
    assert float(statistics.moment([K], 4)) == pytest.approx(float(torch.stack(fourths).mean()), rel=1e-12)


def test_effective_rank_of_one_eigenvalue_is_one():
    (some, *_) = grams(torch.tensor([3.0]), (9,), 3)
    found = statistics.effective_rank(some)
    assert float(found) == pytest.approx(1.0, rel=1e-12)
    assert found.stderr < 1e-12
