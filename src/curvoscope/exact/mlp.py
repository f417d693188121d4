"""The linear multilayer perceptron: the classical network that attention is compared with (section 2 of the paper).

    F = X W_1 W_2 ... W_D        X (L, d_0) or (N, L, d_0),  W_i (d_{i-1}, d_i),  F (..., L, d_D)

Tokens are rows, as in every layer of the package; the paper writes columns, F(x) = W^D ... W^1 x, so W_i is
its (W^i)^T, and vec(W_i) is row-major. Let Z_i = X W_1 ... W_{i-1} (T, d_{i-1}) be the input of layer i for
all T tokens, R_i = W_{i+1} ... W_D (d_i, d_D) the product behind it, and, between layers i < j, the product
C_ij = W_{i+1} ... W_{j-1} (d_i, d_{j-1}). Then, for a loss with gradient G and Hessian S at F,

    J_i[tm, ap]       = Z_i[t, a] R_i[p, m]
    H_o(i, j)[ap, bq] = sum_t Z_i[t, a] Z_j[t, b] (R_i S_t R_j^T)[p, q]
    H_f(i, j)[ap, bq] = (Z_i^T G R_j^T)[a, q] C_ij[p, b]  for i < j,   H_f(i, i) = 0

With the mean square S = c I, c = 2/(T d_D), and H_o(i, i) = c Z_i^T Z_i (x) R_i R_i^T. The input is layer 0
of the same chain, a weight W_0 = X (T, d_0) with the input Z_0 = I_T: block "X" needs no formulas of its own.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import EmptyError, NonFiniteError, ShapeError
from curvoscope.exact.factor import Factor, Pairing, TermList, fits_jacobian
from curvoscope.losses import LossAt, through
from curvoscope.operators.base import LinearOperator, Shape
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single

Directions = dict[int, Tensor]


class LinearMLP:
    """F = X W_1 ... W_D with W_i (d_{i-1}, d_i): blocks "W1", ..., "WD", and "X" on request."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        if isinstance(weights, Tensor):
            raise ShapeError("weights", f"expected a list of matrices, got one tensor {tuple(weights.shape)}")
        if not weights:
            raise EmptyError("weights", "is empty; a network has at least one layer")
        self.weights = tuple(weights)
        for i, weight in enumerate(self.weights):
            checks.floating(f"W{i + 1}", weight, like=self.weights[0] if i else None)
            if weight.ndim != 2:
                raise ShapeError(f"W{i + 1}", f"expected a matrix (d_in, d_out), got {tuple(weight.shape)}")
            if i and weight.shape[0] != self.weights[i - 1].shape[1]:
                above = self.weights[i - 1].shape[1]
                raise ShapeError(f"W{i + 1}", f"expected ({above}, d_out) after W{i}, got {tuple(weight.shape)}")

    def __call__(self, X: Tensor) -> Tensor:
        """F, (L, d_D) or (N, L, d_D)."""
        F = self._chain(X).F
        return F[0] if X.ndim == 2 else F

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dF/dW_i for each weight and dF/dX for "X": (N L d_D, size), rows in the order of F."""
        chain, layers = self._chain(X), self._layers(with_input=True)
        size = sum(chain.factors[layer].numel() for layer in layers.values())
        fits_jacobian(chain.tokens * chain.width, size, ", ".join(layers), X)
        return {name: chain.jacobian(layer) for name, layer in layers.items()}

    def hessian(self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False) -> BlockHessian:
        """The Hessian of loss(F) over "W1", ..., "WD", and with `wrt_input` over "X" as well."""
        chain = self._chain(X)
        checks.commensurate({**{f"W{i}": weight for i, weight in enumerate(self.weights, 1)}, "X": X})
        found = losses.at(loss, chain.F, X.ndim == 2)
        layers = self._layers(wrt_input)
        blocks, everything = _Blocks(chain, found, layers), list(layers)

        def part(outer: bool) -> BlockMatrix:
            product = blocks.multiplication(everything, everything, outer, not outer)
            return BlockMatrix(blocks.shapes, lambda row, column: blocks.block(row, column, outer), X, product)

        product = blocks.multiplication(everything, everything, outer=True, functional=True)
        return BlockHessian(part(outer=True), part(outer=False), product)

    def _layers(self, with_input: bool) -> dict[str, int]:
        """Name of each block and its place in the chain, the input last."""
        layers = {f"W{i}": i for i in range(1, len(self.weights) + 1)}
        return {**layers, "X": 0} if with_input else layers

    def _chain(self, X: Tensor) -> "_Chain":
        width = self.weights[0].shape[0]
        checks.floating("X", X, like=self.weights[0])
        if X.ndim not in (2, 3) or X.shape[-1] != width:
            raise ShapeError("X", f"expected (L, {width}) or (N, L, {width}), got {tuple(X.shape)}")
        chain = _Chain(self.weights, X if X.ndim == 3 else X[None])
        if not bool(torch.isfinite(chain.F).all()):
            raise NonFiniteError("X", "the output overflows; scale the input or the weights down")
        return chain


class _Chain:
    """The chain at one input X (N, L, d_0): the inputs Z_i, the products R_i and C_ij, and the output F."""

    def __init__(self, weights: Sequence[Tensor], X: Tensor) -> None:
        self.depth, self.batch = len(weights), X.shape[:2]
        self.factors = [X.flatten(0, 1), *weights]  # layer 0 is the input
        self._inputs = self.factors[:1]  # Z_1, ..., Z_{D+1}
        for weight in weights:
            self._inputs.append(self._inputs[-1] @ weight)
        behind: Tensor | None = None
        ports = [behind]
        for weight in reversed(weights):
            behind = weight if behind is None else weight @ behind
            ports.append(behind)
        self.ports = ports[::-1]  # R_0, ..., R_D; the last is None, the identity
        self.tokens, self.width = self._inputs[-1].shape

    @property
    def F(self) -> Tensor:
        """The output, (N, L, d_D)."""
        return self._inputs[-1].view(*self.batch, self.width)

    @cached_property
    def _one_token(self) -> Tensor:
        """Z_0, (T, T)."""
        needed = self.tokens**2 * self.factors[0].element_size()
        checks.fits(needed, None, "a block of the input", "use fewer tokens, or products of the whole")
        return self.identity(self.tokens)

    def input(self, layer: int) -> Tensor:
        """Z_i, (T, a)."""
        return self._inputs[layer - 1] if layer else self._one_token

    def pulled(self, layer: int, values: Tensor) -> Tensor:
        """Z_i^T values, (T, w) -> (a, w)."""
        return self.input(layer).T @ values if layer else values

    def between(self, first: int, second: int) -> Tensor:
        """C_ij, (d_i, d_{j-1})."""
        product = self.identity(self.factors[first].shape[1])
        for weight in self.factors[first + 1 : second]:
            product = product @ weight
        return product

    def identity(self, size: int) -> Tensor:
        """I in the dtype and on the device of the chain."""
        return torch.eye(size, dtype=self.factors[0].dtype, device=self.factors[0].device)

    def jacobian(self, layer: int) -> Tensor:
        """J_i[tm, ap] = Z_i[t, a] R_i[p, m] as a dense matrix."""
        size, outputs = self.factors[layer].numel(), self.tokens * self.width
        behind = through(self.identity(self.width), self.ports[layer]).T  # (p, m)
        return torch.einsum("ta,pm->tmap", self.input(layer), behind).reshape(outputs, size)


class _Blocks:
    """The blocks of the Hessian: their terms as Kronecker sums, and closed-form products with any of them."""

    def __init__(self, chain: _Chain, loss: LossAt, layers: dict[str, int]) -> None:
        self._chain, self._loss, self._layers = chain, loss, layers
        self._gradient = loss.gradient.flatten(0, 1)
        self._paired = Pairing(loss.curvature, chain.width, chain.batch[1])
        self._factors: dict[int, Factor] = {}
        self.shapes: dict[str, Shape] = {
            name: (chain.factors[layer].shape[0], chain.factors[layer].shape[1]) for name, layer in layers.items()
        }

    def block(self, row: str, column: str, outer: bool) -> LinearOperator:
        """One block of one part."""
        i, j = self._layers[row], self._layers[column]
        terms = self._outer if outer else self._functional
        made = terms(i, j) if i <= j else [term.T for term in terms(j, i)]
        products = tuple(self.multiplication([r], [c], outer, not outer) for r, c in ((row, column), (column, row)))
        like = self._chain.factors[0]
        return KroneckerSum(
            self.shapes[row], self.shapes[column], made, like, row == column, (products[0], products[1])
        )

    def _outer(self, i: int, j: int) -> TermList:
        """sum_t z_t z'_t^T (x) R_i S_t R_j^T, for i <= j."""
        return self._paired(self._factor(i), self._factor(j))

    def _factor(self, i: int) -> Factor:
        if i not in self._factors:
            self._factors[i] = Factor(self._chain.input(i), self._chain.ports[i])
        return self._factors[i]

    def _functional(self, i: int, j: int) -> TermList:
        """(Z_i^T G R_j^T) crossed with C_ij, for i <= j. F is linear in each weight: nothing when i = j."""
        if i == j:
            return []
        at_layer = through(self._gradient, self._chain.ports[j])
        return [Single(self._chain.pulled(i, at_layer), self._chain.between(i, j), (0, 1))]

    # ---- products

    def multiplication(
        self, wanted: Sequence[str], given: Sequence[str], outer: bool, functional: bool
    ) -> Callable[[Tensor], Tensor]:
        """Columns (C, n) over the blocks `given` -> (R, n) over the blocks `wanted`, in closed form."""
        shapes = [self.shapes[name] for name in given]
        widths = sum(factor.shape[1] for factor in self._chain.factors)

        def multiply(columns: Tensor) -> Tensor:
            bytes_a_column = 4 * self._chain.tokens * widths * columns.element_size()
            budget = checks.memory_budget(None) // 2
            parts = []
            for start, stop in checks.chunks(columns.shape[1], 1, bytes_a_column, budget):
                pieces = columns[:, start:stop].T.split([a * p for a, p in shapes], 1)
                directions = {
                    self._layers[name]: piece.reshape(-1, *shape)
                    for name, piece, shape in zip(given, pieces, shapes, strict=True)
                }
                answers = self._multiplied(directions, outer, functional)
                parts.append(torch.cat([answers[self._layers[name]].flatten(1) for name in wanted], 1).T)
            return torch.cat(parts, 1)

        return multiply

    def _multiplied(self, directions: Directions, outer: bool, functional: bool) -> Directions:
        """The parts asked for, of the Hessian times directions dW_i (n, a, p), at all layers.

        Forward dZ_{i+1} = dZ_i W_i + Z_i dW_i; backward, with g_i = G R_i^T the gradient behind layer i and
        Z_i^T g_i that of W_i, dg_{i-1} = dg_i W_i^T + g_i dW_i^T. The outer part moves the gradient through
        dg_D = S dF alone; the functional part holds G fixed.
        """
        chain, n = self._chain, next(iter(directions.values())).shape[0]
        dZ = directions.get(0, chain.factors[0].new_zeros(n, *chain.factors[0].shape))
        moved = [dZ]
        for i in range(1, chain.depth + 1):
            dZ = dZ @ chain.factors[i]
            if i in directions:
                dZ = dZ + chain.input(i) @ directions[i]
            moved.append(dZ)  # dZ_{i+1}
        back = torch.zeros_like(dZ)
        if outer:
            dF = dZ.view(n, *chain.batch, chain.width)
            back = self._loss.curvature.apply(dF).reshape(n, chain.tokens, chain.width)
        answers: Directions = {}
        for i in range(chain.depth, 0, -1):
            answers[i] = chain.input(i).T @ back
            back = back @ chain.factors[i].T
            if functional:
                behind = through(self._gradient, chain.ports[i])
                answers[i] += moved[i - 1].mT @ behind
                if i in directions:
                    back = back + behind @ directions[i].mT
        answers[0] = back
        return answers
