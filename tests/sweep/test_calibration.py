"""Sweeps of small models against their dense Gauss-Newton matrices: no bias over 400 draws, intervals that hold."""

from statistics import NormalDist

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.layer_calls import without_cache
from curvoscope.curvature import trainable
from curvoscope.losses import objective_of
from curvoscope.sweep import statistics
from curvoscope.sweep.plan import CHUNK
from curvoscope.sweep.run import _Sweeping
from sweep_cases import bert, convolutions, encoder, gpt2

DRAWS, SAMPLES = 400, 8  # sweeps, and samples of each
MOST = 24  # blocks and heads of one model
CHANCE = 1e-3  # that any number of a model is further from the truth than its limit
HELD = 0.92, 0.98


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


# tied embeddings, heads and uneven batches; padding; squares over uneven batches; label smoothing; losses of one's own
CASES = [gpt2, bert, encoder, convolutions, weighted, log_cosh]


class Swept:
    """400 sweeps of a model: the Gram matrices of some blocks and heads, and the truth of all their pairs."""

    def __init__(self, make):
        torch.manual_seed(0)
        model, loss, batches = make()
        model = model.double().eval()
        blocks = trainable(model, cv.blocks_of(model))
        rows = blocks.per_head()
        dense = cv.hessian(model, loss, batches, blocks=rows, method="autodiff").outer.dense()
        squares = dense.square()
        for dim in (0, 1):  # |H_bc|_F^2 of heads, and of blocks without
            squares = torch.stack([part.sum(dim) for part in squares.split(list(rows.sizes.values()), dim)], dim)
        traces = torch.stack([part.sum() for part in dense.diagonal().split(list(rows.sizes.values()))])
        wholes = [
            [f"{name}.{i}" for i in range(block.heads)] for name, block in blocks.items() if (block.heads or 1) > 1
        ]
        parts = [*([name] for name in rows), *wholes]  # a head, or a block with all of its heads
        places = torch.tensor([[float(name in part) for part in parts] for name in rows]).double()
        seen = places.T @ squares @ places
        known = (seen.diagonal() > 1e-18 * seen.max()).nonzero().flatten()  # keys' biases have no curvature
        chosen = known[:: -(-len(known) // MOST)]
        self.squares, self.traces = seen[chosen][:, chosen], (places.T @ traces)[chosen]
        with without_cache(model):
            engine = Autodiff(model, objective_of(loss), Batches(batches), blocks)
            sweeping = _Sweeping(engine, 11, None, None)
            sweeping._examine()
            for _ in range(DRAWS * SAMPLES // CHUNK):
                sweeping._add_chunk(CHUNK)
        generator, grams = torch.Generator().manual_seed(12), []
        for chunk in sweeping.sweep.chunks:  # its samples are sorted by batch; shuffled, they are independent again
            order = torch.randperm(CHUNK, generator=generator)
            found = torch.stack([chunk[name] for name in rows])[:, order[:, None], order]
            grams.append(torch.einsum("rij,rq->qij", found, places[:, chosen]))
        self.whole = grams = torch.stack(grams)  # (50, blocks, 64, 64)
        some = [grams[..., i : i + SAMPLES, i : i + SAMPLES] for i in range(0, CHUNK, SAMPLES)]
        self.grams = torch.cat(some)  # (400, blocks, 8, 8): what sweeps of 8 samples find

    def deviations(self):
        """Traces, and squared norms of all pairs: means over the draws less the truth, in their standard errors."""
        count = len(self.traces)
        first, second = torch.triu_indices(count, count)
        squares = [statistics.squared_norms([self.grams[:, i : i + 1]], [self.grams])[0] for i in range(count)]
        traces = [[statistics.trace([K]) for K in draw] for draw in self.grams]
        found = torch.cat([torch.tensor(traces, dtype=torch.float64), torch.stack(squares, 1)[:, first, second]], 1)
        truth = torch.cat([self.traces, self.squares[first, second]])
        return (found.mean(0) - truth) / (found.std(0) / DRAWS**0.5 + 1e-9 * truth)

    def held(self):
        """For traces, norms, and norms of some pairs: the share of 95 % intervals of 64 samples with the truth in."""
        shares = []
        for b, trace in enumerate(self.traces):
            shares.append(held([statistics.trace([draw[b]]) for draw in self.whole], float(trace)))
            for c in {0, b}:
                several = zip(*statistics.squared_norms([self.whole[:, b]], [self.whole[:, c]]), strict=True)
                norms = [statistics.norm(statistics.SquaredNorms(*one), CHUNK) for one in several]
                shares.append(held(norms, float(self.squares[b, c]) ** 0.5))
        return shares


def held(estimates, truth):
    return sum(low <= truth <= high for low, high in (one.interval() for one in estimates)) / len(estimates)


@pytest.mark.slow
def test_against_dense_matrices():
    near, shares = [], []
    for make in CASES:
        sweeps = Swept(make)
        off = sweeps.deviations().abs()
        limit = NormalDist().inv_cdf(1 - CHANCE / (2 * len(off)))
        assert float(off.max()) <= limit, make.__name__
        near.append((off <= 3).double())
        shares += sweeps.held()
    assert float(torch.cat(near).mean()) >= 0.97
    assert HELD[0] <= sum(shares) / len(shares) <= HELD[1]
