"""What the algebra says of attention's Hessian: zeros, gauge identities, the split at the scores, ranks, moments."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvoscope as cv
from curvoscope import checks
from curvoscope.errors import RangeError
from curvoscope.papers import theorems
from matrices import within
from reference import attention, dense_hessian, normal, relative


def _layer(r, d=4, k=3, e=3, m=4, **options):
    heads, kv = options.get("heads", 1), options.get("kv_heads", options.get("heads", 1))
    W_O = r(heads * e, m) if m else None
    return cv.exact.SelfAttention(r(d, heads * k), r(d, kv * k), r(d, kv * e), W_O, **options)


# ---- zeros that are exact


@pytest.mark.parametrize("loss", ["mse", "mixing"])
def test_functional_value_and_output_blocks_are_exactly_zero(loss):
    r = normal(0)
    layer, X, Y = _layer(r, heads=2), r(2, 5, 4), r(2, 5, 4)
    H = layer.hessian(X, cv.losses.MSE(Y) if loss == "mse" else lambda F: (F * Y).logsumexp((0, 1, 2)))
    for name in ("V", "O"):
        assert torch.count_nonzero(H.functional[name].dense()) == 0
        assert H.functional[name].frobenius_norm() == H.functional[name].trace() == 0.0


def test_functional_blocks_between_heads_are_exactly_zero():
    r = normal(1)
    H = _layer(r, heads=3, causal=True).hessian(r(2, 5, 4), cv.losses.MSE(r(2, 5, 4)), per_head=True)
    for row in H.names:
        for column in H.names:
            block = H.functional[row, column]
            if row.split(".")[1] != column.split(".")[1]:
                assert torch.count_nonzero(block.dense()) == 0 and block.frobenius_norm() == 0.0
                assert H.outer[row, column].frobenius_norm() > 0


def test_linear_attention_has_no_functional_diagonal():
    r = normal(2)
    H = _layer(r, activation="linear").hessian(r(2, 5, 4), cv.losses.MSE(r(2, 5, 4)))
    for name in H.names:
        assert torch.count_nonzero(H.functional[name].dense()) == 0
        assert float(H[name].eigenvalues().min()) >= -1e-13 * H[name].spectral_norm()  # so they are semidefinite
    assert H.functional["Q", "K"].frobenius_norm() > 0


def test_key_bias_is_a_null_direction():
    r = normal(3)
    W_Q, W_K, W_V = r(4, 3), r(4, 3), r(4, 3)
    layer = cv.exact.SelfAttention(W_Q, W_K, W_V, b_Q=r(3), b_K=r(3), b_V=r(3), biases=True)
    H = layer.hessian(r(2, 5, 4), cv.losses.MSE(r(2, 5, 3)))
    assert H.names == ["Q", "K", "V", "b_Q", "b_K", "b_V"]
    for name in H.names:
        assert torch.count_nonzero(H["b_K", name].dense()) == 0
    assert H["b_Q"].frobenius_norm() > 0 and torch.count_nonzero(H.functional["b_V"].dense()) == 0


def test_one_hot_attention_kills_query_and_key_blocks():
    """Rows of A that are one-hot have M2 = M3 = 0."""
    r = normal(4)
    X = torch.eye(4, dtype=torch.float64)[None] * 3
    layer = cv.exact.SelfAttention(40 * torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64), r(4, 4))
    H = layer.hessian(X, cv.losses.MSE(r(1, 4, 4)))
    assert H["V"].frobenius_norm() > 0.1
    for pair in (("Q", "Q"), ("K", "K"), ("Q", "K"), ("Q", "V"), ("K", "V")):
        assert H[pair].frobenius_norm() < 1e-12


# ---- identities that need no dense matrix: far beyond what autodiff could form


@pytest.mark.parametrize("loss_kind", ["mse", "cross_entropy"])
def test_gauge_and_euler_identities_at_d_512(loss_kind):
    d, L, k, e, m = 512, 256, 64, 48, 512
    r = normal(5)
    weights = {"Q": r(d, k) / 30, "K": r(d, k) / 30, "V": r(d, e) / 20, "O": r(e, m) / 7}
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    X = r(1, L, d)
    if loss_kind == "mse":
        loss = cv.losses.MSE(r(1, L, m))
    else:
        loss = cv.losses.CrossEntropy(torch.arange(L)[None] % 31, r(m, 31) / 10)
    visible = torch.ones(L, L, dtype=torch.bool).tril()
    value = loss(attention(weights, X, scale=1 / math.sqrt(k), visible=visible))
    g = dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True))
    w = {name: weight.detach() for name, weight in weights.items()}
    layer = cv.exact.SelfAttention(w["Q"], w["K"], w["V"], w["O"], causal=True)
    H = layer.hessian(X, loss)
    pack = lambda *parts: torch.cat([part.flatten() for part in parts])  # noqa: E731
    zero = {name: torch.zeros_like(weight) for name, weight in w.items()}

    gauge = r(k, k)
    found = H @ pack(w["Q"] @ gauge, -w["K"] @ gauge.T, zero["V"], zero["O"])
    expected = pack(-g["Q"] @ gauge.T, g["K"] @ gauge, zero["V"], zero["O"])
    assert relative(found, expected) < 1e-10
    gauge = r(e, e)
    found = H @ pack(zero["Q"], zero["K"], w["V"] @ gauge, -gauge @ w["O"])
    expected = pack(zero["Q"], zero["K"], -g["V"] @ gauge.T, gauge.T @ g["O"])
    assert relative(found, expected) < 1e-10
    # Euler: the output is linear in W_V, so H_f(., V) vec(W_V) is the gradient
    found = H.functional @ pack(zero["Q"], zero["K"], w["V"], zero["O"])
    assert relative(found, pack(g["Q"], g["K"], zero["V"], g["O"])) < 1e-10
    # H = H_o + H_f and symmetry, by products
    v, u = r(H.shape[0]), r(H.shape[0])
    assert relative(H.outer @ v + H.functional @ v, H @ v) < 1e-12
    assert abs(float(u @ (H @ v) - v @ (H @ u))) < 1e-10 * float((H @ v).norm() * u.norm())


def test_weight_degrees_by_gauge():
    """W_K -> t W_K, W_Q -> W_Q / t leaves the attention as it is, and scales each block by its degree."""
    r = normal(6)
    W_Q, W_K, W_V, X, Y = r(4, 3), r(4, 3), r(4, 4), r(1, 5, 4), r(1, 5, 4)
    before = cv.exact.SelfAttention(W_Q, W_K, W_V).hessian(X, cv.losses.MSE(Y))
    after = cv.exact.SelfAttention(W_Q / 1.7, W_K * 1.7, W_V).hessian(X, cv.losses.MSE(Y))
    degrees = {("Q", "Q"): 2, ("K", "K"): -2, ("V", "Q"): 1, ("V", "K"): -1, ("Q", "K"): 0, ("V", "V"): 0}
    for pair, degree in degrees.items():
        for part in ("outer", "functional"):
            expected = 1.7**degree * getattr(before, part)[pair].dense()
            rounding = 1e-14 * max(1.0, float(expected.abs().max()))
            assert torch.allclose(getattr(after, part)[pair].dense(), expected, rtol=0, atol=rounding)


# ---- the literal theorems


@pytest.mark.parametrize("sizes", [(5, 4, 3, 4), (4, 3, 4, 3), (4, 3, 2, 5), (1, 2, 2, 2)])
def test_against_the_literal_theorems(sizes):
    L, d, k, m = sizes
    r = normal(7)
    X, W_Q, W_K, W_V, Y = r(L, d), r(d, k), r(d, k), r(d, m), r(L, m)
    H = cv.exact.SelfAttention(W_Q, W_K, W_V).hessian(X, cv.losses.MSE(Y))
    for part, blocks in (
        (H.outer, theorems.attention.outer_blocks(X, W_Q, W_K, W_V)),
        (H.functional, theorems.attention.functional_blocks(X, W_Q, W_K, W_V, Y)),
    ):
        assert len(blocks) >= 6
        for pair, expected in blocks.items():
            scale = expected.abs().max() + H.dense().abs().max()
            assert relative(part[pair].dense(), expected, scale=scale) < 1e-12


def test_moments():
    r = normal(8)
    X, layer = r(2, 5, 4), _layer(r, causal=True)
    moments = layer.moments(X)
    A = moments.attention
    assert A.shape == (2, 5, 5) and torch.allclose(A.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert torch.count_nonzero(A.triu(1)) == 0
    for n in range(2):
        for i in range(5):
            mean = sum(A[n, i, j] * X[n, j] for j in range(5))
            x = [X[n, j] - mean for j in range(5)]
            second = sum(A[n, i, j] * torch.outer(x[j], x[j]) for j in range(5))
            third = sum(A[n, i, j] * torch.kron(x[j][:, None], torch.outer(x[j], x[j])) for j in range(5))
            assert torch.allclose(moments.M1[n, i], mean) and torch.allclose(moments.M2[n, i], second)
            assert moments.M3.shape == (2, 5, 16, 4) and torch.allclose(moments.M3[n, i], third)
    assert torch.allclose(moments.entropy[:, 0], torch.zeros(2, dtype=torch.float64))
    uniform = cv.exact.SelfAttention(torch.zeros(4, 3).double(), r(4, 3), r(4, 3)).moments(X)
    assert torch.allclose(uniform.entropy, torch.full((2, 5), math.log(5)).double())
    assert _layer(r, heads=2).moments(X).M2.shape == (2, 2, 5, 4, 4)
    assert layer.moments(X[0]).M1.shape == (5, 4)


# ---- the split at the scores


SPLITS = [
    {},
    {"m": 0, "e": 4},
    {"heads": 2},
    {"heads": 4, "kv_heads": 2, "k": 2, "e": 2},
    {"heads": 2, "causal": True, "activation": "linear"},
]


@pytest.mark.parametrize("options", SPLITS)
@pytest.mark.parametrize("biased", [False, True])
def test_split_at_the_scores(options, biased):
    """T-outer is J_T^T (d^2 loss/dT^2) J_T, by autodiff through the scores; both parts add up to the Hessian."""
    r = normal(9)
    N, L, d = 2, 4, 4
    layer = _layer(r, **options)
    X, Y = r(N, L, d), r(N, L, layer.d_out)
    if biased:
        layer = cv.exact.SelfAttention(
            layer.W_Q, layer.W_K, layer.W_V, layer.W_O,
            r(layer.W_Q.shape[1]), r(layer.W_K.shape[1]), None,
            heads=layer.heads, kv_heads=layer.kv_heads, activation=layer.activation, causal=layer.causal, biases=True,
        )  # fmt: skip
    H = layer.hessian(X, cv.losses.MSE(Y))
    queries, keys = (["Q", "b_Q"], ["K", "b_K"]) if biased else (["Q"], ["K"])
    names = [*queries, *keys]
    outer, functional = H.t_outer, H.t_functional
    assert outer.names == functional.names == names
    total = H.total.select(names).dense()
    assert relative(outer.dense() + functional.dense(), total) < 1e-12

    parameters = {"Q": layer.W_Q, "K": layer.W_K, "b_Q": layer.b_Q, "b_K": layer.b_K}
    parameters = {name: parameters[name] for name in names}

    def scores(p):
        q, k = (X @ p[n] + p.get(f"b_{n}", 0.0) for n in "QK")
        q, k = (t.unflatten(-1, (-1, layer.d_k)).transpose(1, 2) for t in (q, k))
        return layer.scale * q @ k.repeat_interleave(layer.heads // layer.kv_heads, 1).mT

    visible = torch.ones(L, L, dtype=torch.bool).tril() if layer.causal else torch.ones(L, L, dtype=torch.bool)

    def tail(T):
        A = T.masked_fill(~visible, -math.inf).softmax(-1) if layer.activation == "softmax" else T * visible
        V = (X @ layer.W_V).unflatten(-1, (-1, layer.d_v)).transpose(1, 2)
        F = (A @ V.repeat_interleave(layer.heads // layer.kv_heads, 1)).transpose(1, 2).flatten(2)
        return (((F @ layer.W_O if layer.W_O is not None else F) - Y) ** 2).mean()

    truth = dense_hessian(scores, parameters, tail)
    assert relative(outer.dense(), truth.outer) < 1e-10
    assert relative(functional.dense(), truth.functional) < 1e-10
    values = torch.linalg.eigvalsh(truth.functional)
    assert torch.allclose(functional.eigenvalues(), values, rtol=0, atol=1e-11)
    assert torch.allclose(functional.eigenvalues(), -functional.eigenvalues().flip(0))  # in pairs
    assert abs(functional.spectral_norm() - float(values.abs().max())) < 1e-11
    assert abs(functional.frobenius_norm() - float(truth.functional.norm())) < 1e-11
    assert relative(functional @ values, truth.functional @ values) < 1e-10


@pytest.mark.parametrize(
    "options, d, k", [({}, 1, 4), ({}, 2, 6), ({"heads": 2}, 2, 5), ({"heads": 2, "kv_heads": 1}, 1, 4)]
)
@pytest.mark.parametrize("output", [0, 3])
def test_bulk_of_the_complete_hessian(options, d, k, output):
    r = normal(10)
    layer = _layer(r, d=d, k=k, e=2, m=output, **options)
    H = layer.hessian(r(2, 5, d), cv.losses.MSE(r(2, 5, layer.d_out)))
    values, multiplicity = H.bulk()
    queries = layer.heads // layer.kv_heads
    assert multiplicity == k + 1 - (1 + queries) * d > 0 and len(values) == 2 * d * layer.kv_heads
    eigenvalues = H.total.eigenvalues()
    for value in values:
        assert int((eigenvalues - value).abs().lt(1e-11).sum()) >= multiplicity
    for d, k in ((4, 3), (2, 3)):  # far too narrow, and by one
        narrow = _layer(r, d=d, k=k).hessian(r(2, 5, d), cv.losses.MSE(r(2, 5, 4))).bulk()
        assert narrow[1] == 0 and len(narrow[0]) == 0


@settings(max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5),
    st.booleans(), st.sampled_from([(1, 1), (2, 2), (2, 1)]), st.integers(0, 2**16),
)  # fmt: skip
def test_rank_bounds(N, L, d, k, causal, heads, seed):
    r = normal(seed)
    layer = _layer(r, d=d, k=k, heads=heads[0], kv_heads=heads[1], causal=causal)
    H = layer.hessian(r(N, L, d), cv.losses.MSE(r(N, L, 4)))
    bounds = H.rank_bounds()
    for name, matrix in (("t_outer", H.t_outer.dense()), ("Q", H["Q"].dense()), ("K", H["K"].dense())):
        printed, sharp = bounds[name]
        rank = int(torch.linalg.matrix_rank(matrix, atol=1e-10 * float(matrix.abs().max() + 1e-300)))
        assert rank <= sharp <= printed
    if heads == (1, 1):
        assert bounds["t_outer"][0] == (2 * d * k - k * k if k < d else d * d)


def test_sharp_rank_bound_is_attained():
    r = normal(11)
    H = _layer(r, d=5, k=4, causal=True).hessian(r(1, 3, 5), cv.losses.MSE(r(1, 3, 4)))
    assert H.rank_bounds()["t_outer"] == (24, 3)
    assert int(torch.linalg.matrix_rank(H.t_outer.dense(), rtol=1e-10)) == 3
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])  # the last query sees one key
    H = _layer(r, d=4, k=1).hessian(r(1, 3, 4), cv.losses.MSE(r(1, 3, 4)), mask=mask)
    assert H.rank_bounds()["Q"] == (4, 2)
    assert int(torch.linalg.matrix_rank(H["Q"].dense(), rtol=1e-10)) == 2


def test_split_needs_two_matrices_and_no_rotation():
    r = normal(12)
    X, loss = r(2, 5, 4), cv.losses.MSE(r(2, 5, 4))
    with pytest.raises(RangeError, match="rotary"):
        _ = _layer(r, k=4, rotary=100.0).hessian(X, loss).t_outer
    with pytest.raises(RangeError, match="W_QK"):
        _ = cv.exact.SelfAttention.single_matrix(r(4, 4), r(4, 4)).hessian(X, loss).t_functional
    with pytest.raises(RangeError, match="per_head"):
        _ = _layer(r, heads=2).hessian(X, loss, per_head=True).t_functional


def test_certificates_bound_the_norms_tightly():
    """Local certificates: never below the norm, and within a small factor of it."""
    ratios = []
    for seed in range(60):
        r = normal(seed)
        scale = 10 ** (2 * torch.rand(3, generator=torch.Generator().manual_seed(seed)).double() - 1)
        layer = cv.exact.SelfAttention(scale[0] * r(4, 3), r(4, 3), scale[1] * r(4, 4))
        X = scale[2] * r(1, 5, 4)
        cross_entropy = cv.losses.CrossEntropy(torch.arange(5)[None] % 3, r(4, 3))
        H = layer.hessian(X, cross_entropy if seed % 2 else cv.losses.MSE(r(1, 5, 4)))
        norm = H.total.spectral_norm()
        bound = H.total.norm_bound()
        assert bound >= norm * (1 - 1e-12)
        ratios.append(bound / norm)
    assert float(torch.tensor(ratios).median()) < 2.5


@pytest.mark.parametrize("loss_kind", ["mse", "cross_entropy"])
@pytest.mark.parametrize("options", [{}, {"heads": 2, "kv_heads": 1}])
def test_contractions_in_small_memory(loss_kind, options, monkeypatch):
    """With room for a few tokens at a time, traces, diagonals and norms are what they are with room for all."""
    from curvoscope.exact.attention import moments

    monkeypatch.setattr(moments, "_KEPT_NUMBERS", 0)
    monkeypatch.setattr(checks, "LEAST_CHUNK", 1)
    r = normal(13)
    layer, X, Y = _layer(r, causal=True, **options), r(3, 7, 4), r(3, 7, 4)
    cross_entropy = cv.losses.CrossEntropy(torch.arange(21).view(3, 7) % 6, r(4, 6))
    H = layer.hessian(X, cv.losses.MSE(Y) if loss_kind == "mse" else cross_entropy)
    truth = H.dense()
    limits = 12_000, 40_000, 200_000  # parts of one sequence, one sequence, several
    pairs = itertools.product(H.names, H.names)
    for (row, column), limit in zip(pairs, itertools.cycle(limits), strict=False):
        expected = truth[H.total.ranges[row], H.total.ranges[column]]
        assert abs(within(limit, H[row, column].frobenius_norm) - float(expected.norm())) < 1e-12
    for name, limit in itertools.product(H.names, limits):
        expected = truth[H.total.ranges[name], H.total.ranges[name]]
        assert abs(within(limit, H[name, name].trace) - float(expected.trace())) < 1e-12
        assert torch.allclose(within(limit, H[name, name].diagonal), expected.diagonal(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [None, 1])  # from the cores, and where these are too large in closed form
@pytest.mark.parametrize("options", [{}, {"heads": 2, "kv_heads": 1}])
def test_products_with_transposed_blocks(options, limit):
    r = normal(14)
    H = _layer(r, causal=True, **options).hessian(r(2, 5, 4), cv.losses.MSE(r(2, 5, 4)))
    scale = H.dense()
    for part, (row, column) in itertools.product((H.total, H.outer, H.functional), itertools.permutations(H.names, 2)):
        block = part[row, column]
        expected, v = block.dense().T, r(block.shape[0], 2)
        with cv.settings(memory_limit=limit):
            assert relative(block.T @ v, expected @ v, scale) < 1e-12
            assert relative(block @ (expected @ v), expected.T @ (expected @ v), scale) < 1e-12
