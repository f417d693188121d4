"""The Hessian of a model's loss at the output of each attention and feed-forward layer.

S couples the tokens of a sequence wherever an attention layer follows. Where it takes few products through the tail of
the network it is computed in full; else it is known by its products. The layer itself is in closed form where it could
be rebuilt, which gives its Jacobian, and for attention the moments of its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from curvoscope import checks
from curvoscope.closed.closed_forms import ClosedForms
from curvoscope.closed.passes import DownstreamLoss
from curvoscope.closed.rebuilding import Rebuilt
from curvoscope.exact.attention.moments import Moments
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.backpropagation import JacobianProducts
from curvoscope.exact.grouped import Grouped
from curvoscope.exact.links import AttentionLink, Link, TokenwiseLink
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.compositions import MatrixFree

_MOST_PRODUCTS = 512  # through the tail of the network, for all of S


class DownstreamCurvature(MatrixFree):
    """S, or a part of it, at the output of a layer (T, m), by products through the tail of the network."""

    def __init__(self, tail: DownstreamLoss, part: str) -> None:
        sequences, length, width = tail.gradient.shape
        super().__init__((sequences * length, width), (sequences * length, width), tail.gradient, symmetric=True)
        self._tail, self._part = tail, part

    def _matmat(self, columns: Tensor) -> Tensor:
        directions = columns.T.reshape(-1, *self._tail.gradient.shape)
        return self._tail.products(self._part, directions).flatten(1).T


@dataclass(frozen=True, eq=False)
class CurvatureAtOutput:
    """The loss at the output F of one layer: S = S_gn + S_functional, (T m, T m), split at the model's output.

    `jacobian`: dF/dX of the layer alone (T m, T d); `moments`: of attention, with a head axis. None where no closed
    form fits the layer.
    """

    name: str
    S: LinearOperator
    S_functional: LinearOperator
    jacobian: LinearOperator | None
    moments: Moments | None


def layer_curvatures(closed: ClosedForms) -> Iterator[CurvatureAtOutput]:
    """Layer by layer in the order of the model; only the one at hand is kept in memory."""
    for layer in closed.layers:
        tail, rebuilt = closed.tail(layer)
        alone = rebuilt is not None and rebuilt.queries is None  # cross-attention has two inputs
        jacobian, moments = _around(layer.name, rebuilt, tail.gradient) if rebuilt and alone else (None, None)
        yield CurvatureAtOutput(layer.name, _operator(tail, "total"), _operator(tail, "functional"), jacobian, moments)


def _around(name: str, rebuilt: Rebuilt, gradient: Tensor) -> tuple[LinearOperator, Moments | None]:
    layer, X = rebuilt.layer, rebuilt.X
    at: Link
    if isinstance(layer, SelfAttention):
        passed = rebuilt.forward_pass(layer)
        at, moments = AttentionLink(name, layer, X, passed), Moments(X[:, None], passed.A)
    else:
        at, moments = TokenwiseLink(name, layer, X), None
    at.settle(gradient)
    return JacobianProducts(at), moments


def _operator(tail: DownstreamLoss, part: str) -> LinearOperator:
    size, (sequences, length, width) = tail.coupled(part), tail.gradient.shape
    needed = 4 * sequences * length * size * width**2 * tail.gradient.element_size()
    if size * width > _MOST_PRODUCTS or needed > checks.memory_budget():
        return DownstreamCurvature(tail, part)
    return Grouped.of(tail.curvature(part), tail.gradient)
