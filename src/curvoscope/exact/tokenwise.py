"""The Hessian of any layer that treats each token alone: its blocks from what the layer says of one token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.exact.assembly import ColumnProducts, Directions, assembled
from curvoscope.exact.factor import Factor, Pairing, TermList, fits_jacobians
from curvoscope.exact.frozen import frozen
from curvoscope.exact.grouped import Grouped
from curvoscope.losses import LossAt, PairCurvature
from curvoscope.operators.base import LinearOperator, ProductPair, Shape
from curvoscope.operators.block_matrix import BlockHessian
from curvoscope.operators.compositions import Product
from curvoscope.operators.kronecker import KroneckerSum

# At a weight (a, p): pairs l (T, a), v (T, p), either with n directions before it, of which Σ_t l_t v_t^T is the sum
Pairs = dict[str, list[tuple[Tensor, Tensor]]]


class TokenStrip(Product):
    """A block of a weight with the input, or of the input with a weight: `entries()` makes it token by token."""

    def __init__(
        self,
        products: ProductPair,
        row_shape: Shape,
        column_shape: Shape,
        like: Tensor,
        entries: Callable[[], Tensor],
    ) -> None:
        super().__init__(products, row_shape, column_shape, like)
        self._entries = entries

    def _write(self, out: Tensor) -> None:
        out.copy_(self._entries())

    def _workspace(self, room: int) -> int:
        return 2 * self.shape[0] * self.shape[1] * self.dtype.itemsize  # the entries, token by token and in their order

    def _transposed(self) -> LinearOperator:
        products, entries = (self._products[1], self._products[0]), lambda: self._entries().permute(2, 3, 0, 1)
        return TokenStrip(products, self.column_shape, self.row_shape, self.like, entries)


class TokenwiseHessian(ABC):
    """The Hessian of a layer that treats each token alone: subclasses give its functional terms and its product.

    Weights reach the output as their `factors` say; "X" is the input, all T tokens as rows. Blocks of two weights are
    Kronecker sums. The input with itself is block-diagonal over tokens, unless the loss mixes them.
    """

    def __init__(self, factors: dict[str, Factor], X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> None:
        self.factors, self.loss, self.shapes = factors, loss, shapes
        self.X, self.period = X.flatten(0, 1), X.shape[1]
        self.gradient = loss.gradient.flatten(0, 1)
        widths = sum(p for _, p in shapes.values()) + self.X.shape[1] + self.gradient.shape[1]
        self._paired = Pairing(loss.curvature, self.gradient.shape[1], self.period)
        self._workspace = 8 * self.X.shape[0] * widths * X.element_size()  # bytes that a product needs for a direction

    @abstractmethod
    def functional_terms(self, row: str, column: str) -> TermList:
        """The functional part of a block of two weights."""

    @abstractmethod
    def push(self, directions: Directions) -> tuple[Tensor, Directions]:
        """dF (n, T, m) along directions (n, a, p) of the weights and (n, T, d) of "X", and what moved on the way."""

    @abstractmethod
    def pull(self, directions: Directions, moved: Directions, back: Tensor, functional: bool) -> tuple[Pairs, Tensor]:
        """How the gradients at the weights and at the input (n, T, d) move when the one at the output moves by `back`
        (n, T, m) and, with `functional`, when the layer itself moves along the directions while G is held fixed."""

    @abstractmethod
    def mixed(self, name: str) -> list[Factor]:
        """How a weight moves the gradient at the input, as factors: the functional part of the block of the two."""

    @abstractmethod
    def input_jacobian(self) -> Tensor:
        """dF/dx of every token, (T, m, d)."""

    @abstractmethod
    def input_curvature(self) -> Tensor:
        """The functional part of the block of the input with itself, of every token, (T, d, d)."""

    def product(self, directions: Directions, outer: bool, functional: bool) -> tuple[Pairs, Tensor]:
        """The parts asked for, of the Hessian times directions (n, a, p): at the weights and at the input (n, T, d)."""
        dF, moved = self.push(directions)
        return self.pull(directions, moved, self.applied(dF) if outer else torch.zeros_like(dF), functional)

    def assemble(self, aliases: Mapping[str, str] | None = None) -> BlockHessian:
        """All blocks of both parts; `aliases` are other names of theirs."""
        columns = ColumnProducts(self.shapes, self._multiplied, self._workspace)
        return BlockHessian(*assembled(columns, self.X, self._block, aliases=aliases))

    def applied(self, dF: Tensor) -> Tensor:
        """S dF for directions (n, T, m)."""
        n, tokens, width = dF.shape
        sequences = dF.view(n, tokens // self.period, self.period, width)
        return self.loss.curvature.apply(sequences).reshape(n, tokens, width)

    def _block(self, row: str, column: str, outer: bool, products: ProductPair) -> LinearOperator:
        shapes, same = (self.shapes[row], self.shapes[column]), row == column
        if "X" not in (row, column):
            terms = (
                self._paired(self.factors[row], self.factors[column]) if outer else self.functional_terms(row, column)
            )
            return KroneckerSum(*shapes, terms, self.X, same, products)
        if outer and isinstance(self.loss.curvature, PairCurvature):
            return Product(products, *shapes, self.X, same)
        if same:
            return Grouped(self._by_token(outer)[1].permute(1, 2, 0), 1, symmetric=True)
        return TokenStrip(products, *shapes, self.X, lambda: self._strip(row, outer))  # the input comes last

    def _by_token(self, outer: bool) -> tuple[Pairs, Tensor]:
        """Products with each of the d features of the input, moved in all tokens at once: tokens do not mix."""
        tokens, d = self.X.shape
        checks.fits(
            d * self._workspace, None, "a block of the input", "use fewer tokens, or products with @ of the whole"
        )
        directions = torch.eye(d, dtype=self.X.dtype, device=self.X.device)[:, None].expand(d, tokens, d)
        return self.product({"X": directions}, outer, not outer)

    def _strip(self, name: str, outer: bool) -> Tensor:
        """The block of a weight with the input, (a, p, T, d)."""
        d = self.X.shape[1]
        pairs = self._by_token(outer)[0][name]
        terms = [
            torch.einsum("nta,ntp->aptn", left.expand(d, -1, -1), right.expand(d, -1, -1)) for left, right in pairs
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def _multiplied(self, directions: Directions, wanted: Sequence[str], outer: bool, functional: bool) -> Directions:
        pairs, at_input = self.product(directions, outer, functional)
        return {name: at_input if name == "X" else contracted(pairs[name]) for name in wanted}


def contracted(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ_t l_t v_t^T, summed over the pairs: (n, a, p)."""
    total = pairs[0][0].mT @ pairs[0][1]
    for left, right in pairs[1:]:
        total = total + left.mT @ right
    return total


class TokenwiseLayer(ABC):
    """A layer that treats each token alone, from width `d` to width `d_out`.

    `weights` are its weights and biases by the names of their blocks, `labels` their other names in a network.
    """

    d: int
    d_out: int
    weights: dict[str, Tensor]
    labels: Mapping[str, str] = MappingProxyType({})

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The weight matrices."""
        return {name: values for name, values in self.weights.items() if values.ndim == 2}

    @abstractmethod
    def __call__(self, X: Tensor) -> Tensor:
        """The output, (L, m) or (N, L, m)."""

    @abstractmethod
    def _around(self, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> TokenwiseHessian:
        """The layer to second order at X (N, L, d), over the blocks of the given shapes."""

    def around(self, X: Tensor, loss: LossAt, *, wrt_input: bool = True, biases: bool = True) -> TokenwiseHessian:
        """The layer to second order at X, for a loss known by its G and S at the output."""
        names = [name for name in self.weights if biases or not name.startswith("b")]
        shapes = {name: matrix_shape(self.weights[name]) for name in names}
        if wrt_input:
            shapes["X"] = (X[..., 0].numel(), self.d)
        return self._around(X if X.ndim == 3 else X[None], loss, shapes)

    def hessian(
        self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False, biases: bool = True
    ) -> BlockHessian:
        """The Hessian of the loss over the weights, in closed form.

        Args:
            X: (L, d) or (N, L, d).
            loss: a loss of `cv.losses`, or any function of the output.
            wrt_input: whether "X" (T, d) is a block too.
            biases: whether biases are blocks.

        Returns:
            A `BlockHessian` over the layer's blocks; that of a bias has the shape (1, size).
        """
        layer, X = frozen(self), frozen(X)
        F = layer(X)
        found = losses.at(loss, F if X.ndim == 3 else F[None], X.ndim == 2)
        aliases = {label: name for name, label in self.labels.items() if label}
        return layer.around(X, found, wrt_input=wrt_input, biases=biases).assemble(aliases)

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dF/dW for each weight and bias, and dF/dX for "X": (N L m, size), rows in the order of F."""
        layer, X = frozen(self), frozen(X)
        F = layer(X)
        fits_jacobians(F, {**{name: values.numel() for name, values in self.weights.items()}, "X": X.numel()})
        nothing = LossAt(0.0, torch.zeros_like(F if F.ndim == 3 else F[None]), losses.ScalarCurvature(0.0))
        at = layer.around(X, nothing, wrt_input=False)
        found = {name: factor.jacobian(self.d_out, name) for name, factor in at.factors.items()}
        return {**found, "X": Grouped(at.input_jacobian(), 1).dense()}


def matrix_shape(values: Tensor) -> Shape:
    """The shape of a weight as a matrix: a bias has one row."""
    return (values.shape[0], values.shape[1]) if values.ndim == 2 else (1, values.shape[0])
