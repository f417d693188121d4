"""Upper bounds on the spectral norm of Hessian blocks, each with the norm that it bounds: an audit of the bounds.

For a loss with gradient G and Hessian S at the output F, every block is H_ij = J_i^T S J_j + <G, d²F/dW_i dW_j>, so

    |H_ij| ≤ |S| |J_i| |J_j| + |<G, d²F/dW_i dW_j>|        |H| ≤ |matrix of the block bounds|

with spectral norms throughout. What follows bounds |J_i| and the contraction through norms of the input, of the weights
and of G; nothing is multiplied by a safety factor. Proofs: docs/bounds.md.

The bounds say what curvature cannot exceed at the point at hand. They are far above the truth if a softmax is
saturated, they hold at one point and not along a step, and none of them is meant as a step size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from curvoscope import losses
from curvoscope.errors import BlockNameError, RangeError
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.bound_factors import (
    Pair,
    Values,
    attention_factors,
    curvature_norm,
    feed_forward_factors,
    norm,
)
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.frozen import frozen
from curvoscope.exact.norms import LayerNorm, RMSNorm
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix


@dataclass(frozen=True)
class Bound:
    """An upper bound `value` on a norm, and the norm itself, `measured` when first asked for.

    Attributes:
        name: of the block or pair of blocks.
        part: "outer", "functional" or "total".
        value: the bound.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer, X = cv.exact.LinearMLP([torch.eye(2)]), torch.eye(2)
        >>> found = cv.exact.bounds.block(layer.hessian(X, cv.losses.MSE(torch.zeros(2, 2))))
        >>> bound = found["W1", "W1"]
        >>> round(bound.value, 6), round(bound.tightness, 6)
        (0.5, 1.0)
    """

    name: str
    part: str
    value: float
    _measure: Callable[[], float] = field(repr=False, compare=False)

    @cached_property
    def measured(self) -> float:
        """The norm that is bounded, exact; of a block known by its products only, as Lanczos finds it."""
        return self._measure()

    @property
    def tightness(self) -> float:
        """value / measured: 1 if the bound is attained, infinite if the norm is 0 and the bound is not."""
        if self.measured == 0.0:
            return 1.0 if self.value == 0.0 else math.inf
        return self.value / self.measured


class BoundMatrix(Mapping[Pair, Bound]):
    """Bounds on all blocks of one part, by pairs of names in either order, and on the whole of it.

    Args:
        part: "outer", "functional" or "total".
        matrix: the blocks that are bounded.
        values: the bounds, by pairs of names.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer, X = cv.exact.LinearMLP([torch.eye(2)]), torch.eye(2)
        >>> found = cv.exact.bounds.block(layer.hessian(X, cv.losses.MSE(torch.zeros(2, 2))))
        >>> list(found.outer), round(found.outer.whole.value, 6)
        ([('W1', 'W1')], 0.5)
    """

    def __init__(self, part: str, matrix: BlockMatrix, values: Values) -> None:
        self.part, self._matrix, self._values = part, matrix, values
        self._made: dict[Pair, Bound] = {}

    @property
    def names(self) -> list[str]:
        """Names of the blocks."""
        return self._matrix.names

    def __getitem__(self, pair: Pair) -> Bound:
        key = pair if pair in self._values else pair[::-1]
        if key not in self._values:
            raise BlockNameError("block", f"there is no bound on {pair}, only on pairs of {', '.join(self.names)}")
        if key not in self._made:
            row, column = key
            name = row if row == column else f"{row}, {column}"
            self._made[key] = Bound(name, self.part, self._values[key], lambda: _measured(self._matrix[key]))
        return self._made[key]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def whole(self) -> Bound:
        """The spectral norm of the matrix of the block bounds, a bound on the norm of all blocks together."""
        table = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        for (row, column), value in self._values.items():
            i, j = self.names.index(row), self.names.index(column)
            table[i, j] = table[j, i] = value
        return Bound("all", self.part, norm(table), lambda: _measured(self._matrix))


class BlockBounds:
    """Bounds on a Hessian over named blocks: `total`, `outer` and `functional`, each a `BoundMatrix`.

    Args:
        hessian: the Hessian that is bounded.
        outer: bounds on the blocks of the outer part, by pairs of names.
        functional: those of the functional part.
        total: those of the sum; by default the sums of the two.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer, X = cv.exact.LinearMLP([torch.eye(2)]), torch.eye(2)
        >>> found = cv.exact.bounds.block(layer.hessian(X, cv.losses.MSE(torch.zeros(2, 2))))
        >>> round(found.whole.value, 6)
        0.5
    """

    def __init__(self, hessian: BlockHessian, outer: Values, functional: Values, total: Values | None = None) -> None:
        self.outer = BoundMatrix("outer", hessian.outer, outer)
        self.functional = BoundMatrix("functional", hessian.functional, functional)
        total = {pair: outer[pair] + functional[pair] for pair in outer} if total is None else total
        self.total = BoundMatrix("total", hessian.total, total)

    def __getitem__(self, pair: Pair) -> Bound:
        return self.total[pair]

    @property
    def whole(self) -> Bound:
        """The bound on the whole Hessian."""
        return self.total.whole


def attention(layer: SelfAttention, X: Tensor, loss: losses.LossFunction, mask: Tensor | None = None) -> BlockBounds:
    """A-priori bounds on the blocks "Q", "K", "V", "O" of `layer.hessian(X, loss, mask)`: no attention enters them.

    Let D be the diameter of the tokens of a sequence, D_K that of their keys, D_V of their values and D_U of what the
    values become at the output; D_K ≤ |W_K| D and so on. With s the scale of the scores, x = |X|, q = |X W_Q + b_Q|,
    and m = min(√T max|x_i|, √L x) ≥ |A X| for T tokens in sequences of L:

        J_Q ≤ s x D_K D_U/4      J_K ≤ s q D D_U/4      J_V ≤ m |W_O|      J_O ≤ m |W_V| + √T |b_V|

    and the functional parts are at most

        QQ  s² x² Y_KK               QK  s² x q Y_KX + s x D D_U/4 |G|_F         KK  s² q² Y_XX
        VQ  s x D D_K/4 |W_O| |G|    VK  s q D²/4 |W_O| |G|      VO  m |G|       VV, OO  0
        OQ  s x D_K D_V/4 |G|        OK  s q D D_V/4 |G|
        Y_fg = max|G_i| min(D_f D_g D_U/4, √3/18 D³ |W_f| |W_g| |W_V W_O|)       f, g: keys, or the tokens themselves

    Heads are bounded one by one and put together. Masks and biases may be there; biases have no block here.

    Args:
        layer: attention with a softmax, without rotary positions, norms of queries and keys, soft caps and sinks.
        X: (L, d) or (N, L, d).
        loss: a loss of `cv.losses`, or any function of F.
        mask: as in `SelfAttention.hessian`.

    Returns:
        A `BlockBounds`.

    Example:
        >>> import torch, curvoscope as cv
        >>> W, X = torch.eye(2), torch.eye(2)
        >>> found = cv.exact.bounds.attention(cv.exact.SelfAttention(W, W, W), X, cv.losses.MSE(torch.zeros(2, 2)))
        >>> found["Q", "K"].measured <= found["Q", "K"].value
        True
    """
    if layer.activation != "softmax":
        raise RangeError("layer", f"the bounds need the rows of a softmax, got activation={layer.activation!r}")
    if not layer.is_bilinear or layer.sinks is not None:
        what = "rotary positions" if layer.rotary is not None else "norms of queries and keys, soft caps and sinks"
        raise RangeError("layer", f"the bounds do not cover {what}; use bounds.block(layer.hessian(X, loss))")
    layer, X, mask = frozen(layer), frozen(X), frozen(mask)
    passed = layer.forward_pass(X, mask)
    found = losses.at(loss, passed.F, passed.squeeze)
    hessian = layer.hessian(X, loss, mask, biases=False)
    first, second = attention_factors(layer, passed.X.double(), found.gradient.double().flatten(0, 1))
    names = {"QK": "Q"}  # one matrix for queries and keys is a query weight whose key weight is the identity
    curvature, outer, functional = curvature_norm(found.curvature, passed.F), {}, {}
    for row, column in _pairs(hessian.names):
        i, j = names.get(row, row), names.get(column, column)
        outer[row, column] = curvature * first[i] * first[j]
        functional[row, column] = second.get((i, j), second.get((j, i), 0.0))
    return BlockBounds(hessian, outer, functional)


def feed_forward(layer: FeedForward, X: Tensor, loss: losses.LossFunction) -> BlockBounds:
    """Bounds on the blocks of `layer.hessian(X, loss)` from norms of X, of the weights and of G and S.

    With c1, c2 the largest |φ'|, |φ''|, x = |X| for a weight and √T for a bias, w = max_e |W2_e| over the rows of W2:

        J_1 ≤ x c1 |W2|         J_2 ≤ |z| ≤ |X|_F |W1| + √T |b1|, and √T for b2
        H_f(1, 1) ≤ x² c2 w max|G_t|, or x c2 w |G| if one is a bias      H_f(1, 2) ≤ x c1 |G|     nothing with b2

    In the gated form z = φ(v) ∘ h the constants are max|v| for W1, c1 max|h| for the gate, c1 between them and
    c2 max|h| for the gate twice, with max|h| ≤ max|x_t| max_e|W1_e| + max|b1| over the columns of W1.

    Args:
        layer: a `FeedForward`.
        X: (L, d) or (N, L, d).
        loss: a loss of `cv.losses`, or any function of the output.

    Returns:
        A `BlockBounds`.

    Example:
        >>> import torch, curvoscope as cv
        >>> W, X = torch.eye(2), torch.eye(2)
        >>> layer = cv.exact.FeedForward(W, None, W, None)
        >>> found = cv.exact.bounds.feed_forward(layer, X, cv.losses.MSE(torch.zeros(2, 2)))
        >>> found["W1", "W2"].measured <= found["W1", "W2"].value
        True
    """
    layer, X = frozen(layer), frozen(X)
    hessian, F = layer.hessian(X, loss), layer(X)
    found = losses.at(loss, F if F.ndim == 3 else F[None], F.ndim == 2)
    factors = feed_forward_factors(layer, X.double().flatten(0, -2), found.gradient.double().flatten(0, 1))
    curvature, pairs = curvature_norm(found.curvature, F if F.ndim == 3 else F[None]), _pairs(hessian.names)
    outer = {(row, column): curvature * factors.jacobian(row) * factors.jacobian(column) for row, column in pairs}
    return BlockBounds(hessian, outer, {pair: factors.functional(*pair) for pair in pairs})


def layer_norm(layer: LayerNorm | RMSNorm, X: Tensor) -> dict[str, Bound]:
    """Bounds on the "jacobian" dy/dX and the "second derivative" d²y/dX², exact if all γ have one magnitude.

    |dy/dX| ≤ max|γ| max_t |dx̂_t/dx_t| = max|γ| / min σ, and the same for d²y/dX² as a matrix of N L d · N L d rows and
    N L d columns: tokens do not mix, and diag(γ) multiplies from the left. For ε = 0 and d ≥ 3 the norms of x̂ are
    1/σ and √(max(d - 2, 2)/d)/σ² (LayerNorm).

    Args:
        layer: a `LayerNorm` or `RMSNorm`.
        X: (L, d) or (N, L, d).

    Returns:
        A `Bound` for "jacobian" and one for "second derivative".

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.tensor([[1.0, 2.0, 4.0]])
        >>> found = cv.exact.bounds.layer_norm(cv.exact.LayerNorm(torch.ones(3), eps=0.0), X)
        >>> round(found["jacobian"].tightness, 4)
        1.0
    """
    layer, X = frozen(layer), frozen(X)
    scale = float(layer.gamma.abs().max())
    jacobian = layer.input_jacobian(X)
    identity = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    entries = [layer.second_derivative(X, unit.expand(X.shape)) for unit in identity]  # d²y_a for every a
    second = torch.stack(entries, 1).flatten(1, 2)
    found = {
        "jacobian": (layer.jacobian_norm(X), jacobian),
        "second derivative": (layer.second_derivative_norm(X, flattened=True), second),
    }
    return {
        name: Bound(name, "total", scale * float(norms.max()), partial(norm, matrices))
        for name, (norms, matrices) in found.items()
    }


def block(hessian: BlockHessian, *, exact: bool = True) -> BlockBounds:
    """Bounds on any Hessian over named blocks: the whole by the spectral norm of the matrix of its blocks' norms.

    With `exact` these are the norms themselves, one eigenvalue problem per block. Without, a block that is a sum of
    Kronecker products is bounded by its measured factors, |Σ_t l_t r_t^T ⊗ C_t| ≤ |l| |r| max_t |C_t|.

    Args:
        hessian: any `BlockHessian`.
        exact: whether to take the norms of the blocks themselves.

    Returns:
        A `BlockBounds`.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer, X = cv.exact.LinearMLP([torch.eye(2)]), torch.eye(2)
        >>> found = cv.exact.bounds.block(layer.hessian(X, cv.losses.MSE(torch.zeros(2, 2))))
        >>> round(found["W1", "W1"].value, 6)
        0.5
    """

    def values(matrix: BlockMatrix) -> Values:
        return {pair: _exact(matrix[pair]) if exact else matrix[pair].norm_bound() for pair in _pairs(matrix.names)}

    return BlockBounds(hessian, values(hessian.outer), values(hessian.functional), values(hessian.total))


def _exact(operator: LinearOperator) -> float:
    found = operator.spectral_norm()
    if not found.exact:  # what Lanczos finds may be below the norm, and would not bound it
        raise RangeError("exact", "got True, but this Hessian is known by its products only; use exact=False")
    return found


def _measured(operator: LinearOperator) -> float:
    return float(operator.spectral_norm())


def _pairs(names: list[str]) -> list[Pair]:
    return [(row, column) for i, row in enumerate(names) for column in names[i:]]
