"""LayerScale in closed form, alone and inside a model, against nested autodiff."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from adapter_cases import D, Model, batch
from curvoscope.errors import DtypeError, ShapeError
from family_cases import shaken
from reference import dense_hessian, normal, relative

LOSS = cv.losses.CrossEntropy()


@pytest.mark.parametrize("mixing", [False, True], ids=["tokens apart", "tokens mixed"])
def test_with_its_input(mixing):
    draw = normal(1)
    X, scale, Y = draw(2, 3, 4), draw(4), draw(2, 3, 4)

    def loss(F):
        return (F.tanh().cumsum(1) if mixing else F.tanh()).sub(Y).square().mean()

    H = cv.exact.LayerScale(scale).hessian(X, loss, wrt_input=True)
    truth = dense_hessian(lambda p: (p["X"] * p["scale"]).view(2, 3, 4), {"scale": scale, "X": X.flatten(0, 1)}, loss)
    assert H.names == ["scale", "X"] and H.shapes == {"scale": (1, 4), "X": (6, 4)}
    for part in ("total", "outer", "functional"):
        assert relative(getattr(H, part).dense(), getattr(truth, part), truth.total) < 1e-12
    v = draw(28)
    assert relative(H @ v, truth.total @ v) < 1e-12
    jacobian = cv.exact.LayerScale(scale).jacobian(X)
    assert relative(jacobian["scale"], torch.cat([torch.diag(x) for x in X.flatten(0, 1)])) == 0


def test_errors():
    with pytest.raises(ShapeError, match=r"scale: expected a vector \(d,\), got \(2, 2\)"):
        cv.exact.LayerScale(torch.ones(2, 2))
    with pytest.raises(ShapeError, match=r"X: expected \(L, 2\) or \(N, L, 2\), got \(3,\)"):
        cv.exact.LayerScale(torch.ones(2))(torch.ones(3))
    with pytest.raises(DtypeError, match="X"):
        cv.exact.LayerScale(torch.ones(2))(torch.ones(3, 2, dtype=torch.float64))


class Scaled(nn.Module):
    """A layer whose output is multiplied, in a module of its own or beside the layer."""

    def __init__(self, inner, apart):
        super().__init__()
        self.inner, self.gamma = inner, nn.Parameter(torch.ones(D))
        self.times = _Times() if apart else None
        if apart:
            del self.gamma

    def forward(self, x):
        return self.times(self.inner(x)) if self.times is not None else self.gamma * self.inner(x)


class _Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * self.factors


@pytest.mark.parametrize("apart", [True, False], ids=["module", "inside"])
def test_in_a_model(apart):
    """The layers before a scale have closed forms with it, and so has the scale if it is a module."""
    torch.manual_seed(0)
    model = Model(depth=2)
    for layer in model.layers:
        layer.self_attn, layer.mlp = Scaled(layer.self_attn, apart), Scaled(layer.mlp, apart)
    model = shaken(model)
    blocks = cv.blocks_of(model, batch()[0]).select("h.0.*.scale", "h.1.*.scale", "h.0.attn.O", "h.1.mlp.up")
    H, R = (cv.hessian(model, LOSS, batch(), blocks, method=method) for method in ("auto", "autodiff"))
    assert len(H.names) == 6
    for name in H.names:
        exact = apart or not name.endswith(".scale")
        assert H.method_of(name) == ("exact" if exact else "autodiff"), name
        for part in ("outer", "functional"):
            expected = getattr(R, part)[name].dense()
            assert relative(getattr(H, part)[name].dense(), expected, R[name].dense()) < 1e-9
    if not apart:
        assert "only weight of a module" in H.plan["h.0.attn.scale", "outer"].reason
