"""Norms at a checkpoint against autodiff, the bound through the moments, and attention driven to one-hot."""

import math

import pytest
import torch
from torch.func import functional_call, grad, jacfwd

from curvoscope.papers import tasks
from curvoscope.papers.experiments import Row
from curvoscope.papers.experiments.figures import phases
from curvoscope.papers.experiments.one_hot import query_bound, row_moments, row_numbers, sharpened, smallest_gap
from curvoscope.papers.experiments.setting import checkpoints
from curvoscope.papers.networks import GPT2

TINY = {"d": 4, "sequences": 3, "batch": 8, "checkpoints": (0, 4)}


@pytest.fixture(scope="module")
def values():
    """What a small configuration measures."""
    return phases.measure(phases.PhasesConfiguration(**TINY), {"norm": "pre"}, 1, 0)


@pytest.fixture
def network():
    """The same network after training, and its data."""
    model = GPT2(4, norm="pre", seed=1)
    for _ in checkpoints(model, (4,), 8, 0.003, 1):
        pass
    tokens = tasks.addition(3, seed=0)
    return model, tokens[:, :-1], tasks.answer_targets(tokens)


def block_hessian(model, name, inputs, targets):
    """The dense diagonal block of one parameter, by autodiff."""
    weight = dict(model.named_parameters())[name].detach()

    def loss(flat):
        logits = functional_call(model, {name: flat.view_as(weight)}, (inputs,))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    return jacfwd(grad(loss))(weight.flatten()).detach()


def attention_rows(model, inputs):
    """The causal rows of the answers (N, 6, L) and the inputs, from the formula."""
    block = model.blocks[0]
    with torch.no_grad():
        X = block.norm1(model.W_E[inputs] + model.W_pos[:17])
        scores = (X @ block.W_Q + block.b_Q) @ (X @ block.W_K + block.b_K).mT / 2
        later = torch.ones(17, 17).triu(1).bool()
        return scores.masked_fill(later, -math.inf)[:, 11:], X


def number(values, quantity, block, part, at):
    """The value of these coordinates."""
    return next(v.value for v in values if (v.quantity, v.block, v.part, v.at) == (quantity, block, part, at))


def test_numbers_of_the_rows_against_sums_over_keys(values, network):
    model, inputs, targets = network
    scores, X = attention_rows(model, inputs)
    A = scores.softmax(-1)
    entropy = second = third = 0.0
    for n in range(3):
        for i in range(6):
            a = A[n, i]
            entropy -= float((a[a > 0] * a[a > 0].log()).sum()) / 18
            centred = X[n] - a @ X[n]
            second += float((a * centred.square().sum(1)).sum()) / 18
            third += float(torch.einsum("j,ja,jb,jc->abc", a, centred, centred, centred).norm()) / 18
    square = float(X.square().sum(-1).mean())
    found = row_numbers(row_moments(model, inputs))
    expected = {"entropy": entropy, "M2": second / square, "M3": third / square**1.5}
    assert found == pytest.approx(expected, rel=1e-10)
    assert number(values, "entropy", "A", "moment", 4.0) == pytest.approx(entropy, rel=1e-10)
    assert number(values, "loss", "all", "total", 4.0) == pytest.approx(model.loss(inputs, targets).item(), rel=1e-12)


def test_block_norms_and_shares_against_autodiff(values, network):
    model, inputs, targets = network
    names = {"Q": "W_Q", "K": "W_K", "V": "W_V", "O": "W_O", "up": "W_up", "down": "W_down"}
    squares = {"outer": 0.0, "functional": 0.0}
    for block, name in names.items():
        total = block_hessian(model, f"blocks.0.{name}", inputs, targets)
        weight = dict(model.named_parameters())[f"blocks.0.{name}"].detach()

        def logits(flat, name=name, weight=weight):
            out = functional_call(model, {f"blocks.0.{name}": flat.view_as(weight)}, (inputs,))
            return out[:, 11:].flatten(0, 1)

        J = jacfwd(logits)(weight.flatten())  # (18, 12, p)
        pi = logits(weight.flatten()).detach().softmax(-1)
        S = (torch.diag_embed(pi) - pi[:, :, None] * pi[:, None, :]) / 18
        outer = torch.einsum("tvp,tvw,twq->pq", J, S, J)
        parts = {"outer": outer.norm().item(), "functional": (total - outer).norm().item()}
        for part, norm in parts.items():
            assert number(values, "frobenius_norm", block, part, 4.0) == pytest.approx(norm, rel=1e-8, abs=1e-14)
            squares[part] += norm**2
    share = squares["functional"] / sum(squares.values())
    assert number(values, "share", "all", "functional", 4.0) == pytest.approx(share, rel=1e-8)


@pytest.mark.parametrize("factor", [0.3, 3.0, 30.0])
def test_the_bound_is_above_the_norm_of_the_query_block_and_vanishes_with_the_moments(network, factor):
    model, inputs, targets = network
    with sharpened(model, factor):
        norm = float(block_hessian(model, "blocks.0.W_Q", inputs, targets).norm())
        assert norm <= query_bound(model, inputs, targets, row_moments(model, inputs))
    gap = smallest_gap(model, inputs)
    with sharpened(model, 60 / gap):
        assert query_bound(model, inputs, targets, row_moments(model, inputs)) < 1e-12


def test_the_smallest_gap_and_scores_that_are_put_back(network):
    model, inputs, _ = network
    scores, _ = attention_rows(model, inputs)
    gaps = [row.sort(descending=True).values[:2] for row in scores.flatten(0, 1)]
    gap = min(float(first - second) for first, second in gaps)
    assert smallest_gap(model, inputs) == pytest.approx(gap, rel=1e-9)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError), sharpened(model, 7.0):
        assert smallest_gap(model, inputs) == pytest.approx(7 * gap, rel=1e-9)
        raise RuntimeError
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_one_hot_attention_leaves_the_value_block_alone(values):
    """e^(-2βδ) and e^(-βδ) of the theory; between the two last places only the last row is left."""
    rates = {
        ("Q", "outer"): -2,
        ("K", "outer"): -2,
        ("Q", "functional"): -1,
        ("K", "functional"): -1,
        ("V", "outer"): 0,
    }
    for (block, part), rate in rates.items():
        last, before = (number(values, "sharpened", block, part, at) for at in (20.0, 18.0))
        assert math.log(last / before) / 2 == pytest.approx(rate, abs=0.01)


def test_the_verdicts(values):
    verdicts = phases.FIGURE.verdicts([Row({"norm": "pre"}, 1, value) for value in values])
    judged = [v for v in verdicts if v.agrees is not None]
    assert len(judged) == 7 and all(v.agrees for v in judged)
    bound = judged[-1]
    assert 0 < bound.fitted <= 1 and "at most 1" in bound.statement
    seen = {v.statement: v.fitted for v in verdicts if v.agrees is None}
    assert seen["functional share after 4 steps"] == number(values, "share", "all", "functional", 4.0)
