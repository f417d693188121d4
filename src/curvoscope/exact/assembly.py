"""Hessians from their pieces: products with columns, blocks of weights that are cut into parts, and the whole.

A layer, or a network of layers, says how its gradients move along directions of its weights, and which terms the block
of two weights has. What makes a `BlockHessian` of that is here, once for all of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.factor import TermList
from curvoscope.operators.base import LinearOperator, Multiplication, ProductPair, Shape
from curvoscope.operators.block_matrix import BlockMatrix, Entries, Slot, Tiles
from curvoscope.operators.kronecker import KroneckerSum

Directions = dict[str, Tensor]  # n at once: (n, a, p) of each weight, (n, T, d) of the input "X"
# The parts asked for (outer, functional) of the Hessian times directions, at the blocks wanted
PartProduct = Callable[[Directions, Sequence[str], bool, bool], Directions]
BlockMaker = Callable[[str, str, bool, ProductPair], LinearOperator]  # row, column, whether outer, and their products

_CHUNK = 2**26  # bytes for the directions taken at once: more gain nothing, and leave the cache


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight that has terms of its own, such as that of a head: its shape and its place."""

    shape: Shape
    slot: Slot


RowPart = TypeVar("RowPart", bound=WeightPart)
ColumnPart = TypeVar("ColumnPart", bound=WeightPart)


def column_chunks(columns: int, workspace: int) -> list[tuple[int, int]]:
    """Ranges of columns that fit into the memory at hand, if each needs `workspace` bytes."""
    budget = min(_CHUNK, checks.memory_budget() // 8)
    return list(checks.chunks(columns, 1, workspace, budget, "a product with a vector"))


class ColumnProducts:
    """Products with columns over named blocks, from products with directions that need `workspace` bytes each."""

    def __init__(self, shapes: dict[str, Shape], product: PartProduct, workspace: int) -> None:
        self.shapes, self._product, self._workspace = shapes, product, workspace

    def multiplication(
        self, wanted: Sequence[str], given: Sequence[str], outer: bool, functional: bool
    ) -> Multiplication:
        """Columns (C, n) over the blocks `given` -> (R, n) over the blocks `wanted`."""
        shapes = {name: self.shapes[name] for name in given}

        def multiply(columns: Tensor) -> Tensor:
            parts = []
            for start, stop in column_chunks(columns.shape[1], self._workspace):
                answers = self._product(unpacked(columns[:, start:stop], shapes), wanted, outer, functional)
                parts.append(packed(answers, wanted))
            return torch.cat(parts, 1)

        return multiply

    def pair(self, row: str, column: str, outer: bool) -> ProductPair:
        """With one block of one part, and with its transpose."""
        there = self.multiplication([row], [column], outer, not outer)
        return there, self.multiplication([column], [row], outer, not outer)


def unpacked(columns: Tensor, shapes: dict[str, Shape]) -> Directions:
    """(C, n) -> (n, a, p) for each name."""
    pieces = columns.T.split([a * p for a, p in shapes.values()], 1)
    return {name: piece.reshape(-1, *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def packed(answers: Directions, names: Iterable[str]) -> Tensor:
    """(n, a, p) for each name -> (R, n)."""
    return torch.cat([answers[name].flatten(1) for name in names], 1).T


def pushed_jacobian(
    push: Callable[[Directions], Tensor], name: str, shape: Shape, output: Tensor, workspace: int
) -> Tensor:
    """dF/dW as a dense matrix (T m, a p): `push` gives dF (n, T, m) along directions that need `workspace` bytes."""
    size = shape[0] * shape[1]
    result = output.new_empty(output.numel(), size)
    for start, stop in column_chunks(size, workspace):
        unit = output.new_zeros(stop - start, size)
        unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
        result[:, start:stop] = push({name: unit.view(-1, *shape)}).flatten(1).T
    return result


def tiled(
    shapes: tuple[Shape, Shape],
    rows: Sequence[RowPart],
    columns: Sequence[ColumnPart],
    terms: Callable[[RowPart, ColumnPart], TermList],
    like: Tensor,
    symmetric: bool,
    products: ProductPair | None = None,
) -> LinearOperator:
    """The block of two weights: one Kronecker sum, or one for each pair of their parts."""
    if len(rows) == len(columns) == 1:
        return KroneckerSum(*shapes, terms(rows[0], columns[0]), like, symmetric, products)
    entries: dict[tuple[int, int], LinearOperator] = {}
    for i, left in enumerate(rows):
        for j, right in enumerate(columns):
            if symmetric and j < i:
                entries[i, j] = entries[j, i].T
            else:
                entries[i, j] = KroneckerSum(left.shape, right.shape, terms(left, right), like, symmetric and i == j)
    slots = [part.slot for part in rows], [part.slot for part in columns]
    return Tiles(*shapes, *slots, entries, like, symmetric, products)


def assembled(
    columns: ColumnProducts,
    like: Tensor,
    block: BlockMaker,
    entries: Callable[[bool, bool], Entries] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> tuple[BlockMatrix, BlockMatrix, Multiplication, Callable[[], Entries] | None]:
    """The outer and the functional part, and products and entries of their sum: what a `BlockHessian` is made of.

    `block` makes one block, `entries` those of several blocks at once, of the parts asked for (outer, functional). For
    `aliases` see `BlockMatrix`.
    """
    names = list(columns.shapes)

    def made(outer: bool, functional: bool) -> Callable[[], Entries] | None:
        return None if entries is None else partial(entries, outer, functional)

    def part(outer: bool) -> BlockMatrix:
        return BlockMatrix(
            columns.shapes,
            lambda row, column: block(row, column, outer, columns.pair(row, column, outer)),
            like,
            columns.multiplication(names, names, outer, not outer),
            made(outer, not outer),
            aliases,
        )

    return part(True), part(False), columns.multiplication(names, names, True, True), made(True, True)
