import math

import pytest
import torch
from scipy import stats
from torch import nn

from curvoscope.analysis.plateau import gradient_plateau, plateau_from
from curvoscope.errors import EmptyError
from surface_cases import regression


def test_the_plateau_of_the_gradient():
    model, X, y, residuals = regression(rows=32)
    fitted = gradient_plateau(model, nn.functional.mse_loss, [(X[:20], y[:20]), (X[20:], y[20:])])
    assert fitted.full_norm < 1e-12 and fitted.is_stationary and fitted.squared_norm < 0
    gradients = 2 * residuals[:, None] * X
    assert fitted.trace == pytest.approx(float(gradients.var(0).sum()), rel=1e-9)
    assert fitted.noise_norm == pytest.approx(math.sqrt(fitted.trace / 32), rel=1e-9)
    with torch.no_grad():
        model.weight.add_(1.0)
    moved = gradient_plateau(model, nn.functional.mse_loss, [(X[:20], y[:20]), (X[20:], y[20:])])
    gradients = 2 * (X @ model.weight.T - y).detach() * X
    assert moved.full_norm == pytest.approx(float(gradients.mean(0).norm()), rel=1e-10)
    assert not moved.is_stationary and moved.squared_norm > 0
    k = moved.counts.double()
    expected = (gradients.mean(0).square().sum() + gradients.var(0).sum() * (1 / k - 1 / 32)).sqrt()
    torch.testing.assert_close(moved.law, expected)
    torch.testing.assert_close(moved.norms, expected, rtol=0.3, atol=0)
    assert moved.norms[-1] == pytest.approx(moved.full_norm, rel=1e-10)


@pytest.mark.parametrize("width", [1, 6])
def test_the_test_of_stationarity_keeps_its_level(width):
    """At the population's minimum, fresh samples reject in 5 % of the draws; in one dimension it is Student's test."""
    rejected, trials = 0, 400
    generator = torch.Generator().manual_seed(width)
    for _ in range(trials):
        gradients = torch.randn(24, width, generator=generator, dtype=torch.float64)
        gradients = gradients * torch.tensor([10.0, 3.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:width]
        found = plateau_from(gradients, torch.ones(24, dtype=torch.float64), 24)
        rejected += not found.is_stationary
    assert stats.binom.cdf(rejected, trials, 0.05) > 0.005 and stats.binom.sf(rejected - 1, trials, 0.05) > 0.005
    if width == 1:
        assert found.degrees == pytest.approx(1, abs=1e-9)
        assert found.p_value == pytest.approx(stats.ttest_1samp(gradients.numpy().ravel(), 0).pvalue, rel=1e-6)


def test_many_samples_are_put_into_groups():
    model, X, y, residuals = regression(rows=100)
    found = gradient_plateau(model, nn.functional.mse_loss, [(X[:50], y[:50]), (X[50:], y[50:])])
    assert len(found.counts) <= 34 and found.counts[-1] == 100
    trace = float((2 * residuals[:, None] * X).var(0).sum())
    assert found.trace == pytest.approx(trace, rel=0.4)
    with pytest.raises(EmptyError, match="at least 3"):
        gradient_plateau(model, nn.functional.mse_loss, [(X[:2], y[:2])])
