import math

import numpy as np
import pytest
import torch
from torch import nn

from curvoscope.analysis.convergence import _bound, convergence
from curvoscope.analysis.samples import sample_losses
from curvoscope.analysis.surface import Surface
from curvoscope.curvature import MeanLoss
from curvoscope.errors import EmptyError, NonFiniteError, RangeError
from surface_cases import regression


@pytest.mark.parametrize("batch", [1, 4])
def test_the_averaging_identity_the_laws_and_the_null_line(batch):
    model, X, y, residuals = regression(rows=100)
    found = convergence(model, nn.functional.mse_loss, [(X[:45], y[:45]), (X[45:], y[45:])], batch, orders=800)
    losses = residuals.square()
    (curve,) = found.curves
    assert curve.identity_error < 1e-12
    assert found.samples == 100 and found.batch == batch and curve.distance == 0
    assert curve.variance == pytest.approx(float(losses.var()), rel=1e-10)
    k = curve.counts.double()
    torch.testing.assert_close(curve.law_rms, losses.std() * (batch / (k * (k + batch))).sqrt())
    absolute = (losses - losses.mean()).abs().mean() if batch == 1 else math.sqrt(2 / math.pi) * losses.std()
    torch.testing.assert_close(curve.law, absolute * (batch / (k * (k + batch))).sqrt())
    # exact over random orders: 800 of them leave an error of a few per cent
    torch.testing.assert_close(curve.rms, curve.law_rms, rtol=0.25, atol=0)
    assert float((curve.rms / curve.law_rms).mean()) == pytest.approx(1, abs=0.06)
    assert curve.ratio == pytest.approx(1, abs=0.1)
    # random numbers fall as fast
    assert curve.slope.value == pytest.approx(-1, abs=0.12)
    assert curve.null_slope.value == pytest.approx(curve.slope.value, abs=0.05)
    torch.testing.assert_close(curve.second_order_rms, curve.law_rms, rtol=1e-6, atol=0)
    assert curve.second_order_ratio == pytest.approx(1, rel=1e-6)
    B = float(losses.max())
    torch.testing.assert_close(curve.bound, B * batch / (k + batch))
    assert bool((curve.mean <= curve.bound).all())


def test_the_change_is_that_of_means_taken_plainly():
    model, X, y, residuals = regression(rows=8)
    found = convergence(model, nn.functional.mse_loss, [(X, y)], orders=3000)
    rng, losses = np.random.default_rng(0), residuals.square().numpy()
    for k, mean in zip(found.curves[0].counts.tolist(), found.curves[0].mean.tolist(), strict=True):
        plain = []
        for _ in range(3000):
            order = rng.permutation(losses)
            plain.append(abs(order[: k + 1].mean() - order[:k].mean()))
        assert mean == pytest.approx(np.mean(plain), rel=0.1)


def test_at_a_distance_the_second_order_law_holds_and_the_bound_needs_a_global_constant():
    model, X, y, _ = regression(rows=60)
    M = 2 * float(X.square().sum(1).max())  # the square loss of sample i has the Hessian 2 x x^T everywhere
    arguments = (model, nn.functional.mse_loss, [(X, y)], 2, [0.0, 0.2])
    found = convergence(*arguments, smoothness=M, draws=150, orders=4, probes=8)
    here, there = found.curves
    # the loss is quadratic in the weights: the law is exact but for the draws of ξ
    assert there.variance == pytest.approx(found.variance(0.2), rel=0.15)
    assert found.variance(0.0) == pytest.approx(here.variance, rel=1e-10)
    assert there.variance > 1.3 * here.variance
    k = there.counts.double()
    torch.testing.assert_close(there.second_order_rms, math.sqrt(found.variance(0.2)) * (2 / (k * (k + 2))).sqrt())
    assert there.bound is not None and bool((there.mean <= there.bound).all())
    assert convergence(*arguments, draws=1, orders=2).curves[1].bound is None
    assert found.plateau.is_stationary


def test_the_repaired_bound_is_attained():
    # ℓ = ½(w - a)², w* = 0, w = -a, every other loss zero: |L_{k+1} - L_k| = (2B + M|δ|²)/(k+1)
    class Point(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.w = nn.Parameter(torch.full((1,), w, dtype=torch.float64))

        def forward(self, x):
            return x * self.w

    a, rows = 1.7, 10
    x, y = torch.zeros(rows, 1, dtype=torch.float64), torch.zeros(rows, 1, dtype=torch.float64)
    x[-1], y[-1] = 1, a
    half = MeanLoss(lambda out, t: 0.5 * (out - t).square().mean())
    surface = Surface(Point(0.0), half, [(x, y)])
    move = torch.tensor([[-a]], dtype=torch.float64)
    here, there = (sample_losses(surface, m) for m in (0 * move, move))
    counts = torch.arange(1, rows)
    bound = _bound(here, move, counts, 1, 1.0)
    change = there.losses[0].mean() - there.losses[0, :-1].mean()
    assert float(change) == pytest.approx(float(bound[-1]), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"batch": 0}, RangeError),
        ({"batch": 30}, EmptyError),
        ({"distances": [-1.0]}, RangeError),
        ({"distances": []}, RangeError),
        ({"orders": 0}, RangeError),
        ({"draws": 0}, RangeError),
        ({"smoothness": -2.0}, RangeError),
        ({"distances": [1e200]}, NonFiniteError),
    ],
)
def test_studies_that_are_refused(change, error):
    model, X, y, _ = regression()
    with pytest.raises(error):
        convergence(model, nn.functional.mse_loss, [(X, y)], **change)


def test_losses_that_are_all_equal_are_refused():
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    X, y = torch.zeros(8, 2, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)
    with pytest.raises(RangeError, match="same loss"):
        convergence(model, nn.functional.mse_loss, [(X, y)])
