import math

import pytest
from torch import nn

from curvoscope.analysis.data_sufficiency import data_sufficiency
from curvoscope.errors import CurvoscopeError, NonFiniteError, RangeError
from surface_cases import regression


def test_the_number_of_samples_that_are_enough():
    model, X, y, residuals = regression(rows=200)
    found = data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 1e-3, batch=10)
    variance = float(residuals.square().var())
    assert found.variance == pytest.approx(variance, rel=1e-10)
    k = found.samples
    moves = lambda k: math.sqrt(variance * 10 / (k * (k + 10)))  # noqa: E731
    assert moves(k) <= 1e-3 < moves(k - 1)
    assert k == pytest.approx(math.sqrt(variance * 10) / 1e-3 - 5, abs=2)
    assert found.interval[0] < k < found.interval[1]
    assert found.settled == math.ceil(variance / 1e-6)
    assert found.settled_interval == tuple(math.ceil(end / 1e-6) for end in found.variance_interval)
    assert found.available == 200 and not found.is_enough
    # the interval of the bootstrap against the moments: se(s²) = sqrt((m4 - s⁴)/N)
    losses = residuals.square()
    m4 = float((losses - losses.mean()).pow(4).mean())
    se = math.sqrt((m4 - variance**2) / 200)
    assert found.variance_interval[1] - found.variance_interval[0] == pytest.approx(2 * 1.96 * se, rel=0.3)
    assert data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 10.0).samples == 1
    far = data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 1e-3, batch=10, distance=0.5, draws=16)
    assert far.samples > k


def test_a_distance_where_the_loss_is_not_finite_is_named():
    model, X, y, _ = regression()
    with pytest.raises(NonFiniteError, match=r"^distance: a loss is NaN or infinite"):
        data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 0.1, distance=1e200)


@pytest.mark.parametrize(
    "change", [{"tolerance": 0.0}, {"batch": 0}, {"distance": -1.0}, {"level": 1.0}, {"resamples": 1}, {"draws": 0}]
)
def test_questions_about_data_that_are_refused(change):
    model, X, y, _ = regression()
    with pytest.raises(RangeError) as caught:
        data_sufficiency(model, nn.functional.mse_loss, [(X, y)], **{"tolerance": 0.1, **change})
    assert isinstance(caught.value, CurvoscopeError) and next(iter(change)) in str(caught.value)
