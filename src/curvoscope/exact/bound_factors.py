"""Norms of Jacobians and of contracted second derivatives, bounded through norms of inputs, weights and gradients.

What attention adds to this is one fact about any distribution, such as a row of a softmax: numbers whose range is r
have a variance of at most r²/4 and a third central moment of at most √3/18 r³, both attained by two points.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import RangeError
from curvoscope.exact.attention.layer import AttentionLayer
from curvoscope.exact.feedforward import FeedForward

Pair = tuple[str, str]
Values = dict[Pair, float]

_VARIANCE = 1 / 4
_THIRD_MOMENT = math.sqrt(3) / 18

# The largest |φ'| and |φ''|. GELU: Φ(√2) + √2 ϕ(√2) and 2 ϕ(0); slopes without a closed form are rounded up.
ACTIVATION_NORMS = {
    "relu": (1.0, 0.0),
    "gelu": ((1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi), math.sqrt(2 / math.pi)),
    "gelu_tanh": (1.128993069, math.sqrt(2 / math.pi)),
    "silu": (1.099839321, 0.5),
    "quick_gelu": (1.099839321, 1.702 / 2),
    "gelu_bloom": (1.128993069, math.sqrt(2 / math.pi)),
}


def norm(matrices: Tensor) -> float:
    """The largest singular value among matrices (..., m, n)."""
    return float(torch.linalg.matrix_norm(matrices.double(), 2).max())


def diameter(rows: Tensor) -> float:
    """The largest distance between two rows of one sequence, (N, L, d)."""
    return float(torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").max())


def curvature_norm(curvature: losses.Curvature, F: Tensor) -> float:
    """|S|, exact, for outputs F (N, L, m)."""
    if isinstance(curvature, losses.ScalarCurvature):
        return abs(curvature.factor)
    if isinstance(curvature, losses.PairCurvature):
        groups, size, width = curvature.blocks.shape[:3]
        return norm(curvature.blocks.reshape(groups, size * width, size * width))
    assert isinstance(curvature, losses.PerToken)
    needed = (curvature.workspace(None, None) + 2 * F.shape[2] ** 2) * F.element_size()
    parts = checks.chunks(F[..., 0].numel(), F.shape[1], needed, checks.memory_budget() // 4)
    return max(norm(curvature.between(None, None, start, stop)) for start, stop in parts)


# ---- attention


def attention_factors(layer: AttentionLayer, X: Tensor, G: Tensor) -> tuple[dict[str, float], Values]:
    """Bounds on |J_i| and on the functional blocks, by "Q", "K", "V", "O"; X (N, L, d), G (N L, m) in float64."""
    inputs = _Inputs(X, G)
    heads = [_HeadBounds(layer, inputs, h) for h in range(layer.heads)]
    share = layer.heads // layer.kv_heads
    shared = {"Q": 1, "K": share, "V": share, "O": 1}  # heads that use one part of the weight
    disjoint = layer.W_O is None and layer.combine == "concat"  # every head has columns of F to itself
    jacobians = {name: _joined([head.jacobians[name] for head in heads], shared[name], disjoint) for name in shared}
    functional = {
        (row, column): _paired([head.functional[row, column] for head in heads], shared[row], shared[column])
        for row, column in heads[0].functional
    }
    return jacobians, functional


@dataclass(frozen=True)
class _Inputs:
    """Tokens X (N, L, d) and the loss gradient G (N L, m), with the norms that all heads share."""

    X: Tensor
    G: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.X.flatten(0, 1)

    @cached_property
    def size(self) -> float:
        return norm(self.tokens)

    @cached_property
    def width(self) -> float:
        return diameter(self.X)

    @cached_property
    def mean(self) -> float:
        """A bound on |A X|: its rows are means of tokens, and |A| ≤ √L."""
        longest = float(self.tokens.norm(dim=1).max())
        return min(math.sqrt(len(self.tokens)) * longest, math.sqrt(self.X.shape[1]) * self.size)


class _HeadBounds:
    """One head: its bounds on |J_i| and on the functional blocks. The formulas are those of `bounds.attention`."""

    def __init__(self, layer: AttentionLayer, inputs: _Inputs, head: int) -> None:
        X, G, tokens = inputs.X, inputs.G, inputs.tokens
        kv_head = head // (layer.heads // layer.kv_heads)
        way = layer.port(head)
        way = way.double() if isinstance(way, Tensor) else way
        port = losses.through(torch.eye(layer.d_out, dtype=X.dtype, device=X.device), way).mT
        W_Q = layer.W_Q.double().chunk(layer.heads, 1)[head]
        W_K, W_V = (W.double().chunk(layer.kv_heads, 1)[kv_head] for W in (layer.W_K, layer.W_V))
        U = W_V @ port
        b_Q = 0.0 if layer.b_Q is None else layer.b_Q.double().chunk(layer.heads)[head]
        b_V = 0.0 if layer.b_V is None else float(layer.b_V.double().chunk(layer.kv_heads)[kv_head].norm())
        s, x, q, m = abs(layer.scale), inputs.size, norm(tokens @ W_Q + b_Q), inputs.mean
        D, D_K, D_V, D_U = inputs.width, diameter(X @ W_K), diameter(X @ W_V), diameter(X @ U)
        k, u, o = norm(W_K), norm(U), norm(port)
        largest_G, G_2, G_F = float(G.norm(dim=1).max()), norm(G), float(G.norm())

        def third(widths: float, weights: float) -> float:
            """Y_fg from D_f D_g and |W_f| |W_g|."""
            return largest_G * min(_VARIANCE * widths * D_U, _THIRD_MOMENT * D**3 * weights * u)

        self.jacobians = {
            "Q": s * x * _VARIANCE * D_K * D_U,
            "K": s * q * _VARIANCE * D * D_U,
            "V": m * o,
            "O": m * norm(W_V) + math.sqrt(len(tokens)) * b_V,
        }
        self.functional = {
            ("Q", "Q"): s**2 * x**2 * third(D_K**2, k**2),
            ("K", "K"): s**2 * q**2 * third(D**2, 1.0),
            ("Q", "K"): s**2 * x * q * third(D_K * D, k) + s * x * _VARIANCE * D * D_U * G_F,
            ("V", "Q"): s * x * _VARIANCE * D * D_K * o * G_2,
            ("V", "K"): s * q * _VARIANCE * D**2 * o * G_2,
            ("O", "Q"): s * x * _VARIANCE * D_K * D_V * G_2,
            ("O", "K"): s * q * _VARIANCE * D * D_V * G_2,
            ("V", "O"): m * G_2,
        }


def _joined(values: list[float], share: int, disjoint: bool) -> float:
    """|J| from |J_h|: `share` heads move with one part of the weight; the outputs of all add up, or are disjoint."""
    groups = torch.tensor(values, dtype=torch.float64).view(-1, share)
    if disjoint:
        return float(groups.norm(dim=1).max())
    return float(groups.sum(1).norm())


def _paired(values: list[float], row_share: int, column_share: int) -> float:
    """The norm of a functional block from those of its heads: a head meets only the parts of weights that it uses."""
    groups = torch.tensor(values, dtype=torch.float64).view(-1, max(row_share, column_share))
    return float((groups.sum(1) if row_share == column_share else groups.norm(dim=1)).max())


# ---- the feed-forward layer


def feed_forward_factors(layer: FeedForward, tokens: Tensor, G: Tensor) -> "_FeedForwardFactors":
    """Bounds on |J_i| and on the functional blocks; tokens (T, d), G (T, m) in float64."""
    return _FeedForwardFactors({name: values.double() for name, values in layer.weights.items()}, layer, tokens, G)


class _FeedForwardFactors:
    """The formulas of `bounds.feed_forward`: |z_i| and |z_ij| elementwise, i and j the hidden weights."""

    def __init__(self, weights: dict[str, Tensor], layer: FeedForward, tokens: Tensor, G: Tensor) -> None:
        self._weights, self._tokens, self._G = weights, tokens, G
        if layer.activation not in ACTIVATION_NORMS:
            raise RangeError("layer", f"there is no bound on the slope of activation={layer.activation!r}")
        slope, bend = ACTIVATION_NORMS[layer.activation]
        if "W_gate" not in weights:
            self._slopes, self._bends = {"W1": slope}, {("W1", "W1"): bend}
            self._hidden = self._size("W1")
        else:
            h, v = self._peak("W1"), self._peak("W_gate")
            self._slopes = {"W1": v, "W_gate": slope * h}
            self._bends = {("W1", "W_gate"): slope, ("W_gate", "W_gate"): bend * h}  # pairs in the order of the names
            self._hidden = min(v * self._size("W1"), h * self._size("W_gate"))

    def jacobian(self, name: str) -> float:
        """A bound on |dy/dW|."""
        if name == "W2":
            return self._hidden
        if name == "b2":
            return self._reach(name)
        return self._reach(name) * self._slopes["W" + name[1:]] * norm(self._weights["W2"])

    def functional(self, row: str, column: str) -> float:
        """A bound on |H_f|."""
        first, second = "W" + row[1:], "W" + column[1:]
        if "b2" in (row, column) or first == second == "W2":
            return 0.0
        if "W2" in (first, second):
            inner, weight = (row, first) if second == "W2" else (column, second)
            return self._slopes[weight] * self._reach(inner) * norm(self._G)
        bend = self._bends.get((first, second), 0.0) * float(self._weights["W2"].norm(dim=1).max())
        if row.startswith("W") and column.startswith("W"):
            return bend * self._reach(row) * self._reach(column) * float(self._G.norm(dim=1).max())
        return bend * self._reach(row if column.startswith("b") else column) * norm(self._G)

    def _reach(self, name: str) -> float:
        """|X| for a weight, √T for a bias."""
        return norm(self._tokens) if name.startswith("W") else math.sqrt(len(self._tokens))

    def _size(self, name: str) -> float:
        """A bound on the Frobenius norm of the pre-activations."""
        bias = self._weights.get("b" + name[1:])
        shift = 0.0 if bias is None else math.sqrt(len(self._tokens)) * float(bias.norm())
        return float(self._tokens.norm()) * norm(self._weights[name]) + shift

    def _peak(self, name: str) -> float:
        """A bound on the largest entry of the pre-activations."""
        bias = self._weights.get("b" + name[1:])
        shift = 0.0 if bias is None else float(bias.abs().max())
        return float(self._tokens.norm(dim=1).max()) * float(self._weights[name].norm(dim=0).max()) + shift
