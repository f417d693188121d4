"""Every block, part and variant of the attention Hessian against float64 autodiff."""

import math

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import curvoscope as cv
from attention_cases import problems
from reference import attention, dense_hessian, normal, relative

TOLERANCE = 1e-10


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8))]
)  # eighths of the draws
def test_all_blocks_against_autodiff(part):
    @seed(part)  # other draws in each eighth
    @settings(max_examples=30, derandomize=False)
    @given(problems(), st.integers(0, 2**16))
    def check(problem, number):
        layer, X, mask, H, function, p, loss = problem
        assert relative(layer(X, mask), function(p)) < TOLERANCE
        truth = dense_hessian(function, p, loss)
        assert H.names == list(p) and [math.prod(s) for s in H.shapes.values()] == [w.numel() for w in p.values()]
        total, outer, functional = H.dense(), H.outer.dense(), H.functional.dense()
        assert relative(total, truth.total) < TOLERANCE
        assert relative(outer, truth.outer, scale=truth.total) < TOLERANCE
        assert relative(functional, truth.functional, scale=truth.total) < TOLERANCE
        assert relative(outer + functional, total) < 1e-13
        for matrix in (total, outer, functional):
            assert torch.equal(matrix, matrix.T)
        v = torch.randn(total.shape[0], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for operator, matrix in ((H, truth.total), (H.outer, truth.outer), (H.functional, truth.functional)):
            assert relative(operator @ v, matrix @ v, scale=truth.total @ v) < TOLERANCE

    check()


_CONTRACTED = ("total", "outer", "functional")


@pytest.mark.parametrize(
    ("part", "examples"),
    [("total", 6), *(pytest.param(part, 25, marks=pytest.mark.slow) for part in _CONTRACTED)],
)
def test_contractions_without_forming_a_block(part, examples):
    @settings(max_examples=examples)
    @given(problem=problems())
    def check(problem):
        _, _, _, H, function, p, loss = problem
        reference = dense_hessian(function, p, loss)
        truth = getattr(reference, part)
        matrix, size = getattr(H, part), float(reference.total.abs().max().clamp_min(1e-300))
        v = torch.linspace(-1, 1, truth.shape[0], dtype=torch.float64)
        for row in H.names:
            for column in H.names:
                block = matrix[row, column]
                expected = truth[matrix.ranges[row], matrix.ranges[column]]
                norm = float(torch.linalg.matrix_norm(expected, 2))
                assert abs(block.frobenius_norm() - float(expected.norm())) < TOLERANCE * size * len(truth)
                assert abs(block.spectral_norm() - norm) < TOLERANCE * size * len(truth)
                assert block.norm_bound() >= norm * (1 - 1e-10) - 1e-13 * size
                w = v[: expected.shape[1]]
                assert float((block @ w - expected @ w).abs().max()) < TOLERANCE * size * len(truth)
                w = v[: expected.shape[0]]
                assert float((block.T @ w - expected.T @ w).abs().max()) < TOLERANCE * size * len(truth)
                if expected.shape[0] == expected.shape[1]:
                    assert abs(block.trace() - float(expected.trace())) < TOLERANCE * size * len(truth)
                    assert float((block.diagonal() - expected.diagonal()).abs().max()) < TOLERANCE * size
        assert abs(matrix.trace() - float(truth.trace())) < TOLERANCE * size * len(truth)
        assert abs(matrix.frobenius_norm() - float(truth.norm())) < TOLERANCE * size * len(truth)
        eigenvalues = torch.linalg.eigvalsh((truth + truth.T) / 2)
        assert float((matrix.eigenvalues() - eigenvalues).abs().max()) < TOLERANCE * size * len(truth)
        assert matrix.norm_bound() >= float(eigenvalues.abs().max()) * (1 - 1e-10)

    check()


@pytest.mark.slow
@settings(max_examples=20)
@given(problem=problems())
def test_per_head_blocks_are_parts_of_the_whole(problem):
    layer, X, mask, H, _, p, loss = problem
    split = layer.hessian(X, loss, mask, biases="b_Q" in p, wrt_input="X" in p, per_head=True)
    order = []
    for name, where in H.total.ranges.items():
        places = torch.arange(where.start, where.stop).view(H.shapes[name])
        parts = {"Q": layer.heads, "O": layer.heads, "K": layer.kv_heads, "V": layer.kv_heads}
        n = 1 if name in ("X", "b_O") else parts[name[-1]]
        order += [chunk.flatten() for chunk in places.chunk(n, 0 if name == "O" else 1)]
    order = torch.cat(order)
    for matrix, parts in ((H.total, split.total), (H.outer, split.outer), (H.functional, split.functional)):
        assert torch.allclose(parts.dense(), matrix.dense()[order][:, order], rtol=0, atol=1e-12)
    v = torch.linspace(-1, 1, len(order), dtype=torch.float64)
    w = torch.empty_like(v)
    w[order] = v
    assert torch.allclose(split @ v, (H @ w)[order], rtol=0, atol=1e-10 * float((H @ w).abs().max() + 1))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("activation", ["softmax", "linear"])
def test_single_query_key_matrix(heads, activation):
    r = normal(0)
    N, L, d, e = 2, 4, 3, 2
    X, W_QK, W_V, W_O, Y = r(N, L, d), r(d, heads * d) / 2, r(d, heads * e), r(heads * e, 4), r(N, L, 4)
    layer = cv.exact.SelfAttention.single_matrix(
        W_QK, W_V, W_O, heads=heads, activation=activation, temperature=2.0, causal=True
    )
    loss = cv.losses.MSE(Y)
    visible = torch.ones(L, L, dtype=torch.bool).tril()

    def function(p):
        eye = torch.eye(d, dtype=torch.float64).repeat(1, heads)
        weights = {"Q": p["QK"], "K": eye, "V": p["V"], "O": p["O"]}
        return attention(weights, X, heads=heads, kv_heads=heads, scale=0.5, visible=visible, activation=activation)

    H = layer.hessian(X, loss)
    assert H.names == ["QK", "V", "O"]
    truth = dense_hessian(function, {"QK": W_QK, "V": W_V, "O": W_O}, loss)
    assert relative(H.dense(), truth.total) < TOLERANCE
    assert relative(H.outer.dense(), truth.outer) < TOLERANCE
    v = torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)
    assert relative(H @ v, truth.total @ v) < TOLERANCE


@settings(max_examples=20)
@given(problem=problems())
def test_jacobians(problem):
    layer, X, mask, _, function, p, _ = problem
    found = layer.jacobian(X, mask)
    p = {**p, "X": X.reshape(-1, X.shape[-1])}
    truth = torch.func.jacrev(function)(p)
    for name in [n for n in found if n in p]:
        expected = truth[name].reshape(-1, p[name].numel())
        assert relative(found[name], expected, scale=expected.abs().max() + 1e-3) < TOLERANCE


def test_input_without_batch_axis():
    r = normal(0)
    X, layer = r(5, 3), cv.exact.SelfAttention(r(3, 2), r(3, 2) / 2, r(3, 4))
    Y = r(5, 4)
    assert layer(X).shape == (5, 4)
    batched = layer.hessian(X[None], cv.losses.MSE(Y[None])).dense()
    assert torch.equal(layer.hessian(X, cv.losses.MSE(Y)).dense(), batched)
    seen = []
    layer.hessian(X, lambda F: (seen.append(F.shape), F.square().sum())[1])
    assert seen == [(5, 4)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-10)])
def test_large_offset_keeps_its_digits(dtype, tolerance):
    """Covariances are taken after a shift: an offset of 100 in the inputs of float32 costs no digits."""
    r = normal(0)
    X, W_Q, W_K, W_V = r(6, 4) + 100, r(4, 3) / 1000, r(4, 3), r(4, 4)
    layer = cv.exact.SelfAttention(*(w.to(dtype) for w in (W_Q, W_K, W_V)))
    reference = cv.exact.SelfAttention(W_Q, W_K, W_V).moments(X)
    rows = layer.forward_pass(X.to(dtype))
    assert rows.F.dtype == dtype
    from curvoscope.exact.attention.moments import Rows

    # the same attention for both, so that only the covariance is compared
    stats = Rows(reference.attention[None].to(dtype), None)
    feature = stats.feature(X[None].to(dtype))
    assert relative(stats.covariance(feature, feature, 0, 6).double(), reference.M2) < tolerance


def test_results_have_the_dtype_of_the_input():
    r = normal(0, torch.float32)
    X, layer, Y = r(2, 5, 3), cv.exact.SelfAttention(r(3, 2), r(3, 2) / 2, r(3, 4)), r(2, 5, 4)
    H = layer.hessian(X, cv.losses.MSE(Y))
    double = cv.exact.SelfAttention(*(w.double() for w in (layer.W_Q, layer.W_K, layer.W_V)))
    truth = double.hessian(X.double(), cv.losses.MSE(Y.double()))
    assert H.dense().dtype == H["Q"].diagonal().dtype == (H @ torch.ones(H.shape[0])).dtype == torch.float32
    assert relative(H.dense().double(), truth.dense()) < 1e-5
