"""Losses of every kind, over whole data, micro-batches and uneven batches: the same Hessian, or an error."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f
from torch.utils._pytree import tree_map

import curvoscope as cv
from curvoscope.curvature import CrossEntropy, MeanSquaredError
from curvoscope.errors import LossError
from reference import normal, relative

CLASSES, LENGTH, ROWS = 5, 4, 7
WEIGHTS = torch.tensor([0.3, 2.0, 1.0, 0.7, 1.6], dtype=torch.float64)


class Rows(nn.Module):
    """(N, 3) -> (N, classes)."""

    def __init__(self):
        super().__init__()
        draw = normal(0)
        self.up, self.down = nn.Parameter(draw(3, 4)), nn.Parameter(draw(4, CLASSES))

    def forward(self, x):
        return torch.tanh(x @ self.up) @ self.down


@dataclass(frozen=True)
class Case:
    loss: Callable[[Any, Any], torch.Tensor]
    targets: Callable[[], Any]
    tokens: bool = False  # inputs (N, L, 3) instead of (N, 3)
    mixes: bool = False  # rows meet: refused over several batches
    whole: Callable[[Any, Any], torch.Tensor] | None = None  # the plain function, where the loss is an object

    @property
    def function(self):
        return self.whole or self.loss


def classes(*shape, ignore=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(CLASSES, shape, generator=generator)
    if ignore is not None:
        found[torch.rand(shape, generator=generator) < 0.35] = ignore
        found.flatten()[0], found.flatten()[1] = 1, ignore
    return found


def values(*shape):
    return normal(2)(*shape)


def soft(*shape):
    return normal(3)(*shape, CLASSES).softmax(-1)


def binary(*shape):
    return (normal(4)(*shape) > 0).double()


def mask(*shape):
    found = binary(*shape)
    found.flatten()[0] = 1
    return found


def swapped(logits):
    return logits.movedim(-1, 1)


def smooth_tokens(outputs, targets):
    return f.cross_entropy(swapped(outputs), targets, label_smoothing=0.1)


def shifted(outputs, targets):
    return f.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def by_hand(outputs, targets, ignored):
    kept = targets != ignored
    chosen = outputs.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return -(chosen * kept).sum() / kept.sum()


def info_nce(outputs, targets):
    unit = f.normalize(outputs, dim=-1)
    return f.cross_entropy(unit @ unit.T / 0.5 - 10 * torch.eye(len(unit)).double(), targets.argmax(-1) % len(unit))


def pairwise(outputs, targets):
    return (outputs[:, None] - outputs).square().sum(-1).add(1).sqrt().mean()


def masked(outputs, targets):
    given, kept = targets
    return ((outputs - given).square() * kept).sum() / kept.sum()


def weighted(outputs, targets):
    given, weight = targets
    return (weight * f.cross_entropy(outputs, given, reduction="none")).sum() / weight.sum()


def focal(outputs, targets):
    losses = f.cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def ridge(parameters):
    return 0.05 * sum(weight.square().sum() for weight in parameters.values())


def quartic(outputs, targets):
    return (outputs - targets).pow(4).mean()


CASES = {
    "cross-entropy": Case(f.cross_entropy, lambda: classes(ROWS)),
    "CrossEntropyLoss": Case(nn.CrossEntropyLoss(), lambda: classes(ROWS)),
    "CrossEntropyLoss, ignored": Case(nn.CrossEntropyLoss(ignore_index=2), lambda: classes(ROWS, ignore=2)),
    "CrossEntropyLoss, weights": Case(nn.CrossEntropyLoss(WEIGHTS), lambda: classes(ROWS)),
    "CrossEntropyLoss, weights and ignored": Case(nn.CrossEntropyLoss(WEIGHTS), lambda: classes(ROWS, ignore=-100)),
    "CrossEntropyLoss, smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.2), lambda: classes(ROWS)),
    "CrossEntropyLoss, smoothing, weights, ignored": Case(
        nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), lambda: classes(ROWS, ignore=-100)
    ),
    "CrossEntropyLoss, soft": Case(nn.CrossEntropyLoss(), lambda: soft(ROWS)),
    "CrossEntropyLoss, soft, smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.1), lambda: soft(ROWS)),
    "CrossEntropyLoss, sum": Case(nn.CrossEntropyLoss(reduction="sum"), lambda: classes(ROWS)),
    "cross-entropy, lambda": Case(lambda o, t: f.cross_entropy(o, t), lambda: classes(ROWS)),
    "cross-entropy, lambda, ignored": Case(lambda o, t: f.cross_entropy(o, t), lambda: classes(ROWS, ignore=-100)),
    "cross-entropy, partial, ignored": Case(partial(f.cross_entropy, ignore_index=3), lambda: classes(ROWS, ignore=3)),
    "cross-entropy, lambda, weights": Case(lambda o, t: f.cross_entropy(o, t, WEIGHTS), lambda: classes(ROWS)),
    "cross-entropy, lambda, soft": Case(lambda o, t: f.cross_entropy(o, t), lambda: soft(ROWS)),
    "cross-entropy, lambda, sum": Case(lambda o, t: f.cross_entropy(o, t, reduction="sum"), lambda: classes(ROWS)),
    "cross-entropy, twice the mean": Case(lambda o, t: 2 * f.cross_entropy(o, t), lambda: classes(ROWS, ignore=-100)),
    "cross-entropy of tokens": Case(
        lambda o, t: f.cross_entropy(o.flatten(0, 1), t.flatten()), lambda: classes(ROWS, LENGTH, ignore=-100), True
    ),
    "cross-entropy of tokens, shifted": Case(shifted, lambda: classes(ROWS, LENGTH, ignore=-100), True),
    "cross-entropy of tokens, smoothing": Case(smooth_tokens, lambda: classes(ROWS, LENGTH, ignore=-100), True),
    "cross-entropy by hand": Case(partial(by_hand, ignored=-100), lambda: classes(ROWS, LENGTH, ignore=-100), True),
    "cross-entropy by hand, padding": Case(partial(by_hand, ignored=0), lambda: classes(ROWS, LENGTH, ignore=0), True),
    "CrossEntropy": Case(
        CrossEntropy(), lambda: classes(ROWS, LENGTH, ignore=-100), True, whole=partial(by_hand, ignored=-100)
    ),
    "CrossEntropy, soft": Case(CrossEntropy(), lambda: soft(ROWS), whole=f.cross_entropy),
    "NLLLoss": Case(lambda o, t: nn.NLLLoss()(o.log_softmax(-1), t), lambda: classes(ROWS, ignore=-100)),
    "NLLLoss, weights": Case(lambda o, t: nn.NLLLoss(WEIGHTS)(o.log_softmax(-1), t), lambda: classes(ROWS)),
    "focal": Case(focal, lambda: classes(ROWS)),
    "weights of rows": Case(weighted, lambda: (classes(ROWS), values(ROWS).square())),
    "MSELoss": Case(nn.MSELoss(), lambda: values(ROWS, CLASSES)),
    "MSELoss, sum": Case(nn.MSELoss(reduction="sum"), lambda: values(ROWS, CLASSES)),
    "MeanSquaredError": Case(MeanSquaredError(), lambda: values(ROWS, CLASSES), whole=f.mse_loss),
    "mse, lambda": Case(lambda o, t: (o - t).square().mean(), lambda: values(ROWS, LENGTH, CLASSES), True),
    "mse, lambda, sum": Case(lambda o, t: (o - t).square().sum(), lambda: values(ROWS, CLASSES)),
    "mse, half, sum over columns": Case(
        lambda o, t: 0.5 * (o - t).square().sum(-1).mean(), lambda: values(ROWS, CLASSES)
    ),
    "mse, masked": Case(masked, lambda: (values(ROWS, CLASSES), mask(ROWS, CLASSES))),
    "mse, masked by booleans": Case(masked, lambda: (values(ROWS, CLASSES), mask(ROWS, CLASSES).bool())),
    "root of the mean": Case(lambda o, t: (o - t).square().mean().sqrt(), lambda: values(ROWS, CLASSES), mixes=True),
    "SmoothL1Loss": Case(nn.SmoothL1Loss(), lambda: values(ROWS, CLASSES)),
    "HuberLoss": Case(nn.HuberLoss(delta=0.7), lambda: values(ROWS, CLASSES)),
    "quartic": Case(quartic, lambda: values(ROWS, CLASSES)),
    "KLDivLoss, batchmean": Case(
        lambda o, t: nn.KLDivLoss(reduction="batchmean")(o.log_softmax(-1), t), lambda: soft(ROWS)
    ),
    "KLDivLoss, mean": Case(lambda o, t: (t * (t.log() - o.log_softmax(-1))).mean(), lambda: soft(ROWS)),
    "BCEWithLogitsLoss": Case(nn.BCEWithLogitsLoss(), lambda: binary(ROWS, CLASSES)),
    "BCEWithLogitsLoss, pos_weight": Case(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), lambda: binary(ROWS, CLASSES)),
    "PoissonNLLLoss": Case(nn.PoissonNLLLoss(), lambda: values(ROWS, CLASSES).square()),
    "SoftMarginLoss": Case(nn.SoftMarginLoss(), lambda: 2 * binary(ROWS, CLASSES) - 1),
    "InfoNCE": Case(info_nce, lambda: values(ROWS, CLASSES), mixes=True),
    "pairwise distances": Case(pairwise, lambda: values(ROWS, CLASSES), mixes=True),
    "variance of the batch": Case(
        lambda o, t: (o - o.mean(0)).square().mean(), lambda: values(ROWS, CLASSES), mixes=True
    ),
    "MeanLoss with terms": Case(
        cv.losses.MeanLoss(masked, lambda o, t: float(t[1].sum())),
        lambda: (values(ROWS, CLASSES), mask(ROWS, CLASSES)),
        whole=masked,
    ),
    "linear": Case(lambda o, t: (o * t).mean(), lambda: values(ROWS, CLASSES)),
}


def data(case):
    inputs = normal(5)(ROWS, LENGTH, 3) if case.tokens else normal(5)(ROWS, 3)
    return inputs, case.targets()


def truth(model, function, inputs, targets):
    """All entries of the Hessian, by autodiff of the whole."""
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(theta):
        parts = theta.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return function(torch.func.functional_call(model, weights, (inputs,)), targets)

    return torch.autograd.functional.hessian(loss, flat)


def uneven(batch):
    return [tree_map(lambda tensor, cut=cut: tensor[cut], batch) for cut in (slice(0, 2), slice(2, 6), slice(6, 7))]


def test_there_are_forty():
    assert len(CASES) >= 40


@pytest.mark.parametrize("cut", ["whole", "micro-batches", "single rows", "uneven batches"])
@pytest.mark.parametrize("name", CASES)
def test_the_hessian_of_the_whole_or_an_error(name, cut):
    case, model = CASES[name], Rows()
    inputs, targets = data(case)
    batches = uneven((inputs, targets)) if cut == "uneven batches" else [(inputs, targets)]
    rows = {"micro-batches": 3, "single rows": 1}.get(cut)
    if case.mixes and cut != "whole":
        with pytest.raises(LossError, match=r"loss_fn.*Contrastive"):
            cv.hessian(model, case.loss, batches, micro_batch=rows)
        return
    expected = truth(model, case.function, inputs, targets)
    H = cv.hessian(model, case.loss, batches, micro_batch=rows)
    size = float(expected.abs().max()) or 1.0
    assert float((H.dense() - expected).abs().max()) < 1e-12 * max(1.0, size)
    assert relative(H.outer.dense() + H.functional.dense(), expected) < 1e-12


def test_a_mean_with_empty_parts_is_not_a_sum():
    """In every comparison one part has no terms and the loss 0, so that the other one alone adds up to the whole."""

    def masked(outputs, targets):
        mask, given = targets
        return (outputs.pow(4).mean(1) * mask * given[:, 0]).sum() / mask.sum().clamp_min(1e-300)

    mask, given, inputs = torch.tensor([1.0, 0, 1, 1, 0, 1]).double(), values(6, CLASSES).abs(), normal(3)(6, 3)
    batches = [(inputs[part], (mask[part], given[part])) for part in (slice(1), slice(1, 4), slice(4, 6))]
    with pytest.raises(LossError, match="which no number of terms explains"):
        cv.hessian(Rows(), masked, batches)
    loss = cv.losses.MeanLoss(masked, lambda outputs, targets: float(targets[0].sum()))
    whole, found = (cv.hessian(Rows(), loss, some).dense() for some in ([(inputs, (mask, given))], batches))
    assert relative(found, whole) < 1e-10
