"""Which entries of a parameter a product multiplies with, and which of its outputs make which head.

Both are found by vector-Jacobian products in the graph of one forward pass, so that views, cuts and transposes between
a parameter and its use do not matter.
"""

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvoscope.blocks import Layout, Piece
from curvoscope.families.data_flow import LEAF, DataFlow, Node, Use, WeightProduct, shape_of

_EXACT = 2**23  # integers up to which float32 counts


def operand(flow: DataFlow, use: Use) -> Piece | None:
    """The part of a parameter that a product multiplies with, read as W (a, p) in `x @ W`, or None if it is none.

    Found by the derivative of the operand's rows and columns with respect to the parameter, which is exact: it
    moves integers.
    """
    parameter = flow.parameters[use.parameter]
    if use.node.name().startswith("Convolution"):
        return Piece.whole(use.parameter, parameter.shape, Layout(tuple(range(1, parameter.ndim)), (0,)))
    before, number = use.node.next_functions[use.place]
    if use.node.name() == "LinearBackward0":
        return _seen(flow, use, before, number, (parameter.shape[0], parameter.shape[1]), turned=True)
    if parameter.ndim == 2 and before.name() == LEAF:
        shape = (int(parameter.shape[0]), int(parameter.shape[1]))
    elif parameter.ndim == 2 and before.name() == "TBackward0" and before.next_functions[0][0].name() == LEAF:
        shape = (int(parameter.shape[1]), int(parameter.shape[0]))
    else:
        found = shape_of(before, number)
        if len(found) not in (2, 3) or (len(found) == 3 and found[0] != 1):
            return None
        shape = (found[-2], found[-1])
    weight_first = use.place == (1 if use.node.name().startswith(("Addmm", "Baddbmm")) else 0)
    return _seen(flow, use, before, number, shape, turned=weight_first)


def _seen(flow: DataFlow, use: Use, before: Node, number: int, shape: tuple[int, int], turned: bool) -> Piece | None:
    parameter = flow.parameters[use.parameter]
    short = before.name() == LEAF or (before.name() == "TBackward0" and before.next_functions[0][0].name() == LEAF)
    if parameter.ndim == 2 and short:
        straight = (before.name() == LEAF) != turned
        return Piece.whole(use.parameter, parameter.shape, Layout((0,), (1,)) if straight else Layout((1,), (0,)))
    if parameter.dtype not in (torch.float32, torch.float64) or max(shape) > _EXACT:
        return None
    like = parameter.new_ones(shape_of(before, number))
    rows, columns = (torch.arange(1, n + 1, dtype=like.dtype, device=like.device) for n in shape)
    leaf = next(leaf for leaf, name in flow.leaves.items() if name == use.parameter)
    found = []
    for numbers in (rows[:, None], columns[None]):
        cotangent = like * numbers
        if before is leaf:
            found.append(cotangent.reshape(parameter.shape))
            continue
        one = flow.gradient(GradientEdge(before, number), GradientEdge(leaf, 0), cotangent)
        if one is None:
            return None
        found.append(one)
    row, column = reversed(found) if turned else found
    return _piece(use.parameter, row, column)


def heads_of(flow: DataFlow, operands: Iterable[tuple[Node, int]], weight: WeightProduct) -> list[list[int]] | None:
    """Which outputs of `weight` make which head of operands of batched products, in the order of the heads.

    None if an output reaches several heads: then something mixes them.
    """
    found: list[list[int]] = []
    for node, operand in operands:
        before, number = node.next_functions[operand - 2]
        shape, end = shape_of(before, number), _cut(flow, before, weight)
        everything = _reached(flow, before, number, shape, slice(None), weight, end)
        seen: set[int] = set()
        for head in range(shape[0]):
            columns = sorted(_reached(flow, before, number, shape, slice(head, head + 1), weight, end))
            if columns and columns not in found:
                if any(not set(columns).isdisjoint(other) for other in found):
                    return None
                found.append(columns)
            seen |= set(columns)
            if seen == everything and head:
                break
    return found or None


def _reached(
    flow: DataFlow, before: Node, number: int, shape: tuple[int, ...], chosen: slice, weight: WeightProduct, end: Node
) -> set[int]:
    """The outputs of a weight that reach some matrices of a batched product's operand."""
    cotangent = flow.parameters[weight.parameter].new_zeros(shape)
    cotangent[chosen] = _numbers(shape[1:], cotangent)
    gradient = flow.gradient(GradientEdge(before, number), GradientEdge(end, 0), cotangent)
    if gradient is None:
        return set()
    channels = gradient.transpose(1, -1) if weight.is_convolution else gradient
    return set((channels.flatten(0, -2) != 0).any(0).nonzero().flatten().tolist())


def reaches(flow: DataFlow, later: WeightProduct, weight: WeightProduct, columns: Iterable[int]) -> bool:
    """Whether all these outputs of a weight reach the input of a later one."""
    shape, edge = flow.input_of(later)
    found = _reached(flow, edge.node, edge.output_nr, shape, slice(None), weight, weight.node)
    return found.issuperset(columns)


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers that no operation cancels, the same on every run."""
    return (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0))).to(like)


def _cut(flow: DataFlow, before: Node, weight: WeightProduct) -> Node:
    """Where heads are looked for: the output of the weight, or that of a norm over all heads behind it."""
    between = flow.followed(weight.node, lambda node: node in flow.products)
    width = output_width(flow, weight)
    for node in sorted(between, key=lambda one: -one._sequence_nr()):
        sizes = [flow.parameters[use.parameter].numel() for use in flow.at(node) if use.kind in ("gamma", "scale")]
        together = width in sizes and shape_of(node, 0)[-1] == width  # not heads with a gamma of their own
        if together and node in flow.passed([before], lambda one: one is weight.node):
            return node
    return weight.node


def output_width(flow: DataFlow, weight: WeightProduct) -> int:
    """Outputs of a product."""
    piece = operand(flow, weight.weight)
    return 0 if piece is None else piece.shape[1]


def _piece(name: str, row: Tensor, column: Tensor) -> Piece | None:
    """The part of a parameter whose entries stand in these rows and columns of a matrix (from 1; 0: nowhere)."""
    places = column.nonzero()
    if not len(places):
        return None
    low, high = places.min(0).values.tolist(), places.max(0).values.tolist()
    index = tuple(slice(first, last + 1) for first, last in zip(low, high, strict=True))
    stored, row, column = tuple(column.shape), row[index], column[index]
    a, p = (len(one.unique()) for one in (row, column))
    if a * p != row.numel():
        return None
    grid = torch.arange(a * p, device=row.device).reshape(a, p)
    entries = (row - row.min()) * p + column - column.min()
    for order in itertools.permutations(range(row.ndim)):
        if not torch.equal(entries.permute(order).flatten().long(), grid.flatten()):
            continue
        for cut in range(row.ndim + 1):
            lengths = [row.shape[axis] for axis in order[:cut]]
            if math.prod(lengths) == a:
                return Piece(name, stored, index, Layout(order[:cut], order[cut:]))
    return None
