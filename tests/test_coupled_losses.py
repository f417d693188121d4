"""Losses in which rows meet, and losses with a penalty on the parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as f

import curvoscope as cv
from autodiff_cases import MLP, points
from curvoscope.errors import LossError, ModelError
from reference import normal, relative
from test_loss_table import Rows, truth


def info_nce(outputs, targets):
    unit = f.normalize(outputs, dim=-1)
    others = unit @ unit.T / 0.3 - 20 * torch.eye(len(unit), dtype=unit.dtype)
    return f.cross_entropy(others, targets.argmax(-1) % len(unit))


def two_towers(outputs, targets):
    left, right = (f.normalize(part, dim=-1) for part in outputs)
    scores = 4 * left @ right.T
    return (f.cross_entropy(scores, targets) + f.cross_entropy(scores.T, targets)) / 2


class Towers(Rows):
    def forward(self, x):
        found = super().forward(x)
        return found[:, :3], found[:, 2:]


def batch(rows=7):
    return normal(5)(rows, 3), normal(2)(rows, 5)


@pytest.mark.parametrize("rows", [None, 1, 2, 3, 7])
def test_contrastive_over_micro_batches_is_that_of_the_whole(rows):
    model, (inputs, targets) = Rows(), batch()
    expected = truth(model, info_nce, inputs, targets)
    H = cv.hessian(model, cv.losses.Contrastive(info_nce), [(inputs, targets)], micro_batch=rows)
    assert H.loss == pytest.approx(info_nce(model(inputs), targets).item(), rel=1e-13)
    assert relative(H.dense(), expected) < 1e-12
    assert relative(H.outer.dense() + H.functional.dense(), expected) < 1e-12


def test_its_parts_are_those_of_the_whole():
    model = Rows()
    loss = cv.losses.Contrastive(info_nce)
    whole, cut = (cv.hessian(model, loss, [batch()], micro_batch=rows) for rows in (None, 3))
    for part in ("outer", "functional"):
        assert relative(getattr(cut, part).dense(), getattr(whole, part).dense()) < 1e-12
    v = normal(8)(cut["up"].shape[0])
    assert relative(cut.stacked("up") @ v, torch.cat([whole.outer["up"] @ v, whole.functional["up"] @ v])) < 1e-12
    block = cut["up"].dense()
    assert relative(block, whole["up"].dense()) < 1e-12


@pytest.mark.parametrize("memory_limit", [None, 1])
def test_two_outputs_several_batches_and_little_memory(memory_limit):
    """Batches are units: their rows do not meet, and they are weighted by their rows."""
    model = Towers()
    inputs = normal(5)(7, 3)
    batches = [(inputs[:4], torch.arange(4)), (inputs[4:], torch.arange(3))]
    expected = sum(len(x) / 7 * truth(model, two_towers, x, y) for x, y in batches)
    loss = cv.losses.Contrastive(two_towers)
    for rows in (None, 2):
        H = cv.hessian(model, loss, batches, micro_batch=rows, memory_limit=memory_limit)
        assert relative(H.dense(), expected) < 1e-12


def test_contrastive_is_refused_where_it_cannot_be_cut():
    loss = cv.losses.Contrastive(info_nce)
    with pytest.raises(ModelError, match="whole batches"):
        cv.hessian(Rows(), loss, [batch()], micro_batch=2, hvp="difference")
    with pytest.raises(ModelError, match="whole batches"):
        cv.hessian(Rows(), loss, [batch()], micro_batch=2, split="layer")
    with pytest.raises(ModelError, match="Contrastive"):
        cv.hessian(Rows(), loss, [batch()], micro_batch=2, method="exact")


def test_by_differences_on_whole_batches():
    loss = cv.losses.Contrastive(info_nce)
    H, expected = (cv.hessian(Rows(), loss, [batch()], hvp=hvp) for hvp in ("difference", "autodiff"))
    v = normal(1)(H.shape[0])
    assert relative(H @ v, expected @ v) < 1e-6


def ridge(parameters):
    return 0.05 * sum(weight.square().sum() for weight in parameters.values())


def bent(parameters):
    return parameters["up.weight"].pow(4).sum() + (parameters["down.bias"].sum() * parameters["up.bias"].sum()).cos()


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("penalty", [ridge, bent])
def test_regularised_counts_the_penalty_once(penalty, rows):
    model, (inputs, targets) = MLP(), points(5)
    names = [name for name, _ in model.named_parameters()]

    def loss(theta):
        parts = theta.split([p.numel() for p in model.parameters()])
        weights = {n: w.view(p.shape) for n, w, p in zip(names, parts, model.parameters(), strict=True)}
        return f.mse_loss(torch.func.functional_call(model, weights, (inputs,)), targets) + penalty(weights)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = torch.autograd.functional.hessian(loss, flat)
    regularised = cv.losses.Regularised(f.mse_loss, penalty)
    H = cv.hessian(model, regularised, [(inputs, targets)], micro_batch=rows)
    order = torch.cat([_positions(model, H, name) for name in H.names])
    expected = expected[order][:, order]
    assert H.loss == pytest.approx(float(loss(flat)), rel=1e-13)
    assert relative(H.dense(), expected) < 1e-12
    assert relative(H.outer.dense() + H.functional.dense(), expected) < 1e-12
    plain = cv.hessian(model, f.mse_loss, [(inputs, targets)])
    assert relative(H.functional.dense(), plain.functional.dense()) < 1e-12


def _positions(model, H, name):
    """Where the entries of a block stand in the flat vector of all parameters, in the order of the block."""
    numbers, start = {}, 0
    for path, parameter in model.named_parameters():
        numbers[path] = torch.arange(start, start + parameter.numel(), dtype=torch.float64).view(parameter.shape)
        start += parameter.numel()
    return cv.blocks_of(model)[name].gather(numbers).long()


def test_a_penalty_with_a_plain_function_whose_terms_are_found():
    model, (inputs, targets) = MLP(), points(5)
    regularised = cv.losses.Regularised(lambda o, t: (o - t).square().mean(), ridge)
    known = cv.losses.Regularised(f.mse_loss, ridge)
    H, expected = (cv.hessian(model, loss, [(inputs, targets)], micro_batch=2) for loss in (regularised, known))
    v = normal(1)(H.shape[0])
    assert relative(H @ v, expected @ v) < 1e-13
    by_differences = cv.hessian(model, known, [(inputs, targets)], hvp="difference")
    assert relative(by_differences @ v, expected @ v) < 1e-6


def test_bad_penalties():
    with pytest.raises(LossError, match=r"penalty.*scalar tensor.*float"):
        cv.hessian(MLP(), cv.losses.Regularised(f.mse_loss, lambda parameters: 1.0), [points()])
    with pytest.raises(LossError, match="Contrastive, which takes no penalty"):
        cv.losses.Regularised(cv.losses.Contrastive(info_nce), ridge)
    with pytest.raises(LossError, match="is a sum over rows"):
        loss = cv.losses.Regularised(nn.MSELoss(reduction="sum"), ridge)
        cv.hessian(MLP(), loss, [points()], micro_batch=2)
    with pytest.raises(ModelError, match="Regularised has products only"):
        cv.hessian(MLP(), cv.losses.Regularised(f.mse_loss, ridge), [points()], method="exact")
