"""The directions along which low-rank adapters move and the model does not.

A model that depends on A (a, r) and B (r, p) through A B alone is the same for (A S, S^-1 B), S (r, r) invertible. So
with g the gradient of the loss and any Ξ (r, r), in the order of the adapter's own blocks,

    v = (A Ξ, -Ξ B)       g . v = 0       H v = (-g_A Ξ^T, Ξ^T g_B), and zero in all other blocks

These r² directions are curved only as far as the loss is not at a minimum: they say nothing of how flat it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.blocks import Blocks
from curvoscope.errors import BlockNameError, EmptyError, ShapeError
from curvoscope.families.adapters import Adapter
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.compositions import MatrixFree


@dataclass(frozen=True)
class AdapterFactors:
    """The two factors of an adapter: the places of their entries in a vector over all blocks, and their values.

    `places` of A and of the blocks of B, side by side; A (a, r), B (r, p).
    """

    places: tuple[slice, tuple[slice, ...]]
    A: Tensor
    B: Tensor

    def taken(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of A (n, a, r) and of B (n, r, p) in vectors (n, P)."""
        first, others = self.places
        rank = self.B.shape[0]
        parts = [vectors[:, place].unflatten(1, (rank, -1)) for place in others]
        return vectors[:, first].unflatten(1, self.A.shape), torch.cat(parts, 2)

    def put(self, A: Tensor, B: Tensor, vectors: Tensor) -> None:
        """Write entries of A (n, a, r) and B (n, r, p) into vectors (n, P)."""
        first, others = self.places
        vectors[:, first] = A.flatten(1)
        widths = [(place.stop - place.start) // self.B.shape[0] for place in others]
        for place, part in zip(others, B.split(widths, 2), strict=True):
            vectors[:, place] = part.flatten(1)


class Gauge:
    """The gauge directions of the adapters in a Hessian; made by `H.gauge()`.

    Of each adapter, (A Ξ, -Ξ B) for all Ξ (r, r): r² directions, if A or B has full rank. Several adapters on one
    weight have further ones together, which are not here.

    Args:
        size: P, the entries of all blocks.
        factors: of each adapter, by the name of the weight that it acts on.

    Example:
        >>> import torch, curvoscope as cv
        >>> class Adapted(torch.nn.Linear):
        ...     def __init__(self):
        ...         super().__init__(4, 3)
        ...         self.A, self.B = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((4, 2), (2, 3)))
        ...     def forward(self, x):
        ...         return super().forward(x) + x @ self.A @ self.B
        >>> model = Adapted().double()
        >>> data = torch.randn(5, 4).double(), torch.randn(5, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [data], blocks=cv.blocks_of(model).select("*[AB]"))
        >>> gauge = H.gauge()
        >>> gauge.names, gauge.dimension
        (['weight'], 4)
        >>> v = gauge.direction("weight", torch.eye(2).double())
        >>> bool((gauge.removed(v).abs() < 1e-12).all()), gauge.projected(H.total).shape
        (True, (14, 14))
    """

    def __init__(self, size: int, factors: Mapping[str, AdapterFactors]) -> None:
        self.size, self._factors = size, dict(factors)
        self._spectra = {name: _spectrum(one) for name, one in factors.items()}

    @property
    def names(self) -> list[str]:
        """The weights that the adapters act on."""
        return list(self._factors)

    @property
    def dimension(self) -> int:
        """The number of directions in all."""
        return sum(int((inverse > 0).sum()) for _, _, inverse in self._spectra.values())

    def direction(self, name: str, xi: Tensor) -> Tensor:
        """(A Ξ, -Ξ B) of one adapter.

        Args:
            name: one of `names`.
            xi: Ξ (r, r).

        Returns:
            (P,), zero in all other blocks.
        """
        factors, xi = self._checked(name, xi)
        found = factors.A.new_zeros(1, self.size)
        factors.put((factors.A @ xi)[None], -(xi @ factors.B)[None], found)
        return found[0]

    def response(self, name: str, xi: Tensor, gradient: Tensor) -> Tensor:
        """What H times `direction(name, xi)` is, by the gradient alone: (-g_A Ξ^T, Ξ^T g_B).

        Args:
            name: one of `names`.
            xi: Ξ (r, r).
            gradient: of the loss over all blocks, (P,).

        Returns:
            (P,), zero in all other blocks.
        """
        factors, xi = self._checked(name, xi)
        if gradient.shape != (self.size,):
            raise ShapeError("gradient", f"expected ({self.size},), got {tuple(gradient.shape)}")
        (g_A,), (g_B,) = factors.taken(gradient[None])
        found = gradient.new_zeros(1, self.size)
        factors.put(-(g_A @ xi.T)[None], (xi.T @ g_B)[None], found)
        return found[0]

    def removed(self, vectors: Tensor) -> Tensor:
        """The vectors without their part along the gauge directions, which is an orthogonal projection.

        v less (A Ξ, -Ξ B) with A^T A Ξ + Ξ B B^T = A^T v_A - v_B B^T, solved by the eigenvectors of A^T A and B B^T.

        Args:
            vectors: (P,) or (P, n).

        Returns:
            The same shape.
        """
        if vectors.ndim not in (1, 2) or vectors.shape[0] != self.size:
            raise ShapeError("vectors", f"expected ({self.size},) or ({self.size}, n), got {tuple(vectors.shape)}")
        rows = (vectors[None] if vectors.ndim == 1 else vectors.T).clone()
        for name, factors in self._factors.items():
            A, B = factors.taken(rows)
            U, V, inverse = self._spectra[name]
            seen = factors.A.T @ A - B @ factors.B.T
            xi = U @ (inverse * (U.T @ seen @ V)) @ V.T
            factors.put(A - factors.A @ xi, B + xi @ factors.B, rows)
        return rows[0] if vectors.ndim == 1 else rows.T

    def projected(self, operator: LinearOperator) -> LinearOperator:
        """P M P, with P the projection of `removed`: M without the gauge directions, which `dimension` zeros stand for.

        Args:
            operator: M over all blocks, such as `H.total` or `H.outer`.

        Returns:
            An operator of the same shape, known by its products.
        """
        if operator.shape != (self.size, self.size):
            raise ShapeError("operator", f"expected {self.size} rows and columns, got {operator.shape}")
        return Projected(operator, self)

    def _checked(self, name: str, xi: Tensor) -> tuple[AdapterFactors, Tensor]:
        if name not in self._factors:
            raise BlockNameError("name", f"there is no adapter on {name!r} among {checks.listed(name, self.names)}")
        factors = self._factors[name]
        rank = len(factors.B)
        if xi.shape != (rank, rank):
            raise ShapeError("xi", f"expected ({rank}, {rank}), got {tuple(xi.shape)}")
        return factors, checks.floating("xi", xi, like=factors.A)


class Projected(MatrixFree):
    """P M P for the projection P that removes gauge directions."""

    def __init__(self, operator: LinearOperator, gauge: Gauge) -> None:
        super().__init__(operator.row_shape, operator.column_shape, operator.like, operator.symmetric)
        self._operator, self._gauge = operator, gauge

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._gauge.removed(self._operator._matmat(self._gauge.removed(columns)))

    def _transposed(self) -> LinearOperator:
        return Projected(self._operator.T, self._gauge)


def _spectrum(factors: AdapterFactors) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors of A^T A and of B B^T, and 1 / (α_i + β_j), zero where the sum is."""
    alpha, U = torch.linalg.eigh(factors.A.T @ factors.A)
    beta, V = torch.linalg.eigh(factors.B @ factors.B.T)
    sums = alpha[:, None] + beta
    least = len(alpha) * torch.finfo(sums.dtype).eps * sums.max()
    return U, V, torch.where(sums > least, 1 / sums, 0)


def factors_of(
    adapters: Sequence[Adapter], blocks: Blocks, ranges: Mapping[str, slice], weights: Mapping[str, Tensor]
) -> dict[str, AdapterFactors]:
    """The factors of the adapters all of whose entries are in the blocks, which stand at `ranges` of a vector."""
    found: dict[str, AdapterFactors] = {}
    for adapter in adapters:
        if not {"A", "B"} <= set(adapter.parts):
            continue
        own = {
            part: [b for b in blocks.values() if b.pieces[0].parameter == adapter.parts[part].parameter]
            for part in "AB"
        }
        if any(sum(b.size for b in own[part]) != adapter.parts[part].size for part in "AB"):
            continue
        A, B = own["A"][0], torch.cat([block.matrix(weights) for block in own["B"]], 1)
        places = ranges[A.name], tuple(ranges[block.name] for block in own["B"])
        found[A.name.rpartition(".")[0]] = AdapterFactors(places, A.matrix(weights), B)
    if not found:
        raise EmptyError("blocks", "no adapter has both its A and its B in this Hessian; select them, or add adapters")
    return found
