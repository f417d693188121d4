"""Modules whose second derivative torch gets wrong, or which a model writes into."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import gelu, layer_norm, mse_loss

import curvoscope as cv
from curvoscope.autodiff.graph import for_tangents, tangents_alone
from curvoscope.autodiff.kernels import kept_derivatives
from reference import dense_hessian, relative


def settled(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    return model.double().eval()


def data(*shape):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parametrised(layer, dim):
    return nn.utils.parametrizations.weight_norm(layer, dim=dim)


def hooked(layer, dim):
    with warnings.catch_warnings(action="ignore"):  # the older function warns that it is old
        return nn.utils.weight_norm(layer, dim=dim)


@pytest.mark.parametrize("normalise", [parametrised, hooked])
@pytest.mark.parametrize("dim", [0, 2, None])
def test_normalised_weights(normalise, dim):
    """Against the Hessian of g v / |v| written out: torch's own second derivative is off by some percent."""
    model = settled(normalise(nn.Conv1d(2, 3, 2), dim))
    x, y = data(2, 2, 4), data(2, 3, 3)
    names = [name for name, _ in model.named_parameters()]
    bias, g, v = (next(name for name in names if name.endswith(end)) for end in ("bias", ("g", "0"), ("v", "1")))

    def loss(vector):
        parts = vector.split([model.get_parameter(name).numel() for name in names])
        W = {name: part.view_as(model.get_parameter(name)) for name, part in zip(names, parts, strict=True)}
        axes = [axis for axis in range(3) if axis != dim]
        weight = W[g] * W[v] / W[v].square().sum(axes, keepdim=True).sqrt()
        return mse_loss(torch.nn.functional.conv1d(x, weight, W[bias]), y)

    expected = hessian(loss)(torch.cat([model.get_parameter(name).detach().flatten() for name in names]))
    H = cv.hessian(model, mse_loss, [(x, y)])
    assert list(H.names) == names
    assert relative(H.total.dense(), expected) < 1e-12


class WritesIntoOutputs(nn.Module):
    """Masks the outputs of a norm and of an activation in place, as XLM does."""

    def __init__(self):
        super().__init__()
        self.norm, self.activation, self.linear = nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(x)
        x *= torch.arange(1, 5, dtype=x.dtype)
        x = self.activation(self.linear(x))
        x += 1
        return x * x


def test_a_model_may_write_into_the_outputs_of_norms_and_activations():
    model, x, y = settled(WritesIntoOutputs()), data(3, 4), data(3, 4)
    names = [name for name, _ in model.named_parameters()]
    sizes = [model.get_parameter(name).numel() for name in names]

    def loss(vector):
        W = {
            name: part.view_as(model.get_parameter(name)) for name, part in zip(names, vector.split(sizes), strict=True)
        }
        normed = layer_norm(x, (4,)) * W["norm.weight"] + W["norm.bias"]
        inner = (normed * torch.arange(1, 5, dtype=x.dtype)) @ W["linear.weight"].T + W["linear.bias"]
        return mse_loss((gelu(inner) + 1).square(), y)

    point = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
    assert abs(float(loss(point) - mse_loss(model(x), y).detach())) < 1e-12
    assert relative(cv.hessian(model, mse_loss, [(x, y)]).total.dense(), hessian(loss)(point)) < 1e-12


class NormedLayers(nn.Module):
    """Norms and activations in a list of layers, which can be recomputed."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.GELU()) for _ in range(2))

    def forward(self, x):
        for layer in self.h:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("recompute", [None, "layer"])
def test_parts_of_a_model_with_norms_and_activations(recompute):
    """The pass for J v leaves out what it does not need; the next pass through the same graph leaves out nothing."""
    model, x, y = settled(NormedLayers()), data(2, 4, 3), data(2, 4, 3)
    H = cv.hessian(model, mse_loss, [(x, y)], recompute=recompute)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert list(H.names) == list(weights)
    expected = dense_hessian(lambda p: functional_call(model, p, (x,)), weights, lambda F: (F - y).square().mean())
    for part in ("outer", "functional", "total"):
        assert relative(getattr(H, part).dense(), getattr(expected, part), expected.total) < 1e-12, part


def test_a_pass_for_tangents_has_no_derivatives_in_activations():
    model, x = nn.Sequential(nn.LayerNorm(3), nn.GELU()).double(), data(4, 3).requires_grad_()
    g = data(4, 3).requires_grad_()
    with kept_derivatives(model):
        y = model(x)
    (gx,) = torch.autograd.grad(y, x, g, create_graph=True)
    both = torch.autograd.grad(gx, [g, x], data(4, 3), retain_graph=True)
    with for_tangents():
        alone = torch.autograd.grad(gx, [g, x], data(4, 3))
    assert torch.equal(alone[0], both[0]) and both[1].any() and not alone[1].any()
    assert not tangents_alone()


class Centred(nn.GELU):
    """A GELU in which the entries of a row meet."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(-1, keepdim=True)


def _patched(module):
    own = module.forward
    module.forward = lambda x: own(x) * x.sum(-1, keepdim=True)


ALTERED = {
    "output of a norm": lambda model: model[1].register_forward_hook(lambda module, inputs, y: 2 * y**2),
    "input of an activation": lambda model: model[3].register_forward_pre_hook(lambda module, inputs: inputs[0] ** 2),
    "output of an activation": lambda model: model[3].register_forward_hook(lambda module, inputs, y: y - y.mean()),
    "forward of a norm": lambda model: _patched(model[1]),
    "forward of an activation": lambda model: _patched(model[3]),
    "class of an activation": lambda model: model.__setitem__(3, Centred()),
    "every module": lambda model: None,
}


@pytest.mark.parametrize("case", ALTERED)
def test_norms_and_activations_that_hooks_or_subclasses_change(case):
    """The derivatives of a plain norm or activation are not those of a changed one."""
    model = settled(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
    x, y = data(3, 3), data(3, 2)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ALTERED[case](model)

    def doubled(module, inputs, output):
        return output * output.mean() if isinstance(module, nn.GELU) else None

    with nn.modules.module.register_module_forward_hook(doubled) if case == "every module" else nullcontext():
        expected = dense_hessian(lambda p: functional_call(model, p, (x,)), weights, lambda F: (F - y).square().mean())
        H = cv.hessian(model, mse_loss, [(x, y)])
        for part in ("outer", "functional", "total"):
            assert relative(getattr(H, part).dense(), getattr(expected, part), expected.total) < 1e-12, part
