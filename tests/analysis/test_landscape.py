import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import grad, jacfwd

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens
from curvoscope.analysis.convergence import convergence
from curvoscope.analysis.data_sufficiency import data_sufficiency
from curvoscope.analysis.landscape import landscape
from curvoscope.analysis.plateau import gradient_plateau, plateau_from
from curvoscope.analysis.samples import sample_losses, variance_law
from curvoscope.analysis.surface import Surface
from curvoscope.curvature import CrossEntropy, MeanLoss, blocks_of
from curvoscope.errors import CurvoscopeError, EmptyError, LossError, NonFiniteError, RangeError, ShapeError
from surface_cases import flat_loss, state


def regression(rows=40, width=3, noise=0.5, seed=0):
    """Linear regression at its least-squares solution: model, data, design, residuals."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    y = X @ torch.ones(width, 1, dtype=torch.float64) + noise * torch.randn(
        rows, 1, generator=generator, dtype=torch.float64
    )
    model = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    solution = torch.linalg.lstsq(X, y).solution
    with torch.no_grad():
        model.weight.copy_(solution.T)
    return model, X, y, (X @ solution - y).flatten()


# ---- slices


def test_a_line_and_a_plane_against_single_evaluations():
    model, (x, y) = MLP(nn.Tanh), points(6)
    before = state(model)
    function, w = flat_loss(model, x, lambda out: (out - y).square().mean())
    g, H = grad(function)(w), jacfwd(grad(function))(w)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    line = landscape(model, nn.functional.mse_loss, batches, "top2", radius=0.5, points=7)
    u = line.directions[0].vector
    assert line.directions[0].eigenvalue.value == pytest.approx(float(torch.linalg.eigvalsh(H)[-2]), rel=1e-6)
    expected = torch.stack([function(w + a * u) for a in line.coordinates])
    torch.testing.assert_close(line.losses, expected, rtol=1e-12, atol=1e-13)
    plane = landscape(model, nn.functional.mse_loss, batches, ["gradient", "random"], radius=0.5, points=5)
    u, v = (one.vector for one in plane.directions)
    expected = torch.stack([function(w + a * u + b * v) for a in plane.coordinates for b in plane.coordinates])
    torch.testing.assert_close(plane.losses.flatten(), expected, rtol=1e-12, atol=1e-13)
    assert plane.losses[2, 2] == pytest.approx(plane.loss, rel=1e-12)
    moves = [a * u + b * v for a in plane.coordinates for b in plane.coordinates]
    quadratic = torch.stack([function(w) + g @ m + m @ H @ m / 2 for m in moves])
    torch.testing.assert_close(plane.quadratic.flatten(), quadratic, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_points_at_once_and_one_by_one_agree(monkeypatch):
    model, (inputs, targets) = GPT(), tokens()
    batches = [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]
    generator = torch.Generator().manual_seed(0)
    surface, single = (Surface(model.eval(), CrossEntropy(), batches) for _ in range(2))
    moves = 0.3 * torch.randn(9, surface.size, generator=generator, dtype=torch.float64)
    many = surface.losses(moves)
    assert surface._can_batch and surface._is_checked
    single._can_batch = False
    torch.testing.assert_close(many, single.losses(moves), rtol=1e-12, atol=0)
    function, w = flat_loss(model, inputs, lambda out: cross_entropy(out, targets))
    torch.testing.assert_close(many[3], function(w + moves[3]), rtol=1e-12, atol=0)
    torch.testing.assert_close(surface.gradient(moves[3]), grad(function)(w + moves[3]), rtol=1e-9, atol=1e-12)


def test_a_model_that_cannot_be_batched_is_evaluated_point_by_point():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x):
            return x * self.w * (2.0 if float(self.w.detach().sum()) > 2 else 1.0)

    x = torch.ones(2, 2, dtype=torch.float64)
    found = landscape(Branching(), nn.functional.mse_loss, [(x, 0 * x)], torch.ones(2).double(), radius=0.5, points=3)
    move = 0.5 / math.sqrt(2)
    assert found.losses.tolist() == pytest.approx([(1 - move) ** 2, 1, 4 * (1 + move) ** 2])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"points": 4}, RangeError),
        ({"points": 1}, RangeError),
        ({"radius": -1.0}, RangeError),
        ({"radius": 1e200}, NonFiniteError),
        ({"directions": []}, ShapeError),
        ({"directions": ["top", "bottom", "random"]}, ShapeError),
        ({"directions": ["top", "top"]}, RangeError),
        ({"directions": "left"}, RangeError),
        ({"directions": torch.ones(2)}, ShapeError),
    ],
)
def test_slices_that_are_refused(change, error):
    model, X, y, _ = regression()
    with pytest.raises(error):
        landscape(model, nn.functional.mse_loss, [(X, y)], **change)


# ---- losses of samples


def test_sample_losses_with_unequal_terms():
    model, (inputs, targets) = GPT(), tokens()
    surface = Surface(model.eval(), CrossEntropy(), [(inputs, targets)])
    found = sample_losses(surface, torch.zeros(1, surface.size, dtype=torch.float64))
    kept = [i for i in range(len(targets)) if bool((targets[i] != -100).any())]
    with torch.no_grad():
        expected = torch.stack([cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]) for i in kept])
        whole = cross_entropy(model(inputs), targets)
    torch.testing.assert_close(found.losses[0], expected)
    assert found.terms.tolist() == [int((targets[i] != -100).sum()) for i in kept]
    assert float(found.means) == pytest.approx(float(whole), rel=1e-12)
    assert float(found.deviations.mean()) == pytest.approx(0, abs=1e-14)


def test_rows_that_are_not_samples_are_refused():
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model, X, y, _ = regression()
    mixing = Mixing(3, 1, bias=False, dtype=torch.float64)
    mixing.load_state_dict(model.state_dict())
    with pytest.raises(LossError, match="independent"):
        convergence(mixing, nn.functional.mse_loss, [(X, y)])
    with pytest.raises(LossError, match="MeanLoss"):
        convergence(model, lambda out, t: (out - t).square().mean().sqrt(), [(X, y)])
    fine = MeanLoss(lambda out, t: (out - t).square().mean())
    assert convergence(model, fine, [(X, y)]).samples == 40


# ---- the second-order law


def dense_law(model, x, y):
    """The coefficients from dense per-sample Hessians, with the unbiased N - 1."""
    losses, gradients, hessians = [], [], []
    for i in range(len(x)):
        function, w = flat_loss(model, x[i : i + 1], lambda out, i=i: (out - y[i : i + 1]).square().mean())
        losses.append(function(w).detach())
        gradients.append(grad(function)(w))
        hessians.append(jacfwd(grad(function))(w))
    values, G, H = torch.stack(losses), torch.stack(gradients), torch.stack(hessians)
    dH = H - H.mean(0)
    trace = dH.diagonal(dim1=1, dim2=2).sum(-1)
    n = len(x) / (len(x) - 1)
    return (
        (values.var(), n * (G - G.mean(0)).square().sum(1).mean(), n * ((values - values.mean()) * trace).mean()),
        (n * dH.square().sum((1, 2)).mean(), n * trace.square().mean()),
        (values, G, H),
    )


def test_the_second_order_law_against_dense_hessians_and_draws():
    model, (x, y) = MLP(nn.Tanh), points(10)
    law = variance_law(Surface(model, nn.functional.mse_loss, [(x[:4], y[:4]), (x[4:], y[4:])]), probes=64)
    (variance, gradients, coupling), (frobenius, trace), (values, G, H) = dense_law(model, x, y)
    assert law.method == "exact" and law.stderr == (0, 0, 0) and law.samples == 10
    assert law.losses == pytest.approx(float(variance), rel=1e-10)
    assert law.gradients == pytest.approx(float(gradients), rel=1e-10)
    assert law.coupling == pytest.approx(float(coupling), rel=1e-9)
    assert law.frobenius == pytest.approx(float(frobenius), rel=1e-9)
    assert law.trace == pytest.approx(float(trace), rel=1e-9)
    # V(τ) is the expected variance of the quadratic model: 4,000 antithetic pairs
    tau, generator = 0.2, torch.Generator().manual_seed(0)
    xi = tau * torch.randn(4000, G.shape[1], generator=generator, dtype=torch.float64)
    bend = torch.einsum("di,nij,dj->dn", xi, H, xi) / 2
    drawn = torch.stack([(values + sign * xi @ G.T + bend).var(1) for sign in (1, -1)]).mean(0)
    assert abs(float(drawn.mean()) - law(tau)) < 3 * float(drawn.std()) / math.sqrt(4000)


def test_the_second_order_law_from_few_probes_is_within_its_error_bars():
    model, (x, y) = MLP(nn.Tanh), points(10)
    surface = Surface(model, nn.functional.mse_loss, [(x, y)])
    (_, gradients, coupling), (frobenius, trace), _ = dense_law(model, x, y)
    worst = []
    for seed in range(6):
        law = variance_law(surface, probes=12, seed=seed)
        assert law.method == "hutchinson" and law.gradients == pytest.approx(float(gradients), rel=1e-10)
        found = torch.tensor([law.coupling, law.frobenius, law.trace])
        errors = (found - torch.stack([coupling, frobenius, trace])).abs() / torch.tensor(law.stderr)
        worst.append(errors)
    assert float(torch.stack(worst).square().mean().sqrt()) < 2
    assert law.error(0.5) > law.error(0.1) > 0
    with pytest.raises(RangeError, match="probes"):
        variance_law(surface, probes=2)


def test_the_law_with_unequal_terms_is_that_of_deviations():
    # losses quadratic in w with unequal weights: V(τ) must be the mean over draws of the measured variance
    model, (inputs, targets) = GPT(), tokens()
    surface = Surface(model.eval(), CrossEntropy(), [(inputs, targets)], blocks_of(model).select("h.0.norm1"))
    law = variance_law(surface, probes=surface.size)
    tau, generator = 0.02, torch.Generator().manual_seed(1)
    xi = tau * torch.randn(200, surface.size, generator=generator, dtype=torch.float64)
    found = sample_losses(surface, torch.cat([xi, -xi])).variances
    here = sample_losses(surface, 0 * xi[:1]).variances
    assert law.losses == pytest.approx(float(here), rel=1e-12)
    pairs = (found[:200] + found[200:]) / 2 - here
    assert abs(float(pairs.mean()) - (law(tau) - law.losses)) < 3 * float(pairs.std()) / math.sqrt(200) + 0.01 * abs(
        law(tau) - law.losses
    )


# ---- convergence


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

    from curvoscope.analysis.convergence import _bound

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


# ---- the gradient


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


# ---- data sufficiency


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
    assert found.available == 200 and not found.is_enough
    # the interval of the bootstrap against the moments: se(s²) = sqrt((m4 - s⁴)/N)
    losses = residuals.square()
    m4 = float((losses - losses.mean()).pow(4).mean())
    se = math.sqrt((m4 - variance**2) / 200)
    assert found.variance_interval[1] - found.variance_interval[0] == pytest.approx(2 * 1.96 * se, rel=0.3)
    assert data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 10.0).samples == 1
    far = data_sufficiency(model, nn.functional.mse_loss, [(X, y)], 1e-3, batch=10, distance=0.5, draws=16)
    assert far.samples > k


@pytest.mark.parametrize(
    "change", [{"tolerance": 0.0}, {"batch": 0}, {"distance": -1.0}, {"level": 1.0}, {"resamples": 1}, {"draws": 0}]
)
def test_questions_about_data_that_are_refused(change):
    model, X, y, _ = regression()
    with pytest.raises(RangeError) as caught:
        data_sufficiency(model, nn.functional.mse_loss, [(X, y)], **{"tolerance": 0.1, **change})
    assert isinstance(caught.value, CurvoscopeError) and next(iter(change)) in str(caught.value)
