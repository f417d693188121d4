import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import grad, jacfwd

from autodiff_cases import MLP, points
from curvoscope.analysis.fitting import log_slope
from curvoscope.analysis.power_law import power_law
from curvoscope.analysis.scaling import QUANTITIES, required_data, scaling, summary
from curvoscope.curvature import blocks_of, hessian
from curvoscope.errors import CurvoscopeError, EmptyError, NonFiniteError, RangeError, ShapeError
from surface_cases import flat_loss


def ladder(size, seed):
    """Linear regression of `size` weights whose Hessian is diag(1, 2, ..., size)."""
    diagonal = torch.arange(1, size + 1, dtype=torch.float64)
    X = (diagonal * size / 2).sqrt().diag()  # H = 2/n X^T X
    return nn.Linear(size, 1, bias=False, dtype=torch.float64), nn.functional.mse_loss, [(X, X.sum(1, keepdim=True))]


# ---- lines and laws


def test_a_slope_and_its_interval_against_scipy():
    rng = np.random.default_rng(0)
    x = np.geomspace(1, 100, 9)
    y = 3 * x**-1.5 * np.exp(0.1 * rng.standard_normal(9))
    found = log_slope(torch.tensor(x), torch.tensor(y))
    expected = stats.linregress(np.log(x), np.log(y))
    reach = stats.t.ppf(0.975, 7) * expected.stderr
    assert found.value == pytest.approx(expected.slope)
    assert (found.low, found.high) == pytest.approx((expected.slope - reach, expected.slope + reach))
    assert (found.start, found.stop, found.points) == pytest.approx((1, 100, 9))


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [([1.0, 2], [1.0, 2], EmptyError), ([1.0, 2, 3], [1.0, 2], ShapeError), ([1.0, 2, 3], [1.0, -2, 3], RangeError)],
)
def test_points_without_a_slope(x, y, error):
    with pytest.raises(error):
        log_slope(torch.tensor(x), torch.tensor(y))
    with pytest.raises(RangeError, match="x: has values that are not positive"):
        log_slope(torch.tensor([0.0, 1, 2]), torch.ones(3))
    with pytest.raises(RangeError, match="same place"):
        log_slope(torch.ones(3), torch.ones(3))


def test_an_exact_power_law_is_found_exactly():
    law = power_law({size: [0.3 * size**1.7] for size in (2, 5, 11, 40)})
    assert law.exponent == pytest.approx(1.7, rel=1e-12) and law.prefactor == pytest.approx(0.3, rel=1e-10)
    assert law.interval == pytest.approx((1.7, 1.7), rel=1e-9)
    assert law.misfit is None
    inside = law(20.0)
    assert inside.value == pytest.approx(0.3 * 20**1.7) and not inside.extrapolated and inside.factor == 1
    outside = law(100.0)
    assert outside.extrapolated and outside.factor == pytest.approx(2.5)


@pytest.mark.parametrize(("replicas", "least"), [(4, 0.8), (1, 0.7)])
def test_the_interval_of_the_exponent_covers_the_truth(replicas, least):
    covered, trials = 0, 120
    rng = np.random.default_rng(replicas)
    sizes = [4, 8, 16, 32, 64, 128]
    for _ in range(trials):
        data = {n: (n**-0.5 * np.exp(0.2 * rng.standard_normal(replicas))).tolist() for n in sizes}
        low, high = power_law(data, resamples=200).interval
        covered += low <= -0.5 <= high
    assert least <= covered / trials <= 0.995


def test_a_law_that_is_none_says_so():
    rng = np.random.default_rng(0)
    noise = lambda: np.exp(0.02 * rng.standard_normal(3))  # noqa: E731
    bent = power_law({n: (math.exp(-n / 8) * noise()).tolist() for n in (2, 4, 8, 16)})
    straight = power_law({n: (n**-0.5 * noise()).tolist() for n in (2, 4, 8, 16)})
    assert bent.misfit < 1e-6 and straight.misfit > 0.01


def test_the_test_of_a_law_keeps_its_level_with_unequal_numbers_of_values():
    rng, rejected, trials = np.random.default_rng(0), 0, 300
    for _ in range(trials):
        data = {
            size: (size**-0.5 * np.exp(0.2 * rng.standard_normal(count))).tolist()
            for size, count in ((10, 2), (20, 40), (40, 2), (80, 2))
        }
        rejected += power_law(data, resamples=100).misfit < 0.05
    assert 0.005 < stats.binom.cdf(rejected, trials, 0.05) < 0.995


def test_required_data_says_when_it_extrapolates_and_refuses_to_go_far():
    rng = np.random.default_rng(1)
    data = {n: (2 * n**-0.5 * np.exp(0.05 * rng.standard_normal(5))).tolist() for n in (100, 200, 400, 800)}
    inside = required_data(data, 0.12)
    assert inside.value == pytest.approx((2 / 0.12) ** 2, rel=0.15)
    assert not inside.extrapolated and inside.factor == 1 and inside.low < (2 / 0.12) ** 2 < inside.high
    beyond = required_data(power_law(data), 0.04)
    assert beyond.extrapolated and beyond.factor == pytest.approx(beyond.value / 800)
    assert beyond.value == pytest.approx(2500, rel=0.3)
    with pytest.raises(RangeError, match=r"times beyond the measured 100 to 800.*most="):
        required_data(data, 0.01)
    allowed = required_data(data, 0.01, most=100.0)
    assert allowed.extrapolated and allowed.factor > 10
    with pytest.raises(RangeError, match="not known"):
        power_law(data)(1e6)
    with pytest.raises(RangeError, match="no trend"):
        required_data({n: (1 + 0.1 * rng.standard_normal(4)).tolist() for n in (1, 2, 4, 8)}, 0.5)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, EmptyError),
        ({1: [1.0], 2: [1.0]}, EmptyError),
        ({1: [1.0], 2: [], 3: [1.0]}, EmptyError),
        ({1: [1.0], 2: [-1.0], 3: [1.0]}, RangeError),
        ({0: [1.0], 2: [1.0], 3: [1.0]}, RangeError),
        ({1: [1.0], 2: [math.nan], 3: [1.0]}, NonFiniteError),
    ],
)
def test_measurements_without_a_law(data, error):
    with pytest.raises(error, match="measurements"):
        power_law(data)


def test_bad_questions_to_a_law():
    law = power_law({n: [1.0 * n] for n in (1, 2, 4)})
    for ask in (lambda: law(-1.0), lambda: law.required(0.0), lambda: law(2.0, most=0.5)):
        with pytest.raises(RangeError):
            ask()
    for change in ({"level": 1.0}, {"resamples": 3}):
        with pytest.raises(RangeError):
            power_law({n: [1.0 * n] for n in (1, 2, 4)}, **change)


# ---- summaries and families


def test_the_summary_against_the_dense_hessian():
    model, (x, y) = MLP(nn.Tanh), points(6)
    found = summary(hessian(model, nn.functional.mse_loss, [(x, y)], method="autodiff"))
    function, w = flat_loss(model, x, lambda out: (out - y).square().mean())
    H = jacfwd(grad(function))(w)
    outputs, _ = flat_loss(model, x, lambda out: out.flatten())
    J = jacfwd(outputs)(w)
    outer = J.T @ J * (2 / y.numel())
    values = torch.linalg.eigvalsh(H)
    assert found.largest_eigenvalue.value == pytest.approx(float(values[-1]), rel=1e-6)
    assert found.trace.value == pytest.approx(float(values.sum()), rel=1e-9)
    assert found.condition == pytest.approx(float(values.abs().max() / values.abs().min()), rel=1e-6)
    assert found.effective_rank.value == pytest.approx(float(values.square().sum() / values.abs().max() ** 2), rel=1e-6)
    o, f = float(outer.square().sum()), float((H - outer).square().sum())
    assert found.functional_share.value == pytest.approx(f / (o + f), rel=1e-8)


def test_a_family_with_known_spectra():
    sizes = [4, 8, 16, 32]
    study = scaling(ladder, sizes)
    assert [study.values("largest_eigenvalue")[n][0] for n in sizes] == pytest.approx(sizes, rel=1e-6)
    assert [study.values("trace")[n][0] for n in sizes] == pytest.approx([n * (n + 1) / 2 for n in sizes], rel=1e-9)
    assert [study.values("condition")[n][0] for n in sizes] == pytest.approx(sizes, rel=1e-6)
    ranks = [sum(i * i for i in range(1, n + 1)) / n**2 for n in sizes]
    assert [study.values("effective_rank")[n][0] for n in sizes] == pytest.approx(ranks, rel=1e-5)
    assert study.law("largest_eigenvalue").exponent == pytest.approx(1, abs=1e-5)
    assert study.law("trace").exponent == pytest.approx(2, abs=0.12)
    # a linear model has no functional part: a share of zero has no power law
    assert "functional_share" in study.without and set(study.laws) | set(study.without) == set(QUANTITIES)
    with pytest.raises(RangeError, match="no power law"):
        study.law("functional_share")
    assert required_data(study.law("largest_eigenvalue"), 20.0).value == pytest.approx(20, rel=1e-4)


def test_one_model_on_more_data():
    x, y = points(64)

    def build(rows, seed):
        return MLP(nn.Tanh), nn.functional.mse_loss, [(x[:rows], y[:rows])]

    study = scaling(build, [4, 16, 64], seeds=[0, 1], blocks=lambda model: blocks_of(model).select("up*"))
    assert all(len(group) == 2 for group in study.measurements.values())
    assert study.values("trace")[4][0] == pytest.approx(study.values("trace")[4][1])  # the model has one seed


def test_the_condition_of_a_singular_hessian_is_that_of_its_range():
    X = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    found = summary(hessian(model, nn.functional.mse_loss, [(X, X.sum(1, keepdim=True))], method="autodiff"))
    assert found.condition == pytest.approx(4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(([4, 8],), EmptyError), (([0, 4, 8],), RangeError), (([4, 8, 16], []), EmptyError)],
)
def test_families_that_are_refused(arguments, error):
    with pytest.raises(error) as caught:
        scaling(ladder, *arguments)
    assert isinstance(caught.value, CurvoscopeError)


def test_an_unknown_quantity_is_refused():
    with pytest.raises(RangeError, match="quantity"):
        scaling(ladder, [2, 3, 4]).values("sharpness")
