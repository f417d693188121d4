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

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.errors import EmptyError, NonFiniteError, ShapeError
from curvoscope.exact.assembly import ColumnProducts, Directions, assembled
from curvoscope.exact.chain import Branch, Chain
from curvoscope.exact.factor import Factor, Pairing, TermList, fits_jacobians
from curvoscope.exact.network import Network
from curvoscope.exact.tokenwise import Pairs, TokenwiseHessian, TokenwiseLayer
from curvoscope.losses import LossAt
from curvoscope.operators.base import LinearOperator, ProductPair, Shape
from curvoscope.operators.block_matrix import BlockHessian
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single


class Linear(TokenwiseLayer):
    """y = x W with W (d, m): block "W", which in a network has the name of the layer."""

    labels = MappingProxyType({"W": ""})

    def __init__(self, W: Tensor) -> None:
        self.weights, (self.d, self.d_out) = {"W": W}, W.shape

    def __call__(self, X: Tensor) -> Tensor:
        """y, (L, m) or (N, L, m)."""
        output = checks.floating("X", X, like=self.weights["W"]) @ self.weights["W"]
        if not bool(torch.isfinite(output).all()):
            raise NonFiniteError("X", "the output overflows; scale the input or the weights down")
        return output

    def _around(self, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> TokenwiseHessian:
        return _LinearHessian(self.weights["W"], X, loss, shapes)


class _LinearHessian(TokenwiseHessian):
    def __init__(self, W: Tensor, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> None:
        super().__init__({"W": Factor(X.flatten(0, 1))}, X, loss, shapes)
        self._W = W

    def functional_terms(self, row: str, column: str) -> TermList:
        """Nothing: y is linear in W."""
        return []

    def push(self, directions: Directions) -> tuple[Tensor, Directions]:
        """dy = dx W + x dW."""
        moved = [directions["X"] @ self._W] if "X" in directions else []
        if "W" in directions:
            moved.append(self.X @ directions["W"])
        return moved[0] if len(moved) == 1 else moved[0] + moved[1], {}

    def pull(self, directions: Directions, moved: Directions, back: Tensor, functional: bool) -> tuple[Pairs, Tensor]:
        """The gradients x^T G and G W^T move with G, or with G held."""
        pairs, at_x = [(self.X, back)], back @ self._W.T
        if functional and "X" in directions:
            pairs.append((directions["X"], self.gradient))
        if functional and "W" in directions:
            at_x = at_x + self.gradient @ directions["W"].mT
        return {"W": pairs}, at_x

    def mixed(self, name: str) -> list[Factor]:
        """G[q] δ_cb."""
        identity = torch.eye(self.X.shape[1], dtype=self.X.dtype, device=self.X.device)
        return [Factor(self.gradient, identity.expand(len(self.X), -1, -1), axis=1)]

    def input_jacobian(self) -> Tensor:
        """W^T."""
        return self._W.T.expand(len(self.X), -1, -1)

    def input_curvature(self) -> Tensor:
        """Nothing: y is linear in x."""
        return self.X.new_zeros(len(self.X), *2 * self.X.shape[1:])


class LinearMLP(Network):
    """F = X W_1 ... W_D with W_i (d_{i-1}, d_i): blocks "W1", ..., "WD", and "X" on request.

    Args:
        weights: the matrices W_1, ..., W_D.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.LinearMLP([torch.eye(3), torch.ones(3, 2)])
        >>> H = layer.hessian(torch.ones(4, 3), cv.losses.MSE(torch.zeros(4, 2)))
        >>> H.names, H.shape
        (['W1', 'W2'], (15, 15))
    """

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
        self.d = self.weights[0].shape[0]
        self.branches = [Branch(((f"W{i}", Linear(weight)),), False) for i, weight in enumerate(self.weights, 1)]

    def jacobian(self, X: Tensor) -> dict[str, Tensor]:
        """dF/dW_i for each weight, and dF/dX, as dense matrices.

        Args:
            X: (L, d_0) or (N, L, d_0).

        Returns:
            By name, for "W1", ..., "WD" and "X": (N L d_D, size), rows in the order of F.
        """
        blocks = _Blocks(self.chain(X, lambda F: F.sum()), wrt_input=True)
        fits_jacobians(blocks.chain.output, {name: a * p for name, (a, p) in blocks.shapes.items()})
        return {name: blocks.factor(name).jacobian(blocks.width, name) for name in blocks.shapes}

    def hessian(self, X: Tensor, loss: losses.LossFunction, *, wrt_input: bool = False) -> BlockHessian:
        """The Hessian of loss(F) over "W1", ..., "WD".

        Args:
            X: (L, d_0) or (N, L, d_0).
            loss: a loss of `cv.losses`, or any function of F.
            wrt_input: whether "X" (T, d_0) is a block too.

        Returns:
            A `BlockHessian` of Kronecker sums.
        """
        blocks = _Blocks(self.chain(X, loss), wrt_input)
        columns = ColumnProducts(blocks.shapes, blocks.chain.product, blocks.chain.workspace)
        return BlockHessian(*assembled(columns, X, blocks.block))


class _Blocks:
    """The blocks of the Hessian as Kronecker sums: every weight reaches F by one factor, Z_i (x) R_i."""

    def __init__(self, chain: Chain, wrt_input: bool) -> None:
        self.chain, self.width = chain, chain.output.shape[2]
        self.shapes = {**chain.shapes, **({"X": (chain.tokens, chain.X.shape[2])} if wrt_input else {})}
        self._weights = [each.layer.matrices["W"] for each in chain.links]
        self._paired = Pairing(chain.loss.curvature, self.width, chain.X.shape[1])
        self._factors: dict[str, Factor] = {}

    def factor(self, name: str) -> Factor:
        """Z_i (x) R_i."""
        if name not in self._factors:
            i, behind = self._place(name), None
            for weight in reversed(self._weights[i:]):
                behind = weight if behind is None else weight @ behind
            self._factors[name] = Factor(self._input(i), behind)
        return self._factors[name]

    def block(self, row: str, column: str, outer: bool, products: ProductPair) -> LinearOperator:
        """One block of one part."""
        i, j = self._place(row), self._place(column)
        if outer:
            terms = self._paired(self.factor(row), self.factor(column))
        else:
            terms = self._functional(i, j) if i <= j else [term.T for term in self._functional(j, i)]
        return KroneckerSum(self.shapes[row], self.shapes[column], terms, self.chain.X, row == column, products)

    def _functional(self, i: int, j: int) -> TermList:
        """(Z_i^T G R_j^T) crossed with C_ij, for i <= j. F is linear in each weight: nothing when i = j."""
        if i == j:
            return []
        at_layer = self.chain.links[j - 1].gradient.flatten(0, 1)
        width = self._weights[i - 1].shape[1] if i else self.chain.X.shape[2]
        between = torch.eye(width, dtype=at_layer.dtype, device=at_layer.device)
        for weight in self._weights[i : j - 1]:
            between = between @ weight
        return [Single(self._input(i).T @ at_layer if i else at_layer, between, (0, 1))]

    def _place(self, name: str) -> int:
        """i of W_i, and 0 of the input."""
        return 0 if name == "X" else self.chain.where[name] + 1

    def _input(self, i: int) -> Tensor:
        """Z_i, (T, a)."""
        if i:
            return self.chain.links[i - 1].X.flatten(0, 1)
        like, tokens = self.chain.X, self.chain.tokens
        needed = tokens**2 * like.element_size()
        checks.fits(needed, None, "a block of the input", "use fewer tokens, or products of the whole")
        return torch.eye(tokens, dtype=like.dtype, device=like.device)
