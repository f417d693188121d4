"""Eigenvalues and eigenvectors of an operator in a form that multiplies fast: dense, Kronecker, or of low rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.estimate.function_trace import SpectralFunction

ColumnMap = Callable[[Tensor], Tensor]  # columns to columns


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """B = Q diag(λ) Q^T with m orthonormal columns Q, and zero outside of their span; in float64.

    Args:
        values: λ (m,).
        into: Q^T v, columns (n, c) -> (m, c).
        back: Q w, columns (m, c) -> (n, c).
        squares: sum_j Q_ij² w_j, (m,) -> (n,).
        size: n.

    Example:
        >>> import torch
        >>> from curvoscope.solve import Eigenbasis
        >>> basis = Eigenbasis.dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> basis.values.round(decimals=9).tolist()
        [1.0, 3.0]
        >>> basis.apply(torch.reciprocal, torch.tensor([[3.0], [0.0]]).double())[:, 0].round(decimals=9).tolist()
        [2.0, -1.0]
    """

    values: Tensor
    into: ColumnMap
    back: ColumnMap
    squares: ColumnMap
    size: int

    @classmethod
    def dense(cls, matrix: Tensor) -> "Eigenbasis":
        """The eigenbasis of a symmetric matrix, by a full eigendecomposition in float64.

        Args:
            matrix: (n, n), symmetric.

        Returns:
            The eigenbasis with all n eigenvalues, in ascending order.
        """
        values, Q = torch.linalg.eigh(matrix.double())
        return cls(values, lambda v: Q.T @ v, lambda w: Q @ w, lambda w: Q.square() @ w, len(values))

    @classmethod
    def kronecker(cls, outer: Tensor, core: Tensor, axis: int = 0) -> "Eigenbasis":
        """The eigenbasis of a Kronecker product of symmetric matrices; its eigenvalues are the products of theirs.

        Args:
            outer: the factor on one axis of a weight.
            core: the factor on the other axis.
            axis: the axis of `outer`, 0 for rows or 1 for columns.

        Returns:
            The eigenbasis with all eigenvalues, for the row-major vec of the weight.
        """
        pairs = [torch.linalg.eigh(factor.double()) for factor in ((outer, core) if axis == 0 else (core, outer))]
        (one, Q), (two, P) = pairs
        a, p = len(one), len(two)

        def applied(left: Tensor, right: Tensor, columns: Tensor) -> Tensor:
            cube = columns.reshape(a, p, -1)
            return torch.einsum("ij,kl,jlc->ikc", left, right, cube).reshape(columns.shape)

        return cls(
            torch.outer(one, two).flatten(),
            lambda v: applied(Q.T, P.T, v),
            lambda w: applied(Q, P, w),
            lambda w: applied(Q.square(), P.square(), w),
            a * p,
        )

    @classmethod
    def tokens(cls, small: Tensor, U: Tensor, shape: tuple[int, int], axis: int) -> "Eigenbasis":
        """The eigenbasis of (U (x) I) small (U (x) I)^T, for U with orthonormal columns on one axis of a weight.

        Args:
            small: symmetric, (T p, T p).
            U: (width, T), from the space of tokens to that of the weight's axis.
            shape: of the weight; one of its axes is `width`, the other p.
            axis: the axis on which U stands.

        Returns:
            The eigenbasis with T p eigenvalues, for the row-major vec of the weight; the others are zero.
        """
        inner, U = cls.dense(small), U.double()
        (width, count), other = U.shape, shape[1 - axis]

        def into(columns: Tensor) -> Tensor:
            cube = columns.reshape(*shape, -1).movedim(axis, 0).reshape(width, -1)
            return inner.into((U.T @ cube).reshape(count * other, -1))

        def back(columns: Tensor) -> Tensor:
            cube = U @ inner.back(columns).reshape(count, -1)
            return cube.reshape(width, other, -1).movedim(0, axis).reshape(width * other, -1)

        def squares(columns: Tensor) -> Tensor:
            unit = torch.eye(count * other, dtype=U.dtype, device=U.device)
            found = [inner.back(w[:, None] * inner.into(unit)).reshape(count, other, count, other) for w in columns.T]
            diagonals = [torch.einsum("at,tpsp,as->ap", U, F, U).movedim(0, axis).flatten() for F in found]
            return torch.stack(diagonals, 1)

        return cls(inner.values, into, back, squares, width * other)

    @property
    def null(self) -> int:
        """How many eigenvalues are zero because they lie outside of the span of Q."""
        return self.size - len(self.values)

    def at_least(self, floor: float) -> "Eigenbasis":
        """The same eigenvectors, with eigenvalues below a lower bound raised to it: rounding alone makes them smaller.

        Args:
            floor: a lower bound of the eigenvalues.

        Returns:
            The eigenbasis with the values raised; eigenvalues outside of the span of Q stay zero.
        """
        return Eigenbasis(self.values.clamp_min(floor), self.into, self.back, self.squares, self.size)

    def all_values(self) -> Tensor:
        """All n eigenvalues, (n,), in no order."""
        return torch.cat([self.values, self.values.new_zeros(self.null)])

    def apply(self, function: SpectralFunction, columns: Tensor) -> Tensor:
        """f(B) v = Q f(λ) Q^T v + f(0) (v - Q Q^T v).

        Args:
            function: f, applied to a tensor of eigenvalues entry by entry.
            columns: v (n, c) in float64.

        Returns:
            The products, (n, c). f(0) is needed only if some eigenvectors lie outside of the span of Q.
        """
        inside = self.into(columns)
        if not self.null:
            return self.back(function(self.values)[:, None] * inside)
        outside = columns - self.back(inside)
        at_zero = function(torch.zeros_like(self.values[:1]))
        return self.back(function(self.values)[:, None] * inside) + at_zero * outside

    def diagonal(self, function: SpectralFunction) -> Tensor:
        """The diagonal of f(B).

        Args:
            function: f, applied to a tensor of eigenvalues entry by entry.

        Returns:
            The diagonal, (n,).
        """
        found = function(self.values)
        if not self.null:
            return self.squares(found[:, None])[:, 0]
        at_zero = function(torch.zeros_like(self.values[:1]))
        return self.squares((found - at_zero)[:, None])[:, 0] + at_zero

    def direction(self, nearest: float) -> tuple[float, Tensor]:
        """The eigenvalue nearest to a number, and an eigenvector of it.

        Args:
            nearest: the number.

        Returns:
            The eigenvalue, and its unit eigenvector (n,).
        """
        distances = (self.values - nearest).abs()
        if self.null and abs(nearest) < float(distances.min()):
            probe = torch.linspace(1, 2, self.size, dtype=self.values.dtype, device=self.values.device)[:, None]
            outside = probe - self.back(self.into(probe))
            return 0.0, (outside / outside.norm())[:, 0]
        index = int(distances.argmin())
        unit = torch.zeros_like(self.values)
        unit[index] = 1
        return float(self.values[index]), self.back(unit[:, None])[:, 0]
