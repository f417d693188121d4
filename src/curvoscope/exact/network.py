"""Networks of layers, and the Hessian of one over all of its weights.

Let F_a be the output of layer a, J_a = dF_a/dθ_a, T_ac the Jacobian from F_a to the input of layer c, D_a that from F_a
to the network's output Z, and G_c the gradient at F_c. For a below b

    outer        J_a^T (D_a^T S D_b) J_b
    functional   J_a^T (Σ_{c above b} T_ac^T <G_c, d²F_c/dx²> T_bc) J_b + J_a^T T_ab^T <G_b, d²F_b/dx dθ_b>

and the blocks of one layer are its own, with S at its output from Hessian back-propagation. From the last attention
layer on tokens stay apart, and all these are sums over tokens of Kronecker products. Weights below it, and the input,
get their rows from products with the Hessian.
"""

from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import DtypeError, EmptyError, ShapeError
from curvoscope.exact.assembly import ColumnProducts, assembled, tiled
from curvoscope.exact.chain import Branch, Chain, Descent
from curvoscope.exact.factor import Factor, TermList, fits_jacobians
from curvoscope.exact.frozen import frozen
from curvoscope.exact.links import AttentionLink, FactoredPart, TokenwiseLink
from curvoscope.losses import PairCurvature
from curvoscope.operators.base import LinearOperator, ProductPair, Shape
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix, Entries, Slot
from curvoscope.operators.compositions import Product


class Network:
    """Branches of layers on a stream of width d: forward pass, Jacobians and Hessian."""

    d: int
    branches: list[Branch]

    def __call__(self, X: Tensor) -> Tensor:
        """Z, of the shape of X but for its width."""
        self._check(X)
        stream = X
        for branch in self.branches:
            value = stream
            for _, layer in branch.layers:
                value = layer(value)
            stream = stream + value if branch.residual else value
        return stream

    def chain(self, X: Tensor, loss: losses.LossFunction) -> Chain:
        """All layers at X, with the gradients of the loss at their outputs."""
        self._check(X)
        return Chain(frozen(self.branches), frozen(X), loss)

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dZ/dW for each weight and for "X": (N L m, size), rows in the order of Z."""
        chain = self.chain(X, lambda Z: Z.sum())
        shapes = {**{name: chain.shapes[name] for name in self._names(chain)}, "X": (chain.tokens, self.d)}
        fits_jacobians(chain.output, {name: a * p for name, (a, p) in shapes.items()})
        return {name: chain.jacobian(name, shape) for name, shape in shapes.items()}

    def hessian(self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False) -> BlockHessian:
        """The Hessian of loss(Z) over all weights, blocks of two layers among them.

        `outer` is J^T S J with the Jacobian of Z and S at Z; `functional` is the rest.

        Args:
            X: (L, d) or (N, L, d).
            loss: a loss of `cv.losses`, or any function of Z.
            wrt_input: whether "X" (T, d) is a block too.

        Returns:
            A `BlockHessian` over the weights in the order of the forward pass.
        """
        chain = self.chain(X, loss)
        names = self._names(chain)
        return ChainHessian(chain, [*names, "X"] if wrt_input else names)

    def _names(self, chain: Chain) -> list[str]:
        return list(chain.shapes)

    def _check(self, X: Tensor) -> None:
        if not isinstance(X, Tensor):
            raise DtypeError("X", f"expected a torch.Tensor, got {type(X).__name__}")
        if X.ndim not in (2, 3) or X.shape[-1] != self.d:
            raise ShapeError("X", f"expected (L, {self.d}) or (N, L, {self.d}), got {tuple(X.shape)}")
        if X.numel() == 0:
            raise EmptyError("X", f"has no {'tokens' if X.shape[-2] == 0 else 'sequences'}, shape {tuple(X.shape)}")
        checks.floating("X", X)


class ChainHessian(BlockHessian):
    """Over the weights `names` of a chain, in that order, and "X" (T, d) if it is among them."""

    def __init__(self, chain: Chain, names: list[str]) -> None:
        self._chain, self._descent = chain, Descent(chain)
        every = {**chain.shapes, "X": (chain.tokens, chain.X.shape[2])}
        self._shapes: dict[str, Shape] = {name: every[name] for name in names}
        mixing = [number for number, each in enumerate(chain.links) if isinstance(each, AttentionLink)]
        # links from here on do not mix tokens after their output
        self._base = max(mixing, default=0)
        if isinstance(chain.loss.curvature, PairCurvature):
            self._base = len(chain.links)
        self._by_layer: dict[tuple[int, bool], BlockMatrix] = {}
        self._strips: dict[tuple[int, str, bool], list[Factor]] = {}

        self._columns = ColumnProducts(self._shapes, chain.product, chain.workspace)
        super().__init__(*assembled(self._columns, chain.X, self._block, self._from_products))

    # ---- which way to a block

    def _block(self, row: str, column: str, outer: bool, products: ProductPair) -> LinearOperator:
        where = self._chain.where
        if "X" not in (row, column):
            if where[row] == where[column] and self._descent.fits_at(where[row]):
                names = self._chain.links[where[row]].names
                return self._of_layer(where[row], outer)[names[row], names[column]]
            if where[row] != where[column] and {row, column} <= set(self._with_form):
                if where[row] < where[column]:
                    return self._between_layers(row, column, outer, products)
                return self._between_layers(column, row, outer, products[::-1]).T
        shapes = self._shapes[row], self._shapes[column]
        return Product(products, *shapes, self._chain.X, symmetric=row == column)

    def _of_layer(self, number: int, outer: bool) -> BlockMatrix:
        """The blocks of one layer: its own functional part belongs to ours, with that of S."""
        if (number, outer) not in self._by_layer:
            link, length = self._chain.links[number], self._chain.X.shape[1]
            gauss_newton, bent = self._descent.at(number)
            first = link.hessian(gauss_newton.curvature(length))
            self._by_layer[number, True] = first.outer
            self._by_layer[number, False] = (
                first.functional if bent is None else link.hessian(bent.curvature(length)).total
            )
        return self._by_layer[number, outer]

    def _from_products(self, outer: bool, functional: bool) -> Entries:
        """The entries of all blocks that come from products, by one product for each of their columns."""
        both = outer and functional
        slow = {name: shape for name, shape in self._shapes.items() if name not in self._with_form}
        if not slow:
            return {}
        columns, like = sum(a * p for a, p in slow.values()), self._chain.X
        checks.fits(
            (3 if both else 2) * self.shape[0] * columns * like.element_size(),
            None,
            f"{columns} rows of the Hessian",
            "ask for single blocks, or for products with @",
        )
        if both:
            found, more = (self._cut(part, slow) for part in self._chain.rows(self._shapes, slow))
            return {pair: values.add_(more[pair]) for pair, values in found.items()}
        multiply = self._columns.multiplication(list(self._shapes), list(slow), outer, functional)
        return self._cut(multiply(torch.eye(columns, dtype=like.dtype, device=like.device)), slow)

    def _cut(self, strip: Tensor, slow: dict[str, Shape]) -> Entries:
        """Columns (P, ·) of the blocks `slow`, cut into the blocks on and above the diagonal that they fill."""
        rows = dict(zip(self._shapes, strip.split([a * p for a, p in self._shapes.values()]), strict=True))
        sizes = [a * p for a, p in slow.values()]
        blocks = {
            (row, column): block
            for row, part in rows.items()
            for column, block in zip(slow, part.split(sizes, 1), strict=True)
        }
        names = list(self._shapes)
        found = {}
        for i, row in enumerate(names):
            for column in names[i:]:
                if column in slow:
                    values = blocks[row, column]
                elif row in slow:
                    values = blocks[column, row].T
                else:
                    continue
                values = (values + values.T) / 2 if row == column else values.clone()
                found[row, column] = values.view(*self._shapes[row], *self._shapes[column])
        return found

    # ---- blocks of two layers, a below b, from the last attention layer on

    def _between_layers(self, row: str, column: str, outer: bool, products: ProductPair) -> LinearOperator:
        """Of a weight of layer a and one of layer b."""
        shape = self._shapes[column]
        whole = FactoredPart(shape, Slot(0, 0, shape[0]), self._strip(self._chain.where[row], column, outer))

        def terms(part: FactoredPart, strip: FactoredPart) -> TermList:
            return [factor.joined(other) for factor in part.factors for other in strip.factors]

        shapes, like = (self._shapes[row], shape), self._chain.X
        return tiled(shapes, self._with_form[row], [whole], terms, like, False, products)

    def _strip(self, number: int, column: str, outer: bool) -> list[Factor]:
        """How the weight of b moves the gradient at F_a, with a matrix (T, ·, m_a) for each token."""
        key = (number, column, outer)
        if key in self._strips:
            return self._strips[key]
        link = self._chain.links[self._chain.where[column]]
        assert isinstance(link, TokenwiseLink)
        factor = self._with_form[column][0].factors[0]
        couplings = self._couplings[number, self._chain.where[column]]
        coupling = couplings[0] if outer else couplings[1]
        found: list[Factor] = []
        straight = None if coupling is None else factor.times_transposed(coupling)
        if not outer:
            to_input = self._ways[number][self._chain.where[column]].mT
            for mixed in link.mixed(link.names[column]):
                assert isinstance(mixed.port, Tensor)
                matrix = to_input @ mixed.port.mT
                if mixed.axis == 0 and mixed.vectors is factor.vectors and straight is not None:
                    straight = straight + matrix
                else:
                    found.append(Factor(mixed.vectors, matrix.mT, axis=mixed.axis))
        if straight is not None:
            found.append(Factor(factor.vectors, straight.mT))
        self._strips[key] = found
        return found

    @cached_property
    def _with_form(self) -> dict[str, list[FactoredPart]]:
        """How the weights from the last attention layer on reach the output of their layer."""
        found: dict[str, list[FactoredPart]] = {}
        for link in self._chain.links[self._base :]:
            parts = {name: link.parts(local) for name, local in link.names.items()}
            found |= {name: part for name, part in parts.items() if part is not None}
        return found

    @cached_property
    def _ways(self) -> dict[int, list[Tensor]]:
        """T_ac for every link c above a, and D_a last: (T, ·, m_a), by the number of a."""
        found = {}
        for start in range(self._base, len(self._chain.links)):
            width = self._chain.links[start].output.shape[2]
            identity = torch.eye(width, dtype=self._chain.X.dtype, device=self._chain.X.device)
            found[start] = self._way(start, identity.expand(self._chain.tokens, -1, -1))
        return found

    def _way(self, start: int, identity: Tensor) -> list[Tensor]:
        """The Jacobian from the output of a link to the input of every link (empty below), and to Z."""
        at_inputs: list[Tensor] = []
        stream: Tensor | None = None
        for links, residual in self._chain.branches:
            value = stream
            for each in links:
                number = len(at_inputs)
                at_inputs.append(identity[:0] if value is None else value)
                if value is not None:
                    value = each.input_jacobian.blocks @ value
                if number == start:
                    value = identity
            stream = stream + value if residual and stream is not None and value is not None else value
        assert stream is not None
        return [*at_inputs, stream]

    @cached_property
    def _couplings(self) -> dict[tuple[int, int], tuple[Tensor, Tensor | None]]:
        """D_a^T S D_b, and Σ_{c above b} T_ac^T <G_c, d²F_c> T_bc, both (T, m_a, m_b), for a below b."""
        links, ways = self._chain.links, self._ways
        curvature, _ = self._descent.at(len(links) - 1)
        found = {}
        for b in range(self._base + 1, len(links)):
            right = curvature.blocks @ ways[b][-1]
            bent = {c: links[c].input_curvature.blocks @ ways[b][c] for c in range(b + 1, len(links))}
            for a in range(self._base, b):
                functional = [ways[a][c].mT @ values for c, values in bent.items() if len(ways[b][c])]
                found[a, b] = (
                    ways[a][-1].mT @ right,
                    torch.stack(functional).sum(0) if functional else None,
                )
        return found
