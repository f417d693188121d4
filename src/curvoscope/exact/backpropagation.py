"""The Hessian of the loss at the output of every layer of a network, exact up to a size and matrix-free beyond.

For the output F of a layer, with everything else held: G = dloss/dF (N, L, m) and S = d²loss/dF², a matrix over the
T m entries of F, T = N L tokens. S = S_gn + S_functional: the Gauss-Newton part J^T S_loss J, with J the Jacobian of
the network's output in F, and what the curvature of the layers above adds. If S fits into memory it is a `Grouped`: one
block per token above the last attention layer, one per sequence below it. Otherwise S is known by its products, and
`low_rank` gives its largest eigenpairs, with the Frobenius norm of what they leave out as an Estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvoscope import checks, estimate, losses
from curvoscope.errors import MemoryLimitError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.exact.block import Stack, TransformerBlock
from curvoscope.exact.chain import Chain, Descent
from curvoscope.exact.grouped import Grouped
from curvoscope.exact.links import Layer, Link
from curvoscope.magnitudes import norm
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.operators.compositions import MatrixFree


class CurvatureProducts(MatrixFree):
    """S, or a part of it, at the output of a layer (T, m), by products: dF up to the loss and dG down again."""

    def __init__(self, chain: Chain, number: int, width: int, outer: bool, functional: bool) -> None:
        super().__init__((chain.tokens, width), (chain.tokens, width), chain.X, symmetric=True)
        self._multiply = chain.product_after(number, outer, functional)

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._multiply(columns)


class JacobianProducts(MatrixFree):
    """dF/dX of a layer (T m, T d), by products."""

    def __init__(self, link: Link, back: bool = False) -> None:
        tokens = link.X.shape[0] * link.X.shape[1]
        shapes = (tokens, link.output.shape[2]), (tokens, link.X.shape[2])
        super().__init__(*(shapes[::-1] if back else shapes), link.X)
        self._link, self._back = link, back

    def _matmat(self, columns: Tensor) -> Tensor:
        values = columns.T.reshape(-1, *self.column_shape)
        if self._back:
            return self._link.pull({}, None, values, [], functional=False)[1].flatten(1).T
        return self._link.push({"X": values})[0].flatten(1).T

    def _transposed(self) -> LinearOperator:
        return JacobianProducts(self._link, not self._back)


class LowRank(LinearOperator):
    """V diag(λ) V^T with the k eigenpairs of largest magnitude of a symmetric operator.

    Args:
        operator: the operator that it stands for.
        values: λ (k,).
        errors: (k,), the residuals of the eigenpairs.
        vectors: V (n, k).
        remainder: the Frobenius norm of the part that is left out.

    Example:
        >>> import torch, curvoscope as cv
        >>> H = cv.exact.LinearMLP([torch.eye(2)]).hessian(torch.eye(2), cv.losses.MSE(torch.zeros(2, 2)))
        >>> found = cv.exact.low_rank(H.total, k=2)
        >>> type(found).__name__, found.vectors.shape
        ('LowRank', torch.Size([4, 2]))
    """

    def __init__(
        self, operator: LinearOperator, values: Tensor, errors: Tensor, vectors: Tensor, remainder: Estimate
    ) -> None:
        super().__init__(operator.row_shape, operator.column_shape, vectors, symmetric=True)
        self.values, self.errors, self.vectors, self.remainder = values, errors, vectors, remainder

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.vectors @ (self.values[:, None] * (self.vectors.T @ columns))

    def _trace(self) -> float:
        return float(self.values.sum())

    def _diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values

    def _norm(self) -> float:
        return norm(self.values)

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        return torch.cat([self.values, self.values.new_zeros(self.shape[0] - len(self.values))]).sort().values


class _Remainder(LinearOperator):
    """B - V diag(λ) V^T."""

    def __init__(self, operator: LinearOperator, values: Tensor, vectors: Tensor) -> None:
        super().__init__(operator.row_shape, operator.column_shape, vectors, symmetric=True)
        self._operator, self._values, self._vectors = operator, values, vectors

    def _matmat(self, columns: Tensor) -> Tensor:
        known = self._vectors @ (self._values[:, None] * (self._vectors.T @ columns))
        return self._operator._matmat(columns) - known


def low_rank(
    operator: LinearOperator,
    k: int = 16,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    samples: int = 32,
) -> LowRank:
    """The k eigenpairs of largest magnitude by Lanczos, and the Frobenius norm of the rest from `samples` products.

    Args:
        operator: a symmetric operator.
        k: number of eigenpairs.
        matvecs: a budget of products for Lanczos.
        tolerance: the relative error for Lanczos to stop at.
        seed: of the random start.
        samples: products for the norm of the rest.

    Returns:
        A `LowRank`, which is an operator itself.

    Example:
        >>> import torch, curvoscope as cv
        >>> H = cv.exact.LinearMLP([torch.eye(2)]).hessian(torch.eye(2), cv.losses.MSE(torch.zeros(2, 2)))
        >>> cv.exact.low_rank(H.total, k=1).values
        tensor([0.5000])
    """
    if not operator.symmetric:
        raise RangeError("operator", "is not symmetric; only a symmetric one has eigenpairs to keep")
    found = estimate.lanczos(operator, k, "LM", matvecs=matvecs, tolerance=tolerance, seed=seed, vectors=True)
    assert found.vectors is not None
    values = found.value.to(operator.dtype).to(operator.device)
    errors = torch.tensor(found.residuals, dtype=operator.dtype, device=operator.device)
    rest = _Remainder(operator, values, found.vectors)
    remainder = estimate.frobenius_norm(rest, matvecs=samples, seed=seed + 1)
    return LowRank(operator, values, errors, found.vectors, remainder)


@dataclass(frozen=True, eq=False)
class OutputCurvature:
    """The loss at the output of one layer: `name` is that of the layer ("h.0.attn"), or "input".

    Attributes:
        name: of the layer.
        output: F (N, L, m).
        G: the gradient of the loss in F, (N, L, m).
        S: the Hessian of the loss in F, (T m, T m): products, trace, norms, eigenvalues.
        S_gn: its Gauss-Newton part.
        S_functional: the rest.
        exact: whether S and its parts are there in full (`Grouped`); if not they answer by Estimates.

    Example:
        >>> import torch, curvoscope as cv
        >>> stack = cv.exact.Stack([cv.exact.RMSNorm(torch.ones(2))])
        >>> records = cv.exact.backpropagate(stack, torch.eye(2), cv.losses.MSE(torch.zeros(2, 2)))
        >>> records[-1].name, records[-1].S.shape, records[-1].exact
        ('final_norm', (4, 4), True)
    """

    name: str
    output: Tensor
    G: Tensor
    S: LinearOperator
    S_gn: LinearOperator
    S_functional: LinearOperator
    exact: bool
    _link: Link | None = field(repr=False, default=None)

    @property
    def layer(self) -> Layer | None:
        """The layer itself; None for the input."""
        return None if self._link is None else self._link.layer

    @property
    def input(self) -> Tensor | None:
        """What the layer reads, (N, L, d)."""
        return None if self._link is None else self._link.X

    @property
    def jacobian(self) -> LinearOperator | None:
        """dF/dx of the layer itself, (T m, T d), without its residual connection; None for the input."""
        if self._link is None:
            return None
        try:
            return self._link.input_jacobian
        except MemoryLimitError:
            return JacobianProducts(self._link)

    def hessian(self) -> BlockHessian:
        """The Hessian over the layer's own weights, split like S; only if S is exact."""
        if self._link is None:
            raise RangeError("name", "'input' has no weights")
        if not (isinstance(self.S_gn, Grouped) and isinstance(self.S_functional, Grouped)):
            raise RangeError("name", f"S at {self.name!r} does not fit into memory; use the network's hessian()")
        length = self.output.shape[1]
        first = self._link.hessian(self.S_gn.curvature(length))
        second = self._link.hessian(self.S_functional.curvature(length))
        functional = BlockMatrix(first.shapes, lambda row, column: second[row, column], self.output)
        return BlockHessian(first.outer, functional)

    def low_rank(self, k: int = 16, *, matvecs: int | None = None, seed: int = 0) -> LowRank:
        """The eigenpairs of S of largest magnitude, and the Frobenius norm of the rest.

        Args:
            k: number of eigenpairs.
            matvecs: the budget of products for Lanczos.
            seed: of the random start and of the probes for the norm of the rest.

        Returns:
            A `LowRank`, which is an operator of the shape of S.
        """
        return low_rank(self.S, k, matvecs=matvecs, seed=seed)


def backpropagate(
    layers: Stack | Sequence[TransformerBlock | Layer],
    X: Tensor,
    loss: losses.LossFunction,
) -> list[OutputCurvature]:
    """G and S at the input and at the output of every layer and sublayer, in the order of the forward pass.

    Args:
        layers: a `Stack`, or the list of its layers.
        X: (L, d) or (N, L, d).
        loss: of the last output; with `CrossEntropy(targets, unembedding)` the unembedding comes with the loss.

    Returns:
        One `OutputCurvature` for the input and for every layer and sublayer.

    Example:
        >>> import torch, curvoscope as cv
        >>> stack = cv.exact.Stack([cv.exact.RMSNorm(torch.ones(2))])
        >>> records = cv.exact.backpropagate(stack, torch.eye(2), cv.losses.MSE(torch.zeros(2, 2)))
        >>> [record.name for record in records]
        ['input', 'final_norm']
    """
    network = layers if isinstance(layers, Stack) else Stack(layers)
    chain = network.chain(X, loss)
    descent = Descent(chain, max(1, checks.memory_budget() // (len(chain.links) + 1)))
    records = [_record(chain, descent, number) for number in reversed(range(-1, len(chain.links)))]
    return records[::-1]


def _record(chain: Chain, descent: Descent, number: int) -> OutputCurvature:
    link = chain.links[number] if number >= 0 else None
    name, output, G = (
        ("input", chain.X, chain.input_gradient) if link is None else (link.name, link.output, link.gradient)
    )
    if descent.fits_at(number):
        outer, bent = descent.at(number)
        functional = Grouped(torch.zeros_like(outer.blocks), outer.size, symmetric=True) if bent is None else bent
        return OutputCurvature(name, output, G, outer.plus(functional), outer, functional, True, link)
    width = output.shape[2]
    total, outer_products, functional_products = (
        CurvatureProducts(chain, number, width, first, second)
        for first, second in ((True, True), (True, False), (False, True))
    )
    return OutputCurvature(name, output, G, total, outer_products, functional_products, False, link)
