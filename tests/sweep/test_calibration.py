"""Sweeps of small models against their dense Gauss-Newton matrices: no bias over many seeds, intervals that hold."""

import functools
import math

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.curvature import trainable
from curvoscope.losses import objective_of
from curvoscope.sweep.layers import without_cache
from curvoscope.sweep.result import Sweep
from curvoscope.sweep.run import _Sweeping
from sweep_cases import bert, convolutions, encoder, gpt2

DRAWS, SAMPLES = 120, 64
HELD = 0.92, 0.98
SLACK = 4 * math.sqrt(0.05 * 0.95 / DRAWS)


def weighted():
    """A convex loss that is none of ours: cross-entropy with class weights, over batches of different sizes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    X, labels = torch.randn(9, 4).double(), torch.arange(9) % 3
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())
    return model, loss, [(X[:6], labels[:6]), (X[6:], labels[6:])]


def log_cosh():
    """A convex loss that is a function of one's own: log cosh of the residuals."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    X, Y = torch.randn(9, 4).double(), 3 * torch.randn(9, 3).double()
    return model, lambda F, Y: torch.logaddexp(F - Y, Y - F).mean(), [(X, Y)]


OF_LAYERS = (gpt2, bert, encoder)  # one of them: how the walk goes from layer to layer is tested in test_sweep
CASES = {make.__name__: functools.partial(make, layers=1) for make in OF_LAYERS}
CASES |= {make.__name__: make for make in (convolutions, weighted, log_cosh)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_against_the_dense_matrix(case):
    torch.manual_seed(0)
    model, loss, batches = CASES[case]()
    model = model.double().eval()
    blocks = trainable(model, cv.blocks_of(model))
    dense = cv.hessian(model, loss, batches, blocks=blocks, method="autodiff").outer.dense()
    ends = torch.tensor([0, *blocks.sizes.values()]).cumsum(0).tolist()
    places = {name: slice(a, b) for name, a, b in zip(blocks, ends, ends[1:], strict=False)}
    largest = float(dense.abs().max())
    names = [name for name in blocks if float(dense[places[name], places[name]].norm()) > 1e-9 * largest][::3]
    with without_cache(model):
        engine = Autodiff(model, objective_of(loss), Batches(batches), blocks)
        sweeping = _Sweeping(engine, 11, None, None)
        sweeping._examine()
        for _ in range(DRAWS):
            sweeping._add_chunk(SAMPLES)
    sweeps = [Sweep(blocks, [chunk], 0.0) for chunk in sweeping.sweep.chunks]
    pairs = [(name, other) for name in names for other in names[:2]]
    shares = []
    for name, other in pairs:
        truth = float(dense[places[name], places[other]].norm())
        found = [sweep.frobenius_norm(name, other) for sweep in sweeps]
        squares = torch.tensor([float(one) ** 2 for one in found]).double()
        error = float(squares.std()) / DRAWS**0.5
        assert abs(float(squares.mean()) - truth**2) <= 4 * error + 1e-9 * truth**2, (name, other)
        if truth > 3 * error:
            shares.append(held(found, truth))
    for name in names:
        truth = float(dense[places[name], places[name]].trace())
        found = [sweep.trace(name) for sweep in sweeps]
        values = torch.tensor([float(one) for one in found]).double()
        assert abs(float(values.mean()) - truth) <= 4 * float(values.std()) / DRAWS**0.5 + 1e-9 * truth, name
        shares.append(held(found, truth))
    assert min(shares) >= HELD[0] - SLACK
    assert HELD[0] - SLACK / 3 <= sum(shares) / len(shares) <= HELD[1] + SLACK / 3


def held(estimates, truth):
    return sum(low <= truth <= high for low, high in (one.interval() for one in estimates)) / len(estimates)
