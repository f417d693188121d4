"""The numbers against autodiff of a loss that is written out anew, and the theory."""

import numpy as np
import pytest
import torch
from torch.func import grad, jacfwd

from curvoscope.explorer import compute, tour
from curvoscope.explorer.compute import SIGMAS, curves, matrices, problem, spectra
from curvoscope.explorer.state import State

SMALL = {"L": 5, "d": 4, "d_k": 3}
VARIANTS = [
    {},
    {"loss": "ce"},
    {"heads": 2, "mask": "none"},
    {"attention": "linear", "sink": 1.5},
    {"norm": "pre", "skip": 0.7, "loss": "ce", "residual": 0.4},
    {"sink": 2.0, "temperature": 3.0, "residual": 0.25, "skip": 0.5},
]


def by_autodiff(state):
    """The Hessian over (W_Q, W_K, W_V) of the loss as the page describes it."""
    draws = compute._draws(state.seed)
    X = state.sigma * draws["X"][: state.L, : state.d]
    seen = torch.nn.functional.layer_norm(X, (state.d,)) if state.norm == "pre" else X
    layer = problem(state).layer
    shapes = [layer.W_Q.shape, layer.W_K.shape, layer.W_V.shape]

    def output(weights):
        pieces = weights.split([a * b for a, b in shapes])
        W = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        Z = state.skip * X
        for h in range(state.heads):
            Q, K, V = (w.view(state.d, state.heads, -1)[:, h] for w in W)
            scores = (seen @ Q) @ (seen @ K).T / (state.temperature * state.d_k**0.5)
            scores = scores + state.sink * torch.eye(state.L, dtype=X.dtype)[0]
            open_keys = torch.ones(state.L, state.L, dtype=torch.bool)
            open_keys = open_keys.tril() if state.mask == "causal" else open_keys
            if state.attention == "softmax":
                A = scores.masked_fill(~open_keys, -torch.inf).softmax(-1)
            else:
                A = scores * open_keys
            Z = Z + A @ (seen @ V)
        return Z

    weights = torch.cat([layer.W_Q.flatten(), layer.W_K.flatten(), layer.W_V.flatten()])
    with torch.no_grad():
        Z = output(weights)
        U = draws["U"][: state.d] / state.d**0.5
        if state.loss == "mse":
            Y = Z + state.residual * (draws["Y"][: state.L, : state.d] - Z)
        else:
            chosen = torch.nn.functional.one_hot(draws["targets"][: state.L], 10).to(X.dtype)
            probabilities = (Z @ U).softmax(-1)
            Y = probabilities + state.residual * (chosen - probabilities)

    def loss(weights):
        Z = output(weights)
        if state.loss == "mse":
            return (Z - Y).square().mean()
        return -(Y * (Z @ U).log_softmax(-1)).sum(-1).mean()

    return float(loss(weights)), jacfwd(grad(loss))(weights).numpy()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_hessian_loss_and_eigenvalues_are_those_of_the_written_loss(variant):
    state = State(**SMALL, **variant)
    value, H = by_autodiff(state)
    found = matrices(state)
    scale = np.abs(H).max()
    assert found.loss == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(found.dense["total"], H, atol=1e-12 * scale)
    np.testing.assert_allclose(found.dense["outer"] + found.dense["functional"], found.dense["total"], atol=1e-15)
    assert np.linalg.eigvalsh(found.dense["outer"])[0] > -1e-12 * scale
    np.testing.assert_allclose(spectra(found).eigenvalues, np.linalg.eigvalsh(H), atol=1e-12 * scale)
    for (row, column, part), norm in found.norms.items():
        assert norm == pytest.approx(
            float(getattr(found.hessian, part)[row, column].frobenius_norm()), abs=1e-12 * scale
        )


def test_pairs_are_the_spectrum_of_the_t_functional_part_and_the_bulk_is_in_the_hessian():
    state = State(L=6, d=3, d_k=8, mask="none")
    found = spectra(matrices(state))
    T = found.matrices.hessian.t_functional.dense().numpy()
    expected = np.sort(np.concatenate([found.pairs, -found.pairs]).repeat(state.d_k))
    np.testing.assert_allclose(np.linalg.eigvalsh(T), expected, atol=1e-12)
    assert found.multiplicity == 8 + 1 - 2 * 3
    for value in found.bulk:
        assert (np.abs(found.eigenvalues - value) < 1e-10).sum() >= found.multiplicity


@pytest.mark.parametrize(
    "variant",
    [{}, {"loss": "ce"}, {"attention": "linear"}, {"sink": 1.0, "attention": "linear"}, {"heads": 2}],
    ids=str,
)
def test_growth_follows_the_exponents_at_small_scales(variant):
    state = State(L=6, d=4, d_k=4, **variant)
    found = curves(matrices(state))
    for curve, power in zip(found.growth, compute.exponents(state), strict=True):
        if power is None:
            assert not curve.any()
        else:
            assert np.log(curve[1] / curve[0]) / np.log(SIGMAS[1] / SIGMAS[0]) == pytest.approx(power, abs=0.06)


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_growth_is_that_of_hessians_at_the_scales_and_the_residual(loss):
    state = State(**SMALL, loss=loss, residual=0.3, skip=0.5, sink=0.5, sigma=2.0)
    growth = curves(matrices(state)).growth
    for i in (0, 3, 6):
        norms = matrices(state.model_copy(update={"sigma": SIGMAS[i]})).norms
        np.testing.assert_allclose(growth[:, i], [norms[curve] for curve in compute.CURVES], rtol=1e-8, atol=1e-15)


def test_without_a_residual_nothing_is_functional():
    for loss in ("mse", "ce"):
        found = matrices(State(**SMALL, residual=0.0, loss=loss))
        assert np.abs(found.dense["functional"]).max() < 1e-15
        assert compute.exponents(found.state)[1:3] == (None, None)


def test_the_scalar_model_is_that_of_its_written_loss():
    state = State(L=7, d_k=3, sigma=0.8, sink=1.25, residual=0.5)
    model, x, y = compute.scalar_problem(state)
    k = state.d_k

    def f(weights):
        scores = x[:, None] * x[None, :] * (weights[:k] @ weights[k : 2 * k]) / k**0.5
        scores = scores + state.sink * torch.eye(state.L, dtype=x.dtype)[0]
        return weights[-1] * (scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1) @ x)

    weights = torch.cat([model.w_Q, model.w_K, model.w_V.reshape(1)])
    targets = f(weights) + state.residual * (y - f(weights))
    H = jacfwd(grad(lambda w: (f(w) - targets).square().mean()))(weights)
    found = spectra(matrices(state)).scalar
    np.testing.assert_allclose(found.eigenvalues.numpy(), np.linalg.eigvalsh(H.numpy()), atol=1e-12)


def test_one_token_more_keeps_the_others():
    first, second = problem(State(L=5)), problem(State(L=6))
    assert torch.equal(first.X, second.X[:5])
    assert torch.equal(first.layer.W_Q, second.layer.W_Q)


class TestTour:
    """What the texts say is so."""

    def found(self, number):
        return matrices(tour.STEPS[number - 1].state)

    def test_six_steps_of_figures_that_exist(self):
        assert len(tour.STEPS) == 6
        assert {step.figure for step in tour.STEPS} <= {"hessian", "functional", "growth", "scalar"}

    def test_first_the_value_block_is_sparse_and_the_others_are_dense(self):
        found = self.found(1)
        zeros = {name: float((found.hessian.total[name].dense() == 0).double().mean()) for name in "QKV"}
        assert zeros["V"] > 0.9 and zeros["Q"] == zeros["K"] == 0

    def test_second_only_the_functional_part_is_indefinite(self):
        found = self.found(2)
        assert np.linalg.eigvalsh(found.dense["outer"])[0] > -1e-12
        ends = np.linalg.eigvalsh(found.dense["functional"])[[0, -1]]
        assert ends[0] < -0.1 and ends[1] > 0.1
        assert found.norms["V", "V", "functional"] == 0

    def test_third_the_gap_of_queries_and_values(self):
        found = self.found(3)
        assert found.norms["V", "V", "outer"] > 1e3 * found.norms["Q", "Q", "outer"]
        at_one = matrices(State())
        assert 0.3 < at_one.norms["V", "V", "outer"] / at_one.norms["Q", "Q", "outer"] < 3

    def test_fourth_linear_attention_is_even(self):
        found = self.found(4)
        assert all(found.norms[name, name, "functional"] == 0 for name in "QKV")
        assert 0.3 < found.norms["V", "V", "outer"] / found.norms["Q", "Q", "outer"] < 3

    def test_fifth_the_norm_forgets_the_scale(self):
        state = tour.STEPS[4].state
        first, second = (matrices(state.model_copy(update={"sigma": sigma})) for sigma in (0.1, 10.0))
        for key, norm in first.norms.items():
            assert second.norms[key] == pytest.approx(norm, rel=0.01)

    def test_sixth_the_sink_empties_queries_and_keys(self):
        found, without = self.found(6), matrices(tour.STEPS[5].state.model_copy(update={"sink": 0.0}))
        assert found.attention.max(-1).min() > 0.99
        for (row, column, part), norm in found.norms.items():
            if part == "total" and (row, column) != ("V", "V"):
                assert norm < 0.1 * without.norms[row, column, part]
        assert found.norms["V", "V", "total"] > without.norms["V", "V", "total"]
        scalar = curves(found).scalar[:-1]
        assert scalar[-1].bulk < 0.01 * scalar[0].bulk
        outliers = [float(one.outliers.abs().max()) for one in scalar]
        assert outliers == sorted(outliers)
