"""Operators known by their products alone, and operators made of others: added, scaled, squared."""

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.magnitudes import power_of_two
from curvoscope.operators.base import LinearOperator, ProductPair, Shape


class Product(LinearOperator):
    """An operator given by its products with columns, and those of its transpose."""

    def __init__(
        self, products: ProductPair, row_shape: Shape, column_shape: Shape, like: Tensor, symmetric: bool = False
    ) -> None:
        super().__init__(row_shape, column_shape, like, symmetric)
        self._products = products

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._products[0](columns)

    def _transposed(self) -> LinearOperator:
        return Product((self._products[1], self._products[0]), self.column_shape, self.row_shape, self.like)


class MatrixFree(LinearOperator):
    """An operator whose every entry costs a product: estimates are the default, `dense()` must be asked for.

    `matvecs` is the budget, `tolerance` the relative error to stop at.
    """

    def __matmul__(self, other: Tensor) -> Tensor:
        fits = (
            isinstance(other, Tensor)
            and other.ndim == 1
            and other.shape[0] == self.shape[1]
            and other.dtype == self.dtype
        )
        if fits and other.device == self.device and bool(torch.isfinite(other.sum())):
            # the usual checks take 5 % of a product's time
            return checks.finite("product", self._matmat(other[:, None])[:, 0])
        return super().__matmul__(other)

    @property
    def estimated(self) -> bool:
        """Always."""
        return True

    def norm_bound(self) -> float:
        """|B|_2 <= |B|_F: with all products, so for small blocks."""
        return float(self.dense().norm())


class Sum(LinearOperator):
    """The sum of two operators, of which each answers for itself if the answers add."""

    def __init__(self, first: LinearOperator, second: LinearOperator) -> None:
        if first.shape != second.shape:
            raise ShapeError("operator", f"cannot add {second.shape} to {first.shape}")
        super().__init__(first.row_shape, first.column_shape, first.like, first.symmetric and second.symmetric)
        self._terms = (first, second)

    @property
    def estimated(self) -> bool:
        """Of either term."""
        return any(term.estimated for term in self._terms)

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._terms[0]._matmat(columns) + self._terms[1]._matmat(columns)

    def _transposed(self) -> LinearOperator:
        return Sum(self._terms[0].T, self._terms[1].T)

    def _write(self, out: Tensor) -> None:
        self._terms[0]._write(out)
        second = torch.empty(self.shape, dtype=self.dtype, device=self.device).view(out.shape)
        self._terms[1]._write(second)
        out += second

    def _workspace(self, room: int) -> int:
        entries = self.shape[0] * self.shape[1] * self.dtype.itemsize
        return entries + max(term._workspace(max(0, room - entries)) for term in self._terms)

    def _trace(self) -> float:
        return sum(term._trace() for term in self._terms)

    def _diagonal(self) -> Tensor:
        return self._terms[0]._diagonal() + self._terms[1]._diagonal()

    def lower_bound(self) -> float:
        """By Weyl's inequality the sum of those of the terms."""
        return sum(term.lower_bound() for term in self._terms)


class Scaled(LinearOperator):
    """A number times an operator."""

    def __init__(self, operator: LinearOperator, factor: float) -> None:
        super().__init__(operator.row_shape, operator.column_shape, operator.like, operator.symmetric)
        self._operator, self._factor = operator, factor

    @property
    def estimated(self) -> bool:
        """Of the operator."""
        return self._operator.estimated

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._factor * self._operator._matmat(columns)

    def _transposed(self) -> LinearOperator:
        return Scaled(self._operator.T, self._factor)

    def _write(self, out: Tensor) -> None:
        self._operator._write(out)
        out *= self._factor

    def _workspace(self, room: int) -> int:
        return self._operator._workspace(room)

    def _trace(self) -> float:
        return self._factor * self._operator._trace()

    def _diagonal(self) -> Tensor:
        return self._factor * self._operator._diagonal()

    def _norm(self) -> float:
        return abs(self._factor) * self._operator._norm()

    def lower_bound(self) -> float:
        """That of the operator, times the factor if it is not negative."""
        return self._factor * self._operator.lower_bound() if self._factor > 0 else super().lower_bound()


class Gram(LinearOperator):
    """M^T M / unit², for the singular values of M, or of its transpose if that is narrower. The unit, a power of
    two, is the size of the first product with M, so that squares neither over- nor underflow."""

    def __init__(self, operator: LinearOperator) -> None:
        narrow = operator if operator.shape[1] <= operator.shape[0] else operator.T
        super().__init__(narrow.column_shape, narrow.column_shape, operator.like, symmetric=True)
        self._operator = narrow
        self.unit = 0.0

    def _matmat(self, columns: Tensor) -> Tensor:
        product = self._operator._matmat(columns)
        self.unit = self.unit or power_of_two(product)
        return self._operator.T._matmat(product / self.unit) / self.unit

    def lower_bound(self) -> float:
        """0: a Gram matrix has no negative eigenvalues."""
        return 0.0
