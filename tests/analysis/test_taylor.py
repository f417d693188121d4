import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens
from curvoscope.analysis.convergence import convergence
from curvoscope.analysis.data_sufficiency import data_sufficiency
from curvoscope.analysis.landscape import landscape
from curvoscope.analysis.taylor import divergence, taylor
from curvoscope.blocks import Blocks
from curvoscope.curvature import CrossEntropy, blocks_of
from curvoscope.errors import CurvoscopeError, DtypeError, NonFiniteError, RangeError, ShapeError
from surface_cases import flat_loss, state


class Bowl(nn.Module):
    """w over outputs sqrt(λ_i / 2) w_i: with the summed squares as loss, L = ½ Σ λ_i w_i²."""

    def __init__(self, eigenvalues, at):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(at, dtype=torch.float64))
        self.register_buffer("roots", (torch.tensor(eigenvalues, dtype=torch.float64) / 2).sqrt())

    def forward(self, x):
        return x * (self.roots * self.w)


def summed_squares(outputs, targets):
    return (outputs - targets).square().sum(-1).mean()


def bowl(at=(0.0, 0.0, 0.0), eigenvalues=(1.0, 4.0, 10.0)):
    data = [(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))]
    return Bowl(list(eigenvalues), list(at)), summed_squares, data


def mlp():
    x, y = points(6)
    return MLP(nn.Tanh), nn.functional.mse_loss, x, y


@pytest.mark.parametrize("direction", ["gradient", "top", "bottom", "random"])
def test_slope_curvature_and_losses_against_dense_autodiff(direction):
    model, loss, x, y = mlp()
    before = state(model)
    found = taylor(model, loss, [(x[:2], y[:2]), (x[2:], y[2:])], direction)
    function, w = flat_loss(model, x, lambda out: (out - y).square().mean())
    g, H = grad(function)(w), jacfwd(grad(function))(w)
    v = found.direction.vector
    assert float(v.norm()) == pytest.approx(1, abs=1e-12)
    values, vectors = torch.linalg.eigh(H)
    if direction == "gradient":
        torch.testing.assert_close(v, -g / g.norm())
        assert found.direction.length == pytest.approx(float(g.norm()))
        torch.testing.assert_close(found.steps * g.norm(), found.radii)
    elif direction != "random":
        index = -1 if direction == "top" else 0
        assert abs(float(v @ vectors[:, index])) == pytest.approx(1, abs=1e-6)
        assert found.direction.eigenvalue.value == pytest.approx(float(values[index]), rel=1e-6)
        assert found.slope <= 0
    assert found.loss == pytest.approx(float(function(w)), rel=1e-13)
    assert found.slope == pytest.approx(float(g @ v), rel=1e-9, abs=1e-12)
    assert found.curvature == pytest.approx(float(v @ H @ v), rel=1e-9, abs=1e-11)
    expected = torch.stack([function(w + radius * v) for radius in found.radii])
    torch.testing.assert_close(found.actual, expected, rtol=1e-12, atol=1e-13)
    quadratic = function(w) + found.radii * (g @ v) + found.radii**2 / 2 * (v @ H @ v)
    torch.testing.assert_close(found.predicted, quadratic, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.error, (expected - quadratic).abs(), rtol=1e-4, atol=1e-11)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("direction", ["gradient", "top", "random"])
def test_the_error_is_of_third_order(direction):
    model, loss, x, y = mlp()
    found = taylor(model, loss, [(x, y)], direction)
    assert found.order.value == pytest.approx(3, abs=0.1)
    assert found.order.low <= found.order.value <= found.order.high
    assert found.radii[0] <= found.order.start < found.order.stop <= found.radii[-1]
    assert found.is_third_order is True


def test_the_radius_is_where_the_error_reaches_one_percent_of_the_change():
    # L(ε) = exp(ε): the change exp(ε) - 1 against ε + ε²/2
    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            return x * self.w.exp()

    model, data = Exponential(), [(torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1))]
    mean = lambda out, target: out.mean()  # noqa: E731
    found = taylor(model, mean, data, torch.ones(1, dtype=torch.float64), torch.logspace(-3, 0.5, 12))
    epsilon = found.radius
    error = lambda e: abs(torch.tensor(e).double().exp() - 1 - e - e * e / 2) / (torch.tensor(e).double().exp() - 1)  # noqa: E731
    assert float(error(epsilon)) == pytest.approx(0.01, rel=5e-3)
    assert not found.reaches_further
    wider = taylor(model, mean, data, torch.ones(1, dtype=torch.float64), [0.01, 1.0, 3.0], tolerance=0.1)
    assert float(error(wider.radius)) == pytest.approx(0.1, rel=5e-2)


def test_a_quadratic_loss_is_predicted_everywhere_and_has_no_order():
    model, loss, data = bowl((0.3, -0.2, 0.5))
    found = taylor(model, loss, data, "gradient", [0.1, 1.0, 10.0])
    assert found.reaches_further and found.radius == 10.0
    assert found.order is None and found.is_third_order is None
    torch.testing.assert_close(found.actual, found.predicted, rtol=1e-12, atol=0)
    # the predicted decrease of gradient descent: η|g|² - η²/2 g·Hg
    g, H = torch.tensor([0.3, -0.8, 5.0], dtype=torch.float64), torch.tensor([1.0, 4, 10], dtype=torch.float64)
    expected = -found.steps * (g @ g) + found.steps**2 / 2 * ((g * H) @ g)
    torch.testing.assert_close(found.predicted_change, expected)
    torch.testing.assert_close(found.actual_change, expected, rtol=1e-10, atol=1e-10)


def test_an_optimizers_step_is_a_direction_and_one_step_is_the_step():
    model, loss, x, y = mlp()
    moved = MLP(nn.Tanh)
    optimizer = torch.optim.Adam(moved.parameters(), lr=1e-2)
    nn.functional.mse_loss(moved(x), y).backward()
    optimizer.step()
    blocks = blocks_of(model)
    change = {name: p.detach() - dict(model.named_parameters())[name].detach() for name, p in moved.named_parameters()}
    step = blocks.gather(change)
    found = taylor(model, loss, [(x, y)], step, [float(step.norm()) / 2, float(step.norm())])
    assert found.direction.name == "given"
    assert float(found.steps[-1]) == pytest.approx(1)
    assert float(found.actual[-1]) == pytest.approx(nn.functional.mse_loss(moved(x), y).item(), rel=1e-12)


def test_blocks_restrict_the_line_and_ignored_targets_do_not_count():
    model, (inputs, targets) = GPT(), tokens()
    blocks = blocks_of(model).select("*attn*")
    assert isinstance(blocks, Blocks)
    found = taylor(model.eval(), CrossEntropy(), [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])], blocks=blocks)
    size = sum(blocks.sizes.values())
    assert found.direction.vector.shape == (size,)
    assert found.loss == pytest.approx(cross_entropy(model(inputs), targets).item(), rel=1e-12)
    assert found.order.value == pytest.approx(3, abs=0.2)
    change = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    blocks.scatter(found.radii[-1] * found.direction.vector, change)
    moved = {name: p.detach() + change[name] for name, p in model.named_parameters()}
    expected = cross_entropy(functional_call(model, moved, (inputs,)), targets)
    assert float(found.actual[-1]) == pytest.approx(float(expected), rel=1e-12)


def test_single_precision_leaves_rounding_out_of_the_fit():
    x, y = (t.float() for t in points(6))
    found = taylor(MLP(nn.Tanh, torch.float32), nn.functional.mse_loss, [(x, y)], "top")
    assert found.is_third_order is not False
    assert found.radius is not None


def test_nothing_is_left_behind():
    model, loss, x, y = mlp()
    model.train()
    before, random = state(model), torch.get_rng_state()
    taylor(model, loss, [(x, y)], "random")
    divergence(model, loss, [(x, y)], steps=2)
    landscape(model, loss, [(x, y)], points=3)
    convergence(model, loss, [(x, y)], distances=[0.1], orders=2, draws=1, probes=3)
    data_sufficiency(model, loss, [(x, y)], 0.1, distance=0.1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- divergence


@pytest.mark.parametrize("at", [(0.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
def test_descent_on_a_quadratic_diverges_exactly_above_the_critical_rate(at):
    model, loss, data = bowl(at)
    before = state(model)
    rates = torch.tensor([0.02, 0.1, 0.19, 0.1999, 0.2001, 0.21, 0.4], dtype=torch.float64)  # 2/λ_max = 0.2
    found = divergence(model, loss, data, rates, steps=6, kick=0.1)
    assert found.critical_learning_rate == pytest.approx(0.2, rel=1e-9)
    assert found.rises.tolist() == [False] * 4 + [True] * 3
    assert found.agrees
    assert found.gradient_norm == pytest.approx(10 * at[2])
    start = abs(at[2] + 0.1 * (-1 if at[2] > 0 else 1))
    expected = 5 * start**2 * (1 - 10 * rates[:, None]) ** (2 * torch.arange(7))
    torch.testing.assert_close(found.losses, expected, rtol=1e-9, atol=1e-14)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_descent_at_the_minimum_of_linear_regression():
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (3, 1))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(X, y).solution.T)
    found = divergence(model, nn.functional.mse_loss, [(X[:5], y[:5]), (X[5:], y[5:])])
    top = float(torch.linalg.eigvalsh(2 / 12 * X.T @ X)[-1])
    assert found.critical_learning_rate == pytest.approx(2 / top, rel=1e-6)
    assert found.gradient_norm < 1e-12
    assert found.agrees and set(found.rises.tolist()) == {True, False}


def test_a_run_that_leaves_the_floats_ends_at_infinity():
    found = divergence(*bowl(), [1e40, 1e200], steps=8, kick=0.1)
    assert torch.isinf(found.losses[:, -1]).all() and found.agrees


# ---- errors


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"direction": "sideways"}, RangeError, "gradient"),
        ({"direction": "top9"}, RangeError, "3 eigenvalues"),
        ({"direction": torch.ones(4, dtype=torch.float64)}, ShapeError, r"\(3,\)"),
        ({"direction": torch.ones(3, dtype=torch.int64)}, DtypeError, "floating point"),
        ({"direction": torch.zeros(3)}, RangeError, "zero vector"),
        ({"direction": torch.tensor([1.0, torch.nan, 0.0])}, NonFiniteError, "NaN"),
        ({"direction": "gradient"}, RangeError, "gradient is zero"),
        ({"radii": []}, ShapeError, "positive numbers"),
        ({"radii": [0.0, 1.0]}, RangeError, "positive"),
        ({"radii": [1.0, 0.5]}, RangeError, "ascending"),
        ({"radii": [1.0, torch.inf]}, NonFiniteError, "infinite"),
        ({"radii": [1.0, 1e200]}, NonFiniteError, "1e\\+200"),
        ({"tolerance": 0.0}, RangeError, "between 0 and 1"),
    ],
)
def test_what_cannot_be_expanded_is_refused(change, error, words):
    with pytest.raises(error, match=words) as caught:
        taylor(*bowl(), **{"direction": "top", **change})
    assert isinstance(caught.value, CurvoscopeError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"kick": -1.0}, "kick"),
        ({"learning_rates": [-1.0]}, "positive"),
        ({"kick": 1e200}, "smaller kick"),
    ],
)
def test_what_cannot_be_descended_is_refused(change, words):
    with pytest.raises(CurvoscopeError, match=words):
        divergence(*bowl(), **change)


def test_no_learning_rate_is_critical_where_nothing_curves_up():
    model, _, data = bowl()
    with pytest.raises(RangeError, match="no learning rate"):
        divergence(model, lambda out, target: -out.square().sum(), data)
