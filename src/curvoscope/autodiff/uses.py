"""Where a graph multiplies with its parameters: the matrix products and look-ups of each.

A product y = X w (T, p), with w a parameter or a rectangle of one, has the weight gradient X^T delta for a cotangent
delta of y: X and delta (`Factors`) are all that inner products of such gradients need. Parameters that are used in any
other way are `dense`: their gradients are formed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1}  # and the place of their first factor among the inputs
_SAVED = {"MmBackward0": ("_saved_self", "_saved_mat2"), "AddmmBackward0": ("_saved_mat1", "_saved_mat2")}
_LOOK_UP = "EmbeddingBackward0"
_LEAF = "torch::autograd::AccumulateGrad"
_VIEWS = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0", "ViewBackward0", "SliceBackward0"),
    *("SplitBackward0", "SplitWithSizesBackward0", "UnsafeSplitBackward0", "NarrowBackward0", "DetachBackward0"),
}


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One product of a graph with a parameter of two axes.

    `region` is the part of the stored parameter that is used; `transposed`: the rows of w are its second axis.
    `factor` is X (T, a), or the rows (T,) that a look-up reads, of which those with -1 have no gradient. `flipped`:
    the parameter stood on the left, and delta arrives as (p, T).
    """

    parameter: str
    node: Node
    region: tuple[slice, slice]
    transposed: bool
    factor: Tensor
    flipped: bool = False

    @property
    def edge(self) -> GradientEdge:
        """Where delta is found."""
        return GradientEdge(self.node, 0)

    @property
    def is_look_up(self) -> bool:
        """Whether X is a matrix of unit rows."""
        return self.factor.ndim == 1

    @property
    def width(self) -> int:
        """p, the columns of w."""
        side = self.region[0 if self.transposed else 1]
        return side.stop - side.start

    def delta(self, cotangents: Tensor) -> Tensor:
        """delta (n, T, p) from what n samples found at the edge."""
        found = cotangents.reshape(len(cotangents), -1, cotangents.shape[-1])
        return found.mT if self.flipped else found


def nodes_below(roots: Sequence[Node]) -> list[Node]:
    """All nodes from which the roots were computed, the roots among them."""
    stack, seen = list(roots), set(roots)
    for node in stack:  # grows on the way
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                stack.append(before)
    return stack


def find_uses(nodes: Sequence[Node], leaves: Mapping[str, Tensor]) -> tuple[list[WeightUse], set[str]]:
    """The products with parameters among the nodes, and the names of parameters that are used otherwise, too."""
    names = {id(leaf): name for name, leaf in leaves.items()}

    def parameter(node: Node | None) -> tuple[str, Tensor] | None:
        while node is not None:
            if node.name() == _LEAF:
                leaf = node.variable  # type: ignore[attr-defined]
                return (names[id(leaf)], leaf) if id(leaf) in names else None
            if node.name() not in _VIEWS:
                return None
            node = node.next_functions[0][0]
        return None

    found: list[WeightUse] = []
    dense: set[str] = set()
    for node in nodes:
        kind = node.name()
        if kind in _VIEWS or kind == _LEAF:
            continue
        for place, (before, output) in enumerate(node.next_functions):
            known = parameter(before)
            if known is None or before is None:
                continue
            name, leaf = known
            use = _use(node, place, GradientEdge(before, output), name, leaf)
            if use is None:
                dense.add(name)
            else:
                found.append(use)
    return [use for use in found if use.parameter not in dense], dense


def _use(node: Node, place: int, edge: GradientEdge, name: str, leaf: Tensor) -> WeightUse | None:
    kind = node.name()
    if leaf.ndim != 2:
        return None
    if kind == _LOOK_UP and edge.node.name() == _LEAF:
        rows = node._saved_indices.flatten()  # type: ignore[attr-defined]
        padding = node._saved_padding_idx  # type: ignore[attr-defined]
        if node._saved_scale_grad_by_freq:  # type: ignore[attr-defined]
            return None
        if 0 <= padding < leaf.shape[0]:
            rows = torch.where(rows == padding, -1, rows)
        return WeightUse(name, node, (slice(0, leaf.shape[0]), slice(0, leaf.shape[1])), False, rows)
    if kind not in _PRODUCTS:
        return None
    side = place - _PRODUCTS[kind]
    if side not in (0, 1):  # the bias of addmm
        return None
    if kind == "AddmmBackward0" and node._saved_alpha != 1:  # type: ignore[attr-defined]
        return None
    placed = _placed(edge, leaf)
    if placed is None:
        return None
    region, transposed = placed
    other = getattr(node, _SAVED[kind][1 - side])
    if other is None:
        return None
    X = other.detach()
    if side == 1:
        return WeightUse(name, node, region, transposed, X)
    return WeightUse(name, node, region, not transposed, X.mT, flipped=True)


def _placed(edge: GradientEdge, leaf: Tensor) -> tuple[tuple[slice, slice], bool] | None:
    """Which rectangle of the parameter the matrix behind the edge is, and whether it is transposed. Rows and columns
    are sent back through the views as numbers, which says where they came from."""
    chain = []
    node: Node | None = edge.node
    while node is not None and node.name() != _LEAF:
        chain.append(node.name())
        node = node.next_functions[0][0]
    whole = slice(0, leaf.shape[0]), slice(0, leaf.shape[1])
    if all(name in ("TBackward0", "AliasBackward0") for name in chain):
        return whole, chain.count("TBackward0") % 2 == 1
    meta = edge.node._input_metadata[edge.output_nr]
    shape = tuple(meta.shape)
    if len(shape) != 2:
        return None
    images = []
    for axis in range(2):
        numbers = torch.arange(1, shape[axis] + 1, dtype=torch.float64).to(leaf)
        spread = (numbers[:, None] if axis == 0 else numbers[None]).expand(shape)
        (image,) = torch.autograd.grad(edge, leaf, spread.contiguous(), retain_graph=True)
        images.append(image)
    used = images[0] != 0
    along = [used.any(1 - axis).nonzero().flatten() for axis in range(2)]
    if not all(len(some) for some in along):
        return None
    region = tuple(slice(int(some[0]), int(some[-1]) + 1) for some in along)
    rows, columns = (image[region] for image in images)
    for transposed, (first, second) in ((False, (rows, columns)), (True, (columns, rows))):
        expected = [torch.arange(1, n + 1).to(leaf) for n in first.shape]
        if torch.equal(first, expected[0][:, None].expand_as(first)) and torch.equal(
            second, expected[1][None].expand_as(second)
        ):
            return (region[0], region[1]), transposed
    return None


@dataclass(frozen=True, eq=False)
class Factors:
    """X and delta of the samples of one micro-batch at one product with a parameter.

    Args:
        samples: numbers of the samples, n of them.
        factor: X (T, a), or the rows (T,) of the parameter that a look-up reads, -1 for none.
        deltas: (n, T, p).
        region: the part of the stored parameter that the product uses.
        transposed: whether the rows of w are the parameter's second axis.
    """

    samples: Tensor
    factor: Tensor
    deltas: Tensor
    region: tuple[slice, slice]
    transposed: bool

    def within(self, index: tuple[slice, slice]) -> "Factors | None":
        """The part that belongs to a rectangle of the parameter; None if there is none."""
        starts = [max(mine.start, wanted.start) for mine, wanted in zip(self.region, index, strict=True)]
        stops = [min(mine.stop, wanted.stop) for mine, wanted in zip(self.region, index, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        own = [slice(a - mine.start, b - mine.start) for a, b, mine in zip(starts, stops, self.region, strict=True)]
        rows, columns = reversed(own) if self.transposed else own
        factor = self.factor
        if factor.ndim == 1:
            outside = (factor < rows.start) | (factor >= rows.stop)
            factor = torch.where(outside, -1, factor)
        else:
            factor = factor[:, rows]
        region = slice(starts[0], stops[0]), slice(starts[1], stops[1])
        return Factors(self.samples, factor, self.deltas[..., columns], region, self.transposed)

    def among(self, rows: Tensor) -> "Factors":
        """A look-up's factors in a parameter of which only these rows are left, each once and in order."""
        places = torch.searchsorted(rows, self.factor.clamp_min(0))
        factor = torch.where(self.factor < 0, -1, places)
        region = slice(0, len(rows)), self.region[1]
        return Factors(self.samples, factor, self.deltas, region, self.transposed)

    @property
    def rows(self) -> slice:
        """Rows of w in the parameter."""
        return self.region[1 if self.transposed else 0]
