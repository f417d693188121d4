"""The bounds hold against float64 autodiff, on random, extreme and adversarial layers, and are as tight as is said."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, vmap

import curvoscope as cv
from curvoscope.errors import BlockNameError, RangeError
from curvoscope.exact import FeedForward, LayerNorm, RMSNorm, SelfAttention, bound_factors, bounds
from curvoscope.exact.bound_factors import ACTIVATION_NORMS
from curvoscope.losses import MSE, CrossEntropy
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.papers.theorems.norm_bounds import combined, theorem_1_corrected, two_dominating_keys
from reference import attention, dense_hessian, normal

SIZES = ((2, 2, 1), (3, 2, 2), (3, 4, 2), (4, 3, 3), (5, 4, 1))
ROUNDING = 1 + 1e-9
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
SLOPES = ACTIVATIONS | {
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "gelu_bloom": lambda h: h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * h**3))) / 2,
}


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def assert_bounds_hold(found: bounds.BlockBounds, shapes: dict[str, tuple[int, ...]], dense) -> None:
    """Every block and the whole, for the total and both parts. Autodiff rounds relative to the largest block."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    names = list(shapes)
    for part in ("total", "outer", "functional"):
        matrix, bounded = getattr(dense, part), getattr(found, part)
        noise = 1e-13 * float(dense.total.abs().max() + dense.outer.abs().max())
        assert set(bounded.names) == set(names)
        for i, strip in enumerate(matrix.split(sizes)):
            for j, block in enumerate(strip.split(sizes, 1)):
                measured, bound = norm(block), bounded[names[i], names[j]]
                assert measured <= bound.value * ROUNDING + noise, (part, bound)
        assert norm(matrix) <= bounded.whole.value * ROUNDING + noise, part
        assert bounded.whole.measured == pytest.approx(norm(matrix), rel=1e-8, abs=noise)


# ---- attention, a priori


def draw(seed: int, count: int, L: int, d: int, k: int) -> tuple[Tensor, ...]:
    """X, W_Q, W_K, W_V, Y for `count` layers, each tensor with its own scale, log-uniform from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** (6 * torch.rand(5, count, 1, 1, generator=generator, dtype=torch.float64) - 3)
    shapes = ((L, d), (d, k), (d, k), (d, d), (L, d))
    return tuple(
        scale * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        for scale, shape in zip(scales, shapes, strict=True)
    )


def attention_hessians(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, Y: Tensor) -> Tensor:
    """The Hessians of the mean square loss of all layers, by autodiff."""
    shapes = [W.shape[1:] for W in (W_Q, W_K, W_V)]

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        q, k, v = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        return (torch.softmax(x @ q @ k.T @ x.T / math.sqrt(q.shape[1]), -1) @ x @ v - y).square().mean()

    theta = torch.cat([W.flatten(1) for W in (W_Q, W_K, W_V)], 1)
    return vmap(jacfwd(grad(loss)))(theta, X, Y)


def tightness(count: int) -> list[float]:
    """Bound over autodiff norm of whole layers, `count` of each size, all their blocks compared on the way."""
    found = []
    for number, (L, d, k) in enumerate(SIZES):
        drawn = draw(number, count, L, d, k)
        sizes = {"Q": d * k, "K": d * k, "V": d * d}
        for H, X, W_Q, W_K, W_V, Y in zip(attention_hessians(*drawn), *drawn, strict=True):
            bounded = bounds.attention(SelfAttention(W_Q, W_K, W_V), X, MSE(Y))
            whole = norm(H)
            for row, strip in zip(sizes, H.split(list(sizes.values())), strict=True):
                for column, block in zip(sizes, strip.split(list(sizes.values()), 1), strict=True):
                    assert norm(block) <= bounded[row, column].value * ROUNDING + 1e-13 * whole
            assert whole <= bounded.whole.value * ROUNDING
            found.append(bounded.whole.value / whole)
    return found


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)], ids=["200 draws", "1,000 draws"])
def test_random_layers_of_all_scales(count: int) -> None:
    found = tightness(count)
    assert len(found) == count * len(SIZES)
    assert statistics.median(found) < 60


def test_never_above_the_corrected_theorem() -> None:
    # Theorem 1 corrected uses only ‖X‖ and the weights' norms: diameters are at most √2 ‖X‖.
    for number, (L, d, k) in enumerate(SIZES):
        for X, W_Q, W_K, W_V, Y in zip(*draw(50 + number, 8, L, d, k), strict=True):
            bounded = bounds.attention(SelfAttention(W_Q, W_K, W_V), X, MSE(Y))
            theorem = theorem_1_corrected(X, W_Q, W_K, W_V, Y)
            for pair, value in theorem.items():
                assert bounded[pair].value <= value * ROUNDING
            assert bounded.whole.value <= combined(theorem, ("Q", "K", "V")) * ROUNDING


def adversarial() -> dict[str, tuple[Tensor, ...]]:
    """X, W_Q, W_K, W_V, Y of layers that would show a bound that is too small."""
    r = normal(5)
    X, W_Q, W_K, W_V, Y = r(4, 3), r(3, 2), r(3, 2), r(3, 3), r(4, 3)
    return {
        "two dominating keys": two_dominating_keys(60, 1e8),
        "small W_K, large W_Q": (X, 1e3 * W_Q, 1e-6 * W_K, W_V, Y),
        "W_K zero, large W_Q": (X, 1e3 * W_Q, 0 * W_K, W_V, Y),
        "large W_K, small W_Q": (X, 1e-6 * W_Q, 1e3 * W_K, W_V, Y),
        "saturated": (30 * X, W_Q, W_K, W_V, Y),
        "equal tokens": (X[:1].repeat(4, 1), W_Q, W_K, W_V, Y),
        "far from the origin": (X + 100, 1e-2 * W_Q, 1e-2 * W_K, W_V, Y),
        "one token": (X[:1], W_Q, W_K, W_V, Y[:1]),
        "two opposite tokens": (torch.stack([X[0], -X[0]]), 0 * W_Q, W_K, W_V, 1e6 * Y[:2]),
        "all zero": (0 * X, 0 * W_Q, 0 * W_K, 0 * W_V, Y),
        "no residual": (X, W_Q, W_K, W_V, SelfAttention(W_Q, W_K, W_V)(X)),
    }


@pytest.mark.parametrize("case", adversarial())
def test_adversarial_layers(case: str) -> None:
    X, W_Q, W_K, W_V, Y = adversarial()[case]
    weights = {"Q": W_Q, "K": W_K, "V": W_V}
    visible = torch.ones(len(X), len(X), dtype=torch.bool)
    scale = 1 / math.sqrt(W_Q.shape[1])
    loss = MSE(Y)
    dense = dense_hessian(lambda p: attention(p, X[None], scale=scale, visible=visible)[0], weights, loss)
    layer, shapes = SelfAttention(W_Q, W_K, W_V), {name: W.shape for name, W in weights.items()}
    assert_bounds_hold(bounds.attention(layer, X, loss), shapes, dense)
    assert_bounds_hold(bounds.block(layer.hessian(X, loss), exact=False), shapes, dense)


@pytest.mark.parametrize("criterion", ["mse", "cross-entropy", "mixing"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 2},
        {"heads": 2, "W_O": True, "biases": True, "causal": True},
        {"heads": 4, "kv_heads": 2, "W_O": True},
        {"heads": 4, "kv_heads": 2},
        {"heads": 2, "combine": "sum", "causal": True},
        {"heads": 4, "kv_heads": 2, "combine": "sum"},
    ],
    ids=["heads", "everything", "groups and W_O", "groups", "sum", "groups, sum"],
)
def test_heads_biases_masks_and_losses(options: dict, criterion: str) -> None:
    r = normal(len(options))
    N, L, d, k, e = 2, 3, 3, 2, 2
    heads, kv_heads = options["heads"], options.get("kv_heads", options["heads"])
    combine, causal = options.get("combine", "concat"), options.get("causal", False)
    X = r(N, L, d)
    weights = {"Q": r(d, heads * k), "K": r(d, kv_heads * k), "V": r(d, kv_heads * e)}
    if options.get("W_O"):
        weights["O"] = r(heads * e, 4)
    biases = {"b_Q": r(heads * k), "b_K": r(kv_heads * k), "b_V": r(kv_heads * e)} if options.get("biases") else {}
    layer = SelfAttention(
        *(weights[name] for name in "QKV"), weights.get("O"), heads=heads, kv_heads=kv_heads, combine=combine,
        causal=causal, **biases,
    )  # fmt: skip
    visible = torch.ones(L, L, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    m = layer.d_out
    Y, mixer = r(N, L, m), r(L, L)
    loss = {
        "mse": MSE(Y),
        "cross-entropy": CrossEntropy(torch.randint(5, (N, L), generator=torch.Generator().manual_seed(0)), r(m, 5)),
        "mixing": lambda F: (mixer @ torch.tanh(F - Y)).square().mean(),
    }[criterion]

    def function(p: dict[str, Tensor]) -> Tensor:
        given = {**p, **{name: b[None] for name, b in biases.items()}}
        return attention(
            given, X, heads=heads, kv_heads=kv_heads, scale=1 / math.sqrt(k), visible=visible, combine=combine
        )

    dense = dense_hessian(function, weights, loss)
    shapes = {name: tuple(W.shape) for name, W in weights.items()}
    assert_bounds_hold(bounds.attention(layer, X, loss), shapes, dense)
    assert_bounds_hold(bounds.block(layer.hessian(X, loss), exact=False), shapes, dense)


def test_one_matrix_for_queries_and_keys() -> None:
    r = normal(0)
    X, W_QK, W_V, Y = r(4, 3), r(3, 3), r(3, 2), r(4, 2)
    layer = SelfAttention.single_matrix(W_QK, W_V)

    def function(p: dict[str, Tensor]) -> Tensor:
        return torch.softmax(X @ p["QK"] @ X.T, -1) @ X @ p["V"]

    dense = dense_hessian(function, {"QK": W_QK, "V": W_V}, MSE(Y))
    assert_bounds_hold(bounds.attention(layer, X, MSE(Y)), {"QK": W_QK.shape, "V": W_V.shape}, dense)


def test_additive_mask() -> None:
    r = normal(1)
    X, W_Q, W_K, W_V, Y, bias = r(4, 3), r(3, 2), r(3, 2), r(3, 3), r(4, 3), 2 * r(4, 4)
    weights = {"Q": W_Q, "K": W_K, "V": W_V}
    visible = torch.ones(4, 4, dtype=torch.bool)
    dense = dense_hessian(
        lambda p: attention(p, X[None], scale=1 / math.sqrt(2), visible=visible, logit_bias=bias)[0], weights, MSE(Y)
    )
    found = bounds.attention(SelfAttention(W_Q, W_K, W_V), X, MSE(Y), mask=bias)
    assert_bounds_hold(found, {name: W.shape for name, W in weights.items()}, dense)


def test_attained_by_one_token() -> None:
    # One token attends to itself: H(V, V) = 2/d x x^T ⊗ I, and nothing else is left.
    r = normal(2)
    X, layer = r(1, 3), SelfAttention(r(3, 2), r(3, 2), r(3, 3))
    found = bounds.attention(layer, X, MSE(r(1, 3)))
    assert found["V", "V"].tightness == pytest.approx(1)
    assert found["Q", "Q"].value == 0
    assert found["Q", "Q"].tightness == 1
    assert found.whole.tightness == pytest.approx(1)


def test_value_query_block_attained_by_two_opposite_tokens() -> None:
    # A = 1/2 everywhere, W_K and G along the tokens: Cov = D²/4, and |<G, ·>| reaches |G| x |W_K| D²/4 s.
    X = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    W_K = torch.tensor([[1.5], [0.0]], dtype=torch.float64)
    zero = torch.zeros(2, 2, dtype=torch.float64)
    Y = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    found = bounds.attention(SelfAttention(zero[:, :1], W_K, zero), X, MSE(Y))
    assert found.functional["V", "Q"].tightness == pytest.approx(1)


# ---- the facts behind it


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_moments_of_numbers_between_0_and_1(points: list[tuple[float, float]]) -> None:
    weights, values = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    if float(weights.sum()) < 1e-6:
        return
    p = weights / weights.sum()
    deviation = values - p @ values
    assert float(p @ deviation**2) <= 1 / 4 * ROUNDING
    assert abs(float(p @ deviation**3)) <= math.sqrt(3) / 18 * ROUNDING


def test_third_moment_is_attained() -> None:
    p = (3 - math.sqrt(3)) / 6
    assert p * (1 - p) * (1 - 2 * p) == pytest.approx(math.sqrt(3) / 18, rel=1e-12)


@pytest.mark.parametrize("activation", ACTIVATION_NORMS)
def test_slopes_of_activations(activation: str) -> None:
    h = torch.cat([torch.linspace(-8, 8, 200_001, dtype=torch.float64), torch.tensor([0.0, math.sqrt(2)]).double()])
    h.requires_grad_()
    first = torch.autograd.grad(SLOPES[activation](h).sum(), h, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), h)[0] if first.requires_grad else torch.zeros_like(h)
    for found, bound in zip((first.detach(), second.detach()), ACTIVATION_NORMS[activation], strict=True):
        assert float(found.abs().max()) <= bound * ROUNDING
        assert float(found.abs().max()) >= bound * (1 - 1e-8)


# ---- the feed-forward layer


def test_an_activation_without_a_largest_slope() -> None:
    layer = FeedForward(torch.eye(2), None, torch.eye(2), None, "relu2")
    with pytest.raises(RangeError, match="layer: there is no bound on the slope of activation='relu2'"):
        bounds.feed_forward(layer, torch.ones(3, 2), MSE(torch.zeros(3, 2)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation: str, biases: bool, gated: bool, seed: int) -> None:
    r, generator = normal(seed), torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(4, generator=generator, dtype=torch.float64) - 2)
    L, d, f, m = 4, 3, 4, 2
    weights = {"W1": sizes[0] * r(d, f), "W2": sizes[1] * r(f, m)}
    if biases:
        weights |= {"b1": r(f), "b2": r(m)}
    if gated:
        weights["W_gate"] = sizes[2] * r(d, f)
        if biases:
            weights["b_gate"] = r(f)
    layer = FeedForward(
        weights["W1"], weights.get("b1"), weights["W2"], weights.get("b2"), activation,
        weights.get("W_gate"), weights.get("b_gate"),
    )  # fmt: skip
    X, Y = sizes[3] * r(L, d), r(L, m)
    loss = CrossEntropy(torch.arange(L) % 3, r(m, 3)) if seed % 2 else MSE(Y)
    phi = ACTIVATIONS[activation]

    def function(p: dict[str, Tensor]) -> Tensor:
        h = X @ p["W1"] + p.get("b1", 0.0)
        z = phi(X @ p["W_gate"] + p.get("b_gate", 0.0)) * h if gated else phi(h)
        return z @ p["W2"] + p.get("b2", 0.0)

    dense = dense_hessian(function, {name: weights[name] for name in layer.weights}, loss)
    shapes = {name: tuple(values.shape) for name, values in layer.weights.items()}
    assert_bounds_hold(bounds.feed_forward(layer, X, loss), shapes, dense)
    assert_bounds_hold(bounds.block(layer.hessian(X, loss), exact=False), shapes, dense)


def test_relu_has_no_functional_diagonal() -> None:
    r = normal(0)
    found = bounds.feed_forward(FeedForward(r(3, 4), r(4), r(4, 2), r(2)), r(5, 3), MSE(r(5, 2)))
    assert found.functional["W1", "W1"].value == found.functional["W1", "W1"].measured == 0
    assert found.functional["W1", "W2"].value > 0


# ---- norms


def layer_norm_derivatives(layer: LayerNorm | RMSNorm, X: Tensor) -> tuple[Tensor, Tensor]:
    """dy/dX (T d, T d) and d²y/dX² (T d · T d, T d) by autodiff, from the definition."""

    def forward(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if isinstance(layer, LayerNorm) else x
        return layer.gamma * centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()

    size = X.numel()
    return jacrev(forward)(X).reshape(size, size), jacfwd(jacrev(forward))(X).reshape(size * size, size)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_norms_are_exact_without_gamma(kind: type, d: int, scale: float, eps: float) -> None:
    if kind is LayerNorm and d == 1 and eps == 0:
        pytest.skip("a row of one number has no variance")
    X = scale * normal(d)(3, d)
    layer = kind(-2 * torch.ones(d, dtype=torch.float64), eps=eps)
    first, second = layer_norm_derivatives(layer, X)
    found = bounds.layer_norm(layer, X)
    for matrix, bound in ((first, found["jacobian"]), (second, found["second derivative"])):
        # Where the true norm is 0, as in one dimension, autodiff leaves rounding of the terms that cancel.
        noise = 1e-12 / float(layer.sigma(X).min()) ** (1 if matrix is first else 2)
        assert bound.value == pytest.approx(norm(matrix), rel=1e-9, abs=noise)
        assert bound.measured == pytest.approx(norm(matrix), rel=1e-9, abs=noise)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("seed", range(20))
def test_norms_are_bounded_with_gamma(kind: type, seed: int) -> None:
    r = normal(seed)
    X, layer = r(3, 5), kind(r(5), eps=1e-5)
    first, second = layer_norm_derivatives(layer, X)
    found = bounds.layer_norm(layer, X)
    assert norm(first) <= found["jacobian"].value * ROUNDING
    assert norm(second) <= found["second derivative"].value * ROUNDING
    assert found["jacobian"].tightness >= 1 / ROUNDING and {one.part for one in found.values()} == {"total"}


def test_norms_of_a_weight_from_those_of_the_heads_that_share_it() -> None:
    """Six heads, three to a key: heads of one group add where their outputs do, those of different groups never."""
    values = [3.0, 0.0, 4.0, 1.0, 1.0, 1.0]
    assert bound_factors._joined(values, 3, disjoint=True) == 5  # |(3, 0, 4)|
    assert bound_factors._joined(values, 3, disjoint=False) == math.hypot(7, 3)
    assert bound_factors._paired(values, 1, 3) == bound_factors._paired(values, 3, 1) == 5
    assert bound_factors._paired(values, 3, 3) == 7


# ---- whole blocks, measured factors


class Given(LinearOperator):
    """A block given by its entries."""

    def __init__(self, matrix: Tensor, symmetric: bool) -> None:
        super().__init__((matrix.shape[0], 1), (matrix.shape[1], 1), matrix, symmetric)
        self._matrix = matrix

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._matrix @ columns

    def _write(self, out: Tensor) -> None:
        out.copy_(self._matrix.view(out.shape))

    def _transposed(self) -> LinearOperator:
        return Given(self._matrix.T.contiguous(), self.symmetric)


def post_norm_blocks(seed: int, count: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors of the shapes of the five weights of the block paper's block, and for `count` blocks of many sizes the
    outer parts and the whole Hessians."""
    generator = torch.Generator().manual_seed(seed)
    L, d, k, f = 3, 4, 2, 4
    shapes = {"1": (d, f), "2": (f, d), "Q": (d, k), "K": (d, k), "V": (d, d)}
    sizes = 10 ** (2 * torch.rand(2, count, generator=generator, dtype=torch.float64) - 1)
    X = sizes[0][:, None, None] * torch.randn(count, L, d, generator=generator, dtype=torch.float64)
    Y = torch.randn(count, L, d, generator=generator, dtype=torch.float64)
    total = sum(math.prod(shape) for shape in shapes.values())
    theta = sizes[1][:, None] * torch.randn(count, total, generator=generator, dtype=torch.float64)

    def layer_norm(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def forward(flat: Tensor, x: Tensor) -> Tensor:
        pieces = flat.split([math.prod(shape) for shape in shapes.values()])
        W = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        A = torch.softmax(x @ W["Q"] @ W["K"].T @ x.T / math.sqrt(k), -1)
        y = layer_norm(x + A @ x @ W["V"])
        return layer_norm(torch.relu(y @ W["1"]) @ W["2"] + y)

    def hessian(flat: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        J = jacrev(forward)(flat, x).flatten(0, 1)
        H = jacfwd(grad(lambda t: (forward(t, x) - y).square().mean()))(flat)
        return J.T @ J * 2 / (L * d), H

    outer, whole = vmap(hessian)(theta, X, Y)
    return {name: torch.empty(shape) for name, shape in shapes.items()}, outer, whole


def as_block_hessian(weights: dict[str, Tensor], outer: Tensor, functional: Tensor) -> BlockHessian:
    sizes = [weight.numel() for weight in weights.values()]
    shapes = {name: (size, 1) for name, size in zip(weights, sizes, strict=True)}
    names = list(weights)

    def part(matrix: Tensor) -> BlockMatrix:
        strips = [strip.split(sizes, 1) for strip in matrix.split(sizes)]

        def entry(row: str, column: str) -> LinearOperator:
            return Given(strips[names.index(row)][names.index(column)].contiguous(), row == column)

        return BlockMatrix(shapes, entry, matrix)

    return BlockHessian(part(outer), part(functional))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_whole_block_with_measured_factors(count: int) -> None:
    weights, outer, whole = post_norm_blocks(0, count)
    found = []
    for first, H in zip(outer, whole, strict=True):
        bounded = bounds.block(as_block_hessian(weights, first, H - first))
        assert norm(H) <= bounded.whole.value * ROUNDING
        assert norm(first) <= bounded.outer.whole.value * ROUNDING
        assert bounded["1", "Q"].tightness == pytest.approx(1)  # entries given: the block's own norm
        found.append(bounded.whole.value / norm(H))
    assert statistics.median(found) < 10


def test_attention_with_measured_factors() -> None:
    found = []
    for number, (L, d, k) in enumerate(SIZES):
        for X, W_Q, W_K, W_V, Y in zip(*draw(100 + number, 4, L, d, k), strict=True):
            hessian = SelfAttention(W_Q, W_K, W_V).hessian(X, MSE(Y))
            bounded, exact = bounds.block(hessian, exact=False).total, bounds.block(hessian).total
            assert exact["Q", "K"].value == bounded["Q", "K"].measured <= bounded["Q", "K"].value * ROUNDING
            assert bounded.whole.measured <= exact.whole.value * ROUNDING <= bounded.whole.value * ROUNDING**2
            found.append(bounded.whole.tightness)
    assert statistics.median(found) < 10


# ---- the interface


def test_a_bound_says_what_it_is() -> None:
    r = normal(0)
    layer = SelfAttention(r(3, 2), r(3, 2), r(3, 3))
    found = bounds.attention(layer, r(4, 3), MSE(r(4, 3)))
    assert len(found.total) == 6
    assert set(found.total) == {("Q", "Q"), ("Q", "K"), ("Q", "V"), ("K", "K"), ("K", "V"), ("V", "V")}
    bound = found["V", "Q"]
    assert bound is found["Q", "V"]
    assert (bound.name, bound.part) == ("Q, V", "total")
    assert (found.outer["Q", "Q"].name, found.outer["Q", "Q"].part) == ("Q", "outer")
    assert (found.whole.name, found.whole.part) == ("all", "total")
    assert bound.tightness == bound.value / bound.measured > 1
    assert bound.value == pytest.approx(found.outer["V", "Q"].value + found.functional["V", "Q"].value)
    assert "measure" not in repr(bound)


def test_zero_blocks() -> None:
    r = normal(0)
    found = bounds.attention(SelfAttention(r(3, 2), r(3, 2), r(3, 3)), r(4, 3), MSE(r(4, 3)))
    assert found.functional["V", "V"].tightness == 1
    saturated = bounds.attention(SelfAttention(1e3 * r(3, 2), 1e3 * r(3, 2), r(3, 3)), r(4, 3), MSE(r(4, 3)))
    assert saturated["Q", "Q"].tightness > 1e6


def test_float32_layer() -> None:
    r = normal(0, torch.float32)
    found = bounds.attention(SelfAttention(r(3, 2), r(3, 2), r(3, 3)), r(4, 3), MSE(r(4, 3)))
    assert all(bound.measured <= bound.value * (1 + 1e-5) for bound in found.total.values())


def test_errors() -> None:
    r = normal(0)
    X, Y = r(4, 3), r(4, 3)
    with pytest.raises(RangeError, match="softmax, got activation='linear'"):
        bounds.attention(SelfAttention(r(3, 2), r(3, 2), r(3, 3), activation="linear"), X, MSE(Y))
    with pytest.raises(RangeError, match=r"rotary positions; use bounds\.block"):
        bounds.attention(SelfAttention(r(3, 2), r(3, 2), r(3, 3), rotary=100.0), X, MSE(Y))
    found = bounds.attention(SelfAttention(r(3, 2), r(3, 2), r(3, 3)), X, MSE(Y))
    with pytest.raises(BlockNameError, match="no bound on"):
        found["Q", "O"]


def test_matrix_free_hessian() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    r = normal(0)
    H = cv.hessian(model, torch.nn.functional.mse_loss, [(r(5, 3), r(5, 1))], method="autodiff")
    with pytest.raises(RangeError, match="known by its products only; use exact=False"):
        bounds.block(H)
    assert norm(H.dense()) <= bounds.block(H, exact=False).whole.value * ROUNDING


def test_a_whole_transformer_block_with_measured_factors():
    """The matrix of the blocks' norms bounds the whole, and not by much."""
    tightness = []
    for seed in range(6):
        draw = normal(100 + seed)
        scale = 10 ** float(draw(1))
        attention = cv.exact.SelfAttention(*(scale * draw(4, 4) / 2 for _ in range(4)), causal=True)
        feedforward = cv.exact.FeedForward(draw(4, 6) / 2, draw(6) / 4, draw(6, 4) / 2, draw(4) / 4, "gelu")
        norms = [cv.exact.LayerNorm(1 + draw(4) / 4, draw(4) / 4, 1e-5) for _ in range(2)]
        block = cv.exact.TransformerBlock(attention, feedforward, *norms, placement=("pre", "post")[seed % 2])
        H = block.hessian(draw(2, 3, 4), cv.losses.MSE(draw(2, 3, 4)))
        found = cv.exact.bounds.block(H).whole
        measured = float(torch.linalg.matrix_norm(H.dense(), 2))
        assert found.value >= measured * (1 - 1e-9)
        assert found.measured == pytest.approx(measured, rel=1e-9)
        tightness.append(found.value / measured)
    assert sorted(tightness)[3] < 10
