"""How blocks grow with the scale of input and weights, and with the temperature: equation (5), Table 1.

Every block is a product of powers as long as the attention matrix A and the loss around the output, its
gradient G and Hessian S, are held fixed. A stays fixed when the scores pay for X -> sigma X: in W_Q, in W_K or in
the temperature. A block has its own degree in each of them, so that the three ways check each other.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvoscope as cv
from curvoscope.papers.theorems import growth
from curvoscope.papers.theorems.growth import slope
from reference import normal as normal_from

SUMMANDS = {"functional": "third moment", "logit": "t_functional"}  # of the functional block of queries and keys
DEGREES = {  # equation (5) and section 3.3, with the key blocks
    (SUMMANDS.get(part, part) if pair == ["Q", "K"] else part, *pair): degrees
    for (part, *pair), degrees in growth.DEGREES.items()
}
LOSSES = ["held fixed", "mse", "cross-entropy"]
SMALL = (1e-4, 2e-4, 4e-4, 8e-4)
SATURATED = (4.0, 6.0, 8.0, 12.0)


class Attention(NamedTuple):
    """A layer's input and weights, and the loss around its output: G (L, e) and S (L e, L e)."""

    X: torch.Tensor
    W_Q: torch.Tensor
    W_K: torch.Tensor
    W_V: torch.Tensor
    G: torch.Tensor
    S: torch.Tensor
    causal: bool = False

    def hessian(self, X=1.0, Q=1.0, K=1.0, V=1.0, temperature=1.0, activation="softmax", loss=None):
        """The Hessian after scaling."""
        layer = cv.exact.SelfAttention(
            Q * self.W_Q,
            K * self.W_K,
            V * self.W_V,
            temperature=temperature,
            causal=self.causal,
            activation=activation,
        )
        inputs = X * self.X
        return layer.hessian(inputs, loss or held_fixed(layer(inputs), self.G, self.S))


def held_fixed(output, G, S):
    """A quadratic loss around this output: wherever the output is, its gradient is G and its Hessian S."""

    def loss(F):
        step = (F - output).flatten()
        return G.flatten() @ step + step @ S @ step / 2

    return loss


def draw(seed, L=5, d=4, k=3, e=4, causal=False, std=0.5):
    normal = normal_from(seed)
    root = normal(L * e, L * e)
    weights = [std * normal(d, width) for width in (k, k, e)]
    return Attention(normal(L, d), *weights, normal(L, e), root @ root.T / (L * e), causal)


def loss_of(kind, layer, seed):
    """A loss with targets, or None for the one that is held fixed around the output."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = layer.G.shape
    targets = torch.randint(0, 7, (tokens,), generator=generator)
    unembedding = torch.randn(width, 7, generator=generator, dtype=torch.float64)
    return {
        "held fixed": None,
        "mse": cv.losses.MSE(layer.G),
        "cross-entropy": cv.losses.CrossEntropy(targets, unembedding),
    }[kind]


layers = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "L": st.integers(2, 5),
        "d": st.integers(1, 4),
        "k": st.integers(1, 4),
        "e": st.integers(1, 4),
        "causal": st.booleans(),
    }
)
scales = st.floats(0.05, 20.0)


def block(H, part, row, column):
    if part == "third moment":  # what is left of H_f(Q, K) without its T-functional term
        return H.functional[row, column].dense() - H.t_functional[row, column].dense()
    return getattr(H, part)[row, column].dense()


def assert_scaled(after, before, factor, tolerance=1e-6):
    """Entry by entry, against the largest entry."""
    assert (after - factor * before).abs().max() <= tolerance * factor * before.abs().max() + 1e-300


def slopes(hessian, scale, parts):
    found = [hessian(sigma) for sigma in scale]
    return {key: slope(scale, [float(block(H, *key).norm()) for H in found]) for key in parts}


class TestDegreesAtFixedAttention:
    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(options=layers, sigma=scales)
    def test_input(self, options, sigma):
        """6, 6, 6, 4, 4, 2 outer and 5, 5, 5 + 3, 3, 3 functional, whichever way A is held fixed."""
        layer = draw(**options)
        ways = {"Q": {"Q": sigma**-2}, "K": {"K": sigma**-2}, "s": {"temperature": sigma**2}}
        cases = {"whole": layer, "third moment": layer._replace(S=0 * layer.S)}  # without S, T-outer is that term alone
        before = {name: case.hessian() for name, case in cases.items()}
        after = {(name, way): cases[name].hessian(X=sigma, **ways[way]) for name in cases for way in ways}
        for (part, *pair), degrees in DEGREES.items():
            case, part = ("third moment", "t_outer") if part == "third moment" else ("whole", part)
            for way in ways:
                power = degrees.X - 2 * getattr(degrees, way)
                assert_scaled(block(after[case, way], part, *pair), block(before[case], part, *pair), sigma**power)
        assert not block(layer.hessian(X=sigma), "functional", "V", "V").any()

    @settings(max_examples=25, deadline=None)
    @given(options=layers, tau=scales)
    def test_gauge_of_queries_and_keys(self, options, tau):
        """W_K -> tau W_K, W_Q -> W_Q/tau keeps the output: QQ tau^2, KK tau^-2, VQ tau, VK 1/tau, the rest 1."""
        layer = draw(**options)
        loss = cv.losses.MSE(layer.G)
        before, after = layer.hessian(loss=loss), layer.hessian(Q=1 / tau, K=tau, loss=loss)
        powers = {"Q": 1, "K": -1, "V": 0}
        for part, row, column in itertools.product(("outer", "functional", "total"), "QKV", "QKV"):
            factor = tau ** (powers[row] + powers[column])
            assert_scaled(block(after, part, row, column), block(before, part, row, column), factor, 1e-9)

    @settings(max_examples=25, deadline=None)
    @given(options=layers, tau=scales)
    def test_value_weights(self, options, tau):
        """Outer query and key blocks are quadratic in W_V, blocks beside values and functional ones linear."""
        layer = draw(**options)
        before, after = layer.hessian(), layer.hessian(V=tau)
        for key, degrees in DEGREES.items():
            if key[0] != "third moment":
                assert_scaled(block(after, *key), block(before, *key), tau**degrees.V, 1e-9)

    @settings(max_examples=25, deadline=None)
    @given(options=layers, t=scales)
    def test_temperature(self, options, t):
        """At fixed A, T-outer falls like 1/t^2 and T-functional like 1/t (section 4.3)."""
        layer = draw(**options)
        before, after = layer.hessian(), layer.hessian(Q=t, temperature=t)
        assert_scaled(block(after, "t_outer", "Q", "Q"), block(before, "t_outer", "Q", "Q"), t**-2, 1e-9)
        assert_scaled(block(after, "t_functional", "Q", "K"), block(before, "t_functional", "Q", "K"), 1 / t, 1e-9)
        after = layer.hessian(K=t, temperature=t)
        assert_scaled(block(after, "t_outer", "K", "K"), block(before, "t_outer", "K", "K"), t**-2, 1e-9)

    def test_mean_square_adds_a_power(self):
        """With fixed targets the residual grows like sigma, and with it the functional part: 6 and 4."""
        layer, scale = draw(0), (1e3, 2e3, 4e3)
        loss = cv.losses.MSE(layer.G)
        found = slopes(
            lambda sigma: layer.hessian(X=sigma, Q=sigma**-2, loss=loss),
            scale,
            [("functional", "Q", "Q"), ("functional", "V", "Q"), ("outer", "Q", "Q")],
        )
        assert abs(found["functional", "Q", "Q"] - 6) < 0.01
        assert abs(found["functional", "V", "Q"] - 4) < 0.01
        assert abs(found["outer", "Q", "Q"] - 6) < 1e-6


class TestSlopesOfTheRealSoftmax:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("kind", LOSSES)
    def test_small_inputs(self, seed, kind):
        """For sigma -> 0 the attention does not move: the degrees are the slopes."""
        layer = draw(seed)
        loss = loss_of(kind, layer, seed)
        complete = {
            ("total", "Q", "Q"): 5,
            ("total", "Q", "K"): 3,
            ("total", "V", "Q"): 3,
            ("total", "V", "V"): 2,
        }
        expected = {key: degrees.X for key, degrees in DEGREES.items()} | complete
        found = slopes(lambda sigma: layer.hessian(X=sigma, loss=loss), SMALL, expected)
        for key, degree in expected.items():
            assert abs(found[key] - degree) < 0.01, (key, found[key])

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("kind", LOSSES)
    def test_saturation(self, seed, kind):
        """Once the softmax saturates, the query block is far from sigma^6, and most often falls."""
        layer = draw(seed)
        loss = loss_of(kind, layer, seed)
        key = ("outer", "Q", "Q")
        assert slopes(lambda sigma: layer.hessian(X=sigma, loss=loss), SATURATED, [key])[key] < 3.5

    def test_high_temperature(self):
        """Slopes -2 and -1 for t -> infinity; near t = 1 the attention moves and T-outer is off."""
        layer = draw(2, std=0.8)
        loss = cv.losses.MSE(layer.G)
        size = {}
        for t in (1e3, 2e3, 4e3, 0.5, 0.7, 1.0, 1.4):
            H = layer.hessian(temperature=t, loss=loss)
            size[t] = H.t_outer.frobenius_norm(), H.t_functional.frobenius_norm()
        hot, warm = (1e3, 2e3, 4e3), (0.5, 0.7, 1.0, 1.4)
        assert abs(slope(hot, [size[t][0] for t in hot]) + 2) < 0.01
        assert abs(slope(hot, [size[t][1] for t in hot]) + 1) < 0.01
        assert abs(slope(warm, [size[t][0] for t in warm]) + 2) > 0.1

    def test_one_hot_rows(self):
        """A query that sees one key has no second and third moments: all but the value block vanishes."""
        layer = draw(1)
        attention = cv.exact.SelfAttention(layer.W_Q, layer.W_K, layer.W_V)
        H = attention.hessian(layer.X, cv.losses.MSE(layer.G), torch.eye(5, dtype=torch.bool).roll(1, 1))
        for part, (row, column) in itertools.product(("outer", "functional"), ("QQ", "KK", "QK", "VQ", "VK")):
            assert block(H, part, row, column).abs().max() < 1e-14
        assert block(H, "outer", "V", "V").abs().max() > 0.1


class TestTable1:
    """H_o and H_f depend on the input through Sigma and Omega in an MLP, Sigma^3 and Omega Sigma in attention."""

    @settings(max_examples=25, deadline=None)
    @given(options=layers, sigma=scales)
    def test_linear_attention_in_the_scale(self, options, sigma):
        """Sigma^3 is sigma^6 in every outer block, Omega Sigma at fixed G is sigma^3; H_f has no diagonal."""
        layer = draw(**options)
        before, after = (layer.hessian(X=scale, activation="linear") for scale in (1.0, sigma))
        for row, column in itertools.product("QKV", repeat=2):
            for part, degree in (("outer", 6), ("functional", 3)):
                assert_scaled(block(after, part, row, column), block(before, part, row, column), sigma**degree, 1e-9)
            if row == column:
                assert not block(after, "functional", row, column).any()

    @settings(max_examples=25, deadline=None)
    @given(
        widths=st.lists(st.integers(1, 4), min_size=2, max_size=6),
        tokens=st.integers(1, 5),
        sigma=scales,
        seed=st.integers(0, 10**6),
    )
    def test_linear_mlp_in_the_scale(self, widths, tokens, sigma, seed):
        """sigma^2 in every outer block and sigma in the functional ones, at any depth."""
        X, weights, G, S = draw_mlp(widths, tokens, seed)
        mlp = cv.exact.LinearMLP(weights)
        before, after = (mlp.hessian(scale * X, held_fixed(mlp(scale * X), G, S)) for scale in (1.0, sigma))
        assert_scaled(after.outer.dense(), before.outer.dense(), sigma**2, 1e-9)
        assert_scaled(after.functional.dense(), before.functional.dense(), sigma, 1e-9)
        for name in after.names:
            assert not after.functional[name].dense().any()

    @pytest.mark.parametrize("depth", [1, 2, 5, 8])
    def test_exponents_side_by_side(self, depth):
        """Norms of the diagonal blocks under the mean square: 2 for the MLP at any depth, 6 for attention."""
        X, weights, Y, _ = draw_mlp([4] * (depth + 1), 6, depth)
        mlp, layer = cv.exact.LinearMLP(weights), draw(depth, L=6)
        attention = cv.exact.SelfAttention(layer.W_Q, layer.W_K, layer.W_V, activation="linear")
        scale, loss = (0.1, 1.0, 10.0), cv.losses.MSE(Y)
        for network, exponent in ((mlp, 2), (attention, 6)):
            found = [network.hessian(sigma * X, loss) for sigma in scale]
            for name in found[0].names:
                assert abs(slope(scale, [H[name].frobenius_norm() for H in found]) - exponent) < 1e-6

    @settings(max_examples=20, deadline=None)
    @given(options=layers)
    def test_only_the_covariances_enter(self, options):
        """An orthogonal mix of the tokens keeps X^T X and X^T G, and with them every entry of the Hessians."""
        layer = draw(**{**options, "causal": False})
        tokens, seed = layer.X.shape[0], options["seed"]
        mix = torch.linalg.qr(draw_mlp([tokens, tokens], tokens, seed)[0]).Q
        curvature = 0.7 * torch.eye(layer.G.numel(), dtype=torch.float64)
        plain = layer._replace(S=curvature)
        mixed = plain._replace(X=mix @ layer.X, G=mix @ layer.G)
        mlp = cv.exact.LinearMLP([layer.W_Q, layer.W_K.T, layer.W_V])
        for hessian in (
            lambda case: case.hessian(activation="linear"),
            lambda case: mlp.hessian(case.X, held_fixed(mlp(case.X), case.G, case.S)),
        ):
            before, after = hessian(plain), hessian(mixed)
            for part in ("outer", "functional"):
                assert_scaled(getattr(after, part).dense(), getattr(before, part).dense(), 1.0, 1e-9)

    def test_softmax_needs_more_than_the_covariances(self):
        """The contrast: with a softmax the same mix changes the Hessian."""
        layer = draw(3)
        mix = torch.linalg.qr(draw_mlp([5, 5], 5, 3)[0]).Q
        before, after = (
            layer.hessian().dense(),
            layer._replace(X=mix @ layer.X, G=mix @ layer.G).hessian().dense(),
        )
        assert (after - before).abs().max() > 0.01 * before.abs().max()


def draw_mlp(widths, tokens, seed):
    """X, weights, and the gradient and Hessian of a loss at the output."""
    normal = normal_from(seed)
    X, weights = normal(tokens, widths[0]), [normal(a, b) / math.sqrt(a) for a, b in itertools.pairwise(widths)]
    outputs = tokens * widths[-1]
    root = normal(outputs, outputs)
    return X, weights, normal(tokens, widths[-1]), root @ root.T / outputs
