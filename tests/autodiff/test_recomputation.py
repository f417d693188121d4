"""`recompute="layer"`: the same products as with all activations kept, from graphs that keep the layers' inputs."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from autodiff_cases import GPT, tokens
from curvoscope.autodiff.graph import SecondDerivativeError
from curvoscope.autodiff.layer_calls import NotRepeatableError
from curvoscope.errors import ModelError, RangeError
from reference import normal, relative
from sweep_cases import albert, bert, encoder, gpt2, llama, mixtral, t5

PARTS = ("total", "outer", "functional")


def both(model, loss, data, **options):
    return [cv.hessian(model, loss, data, method="autodiff", recompute=how, **options) for how in (None, "layer")]


def kept_bytes(H):
    return sum(graph.nbytes for graphs in H._engine._kept.values() for graph in graphs.values())


@pytest.mark.parametrize("rows", [None, 1])
def test_products_are_those_with_all_activations_kept(rows):
    plain, found = both(GPT(3), cv.losses.CrossEntropy(), [tokens()], micro_batch=rows)
    vectors = normal(1)(plain.shape[0], 3)
    for part in PARTS:
        expected = getattr(plain, part) @ vectors
        assert relative(getattr(found, part) @ vectors, expected) < 1e-12
        assert relative(getattr(found, part) @ vectors[:, 0], expected[:, 0]) < 1e-12
        name = "h.1.mlp.up"
        v = vectors[: plain[name].shape[1], 0]
        assert relative(getattr(found, part)[name] @ v, getattr(plain, part)[name] @ v) < 1e-12
    v = vectors[: plain["h.0.attn.Q"].shape[1]]
    assert relative(found.stacked("h.0.attn.Q") @ v, plain.stacked("h.0.attn.Q") @ v) < 1e-12


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [(gpt2, 1e-12), (bert, 1e-12), (albert, 1e-12), (encoder, 1e-12), (t5, 1e-6), (llama, 1e-6), (mixtral, 1e-6)],
)  # the norms of T5 and Llama and the router of Mixtral compute in float32
def test_products_of_the_families(case, tolerance):
    """Keys and values of the past, biases that layers hand on, masks, experts, one layer used several times."""
    torch.manual_seed(0)
    model, loss, data = case()
    plain, found = both(model.double().eval(), loss, data)
    v = normal(1)(plain.shape[0])
    for part in PARTS:
        assert relative(getattr(found, part) @ v, getattr(plain, part) @ v, plain.total @ v) < tolerance


def test_a_graph_keeps_less():
    plain, found = both(GPT(6), cv.losses.CrossEntropy(), [tokens()])
    for H in (plain, found):
        _ = H @ normal(1)(H.shape[0])
    assert kept_bytes(found) < kept_bytes(plain) / 4


def test_the_model_is_left_as_it_is():
    model = GPT(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()], recompute="layer")
    _ = H @ normal(1)(H.shape[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


class Counting(nn.Module):
    """Returns something else each time."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3).double(), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + (self.calls > 3))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].exp()


class OnceDifferentiable(nn.Linear):
    def forward(self, x):
        return Once.apply(super().forward(x))


class Stack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_cannot_be_recomputed_is_refused():
    data = [(normal(1)(4, 3), normal(2)(4, 3))]

    def product(model, **options):
        H = cv.hessian(model, nn.MSELoss(), data, method="autodiff", recompute="layer", **options)
        return H @ normal(3)(H.shape[0])

    with pytest.raises(ModelError, match=r"recompute: got 'layer', but the model has no nn.ModuleList"):
        product(nn.Linear(3, 3).double())
    with pytest.raises(ModelError, match=r"recompute: .* use split='model'"):
        product(Stack(nn.Linear(3, 3).double()), split="layer")
    with pytest.raises(ModelError, match=r"recompute: .* differences"):
        product(Stack(nn.Linear(3, 3).double()), hvp="difference")
    with pytest.raises(RangeError, match=r"recompute: got 'all'"):
        cv.hessian(Stack(nn.Linear(3, 3).double()), nn.MSELoss(), data, recompute="all")
    with pytest.raises(NotRepeatableError, match="returns different outputs when run twice"):
        product(Stack(Counting()))
    with pytest.raises(SecondDerivativeError, match="without a second derivative"):
        product(Stack(OnceDifferentiable(3, 3).double()))


class Storing(nn.Module):
    """A layer that stores its hidden units, or reads what the one before has stored."""

    def __init__(self, before=None):
        super().__init__()
        self.up, self.down, self.before, self.hidden = nn.Linear(3, 3), nn.Linear(3, 3), [before], None

    def forward(self, x):
        self.hidden = self.up(x).tanh()
        stored = 0 if self.before[0] is None else self.before[0].hidden
        return x + self.down(self.hidden) + stored


class SideBySide(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        first = Storing()
        self.way, self.layers = way, nn.ModuleList([first, Storing(first if way == "reads" else None)])
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        penalty = self.layers[0].hidden.square().mean()
        if self.way == "returns both":
            return x, penalty
        return x + penalty if self.way == "stores" else x


@pytest.mark.parametrize("way", ["stores", "reads", "returns both"])
def test_tensors_that_layers_hand_on_by_themselves(way):
    """Their derivatives would be missing, if the loss reads them."""
    data, model = [(normal(1)(4, 3), normal(2)(4, 3))], SideBySide(way)
    loss = nn.MSELoss()
    if way == "returns both":
        loss = cv.losses.MeanLoss(lambda F, Y: (F[0] - Y).square().mean(), lambda F, Y: F[0].numel())
        plain, found = both(model, loss, data)  # the loss does not read it
        assert relative(found.dense(), plain.dense()) < 1e-12
        loss = cv.losses.MeanLoss(lambda F, Y: (F[0] - Y).square().mean() + F[1], lambda F, Y: F[0].numel())
    plain, found = both(model, loss, data)
    assert plain.dense().any()
    with pytest.raises(ModelError, match=r"recompute: got 'layer', but 'layers\.[01]' (hands on|reads) tensors"):
        found.dense()
