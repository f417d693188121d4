"""Choosing formats against brute force and dense Hessians; repairing against dense solves and GPTQ as published."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import curvoscope as cv
from autodiff_cases import GPT, cross_entropy, tokens, truth
from curvoscope.analysis import Menu, allocate, gptq, menu, recipes, round_and_repair, scores, sensitivity, surgeon
from curvoscope.analysis.ledger import spearman
from curvoscope.curvature import CrossEntropy, blocks_of


def problem(seed, blocks=5, formats=3):
    """Random costs of a positive semi-definite Hessian, with sizes and bits."""
    r = torch.Generator().manual_seed(seed)
    d = torch.randn(blocks * formats, 4, generator=r, dtype=torch.float64)
    d = d * torch.tensor([1.0, 0.5, 0.1]).repeat(blocks)[:, None]
    second = (d @ d.T).view(blocks, formats, blocks, formats)
    first = 0.1 * torch.randn(blocks, formats, generator=r, dtype=torch.float64)
    sizes = tuple(torch.randint(1, 9, (blocks,), generator=r).tolist())
    return Menu(tuple("abcde"[:blocks]), sizes, ("int3", "int4", "int8"), (3.0, 4.0, 8.0), first, second)


def best_of_all(costs, budget):
    """The least cost by brute force, within the budget."""
    total, least = sum(costs.sizes), np.inf
    for choice in product(range(3), repeat=len(costs.names)):
        if sum(n * costs.bits[f] for n, f in zip(costs.sizes, choice, strict=True)) <= budget * total + 1e-9:
            at = [i * 3 + f for i, f in enumerate(choice)]
            cost = float(costs.first.flatten()[at].sum() + costs.second.view(15, 15)[at][:, at].sum())
            least = min(least, cost)
    return least


def test_allocation_against_brute_force():
    """Within the budget, and the best of all choices, on 40 random problems."""
    for seed in range(40):
        costs, budget = problem(seed), 3.0 + seed % 5
        one = allocate(costs, budget)
        assert one.bits <= budget + 1e-9 and one.bits == pytest.approx(costs.average_bits(costs.choice(one.formats)))
        assert one.predicted == pytest.approx(costs.cost(costs.choice(one.formats)), abs=1e-12)
        assert one.predicted == pytest.approx(best_of_all(costs, budget), abs=1e-9)


def test_the_smallest_and_the_largest_budget():
    costs = problem(0)
    assert set(allocate(costs, 3.0).formats.values()) == {"int3"}
    with pytest.raises(cv.CurvoscopeError, match=r"budget: got 2\.5 bits, the smallest format has 3"):
        allocate(costs, 2.5)


def test_interactions_decide():
    """Two blocks whose changes cancel are cheap together, and without interactions neither would be taken."""
    second = torch.zeros(3, 2, 3, 2, dtype=torch.float64)
    for b, c, cost in ((0, 0, 1.0), (1, 1, 1.0), (0, 1, -0.9), (1, 0, -0.9), (2, 2, 0.6)):
        second[b, 1, c, 1] = cost
    costs = Menu(tuple("abc"), (1, 1, 2), ("kept", "int4"), (16.0, 4.0), torch.zeros(3, 2).double(), second)
    assert allocate(costs, 10.0).formats == {"a": "int4", "b": "int4", "c": "kept"}
    assert allocate(costs.without_interactions(), 10.0).formats == {"a": "kept", "b": "kept", "c": "int4"}
    assert not costs.without_gradient().first.any() and costs.without_gradient().second is costs.second
    scored = costs.scored({"kept": dict.fromkeys("abc", 0.0), "int4": {"a": 2.0, "b": 2.0, "c": 5.0}})
    assert allocate(scored, 10.0).formats == {"a": "int4", "b": "int4", "c": "kept"}


def test_a_menu_against_ledgers_and_the_dense_hessian():
    model, (x, y) = GPT(d=8), tokens()
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    formats = {"kept": (None, 16), "int3": (recipes.int3, 3), "int4": (recipes.int4, 4)}
    found = menu(model, CrossEntropy(), data, formats)
    assert found.names == tuple(
        f"h.0.{role}" for role in ("attn.Q", "attn.K", "attn.V", "attn.O", "mlp.up", "mlp.down")
    )
    for f, recipe in ((1, recipes.int3), (2, recipes.int4)):
        ledger = sensitivity(model, CrossEntropy(), data, recipe)
        same = Menu.of_ledger(ledger, 4)
        torch.testing.assert_close(found.second[:, f, :, f], same.second[:, 1, :, 1])
        torch.testing.assert_close(found.first[:, f], same.first[:, 1])
        assert found.cost(torch.full((len(found.names),), f)) == pytest.approx(ledger.predicted)
    assert not found.first[:, 0].any() and not found.second[:, 0].any() and not found.second[:, :, :, 0].any()
    blocks = blocks_of(model).select(*found.names)
    H = truth(model, x, lambda F: cross_entropy(F, y), blocks).total
    moves = {}
    for f, recipe in ((1, recipes.int3), (2, recipes.int4)):
        state = recipe(model)
        delta = blocks.gather({name: state[name] - p.detach() for name, p in model.named_parameters()})
        moves[f] = delta.split(list(blocks.sizes.values()))
    starts = np.cumsum([0, *blocks.sizes.values()])
    H_QV = H[starts[0] : starts[1], starts[2] : starts[3]]
    assert found.second[0, 1, 2, 2] == pytest.approx(float(moves[1][0] @ H_QV @ moves[2][2]) / 2)
    chosen = allocate(found, 4.0)
    mixed = recipes.mix(model, chosen.changes({name: change for name, (change, _) in formats.items()}))
    ledger = sensitivity(model, CrossEntropy(), data, mixed, False)
    assert ledger.predicted == pytest.approx(chosen.predicted)
    assert cv.analysis.measured_change(model, CrossEntropy(), data, mixed) == pytest.approx(ledger.measured)


def test_bad_menus():
    model, (x, y) = GPT(), tokens()
    with pytest.raises(cv.CurvoscopeError, match="formats: there are none"):
        menu(model, CrossEntropy(), [(x, y)], {})
    with pytest.raises(cv.CurvoscopeError, match="formats: no format changes"):
        menu(model, CrossEntropy(), [(x, y)], {"kept": (None, 16)})


# ---- surgeon


class Regression:
    """Linear regression: the Hessian of W (a, p) is 2 X^T X / (N p) (x) I, exactly."""

    def __init__(self, a=6, p=3, rows=20, seed=0):
        r = torch.Generator().manual_seed(seed)
        mixing = torch.randn(a, a, generator=r, dtype=torch.float64)
        self.X = torch.randn(rows, a, generator=r, dtype=torch.float64) @ mixing
        self.W = torch.randn(a, p, generator=r, dtype=torch.float64)
        model = nn.Linear(a, p, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(self.W.T)
        self.H = cv.hessian(model, nn.MSELoss(), [(self.X, self.X @ self.W)])


def oriented(problem):
    """The block as (a, p), which nn.Linear stores as (p, a)."""
    a, p = problem.W.shape
    return problem.H.outer["weight"].dense().view(p, a, p, a).permute(1, 0, 3, 2).reshape(a * p, a * p)


class Dense(cv.LinearOperator):
    def __init__(self, matrix, shape):
        super().__init__(shape, shape, matrix, symmetric=True)
        self.matrix = matrix

    def _matmat(self, columns):
        return self.matrix @ columns


def test_surgeon_against_a_dense_solve_and_the_formula_of_one_weight():
    one = Regression()
    H = oriented(one) + 0.01 * torch.eye(18).double()
    fixed = torch.zeros(18, dtype=torch.bool)
    fixed[[1, 7, 8, 12]] = True
    delta = torch.where(fixed, -one.W.flatten(), 0.0)
    found = surgeon({"W": Dense(H, (6, 3))}, "W", delta, damping=0.0, tolerance=1e-12)
    free = ~fixed
    expected = delta.clone()
    expected[free] = -torch.linalg.solve(H[free][:, free], H[free][:, fixed] @ delta[fixed])
    torch.testing.assert_close(found.delta, expected, rtol=1e-8, atol=1e-10)
    assert found.after == pytest.approx(float(expected @ H @ expected) / 2) and found.after < found.before
    assert found.before == pytest.approx(float(delta @ H @ delta) / 2) and found.residual < 1e-11
    # Optimal Brain Surgeon for one weight q: δ = -w_q H^-1 e_q / [H^-1]_qq, at the cost w_q^2 / (2 [H^-1]_qq)
    inverse, q = torch.linalg.inv(H), 4
    single = torch.zeros(18).double()
    single[q] = -one.W.flatten()[q]
    found = surgeon({"W": Dense(H, (6, 3))}, "W", single, damping=0.0, tolerance=1e-12)
    torch.testing.assert_close(found.delta, single[q] * inverse[q] / inverse[q, q], rtol=1e-8, atol=1e-10)
    assert found.after == pytest.approx(float(single[q] ** 2 / inverse[q, q]) / 2)


def test_the_damping_of_gptq_and_its_rounding():
    """With X^T X (x) I, rounding and repairing input by input is GPTQ, as published: Cholesky of the inverse."""
    one = Regression()
    gram = one.X.T @ one.X
    identity = Dense(torch.kron(gram, torch.eye(3).double()), (6, 3))
    scale = one.W.abs().amax(0) / 3

    def nearest(i, w):
        return (w / scale).round().clamp(-3, 3) * scale

    damping = 0.01 * float(gram.diagonal().mean())
    found = round_and_repair({"W": identity}, "W", one.W, nearest, damping=damping, tolerance=1e-13)
    direct = gptq(one.W, gram, nearest)
    torch.testing.assert_close(found, direct)
    # one column after the other, with the inverse updated by elimination, as in Optimal Brain Quantization
    expected = one.W.clone()
    inverse = torch.linalg.inv(gram + damping * torch.eye(6).double())
    for i in range(6):
        rounded = nearest(i, expected[i])
        error = (rounded - expected[i]) / inverse[i, i]
        expected += inverse[i][:, None] * error
        expected[i] = rounded
        inverse = inverse - torch.outer(inverse[i], inverse[i]) / inverse[i, i]
    torch.testing.assert_close(direct, expected)
    plain = torch.stack([nearest(i, w) for i, w in enumerate(one.W)])
    errors = [float((one.X @ (W - one.W)).square().sum()) for W in (plain, direct)]
    assert errors[1] < errors[0]
    whole = round_and_repair({"W": identity}, "W", one.W, nearest, step=6)
    torch.testing.assert_close(whole, plain)


def test_rounding_by_inputs_does_not_see_the_factor_of_the_outputs():
    """With the curvature gram (x) V the other inputs make up for a rounded one as with X^T X alone, for any V."""
    one = Regression()
    gram, V = one.X.T @ one.X, torch.tensor([[2.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 1.0]]).double()
    curvature = {"W": Dense(torch.kron(gram, V), (6, 3))}
    found = round_and_repair(curvature, "W", one.W, lambda i, w: w.round(), damping=0.0, tolerance=1e-13)
    torch.testing.assert_close(found, gptq(one.W, gram, lambda i, w: w.round(), damping=0.0))


def test_the_default_damping_is_a_hundredth_of_the_mean_diagonal():
    one = Regression(a=3, p=2)
    found = surgeon(one.H.outer, "weight", torch.tensor([1.0, 0, 0, 0, 0, 0]).double())
    assert found.damping == pytest.approx(0.01 * float(one.H.outer["weight"].dense().trace()) / 6)


def test_bad_repairs():
    one = Regression(a=3, p=2)
    unit, downhill = torch.tensor([1.0, 0, 0, 0, 0, 0]).double(), -torch.eye(6).double()
    downhill[0, 1] = downhill[1, 0] = 1
    cases = [
        (lambda: surgeon(one.H.outer, "weight", unit[:5]), r"delta: got \(5,\), expected \(6,\)"),
        (lambda: surgeon(one.H.outer, "weight", unit, unit), "fixed: got"),
        (lambda: surgeon(one.H.outer, "weight", unit, damping=-1.0), "damping: got -1.0"),
        (lambda: surgeon({"W": Dense(downhill, (3, 2))}, "W", unit, damping=0.0), "H: has negative curvature"),
        (lambda: round_and_repair(one.H.outer, "weight", one.W, lambda i, w: w, 0), "step: got 0"),
        (
            lambda: round_and_repair(one.H.outer, "weight", one.W, lambda i, w: w),
            r"W: got \(3, 2\), expected \(2, 3\), the shape of 'weight'",
        ),
        (lambda: gptq(one.W, torch.eye(2).double(), lambda i, w: w), "gram: got"),
        (lambda: gptq(one.W, torch.zeros(len(one.W), len(one.W)).double(), lambda i, w: w), "gram: is singular"),
        (lambda: gptq(one.W, torch.eye(len(one.W)).double(), lambda i, w: w, damping=-2.0), "damping: got -2"),
    ]
    for call, said in cases:
        with pytest.raises(cv.CurvoscopeError, match=said):
            call()


# ---- the scores that others use


def test_scores_against_explicit_gradients_and_inputs():
    model, (x, y) = GPT(), tokens()
    found = scores(model, CrossEntropy(), [(x, y)], recipes.int3)
    state = recipes.int3(model)
    delta = {name: state[name] - p.detach() for name, p in model.named_parameters()}
    blocks, terms = blocks_of(model), (y != -100).sum(1).double()
    squares = total = 0
    for i in range(4):
        model.zero_grad()
        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        gradient = blocks["h.0.attn.K"].gather({n: p.grad for n, p in model.named_parameters()})
        squares = squares + terms[i] ** 2 / terms.sum() * gradient.square()
        total = total + terms[i] / terms.sum() * gradient
    model.zero_grad()
    d = blocks["h.0.attn.K"].gather(delta)
    assert found["fisher"]["h.0.attn.K"] == pytest.approx(float(squares @ d.square()) / 2)
    assert found["gradient"]["h.0.attn.K"] == pytest.approx(abs(float(total @ d)))
    assert found["magnitude"]["h.0.attn.K"] == pytest.approx(float(d @ d))
    seen = []
    with model.h[0].attn.c_attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
        model(x)
    out = seen[0].detach() @ d.view(4, 4)
    assert found["inputs"]["h.0.attn.K"] == pytest.approx(float(out.square().sum(-1).mean()) / 2)
    assert set(found["inputs"]) == set(found["fisher"])


def test_spearman_against_scipy():
    from scipy import stats

    r = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 5, (2, 12), generator=r).double()
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x.numpy(), y.numpy()).statistic)
    assert spearman(torch.ones(4).double(), torch.arange(4.0).double()) == 0
