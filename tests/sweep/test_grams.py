"""Gram matrices of the walk against inner products of gradients that autograd forms, sample by sample."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.cotangents import SoftmaxCotangents, cotangents
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.layer_calls import without_cache
from curvoscope.curvature import trainable
from curvoscope.losses import objective_of
from curvoscope.sweep.run import _Sweeping
from sweep_cases import albert, bert, beside, convolutions, encoder, gpt2, inside, llama, mixtral, t5, unusual, vit

SAMPLES = 6
FLOAT32_NORMS = [llama, t5, mixtral]  # their norms round to float32 inside
CASES = [gpt2, llama, bert, t5, albert, vit, mixtral, encoder, convolutions, unusual, beside, inside]


def sampled(make, cut, *patterns):
    """The Gram matrices of the walk, and the gradients of each row by autograd, of all blocks or of some."""
    torch.manual_seed(0)
    model, loss, batches = make()
    model = model.double().eval()
    with without_cache(model):
        blocks = trainable(model, cv.blocks_of(model))
        blocks = blocks.select(*patterns) if patterns else blocks
        engine = Autodiff(model, objective_of(loss), Batches(batches), blocks)
        sweeping = _Sweeping(engine, 3, None, None)
        sweeping._cut = cut
        sweeping._examine()
        sweeping._add_chunk(SAMPLES)
        rows = blocks.per_head()
        found = torch.zeros(SAMPLES, sum(rows.sizes.values()), dtype=torch.float64)
        weights, leaves = engine.snapshot.leaves(sorted(blocks.parameters))
        with engine.running():
            for draw in sweeping._draws(SAMPLES, 0)[0]:
                outputs = engine.snapshot(weights, draw.batch)
                F, draws = cotangents(engine.objective, outputs, draw.batch.targets)
                for sample, seed in zip(draw.samples, draw.seeds, strict=True):
                    gradients = torch.autograd.grad(
                        F, list(leaves.values()), draws.draw(seed), retain_graph=True, materialize_grads=True
                    )
                    found[sample] = rows.gather(dict(zip(leaves, gradients, strict=True)))
    return sweeping, rows, found


def check(make, sweeping, rows, gradients):
    """Every Gram matrix is that of the gradients, to rounding."""
    largest = float(gradients.square().sum(1).max())
    rounding = torch.finfo(torch.float32 if make in FLOAT32_NORMS else torch.float64).eps
    for name, some in zip(rows, gradients.split(list(rows.sizes.values()), 1), strict=True):
        K = sweeping.sweep.chunks[0][name]
        torch.testing.assert_close(K, some @ some.T, rtol=1e4 * rounding, atol=1e3 * rounding * largest)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cut", [True, False], ids=["layers", "whole"])
def test_against_gradients(make, cut):
    sweeping, rows, gradients = sampled(make, cut)
    assert set(sweeping.sweep.chunks[0]) == set(rows)
    check(make, sweeping, rows, gradients)


def classifier():
    X, labels = torch.randn(20, 3).double(), torch.arange(20) % 11
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 11)), nn.CrossEntropyLoss(), [(X, labels)]


@pytest.mark.parametrize(
    ("make", "patterns"),
    [
        (gpt2, ["h.*"]),
        (llama, ["h.*"]),
        (bert, ["h.*"]),
        (classifier, ["0.weight"]),
        (classifier, ["0.weight", "2.bias"]),
    ],
)
def test_a_head_that_is_no_block_is_passed_by_columns(make, patterns, monkeypatch):
    """Cotangents of all columns of the vocabulary are never drawn for all samples."""
    monkeypatch.setattr("curvoscope.autodiff.cotangents.COLUMNS", 4)
    whole, drawn = SoftmaxCotangents.draw, []
    monkeypatch.setattr(SoftmaxCotangents, "draw", lambda self, seed: drawn.append(seed) or whole(self, seed))
    sweeping, rows, gradients = sampled(make, True, *patterns)
    assert len(drawn) == 1 + SAMPLES  # the sweep's look at one sample, and those of this test
    check(make, sweeping, rows, gradients)


def test_many_tokens_form_gradients():
    """With more tokens than rows the gradients are formed, some rows at a time: the same numbers."""

    def make():
        X = torch.randn(40, 3).double()
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
        return model, nn.MSELoss(), [(X, X), (X[:7], X[:7])]

    sweeping, rows, gradients = sampled(make, True)
    for name, some in zip(rows, gradients.split(list(rows.sizes.values()), 1), strict=True):
        torch.testing.assert_close(sweeping.sweep.chunks[0][name], some @ some.T, rtol=1e-10, atol=1e-14)


class Carrier(nn.Module):
    """A layer that hands a tensor to the next one beside its output."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x):
        y = torch.tanh(self.linear(x)) + sum(self.held)
        self.held[:] = [y * y]
        return y


class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = []
        self.layers = nn.ModuleList([Carrier(self.held) for _ in range(3)])

    def forward(self, x):
        self.held.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_that_cannot_run_alone():
    """The sweep sees that a path between layers is missing, and takes the model whole."""
    torch.manual_seed(0)
    X = torch.randn(6, 4).double()
    batches = [(X, torch.zeros_like(X))]
    model = Carried().double()
    sweep = cv.sweep(model, nn.MSELoss(), batches, samples=256, seed=0)
    exact = cv.hessian(model, nn.MSELoss(), batches).outer
    for name in sweep.names:
        low, high = sweep.trace(name).interval(0.9999)
        assert low <= exact[name].trace() <= high
