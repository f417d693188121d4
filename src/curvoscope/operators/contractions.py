"""Blocks of weights that are made of other weights: W = θ contracted along one axis with a matrix that is held fixed.

With W (a, p) = θ N^T, θ (a, r), or W = M θ, θ (r, p), the block of θ is that of W with its axis contracted. A term of a
Kronecker sum stays one: contraction acts on its vectors if they stand on that axis, and otherwise on its cores,

    Σ_t (l_t r_t^T) (x) C_t   ->   Σ_t (l_t r_t^T) (x) N^T C_t N      or     Σ_t (M^T l_t r_t^T M) (x) C_t
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from curvoscope.operators.base import LinearOperator, ProductPair, Shape, summed
from curvoscope.operators.block_matrix import Slot, Tiles
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import Core, RowForm, TokenForm
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term


@dataclass(frozen=True, eq=False)
class Contraction:
    """Axis `axis` of a weight (a, p) contracted with `matrix` (a or p, r): (r, p) or (a, r) are left."""

    axis: int
    matrix: Tensor

    def shape(self, weight: Shape) -> Shape:
        """What is left of the weight's shape."""
        left = list(weight)
        left[self.axis] = self.matrix.shape[1]
        return left[0], left[1]

    def cut(self, slot: Slot) -> "Contraction":
        """The same for a tile of the weight."""
        return replace(self, matrix=self.matrix[slot.start : slot.stop]) if slot.axis == self.axis else self

    def spread(self, columns: Tensor, weight: Shape) -> Tensor:
        """Columns over what is left -> columns over the weight (a p, n)."""
        return self._along(columns, self.shape(weight), self.matrix)

    def gathered(self, columns: Tensor, weight: Shape) -> Tensor:
        """Columns over the weight (a p, n) -> columns over what is left."""
        return self._along(columns, weight, self.matrix.T)

    def _along(self, columns: Tensor, shape: Shape, matrix: Tensor) -> Tensor:
        values = columns.reshape(*shape, -1).movedim(self.axis, -1) @ matrix.T
        return values.movedim(-1, self.axis).reshape(-1, columns.shape[1])


Side = Contraction | None  # None: the weight itself


def contracted(operator: LinearOperator, rows: Side, columns: Side, symmetric: bool = False) -> LinearOperator:
    """The block of two weights that are made of those of `operator`; `symmetric`: that the result is.

    Kronecker sums stay Kronecker sums, and heads on an axis that is not contracted stay apart. Anything else is left to
    its products.
    """
    if rows is None and columns is None:
        return operator
    if isinstance(operator, KroneckerSum):
        shapes = _left(rows, operator.row_shape), _left(columns, operator.column_shape)
        terms = [_term(term, rows, columns) for term in operator.terms]
        products = None if operator._products is None else _products(operator, rows, columns)
        return KroneckerSum(*shapes, terms, operator.like, symmetric, products)
    if isinstance(operator, Tiles):
        return _tiles(operator, rows, columns, symmetric)
    shapes = _left(rows, operator.row_shape), _left(columns, operator.column_shape)
    return Product(_products(operator, rows, columns), *shapes, operator.like, symmetric)


def added(operators: Sequence[LinearOperator], symmetric: bool) -> LinearOperator:
    """The sum of operators, which may be symmetric although they are not."""
    first = operators[0]
    if len(operators) == 1 and first.symmetric == symmetric:
        return first
    shapes = first.row_shape, first.column_shape
    sums = [one for one in operators if isinstance(one, KroneckerSum)]
    if len(sums) == len(operators):
        products = reduce(summed, (one._products for one in sums))
        return KroneckerSum(*shapes, [term for one in sums for term in one.terms], first.like, symmetric, products)

    def multiply(columns: Tensor) -> Tensor:
        return torch.stack([one._matmat(columns) for one in operators]).sum(0)

    def back(columns: Tensor) -> Tensor:
        return torch.stack([one.T._matmat(columns) for one in operators]).sum(0)

    return Product((multiply, back), *shapes, first.like, symmetric)


def _left(side: Side, shape: Shape) -> Shape:
    return shape if side is None else side.shape(shape)


def _products(operator: LinearOperator, rows: Side, columns: Side) -> ProductPair:
    def way(inner: LinearOperator, into: Side, out: Side, values: Tensor) -> Tensor:
        values = values if into is None else into.spread(values, inner.column_shape)
        found = inner._matmat(values)
        return found if out is None else out.gathered(found, inner.row_shape)

    return lambda values: way(operator, columns, rows, values), lambda values: way(operator.T, rows, columns, values)


def _tiles(operator: Tiles, rows: Side, columns: Side, symmetric: bool) -> LinearOperator:
    """Tile by tile; tiles along a contracted axis are added up."""
    shapes = _left(rows, operator.row_shape), _left(columns, operator.column_shape)
    row_slots, row_of = _slots(operator.rows, rows, shapes[0])
    column_slots, column_of = _slots(operator.columns, columns, shapes[1])
    parts: dict[tuple[int, int], list[LinearOperator]] = {}
    for (i, j), entry in operator.entries.items():
        left = None if rows is None else rows.cut(operator.rows[i])
        right = None if columns is None else columns.cut(operator.columns[j])
        right = left if symmetric and i == j else right
        parts.setdefault((row_of[i], column_of[j]), []).append(contracted(entry, left, right, symmetric and i == j))
    entries = {(i, j): added(several, symmetric and i == j) for (i, j), several in parts.items()}
    products = None if operator._products is None else _products(operator, rows, columns)
    if len(entries) == 1:
        one = entries[0, 0]
        if not isinstance(one, KroneckerSum):
            return one
        return KroneckerSum(*shapes, one.terms, one.like, symmetric, products)
    return Tiles(*shapes, row_slots, column_slots, entries, operator.like, symmetric, products)


def _slots(slots: Sequence[Slot], side: Side, left: Shape) -> tuple[list[Slot], list[int]]:
    """The tiles of what is left, and the place of each former tile among them."""
    if side is not None and slots[0].axis == side.axis:
        return [Slot(0, 0, left[0])], [0] * len(slots)
    return list(slots), list(range(len(slots)))


def _term(term: Term | Single, rows: Side, columns: Side) -> Term | Single:
    """The term with its vectors or its cores contracted."""
    sides = list(zip((rows, columns), term.axes, strict=True))
    on_left, on_right = (side if side is not None and side.axis == axis else None for side, axis in sides)
    off = [side if side is not None and side.axis != axis else None for side, axis in sides]
    if isinstance(term, Single):
        outer, core = _sandwiched(term.outer, on_left, on_right), _sandwiched(term.core, *off)
        return Single(outer, core, term.axes, term.symmetric and rows is columns)
    left = term.left if on_left is None else term.left @ on_left.matrix
    same = term.left is term.right and on_left is on_right
    right = left if same else term.right if on_right is None else term.right @ on_right.matrix
    return Term(left, right, term.core if off == [None, None] else ContractedCore(term.core, *off), term.axes)


def _sandwiched(values: Tensor, rows: Side, columns: Side) -> Tensor:
    """M^T V N."""
    values = values if rows is None else rows.matrix.T @ values
    return values if columns is None else values @ columns.matrix


class ContractedCore(Core):
    """M^T C_t N for fixed matrices M (p, r) and N (q, s); None is the identity."""

    def __init__(self, core: Core, rows: Side, columns: Side) -> None:
        (p, q), self._core, self._rows, self._columns = core.shape, core, rows, columns
        shape = p if rows is None else rows.matrix.shape[1], q if columns is None else columns.matrix.shape[1]
        super().__init__(shape, core.period, core.workspace + p * shape[1], core.symmetric and rows is columns)

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, r, s)."""
        return _sandwiched(self._core.dense(start, stop), self._rows, self._columns)

    def token_form(self) -> TokenForm | None:
        """That of C with contracted features."""
        form = self._core.token_form()
        if form is None:
            return None
        left, right = self._features(form.left, form.right)
        return replace(form, left=left, right=right)

    def row_form(self) -> RowForm | None:
        """That of C with contracted features."""
        form = self._core.row_form()
        if form is None:
            return None
        if form.left is None or form.right is None:
            unit = torch.eye(form.diagonal.shape[2], dtype=form.diagonal.dtype, device=form.diagonal.device)
            unit = unit.expand(len(form.diagonal), -1, -1)
            form = replace(form, left=unit, right=unit)
        assert form.left is not None and form.right is not None
        left, right = self._features(form.left, form.right)
        return replace(form, left=left, right=right)

    def _features(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        first = left if self._rows is None else left @ self._rows.matrix
        if left is right and self._rows is self._columns:
            return first, first
        return first, right if self._columns is None else right @ self._columns.matrix
