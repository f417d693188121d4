"""The minimum is one, λ_max is that of the dense Hessian, and gradient descent diverges where it must."""

import math

import pytest
import torch
from torch.func import functional_call, grad, jacfwd
from torch.nn.functional import cross_entropy

from curvoscope.papers import tasks
from curvoscope.papers.experiments import Row
from curvoscope.papers.experiments.anchored import Anchored, loss, minimum
from curvoscope.papers.experiments.figures import divergence

TINY = {"d": 4, "sequences": 8, "train": 100, "pull": 0.2, "factors": (0.9, 0.98, 1.02, 1.5), "long": 150}


@pytest.fixture(scope="module")
def found():
    """A small configuration, its minimum and what is measured there."""
    c, kept = divergence.DivergenceConfiguration(**TINY), []

    def once(*arguments):
        kept.append(minimum(*arguments))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "minimum", once)
        values = divergence.measure(c, {"norm": "none"}, 0, 5)
    model, batch = kept[0], c.probe()
    return c, model, batch, values


def one(values, quantity, **wanted):
    """The number of this name."""
    chosen = [v for v in values if v.quantity == quantity and all(getattr(v, k) == w for k, w in wanted.items())]
    assert len(chosen) == 1
    return chosen[0].value


def flat_loss(model, batch):
    """The loss as a function of all weights in one vector, with the penalty written out, and where it is."""
    named = dict(model.named_parameters())
    start = torch.cat([a.flatten() for a in model.anchor])
    weights = torch.cat([p.detach().flatten() for p in named.values()])

    def function(vector):
        parts = vector.split([p.numel() for p in named.values()])
        moved = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        logits = functional_call(model, moved, (batch[0],))[0]
        entropy = cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)
        return entropy + model.pull / 2 * (vector - start).square().sum()

    return function, weights


@pytest.mark.slow
def test_the_point_is_a_strict_minimum_and_its_eigenvalues_those_of_the_dense_hessian(found):
    _, model, batch, values = found
    function, weights = flat_loss(model, batch)
    eigenvalues = torch.linalg.eigvalsh(jacfwd(grad(function))(weights))
    assert float(grad(function)(weights).norm()) < 1e-13 and float(eigenvalues[0]) > 0
    assert one(values, "largest_eigenvalue") == pytest.approx(float(eigenvalues[-1]), rel=1e-9)
    assert one(values, "smallest_eigenvalue") == pytest.approx(float(eigenvalues[0]), abs=1e-5 * float(eigenvalues[-1]))
    assert one(values, "loss") == pytest.approx(float(function(weights)), rel=1e-12)


def test_growth_along_the_eigenvector_is_that_of_a_quadratic(found):
    c, _, _, values = found
    for factor in c.factors:
        growth = one(values, "growth", part="eigenvector", at=factor)
        assert growth == pytest.approx((1 - 2 * factor) ** (2 * c.short), rel=0.02)


def test_runs_from_anywhere_are_those_of_plain_gradient_descent(found):
    """One learning rate at a time by torch's optimizer, from the same start."""
    c, model, batch, values = found
    function, weights = flat_loss(model, batch)
    largest, radius = one(values, "largest_eigenvalue"), one(values, "radius") * float(weights.norm())
    generator = torch.Generator().manual_seed(5)
    kick = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    for factor in c.factors:
        vector = weights + c.kick * radius * torch.cat([k.flatten() for k in kick])
        vector.requires_grad_()
        optimizer = torch.optim.SGD([vector], lr=factor * 2 / largest)
        above = []
        for _ in range(c.long + 1):
            optimizer.zero_grad()
            value = function(vector)
            above.append(value.item() - float(function(weights)))
            if above[-1] > c.most * above[0]:
                break
            value.backward()
            optimizer.step()
        expected = min(above[-1] / above[0], c.most)
        growth = one(values, "growth", part="random", at=factor)
        assert growth == pytest.approx(expected, rel=1e-3)
        assert (growth > 1) == (factor > 1)


def test_the_verdicts_count_runs_on_the_wrong_side(found):
    c, _, _, values = found
    rows = [Row({"norm": "none"}, 0, value) for value in values]
    right = {v.statement: v for v in divergence.FIGURE.verdicts(rows)}
    assert len(right) == 7 and all(v.agrees for v in right.values())
    count = next(v for s, v in right.items() if "random start: runs" in s)
    assert count.fitted == 0 and f"of {len(c.factors)}" in count.statement
    wrong = [
        Row(r.point, 0, divergence.MeasuredValue(1, "all", "random", 0.5, quantity="growth", at=1.02))
        if r.found.part == "random" and r.found.quantity == "growth" and r.found.at == 1.02
        else r
        for r in rows
    ]
    changed = {v.statement: v for v in divergence.FIGURE.verdicts(wrong)}
    assert changed[count.statement].fitted == 1 and not changed[count.statement].agrees
    falls = next(v for s, v in changed.items() if "largest learning rate that falls" in s)
    assert falls.fitted == 1.02 and not falls.agrees


def test_the_network_is_gpt2_with_a_gelu_and_a_penalty():
    model = Anchored(4, "pre", seed=2)
    tokens = tasks.addition(3, seed=1)
    inputs, targets = tokens[:, :-1], tasks.answer_targets(tokens)
    block = model.blocks[0]
    with torch.no_grad():
        x = model.W_E[inputs] + model.W_pos[:17]
        x = x + block.attend(block.norm1(x))
        h = block.norm2(x) @ block.W_up + block.b_up
        x = x + h * (1 + torch.erf(h / math.sqrt(2))) / 2 @ block.W_down + block.b_down
        logits, penalty = model(inputs)
        assert torch.allclose(logits, model.norm(x) @ model.W_U + model.b_U, rtol=1e-12) and float(penalty) == 0
        model.drop_anchor(0.5)
        block.W_Q += 0.1
        entropy = cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten(), ignore_index=-100)
        assert float(loss(model(inputs), targets) - entropy) == pytest.approx(0.5 / 2 * 0.01 * 16)
