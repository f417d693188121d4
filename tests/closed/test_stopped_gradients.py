"""Layers whose gradients are not those of their functions have no closed form: their Hessian is the derivative of the
gradient that torch computes, as everywhere."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, mse_loss

import curvoscope as cv
from reference import normal, relative


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.q, self.k, self.v, self.o = way, *(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.way == "values that count twice":
            v = 2 * v - v.detach()
        mixed = ((q @ k.mT) / 2**0.5).softmax(-1) @ v
        if self.way == "a hook on a gradient" and mixed.requires_grad:
            mixed.register_hook(lambda gradient: 2 * gradient)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Network(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(1)
        self.way, self.norm, self.attn = way, nn.LayerNorm(4), Attention(way)
        self.up, self.down, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        self.double().eval()

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        h = gelu(self.up(x))
        if self.way == "hidden units that count twice":
            h = 2 * h - h.detach()
        return self.head(x + self.down(h))


WAYS = {
    "values that count twice": "attn",
    "a hook on a gradient": "attn",
    "hidden units that count twice": "mlp",
}


@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_closed_form_has_the_gradient_of_the_model(way):
    model, x, y = Network(way), normal(1)(2, 3, 4), normal(2)(2, 3, 2)
    blocks = cv.blocks_of(model, (x, y))
    chosen = blocks.select("*.attn.*", "*.mlp.*")
    H = cv.hessian(model, mse_loss, [(x, y)], chosen)
    for name in H.names:
        kind = name.split(".")[-2]
        weights = [model.get_parameter(piece.parameter) for piece in blocks[name].pieces]
        (gradient,) = torch.autograd.grad(mse_loss(model(x), y), weights, create_graph=True)
        rows = [torch.autograd.grad(one, weights, retain_graph=True)[0].flatten() for one in gradient.flatten()]
        expected = torch.stack(rows).view(*gradient.shape, *gradient.shape)
        expected = expected.permute(1, 0, 3, 2) if gradient.ndim == 2 else expected  # stored as (out, in)
        expected = expected.reshape(gradient.numel(), -1)
        assert H.method_of(name) == ("exact" if WAYS.get(way) != kind else "autodiff"), name
        assert relative(H[name].dense(), expected) < 1e-9 or float(expected.abs().max()) < 1e-15, name
    if way is not None:
        with pytest.raises(cv.CurvoscopeError, match="torch's gradient at"):
            cv.hessian(model, mse_loss, [(x, y)], chosen, method="exact")
