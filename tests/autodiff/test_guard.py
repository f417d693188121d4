"""Models whose second derivative by autograd is wrong are found out; the others are left in peace."""

import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.autodiff import engine, guard
from curvoscope.curvature import SecondDerivativeError, hessian
from reference import normal, relative

MSE = nn.functional.mse_loss


class ForgetfulCube(torch.autograd.Function):
    """x³ + x with the right first derivative, from which the second misses 6 x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 + x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (3 * x.detach() ** 2 + 1)


class LopsidedProduct(torch.autograd.Function):
    """x w with the right first derivatives, of which one forgets that it depends on the other's input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x.detach()).sum(0)


class RightCube(ForgetfulCube):
    """The same with the right second derivative."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (3 * x**2 + 1)


class Custom(nn.Module):
    def __init__(self, function, dtype=torch.float64):
        super().__init__()
        draw = normal(3)
        self.up, self.scale = nn.Parameter(draw(3, 4).to(dtype)), nn.Parameter(draw(4).to(dtype))
        self.down = nn.Parameter(draw(4, 2).to(dtype))
        self.function = function

    def forward(self, x):
        return (self.function(x @ self.up) * self.scale) @ self.down


class Lopsided(Custom):
    def forward(self, x):
        return self.function(x @ self.up, self.scale).tanh() @ self.down


def batch(dtype=torch.float64):
    return normal(4)(5, 3).to(dtype), normal(5)(5, 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", [ForgetfulCube, LopsidedProduct])
def test_a_wrong_second_derivative_is_found(function, dtype):
    kind = Lopsided if function is LopsidedProduct else Custom
    H = hessian(kind(function.apply, dtype), MSE, [batch(dtype)])
    with pytest.raises(SecondDerivativeError, match=rf"{function.__name__}.*hvp='difference'"):
        H @ torch.ones(H.shape[0], dtype=dtype)
    with pytest.raises(SecondDerivativeError):  # and so it stays
        H @ torch.ones(H.shape[0], dtype=dtype)


@pytest.mark.parametrize("part", ["outer", "functional"])
def test_also_when_a_part_is_asked_for_first(part):
    H = hessian(Custom(ForgetfulCube.apply), MSE, [batch()])
    with pytest.raises(SecondDerivativeError, match="ForgetfulCube"):
        getattr(H, part) @ torch.ones(H.shape[0], dtype=torch.float64)


def test_also_for_a_single_block_and_off_the_diagonal():
    H = hessian(Custom(ForgetfulCube.apply), MSE, [batch()])
    with pytest.raises(SecondDerivativeError, match="ForgetfulCube"):
        H["up"] @ torch.ones(12, dtype=torch.float64)
    H = hessian(Custom(ForgetfulCube.apply), MSE, [batch()])
    with pytest.raises(SecondDerivativeError, match="ForgetfulCube"):
        H["up", "down"] @ torch.ones(8, dtype=torch.float64)


def test_a_block_behind_the_function_is_right_and_one_before_it_is_not():
    H = hessian(Custom(ForgetfulCube.apply), MSE, [batch()])
    H["down"] @ torch.ones(8, dtype=torch.float64)
    with pytest.raises(SecondDerivativeError):
        H["up"] @ torch.ones(12, dtype=torch.float64)


def test_in_the_loss():
    def loss(outputs, targets):
        return (ForgetfulCube.apply(outputs) * targets).mean()

    H = hessian(MLP(), loss, [points()])
    with pytest.raises(SecondDerivativeError, match="ForgetfulCube"):
        H @ torch.ones(H.shape[0], dtype=torch.float64)


def test_auto_falls_back_to_differences():
    model = Custom(ForgetfulCube.apply)
    H = hessian(model, MSE, [batch()], hvp="auto")
    assert H.method_of("up") == "difference"
    v = normal(1)(H.shape[0])
    assert relative(H @ v, hessian(Custom(lambda x: x**3 + x), MSE, [batch()]) @ v) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_one_passes(dtype):
    H = hessian(Custom(RightCube.apply, dtype), MSE, [batch(dtype)])
    v = normal(1)(H.shape[0]).to(dtype)
    plain = hessian(Custom(lambda x: x**3 + x, dtype), MSE, [batch(dtype)]) @ v
    assert relative(H @ v, plain) < 100 * torch.finfo(dtype).eps


def test_kinks_are_no_reason_to_cry_wolf():
    """Hundreds of ReLUs change sides on the way: the third difference tells."""

    class Kinked(nn.Module):
        def __init__(self):
            super().__init__()
            draw = normal(0)
            self.layers = nn.ParameterList(draw(64, 64) / 8 for _ in range(4))

        def forward(self, x):
            for weight in self.layers:
                x = RightCube.apply(0.1 * torch.relu(x @ weight))
            return x

    for dtype in (torch.float64, torch.float32):
        draw = normal(1)
        data = draw(64, 64).to(dtype), draw(64, 64).to(dtype)
        H = hessian(Kinked().to(dtype), MSE, [data])
        H @ torch.ones(H.shape[0], dtype=dtype)


def test_kinks_whose_third_difference_vanishes_by_chance():
    """Of 400 such losses, a few look smooth to the right of the weights."""
    h = torch.finfo(torch.float64).eps ** 0.25
    for seed in range(400):
        draw = normal(seed)
        places, slopes = 3 * h * draw(3), draw(3)

        def loss(step, places=places, slopes=slopes):
            return 1 + step**2 / 2 + float(slopes @ (torch.relu(step - places) - torch.relu(-places)))

        guard.check_curvature(loss, loss(0.0), 1.0, torch.float64, [])


def test_what_it_costs(monkeypatch):
    """One more product and three forward passes, on the first micro-batch, once."""
    passes, products = [], []
    model = Custom(lambda x: RightCube.apply(x))
    model.register_forward_hook(lambda *arguments: passes.append(torch.is_grad_enabled()))
    multiply = engine.Graph.product
    monkeypatch.setattr(engine.Graph, "product", lambda *a, **k: products.append(1) or multiply(*a, **k))
    inputs, targets = batch()
    H = hessian(model, MSE, [(inputs, targets)], micro_batch=2)
    passes.clear()
    v = torch.ones(H.shape[0], dtype=torch.float64)
    H @ v
    assert len(products) == 3 + 1
    assert (passes.count(True), passes.count(False)) == (3, 3)
    passes.clear(), products.clear()
    H @ v
    H["up"] @ torch.ones(12, dtype=torch.float64)
    assert len(products) == 6
    assert passes.count(False) == 0


def test_operations_on_the_list_cost_nothing(monkeypatch):
    products = []
    multiply = engine.Graph.product
    monkeypatch.setattr(engine.Graph, "product", lambda *a, **k: products.append(1) or multiply(*a, **k))
    H = hessian(MLP(), MSE, [points()])
    H @ torch.ones(H.shape[0], dtype=torch.float64)
    assert len(products) == 1


def test_torch_is_still_wrong_about_weight_norm():
    """When this fails, the replacement of `torch._weight_norm` can go."""
    v, g = normal(0)(4, 3).requires_grad_(), normal(1)(4, 1).requires_grad_()
    assert not torch.autograd.gradgradcheck(lambda v, g: torch._weight_norm(v, g, 0), (v, g), raise_exception=False)
