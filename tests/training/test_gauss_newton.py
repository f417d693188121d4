"""The Gauss-Newton optimizer: its factors, its steps, its damping and its state."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import Batches
from curvoscope.errors import ModelError, NonFiniteError, RangeError
from curvoscope.losses import objective_of
from curvoscope.training import GaussNewton
from curvoscope.training.factors import sampled_curvature
from reference import normal


def case(seed=0):
    r = normal(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(r(*parameter.shape) / 2)
    X = r(30, 4) * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return model, X, (X @ r(4, 3)).argmax(1)


def test_factors_are_those_of_kfac():
    """Over many samples, the factors of a weight and the diagonal of a bias are the exact ones."""
    model, X, y = case()
    named, objective = dict(model.named_parameters()), objective_of(nn.CrossEntropyLoss())
    found = sampled_curvature(objective, model(X), y, named, [(0, i) for i in range(100)])
    H = cv.hessian(model, nn.CrossEntropyLoss(), [(X, y)])
    for name in ("0.weight", "2.weight"):
        exact = cv.approximations.kfac(H, name).dense()
        left, right = found[name].left, found[name].right
        estimated = torch.kron(left, right)  # over the entries of the stored weight
        order = H._blocks[name].gather({name: torch.arange(len(exact)).view(named[name].shape)}).long()
        assert (estimated[order][:, order] - exact).norm() < 0.3 * exact.norm()
    truth = H.outer["0.bias"].dense().diagonal()
    assert (found["0.bias"].diagonal - truth).norm() < 0.5 * truth.norm()


def test_first_step_is_the_damped_solve():
    """With one step, no momentum and weight decay: -(A + decay + damping)^-1 (gradient + decay w), times its scale."""
    model, X, y = case()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = nn.functional.cross_entropy(model(X), y)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), momentum=0.0, weight_decay=0.1, damping=0.5)
    assert optimizer.step((X, y)) == pytest.approx(float(loss.detach()))
    state = optimizer.state[model[0].weight]["curvature"]
    A = torch.kron(state["left"], state["right"]) + 0.6 * torch.eye(20).double()
    step = -torch.linalg.solve(A, (gradients["0.weight"] + 0.1 * before["0.weight"]).flatten())
    moved = (model[0].weight.detach() - before["0.weight"]).flatten()
    assert 0 < optimizer.scale <= 1 and torch.allclose(moved, optimizer.scale * step, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_it_does_not_mind_badly_scaled_inputs(seed):
    """A condition of 1e6: 20 steps reach what gradient descent at its best step size does not come near to."""
    r = normal(seed)
    X = r(40, 4) * torch.tensor([1.0, 0.1, 0.01, 0.001])
    Y, model = X @ torch.diag(torch.tensor([1.0, 10.0, 100.0, 1000.0]).double()) @ r(4, 3), nn.Linear(4, 3).double()
    optimizer = GaussNewton(model, nn.MSELoss(), momentum=0.0, damping=1e-8, seed=seed)
    for _ in range(20):
        optimizer.step((X, Y))
    plain = nn.Linear(4, 3).double()
    descent = torch.optim.SGD(plain.parameters(), lr=1 / float(2 / 3 * torch.linalg.matrix_norm(X, 2) ** 2 / 40))
    for _ in range(100):
        descent.zero_grad()
        nn.functional.mse_loss(plain(X), Y).backward()
        descent.step()
    losses = [float(nn.functional.mse_loss(network(X), Y).detach()) for network in (model, plain)]
    assert losses[0] < 1e-3 * losses[1]


def test_a_step_that_raises_the_loss_is_undone():
    model, X, y = case()
    optimizer = GaussNewton(model, nn.CrossEntropyLoss(), momentum=0.0, damping=1.0)
    optimizer.step((X, y))
    before, damping = [p.detach().clone() for p in model.parameters()], optimizer.damping
    with torch.no_grad():
        model[0].weight.add_(100)
        (batch,) = Batches([(X, y)])
        optimizer._judge(batch, 0.0, -0.1, before)
    assert torch.equal(model[0].weight, before[0]) and optimizer.damping == 4 * damping


def test_groups_and_state():
    """A run that is stored and continued is the run that went on; the second group does not move."""
    runs = []
    for cut in (False, True):
        model, X, y = case()
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 1e-300}]
        optimizer = GaussNewton(model, nn.CrossEntropyLoss(), groups, weight_decay=1e-3, seed=1)
        fixed = model[2].weight.detach().clone()
        for step in range(6):
            if cut and step == 3:
                state = optimizer.state_dict()
                optimizer = GaussNewton(model, nn.CrossEntropyLoss(), groups, weight_decay=1e-3, seed=1)
                optimizer.load_state_dict(state)
            optimizer.step((X, y))
        assert torch.equal(model[2].weight, fixed)
        runs.append(model[0].weight.detach())
    assert torch.allclose(*runs, rtol=1e-10)


def test_bad_input():
    model, X, y = case()
    for options in ({"lr": 0.0}, {"momentum": 1.0}, {"damping": -1.0}, {"every": 0}, {"weight_decay": -1.0}):
        with pytest.raises(RangeError, match=next(iter(options))):
            GaussNewton(model, nn.CrossEntropyLoss(), **options)
    with pytest.raises(ModelError, match="loss_fn"):
        GaussNewton(model, None)
    with pytest.raises(ModelError, match="no parameter of the model"):
        GaussNewton(model, nn.CrossEntropyLoss(), [nn.Parameter(torch.zeros(2))])
    with pytest.raises(ModelError, match="gauss_newton"):
        GaussNewton(model, nn.CrossEntropyLoss()).load_state_dict(torch.optim.SGD(model.parameters(), 1.0).state_dict())
    with pytest.raises(NonFiniteError, match="lower lr"):
        GaussNewton(model, nn.CrossEntropyLoss()).step((X * float("inf"), y))
