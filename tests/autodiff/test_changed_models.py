"""A Hessian is that of the model, the loss and the data with which it was made, or an error."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear, mse_loss
from torch.nn.utils import parametrize

import curvoscope as cv
from autodiff_cases import MLP, points
from curvoscope.autodiff.batches import BatchError
from reference import dense_hessian, normal, relative


class Regression(nn.Module):
    """A network with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.act, self.dropout = nn.Linear(3, 4).double(), nn.Tanh(), nn.Dropout(0.5)
        self.down, self.scale = nn.Linear(4, 2).double(), 1.0

    def forward(self, x):
        return self.down(self.dropout(self.act(self.up(x)))) * self.scale


def truth(model, x, y):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return dense_hessian(lambda p: functional_call(model, p, (x,)), parameters, lambda F: (F - y).square().mean()).total


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}, {"hvp": "difference"}])
def test_a_model_switched_to_training_later_runs_as_when_the_hessian_was_made(options):
    model, (x, y) = Regression().eval(), points()
    expected = truth(model, x, y)
    H = cv.hessian(model, mse_loss, [(x, y)], **options)
    model.train()
    model.act.eval()
    assert relative(H.dense(), expected) < 1e-8
    assert [module.training for module in model.modules()] == [True, True, False, True, True]


CHANGES = {
    "a hook": lambda model, w: model.up.register_forward_hook(lambda module, inputs, y: 2 * y),
    "a module": lambda model, w: setattr(model, "act", nn.Softplus()),
    "an attribute": lambda model, w: setattr(model, "scale", 1.1),
    "the loss": lambda model, w: w.mul_(1.1),
}


@pytest.mark.parametrize("split", ["model", "layer"])
@pytest.mark.parametrize("change", CHANGES)
def test_another_function_at_the_same_weights_is_an_error(change, split):
    model, (x, y), w = Regression().eval(), points(), torch.ones((), dtype=torch.float64)
    H = cv.hessian(
        model, cv.losses.MeanLoss(lambda F, Y: w * mse_loss(F, Y), lambda F, Y: F.numel()), [(x, y)], split=split
    )
    CHANGES[change](model, w)
    v = normal(1)(8)
    with pytest.raises(cv.CurvoscopeError, match=r"its loss on batch 0 is .*Make a new Hessian"):
        H.outer["down.weight"] @ v


def test_closed_forms_of_a_changed_model_are_an_error():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, dropout=0.0).double().eval()
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 2).double())
    x, y = normal(2)(2, 3, 4), normal(3)(2, 3, 2)
    blocks = cv.blocks_of(model, (x, y)).select("*.attn.[QKVO]", "*.mlp.*")
    before = cv.hessian(model, mse_loss, [(x, y)], blocks, method="exact")
    H = cv.hessian(model, mse_loss, [(x, y)], blocks, method="exact")
    value = next(name for name in H.names if name.endswith("attn.V"))
    up = next(name for name in H.names if name.endswith("mlp.up"))
    expected = H[up].dense()  # kept from here on
    model[1].register_forward_hook(lambda module, inputs, y: 3 * y)
    assert torch.equal(H[up].dense(), expected)
    with pytest.raises(cv.CurvoscopeError, match="Make a new Hessian"):
        before[value].dense()


class Loader:
    """Batches that a loader writes into the same memory, one after the other."""

    def __init__(self, batches, through_numpy):
        self.batches, self.through_numpy = batches, through_numpy
        self.x, self.y = (torch.empty_like(one) for one in batches[0])

    def __iter__(self):
        for x, y in self.batches:
            if self.through_numpy:  # which torch does not notice
                np.copyto(self.x.numpy(), x.numpy())
                np.copyto(self.y.numpy(), y.numpy())
            else:
                self.x.copy_(x)
                self.y.copy_(y)
            yield self.x, self.y


@pytest.mark.parametrize("through_numpy", [False, True])
def test_a_loader_that_uses_its_memory_again(through_numpy):
    model, batches = MLP(), [(normal(seed)(4, 3), normal(9 + seed)(4, 2)) for seed in range(3)]
    x, y = (torch.cat(several) for several in zip(*batches, strict=True))
    expected = truth(model, x, y)
    H = cv.hessian(model, mse_loss, Loader(batches, through_numpy))
    for _ in range(2):  # the second time from graphs that are kept
        assert relative(H.dense(), expected) < 1e-12
    sweeps = (cv.sweep(model, mse_loss, data, samples=16) for data in (Loader(batches, through_numpy), batches))
    one, two = ([float(sweep.trace(name)) for name in sweep.names] for sweep in sweeps)
    assert one == pytest.approx(two, rel=1e-12)


def test_data_that_change_in_place():
    """Graphs that are kept have the old data; a new pass sees that they have changed."""
    model, (x, y) = MLP(), points()
    expected = truth(model, x, y)
    H, other = (cv.hessian(model, mse_loss, [(x, y)]) for _ in range(2))
    assert relative(H.dense(), expected) < 1e-12
    x += 1
    assert relative(H.dense(), expected) < 1e-12
    with pytest.raises(BatchError, match="differs"):
        other.dense()


class Aliased(nn.Module):
    """Reads its weight from a list, from a closure, or from a tensor that it made of it in the first pass."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down, self.way = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), way
        weight = self.up.weight
        self.held, self.cache, self.closure = [weight], None, lambda x: linear(x, weight)

    def forward(self, x):
        if self.way == "closure":
            return self.down(self.closure(x).tanh())
        if self.cache is None:
            self.cache = 2 * self.up.weight
        return self.down(linear(x, self.held[0] if self.way == "list" else self.cache).tanh())


@pytest.mark.parametrize("way", ["list", "closure", "cache"])
def test_weights_that_are_read_from_elsewhere_are_an_error(way):
    """Their derivatives would be missing."""
    model, (x, y) = Aliased(way), points()
    model(x)
    with pytest.raises(cv.CurvoscopeError, match=r"up\.weight: acts on the outputs through another reference"):
        cv.hessian(model, mse_loss, [(x, y)])
    if way != "cache":
        model.up.weight.requires_grad_(False)  # a constant
        H = cv.hessian(model, mse_loss, [(x, y)])
        assert relative(H["down.weight"].dense(), truth(model, x, y)[-10:-2, -10:-2]) < 1e-12


def test_a_model_that_differentiates_inside_is_no_such_case():
    """Forces of an energy: the input has derivatives there, the parameters have none."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = MLP(nn.Tanh)

        def forward(self, x):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)[0]

    model, x, y = Forces(), normal(4)(3, 3), normal(5)(3, 3)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(mse_loss(model(x), y), parameters, create_graph=True)
    flat = torch.cat([one.flatten() for one in gradient])
    rows = [torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True) for one in flat]
    expected = torch.stack([torch.cat([one.flatten() for one in row]) for row in rows])
    assert relative(cv.hessian(model, mse_loss, [(x, y)]).dense(), expected) < 1e-12


class Squared(nn.Module):
    def forward(self, weight):
        return weight**2


@pytest.mark.parametrize("used", [False, True])
def test_parametrised_weights_that_are_cached(used):
    """The cache holds tensors of one pass, which other weights do not move."""
    model, (x, y) = MLP(), points()
    parametrize.register_parametrization(model.up, "weight", Squared())
    expected = truth(model, x, y)
    with parametrize.cached():
        before = model.up.weight if used else None
        H = cv.hessian(model, mse_loss, [(x, y)])
        assert relative(H.dense(), expected) < 1e-12
        assert float(cv.sweep(model, mse_loss, [(x, y)], samples=16).trace(H.names[0])) > 0
        assert not used or model.up.weight is before  # the user's own cache is as it was
