import math

import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens
from curvoscope.analysis.landscape import landscape
from curvoscope.analysis.surface import Surface
from curvoscope.curvature import CrossEntropy
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from surface_cases import flat_loss, regression, state


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
