"""A layer at its place in a network: what the network asks of attention, norms and feed-forward layers alike."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope.exact.assembly import Directions, WeightPart, column_chunks
from curvoscope.exact.attention.blocks import AttentionBlocks, weights_of
from curvoscope.exact.attention.hessian import AttentionHessian
from curvoscope.exact.attention.layer import Pass
from curvoscope.exact.attention.product import AttentionProduct, Moved
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.factor import Factor
from curvoscope.exact.grouped import Grouped, fits
from curvoscope.exact.tokenwise import TokenwiseHessian, TokenwiseLayer, contracted, matrix_shape
from curvoscope.losses import Curvature, LossAt, ScalarCurvature
from curvoscope.operators.base import Shape
from curvoscope.operators.block_matrix import BlockHessian, Slot

Layer = SelfAttention | TokenwiseLayer


@dataclass(frozen=True)
class FactoredPart(WeightPart):
    """With factors whose sum is its Jacobian at the output of the layer."""

    factors: list[Factor]


class Link(ABC):
    """A layer at its input X (N, L, d). `names` are those of its weights in the network -> in the layer."""

    layer: Layer
    names: dict[str, str]
    shapes: dict[str, Shape]
    output: Tensor
    workspace: int  # bytes that a direction needs in a product

    def __init__(self, name: str, X: Tensor) -> None:
        self.name, self.X = name, X
        self.gradient = X.new_empty(0)

    def settle(self, gradient: Tensor) -> Tensor:
        """Take the gradient G (N, L, m) at the output, and return the one at the input."""
        self.gradient = gradient
        self._settled()
        back = gradient.flatten(0, 1)[None]
        return self.pull({}, None, back, [], functional=False)[1].view(self.X.shape)

    @abstractmethod
    def _settled(self) -> None:
        """Prepare for the gradient that is now known."""

    @abstractmethod
    def push(self, directions: Directions) -> tuple[Tensor, object]:
        """dF (n, T, m) along directions of weights (n, a, p) and of "X" (n, T, d), and what moved on the way."""

    @abstractmethod
    def pull(
        self, directions: Directions, moved: object, back: Tensor, wanted: Sequence[str], functional: bool
    ) -> tuple[Directions, Tensor]:
        """How the gradients at the weights `wanted` and at the input (n, T, d) move: see `TokenwiseHessian.pull`."""

    @abstractmethod
    def hessian(self, curvature: Curvature) -> BlockHessian:
        """The Hessian over the layer's weights, for S at its output."""

    @property
    def input_jacobian(self) -> Grouped:
        """dF/dX."""
        return self._input_parts[0]

    @property
    def input_curvature(self) -> Grouped:
        """The Hessian of <G, F> in the input."""
        return self._input_parts[1]

    @cached_property
    @abstractmethod
    def _input_parts(self) -> tuple[Grouped, Grouped]: ...

    @abstractmethod
    def parts(self, name: str) -> list[FactoredPart] | None:
        """How a weight moves the output, part by part; None if its Jacobian has no such form."""


class TokenwiseLink(Link):
    """A norm or a feed-forward layer."""

    layer: TokenwiseLayer

    def __init__(self, name: str, layer: TokenwiseLayer, X: Tensor) -> None:
        super().__init__(name, X)
        self.layer, self.output = layer, layer(X)
        order = [local for local in layer.labels or layer.weights if local in layer.weights]  # matrices first
        labels = {local: layer.labels.get(local, local) for local in order}
        self.names = {f"{name}.{label}" if label else name: local for local, label in labels.items()}
        self.shapes = {local: matrix_shape(layer.weights[local]) for local in labels}
        widths = X.shape[2] + self.output.shape[2] + sum(p for _, p in self.shapes.values())
        self.workspace = 8 * X.shape[0] * X.shape[1] * widths * X.element_size()

    def _settled(self) -> None:
        self.local = self._around(ScalarCurvature(0.0))

    def _around(self, curvature: Curvature) -> TokenwiseHessian:
        return self.layer.around(self.X, LossAt(0.0, self.gradient, curvature), wrt_input=False)

    def push(self, directions: Directions) -> tuple[Tensor, object]:
        """See `TokenwiseHessian.push`."""
        return self.local.push(directions)

    def pull(
        self, directions: Directions, moved: object, back: Tensor, wanted: Sequence[str], functional: bool
    ) -> tuple[Directions, Tensor]:
        """See `TokenwiseHessian.pull`."""
        pairs, at_input = self.local.pull(directions, moved if isinstance(moved, dict) else {}, back, functional)
        return {name: contracted(pairs[name]) for name in wanted}, at_input

    def hessian(self, curvature: Curvature) -> BlockHessian:
        """Of the layer alone."""
        return self._around(curvature).assemble()

    @cached_property
    def _input_parts(self) -> tuple[Grouped, Grouped]:
        tokens, d, m = self.X.shape[0] * self.X.shape[1], self.X.shape[2], self.output.shape[2]
        fits(tokens, 1, m, d, self.X)
        return Grouped(self.local.input_jacobian(), 1), Grouped(self.local.input_curvature(), 1, symmetric=True)

    def parts(self, name: str) -> list[FactoredPart]:
        """The weight as a whole."""
        shape = self.shapes[name]
        return [FactoredPart(shape, Slot(0, 0, shape[0]), [self.local.factors[name]])]

    def mixed(self, name: str) -> list[Factor]:
        """See `TokenwiseHessian.mixed`."""
        return self.local.mixed(name)


class AttentionLink(Link):
    """Self-attention."""

    layer: SelfAttention

    def __init__(self, name: str, layer: SelfAttention, X: Tensor, passed: Pass | None = None) -> None:
        """`passed`: the forward pass at X, if it is not the plain one: with a mask, for example."""
        super().__init__(name, X)
        self.layer, self._passed = layer, passed or layer.forward_pass(X)
        self.output = self._passed.F
        self.shapes = layer.shapes(layer.biases)
        self.names = {f"{name}.{local}": local for local in self.shapes}
        self.workspace = self._passed.workspace

    def _settled(self) -> None:
        found = LossAt(0.0, self.gradient, ScalarCurvature(0.0))
        self._product = AttentionProduct(self.layer, self._passed, found)
        self._blocks = AttentionBlocks(self.layer, self._passed, found)

    def push(self, directions: Directions) -> tuple[Tensor, object]:
        """See `AttentionProduct.push`."""
        dF, moved = self._product.push(directions)
        return dF.flatten(1, 2), moved

    def pull(
        self, directions: Directions, moved: object, back: Tensor, wanted: Sequence[str], functional: bool
    ) -> tuple[Directions, Tensor]:
        """See `AttentionProduct.pull`."""
        inside: Moved | None = moved if isinstance(moved, tuple) else None
        dG = back.view(back.shape[0], *self.output.shape)
        answers = self._product.pull(directions, inside, dG, [*wanted, "X"], functional)
        at_input = answers.pop("X")
        return answers, at_input

    def hessian(self, curvature: Curvature) -> BlockHessian:
        """Of the layer alone."""
        found = LossAt(0.0, self.gradient, curvature)
        return AttentionHessian(self.layer, self._passed, found, self.layer.biases, per_head=False, wrt_input=False)

    @cached_property
    def _input_parts(self) -> tuple[Grouped, Grouped]:
        """Every feature of every position moved in all sequences at once: sequences do not mix."""
        sequences, length, d = self.X.shape
        width, size = self.output.shape[2], length * d
        fits(sequences * length, length, max(width, d), d, self.X)
        first, second = [], []
        for start, stop in column_chunks(size, self.workspace):
            unit = self.X.new_zeros(stop - start, size)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
            directions = {"X": unit.view(-1, 1, length, d).expand(-1, sequences, -1, -1).flatten(1, 2)}
            dF, moved = self._product.push(directions)
            bent = self._product.pull(directions, moved, torch.zeros_like(dF), ["X"], functional=True)["X"]
            first.append(dF.flatten(2))
            second.append(bent.view(-1, sequences, size))
        jacobian, curvature = (torch.cat(parts).permute(1, 2, 0) for parts in (first, second))
        return Grouped(jacobian, length), Grouped(curvature, length, symmetric=True)

    def parts(self, name: str) -> list[FactoredPart] | None:
        """Those of each head: for queries and keys A = Cov[V, f]^T P, for values P, for outputs I."""
        weights = weights_of(self.layer, name, self.shapes[name])
        if not self.layer.has_cores(weights[0].role):
            return None
        return [
            FactoredPart(
                weight.shape,
                weight.slot,
                [factor.at_output(self.layer.d_out) for factor in self._blocks.factors(weight)],
            )
            for weight in weights
        ]


def link(name: str, layer: Layer, X: Tensor) -> Link:
    """The layer at X."""
    return AttentionLink(name, layer, X) if isinstance(layer, SelfAttention) else TokenwiseLink(name, layer, X)
