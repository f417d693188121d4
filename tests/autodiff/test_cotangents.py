"""Cotangents g: linear in their signs, g = A e, with A A^T = S, the Hessian of the loss that torch finds."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff import cotangents as module_under_test
from curvoscope.autodiff.cotangents import column_ranges, cotangents, signs
from curvoscope.errors import LossError
from curvoscope.losses import objective_of

torch.manual_seed(0)
LOGITS = torch.randn(4, 5).double()
WORDS = torch.tensor([0, 4, -100, 2])
SEQUENCES = torch.randn(2, 3, 5).double()
NEXT = torch.tensor([[0, 1, 2], [3, -100, 4]])
SOFT = torch.rand(4, 5).double().softmax(-1)
VALUES = torch.randn(4, 5).double()
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0]).double()


def pairwise(F, targets):
    """Couples the rows of a batch: log sum exp of all their entries together."""
    return torch.logsumexp(F.flatten(), 0) + F.square().mean()


LOSSES = {
    "cross-entropy": (cv.losses.CrossEntropy(), LOGITS, WORDS),
    "of shifted words": (cv.losses.CrossEntropy(shift=True), SEQUENCES, NEXT),
    "classes in the middle": (nn.CrossEntropyLoss(), SEQUENCES.mT, NEXT),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), LOGITS, WORDS),
    "probabilities": (nn.CrossEntropyLoss(), LOGITS, SOFT),
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), LOGITS, WORDS),
    "squares": (nn.MSELoss(), LOGITS, VALUES),
    "binary": (nn.BCEWithLogitsLoss(), LOGITS, VALUES.sigmoid()),
    "Huber": (nn.HuberLoss(), LOGITS, VALUES),
    "coupled rows": (cv.losses.MeanLoss(pairwise, lambda F, targets: 1.0), LOGITS, WORDS),
    "exponential": (lambda F, Y: F.exp().mean(), LOGITS, VALUES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_covariance(name, monkeypatch):
    loss, F, targets = LOSSES[name]
    objective = objective_of(loss)
    with torch.enable_grad():
        leaf = F.clone().requires_grad_()
        _, draws = cotangents(objective, leaf, targets)
    size = F.numel()
    columns = []
    for entry in range(size):
        unit = torch.zeros(size, dtype=torch.float64)
        unit[entry] = 1
        monkeypatch.setattr(module_under_test, "signs", lambda shape, seed, like, unit=unit: unit.view(*shape))
        (g,) = draws.draw((0, 0))
        assert g.shape == F.shape
        columns.append(g.flatten())
    A = torch.stack(columns, 1)
    S = torch.func.hessian(lambda z: objective(z, targets))(F).reshape(size, size)
    torch.testing.assert_close(A @ A.T, S, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("outputs", [2, 3, 4, 5])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), lambda F, Y: F.sum(-1).square().mean()])
def test_few_outputs_that_a_loss_couples(loss, rows, outputs):
    """One row at a time, as approximations take them: two probes of random signs can be equal there."""
    if isinstance(loss, nn.CrossEntropyLoss):
        loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS[:outputs])
    F, targets = torch.linspace(-1, 1, rows * outputs).double().view(rows, outputs), torch.arange(rows)
    S = torch.func.hessian(lambda z: loss(z, targets))(F).reshape(F.numel(), F.numel())
    with torch.enable_grad():
        _, draws = cotangents(objective_of(loss), F.clone().requires_grad_(), targets)
    A = draws.root()[0].reshape(-1, F.numel())
    torch.testing.assert_close(A.T @ A, S, rtol=1e-10, atol=1e-12)


def test_columns_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(module_under_test, "COLUMNS", 2)
    (_,), draws = cotangents(cv.losses.CrossEntropy(), LOGITS, WORDS)
    seeds = [(3, 0), (3, 1)]
    inner = draws.inner_products(seeds)
    parts = torch.cat([draws.columns(*some, seeds, inner) for some in column_ranges(draws.classes)], -1)
    whole = torch.stack([draws.draw(seed)[0] for seed in seeds])
    torch.testing.assert_close(parts, whole)


def test_signs():
    found = signs((1000, 70), (1, 2), LOGITS)
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(found, signs((1000, 70), (1, 2), LOGITS))
    for other in ((1, 3), (2, 2), (2, 1)):
        product = float((found * signs((1000, 70), other, LOGITS)).mean())
        assert abs(product) < 5 / 70_000**0.5
    assert abs(float(found.mean())) < 5 / 70_000**0.5


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda F, Y: -(F - Y).square().mean(), "not convex"),
        (lambda F, Y: (F[:, 0] * F[:, 1]).mean(), "not convex"),
        (cv.losses.Regularised(nn.MSELoss(), lambda parameters: parameters["weight"].sum()), "loss alone"),
    ],
)
def test_refused(loss, said):
    model = nn.Linear(3, 5).double()
    with pytest.raises(LossError, match=said):
        cv.sweep(model, loss, [(LOGITS[:, :3], VALUES)], samples=8)


def test_a_loss_that_couples_too_much():
    def coupled(F, Y):
        return torch.logsumexp(F.flatten(), 0)

    with pytest.raises(LossError, match="couples 5,000 entries"):
        cv.sweep(nn.Linear(2, 50).double(), coupled, [(torch.zeros(100, 2).double(), torch.zeros(100))], samples=8)
