"""The autograd graph of one forward pass, read as a data flow between weights.

Attention appears in it as product, softmax, product, whatever a model calls its parts. A `Use` is a place where a
parameter meets the data; between the parameter and that place stand only views and operations with constants.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_flatten, tree_map

from curvoscope.autodiff.batches import BatchError
from curvoscope.autodiff.safety import undisturbed
from curvoscope.blocks import Layout, Piece

Node = Any  # a node of autograd's graph

_VIEWS = frozenset(
    f"{name}Backward{i}"
    for i in range(3)
    for name in (
        *("T", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Clone", "ToCopy", "Expand", "Split"),
        *("Slice", "Unsqueeze", "Squeeze", "Alias", "Select", "SplitWithSizes", "Unbind", "UnsafeSplit", "Repeat"),
        *("Contiguous", "Detach", "Narrow", "AsStrided", "UpsampleBicubic2D", "UpsampleBilinear2D"),
    )
)
_WITH_CONSTANTS = frozenset(
    f"{name}Backward{i}" for i in range(2) for name in ("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Exp", "Clamp")
)
_LEAF = "torch::autograd::AccumulateGrad"
_PRODUCTS = {  # places of (input, weight, bias) among the operands
    **{"MmBackward0": (0, 1, None), "AddmmBackward0": (1, 2, 0), "LinearBackward0": (0, 1, 2)},
    **{"BmmBackward0": (0, 1, None), "BaddbmmBackward0": (1, 2, 0), "GroupedMmBackward0": (0, 1, None)},
    **{"ConvolutionBackward0": (0, 1, 2), "MvBackward0": (0, 1, None)},
}
_BATCHED = frozenset({"BmmBackward0", "BaddbmmBackward0"})
_SOFTMAX = frozenset({"SoftmaxBackward0", "SafeSoftmaxBackward0", "_SafeSoftmaxBackward0"})
LOOKUPS = frozenset({"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0"})
_NORMS = frozenset(
    {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0", "FusedRmsNormBackward0"}
    | {"CudnnBatchNormBackward0", "MkldnnBatchNormBackward0"}
)
_SUMS = frozenset({"AddBackward0"})
_EXACT = 2**23  # integers up to which float32 counts


@dataclass(frozen=True, eq=False)
class Use:
    """Where a parameter meets the data: operand number `place` of `node`. `kind`: "weight", "bias", "gamma", "beta",
    "scale", "shift", "lookup", "joined" (as further tokens) or "other"."""

    parameter: str
    node: Node
    place: int
    kind: str

    @property
    def order(self) -> int:
        """When it happened."""
        return int(self.node._sequence_nr())


@dataclass(frozen=True, eq=False)
class WeightProduct:
    """A product of the data with a weight, y = x W + b."""

    node: Node
    weight: Use
    bias: Use | None
    before: Node | None  # what makes x

    @property
    def parameter(self) -> str:
        """Name of the weight."""
        return self.weight.parameter

    @property
    def order(self) -> int:
        """When it happened."""
        return self.weight.order

    @property
    def is_convolution(self) -> bool:
        """Whether outputs are channels, axis 1."""
        return self.node.name().startswith("Convolution")


class DataFlow:
    """Nodes of one forward pass in the order in which they ran, their consumers, and the uses of all parameters."""

    def __init__(self, roots: Iterable[Node], parameters: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> None:
        self.parameters = dict(parameters)
        self.inputs = list(inputs)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.consumers: dict[Node, list[tuple[Node, int]]] = {}
        self.leaves: dict[Node, str] = {}
        self.roots = [root for root in roots if root is not None]
        nodes, stack, seen = [], list(self.roots), set[Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == _LEAF:
                name = names.get(id(node.variable))
                if name is not None:
                    self.leaves[node] = name
            else:
                nodes.append(node)
            for place, (before, _) in enumerate(node.next_functions):
                if before is not None:
                    self.consumers.setdefault(before, []).append((node, place))
                    stack.append(before)
        self.nodes = sorted(nodes, key=lambda node: node._sequence_nr())
        self._chain: dict[Node, str] = dict(self.leaves)
        self._parted: dict[Node, list[str]] = {}
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        self._known_sources: dict[Node | None, frozenset[Node]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.gains: dict[str, str] = {}  # of weight norms: direction -> length
        self._at: dict[Node, list[Use]] = {}
        self._find_uses()
        self.products = {product.node: product for product in self._products()}
        self.softmaxes = {node: found for node in self.nodes if (found := _softmax(node)) is not None}

    def _find_uses(self) -> None:
        for node in self.nodes:
            befores = [before for before, _ in node.next_functions if before is not None]
            owners = {self._chain.get(before) for before in befores}
            if None not in owners and len(owners) == 1 and node.name() in _VIEWS | _WITH_CONSTANTS:
                self._chain[node] = next(iter(owners)) or ""
            elif self._is_parted(node, befores):
                continue
            elif None not in owners and node.name().startswith("WeightNorm"):
                self._chain[node] = self._chain[befores[0]]
                self.gains[self._chain[node]] = self._chain[befores[-1]]
                self.uses.setdefault(self._chain[befores[-1]], []).append(
                    Use(self._chain[befores[-1]], node, 1, "gain")
                )
        for node in self.nodes:
            if self.is_constant(node):
                continue
            for place, (before, number) in enumerate(node.next_functions):
                owner = self._part(node, place, number) if before in self._parted else self._chain.get(before)
                if owner is not None:
                    use = Use(owner, node, place, _kind(node, place))
                    self.uses.setdefault(use.parameter, []).append(use)
                    self._at.setdefault(node, []).append(use)

    def _is_parted(self, node: Node, befores: list[Node]) -> bool:
        """Whether a node joins several parameters, or is a view of what another one joined."""
        if node.name() == "CatBackward0":
            found = len(befores) == len(node.next_functions) > 1 and all(b in self._chain for b in befores)
        else:
            found = bool(befores) and node.name() in _VIEWS and befores[0] in self._parted
        if found:
            self._parted.update({node: sorted({name for b in befores for name in self._owners(b)})})
        return found

    def _owners(self, node: Node) -> list[str]:
        return [self._chain[node]] if node in self._chain else self._parted[node]

    def _part(self, node: Node, place: int, number: int) -> str | None:
        """The one parameter that a part of joined parameters comes from."""
        before = node.next_functions[place][0]
        found = []
        for name in self._parted[before]:
            leaf = next(leaf for leaf, other in self.leaves.items() if other == name)
            numel = self.parameters[name].numel()
            try:
                one = self.gradient(
                    GradientEdge(before, number), GradientEdge(leaf, 0), self.parameters[name].new_ones(numel)
                )
            except RuntimeError:  # of another size
                continue
            if one is not None and bool(one.any()):
                found.append(name)
        return found[0] if len(found) == 1 else None

    def _products(self) -> Iterator[WeightProduct]:
        for node in self.nodes:
            places = _PRODUCTS.get(node.name())
            if places is None or node in self._chain:
                continue
            here = {use.place: use for use in self._at.get(node, [])}
            first, second, third = places
            if node.name() in _BATCHED and first in here and second in here:
                continue
            weight, data = (second, first) if second in here else (first, second)
            if weight not in here or here[weight].kind != "weight":
                continue
            before = node.next_functions[data][0]
            bias = here.get(third) if third is not None else None
            yield WeightProduct(node, here[weight], bias or self._added(node), before)

    def _added(self, node: Node) -> Use | None:
        """A bias that is added right behind a product, or behind its sum with a stream."""
        summed = False
        while True:
            after = self.consumers.get(node, [])
            if len(after) != 1:
                return None
            node = after[0][0]
            if node.name() in _SUMS:
                use = next((use for use in self._at.get(node, []) if use.kind == "shift"), None)
                if use is not None or summed:
                    return use if use is None or not summed or self.parameters[use.parameter].ndim == 1 else None
                summed = True
            elif node.name() not in _VIEWS:
                return None

    def at(self, node: Node) -> list[Use]:
        """The parameters that meet the data at a node."""
        return self._at.get(node, [])

    def is_plain(self, node: Node) -> bool:
        """Whether a node is a batched product of two tensors that are no weights."""
        return node.name() in _BATCHED and node not in self.products and node not in self._chain

    def is_sum(self, node: Node) -> bool:
        """Whether a node adds two tensors that depend on the data."""
        befores = [before for before, _ in node.next_functions]
        return node.name() in _SUMS and len(befores) == 2 and not any(map(self.is_constant, befores))

    def is_constant(self, node: Node | None) -> bool:
        """Whether a node is a parameter, or several joined."""
        return node is None or node in self._chain or node in self._parted

    def behind(self, starts: Iterable[Node | None], stop: Callable[[Node], bool]) -> dict[Node, None]:
        """The nearest nodes before `starts`, including them, for which `stop` holds; the start of every path counts."""
        found: dict[Node, None] = {}
        stack, seen = list(starts), set[Node]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if stop(node):
                found[node] = None
            else:
                stack += [before for before, _ in node.next_functions]
        return found

    def passed(self, starts: Iterable[Node | None], stop: Callable[[Node], bool]) -> set[Node]:
        """All nodes before `starts`, including them, up to those for which `stop` holds, without these."""
        stack, seen = list(starts), set[Node]()
        while stack:
            node = stack.pop()
            if node is None or node in seen or stop(node):
                continue
            seen.add(node)
            stack += [before for before, _ in node.next_functions]
        return seen

    def ahead(self, start: Node, stop: Callable[[Node], bool]) -> dict[Node, None]:
        """The nearest nodes after `start` for which `stop` holds."""
        found: dict[Node, None] = {}
        stack, seen = [start], set[Node]()
        while stack:
            for node, _ in self.consumers.get(stack.pop(), []):
                if node in seen:
                    continue
                seen.add(node)
                if stop(node):
                    found[node] = None
                else:
                    stack.append(node)
        return found

    def followed(self, start: Node, stop: Callable[[Node], bool]) -> set[Node]:
        """All nodes after `start` up to those for which `stop` holds, without these."""
        stack, seen = [start], set[Node]()
        while stack:
            for node, _ in self.consumers.get(stack.pop(), []):
                if node not in seen and not stop(node):
                    seen.add(node)
                    stack.append(node)
        return seen

    def stops(self, node: Node) -> bool:
        """Whether a node ends a part of the graph: a product with a weight, one of two activations, or a softmax."""
        return node in self.products or node in self.softmaxes or self.is_plain(node)

    def is_start(self, node: Node) -> bool:
        """Whether a node looks tokens up in a parameter, or is an input."""
        return (node.name() in LOOKUPS and bool(self.at(node))) or (node.name() == _LEAF and node not in self.leaves)

    def sources(self, node: Node | None) -> frozenset[Node]:
        """What a tensor is made of: the nearest products, tables and inputs before it, constants apart."""
        if node not in self._known_sources:
            ends = self.behind(
                [node], lambda n: n in self.products or self.is_plain(n) or self.is_constant(n) or self.is_start(n)
            )
            self._known_sources[node] = frozenset(n for n in ends if not self.is_constant(n))
        return self._known_sources[node]

    def products_behind(self, node: Node | None) -> list[WeightProduct]:
        """The weights that a tensor comes from, the last ones."""
        return [self.products[one] for one in self.behind([node], self.stops) if one in self.products]

    def owner(self, node: Node | None) -> str | None:
        """The parameter that a node is a view of, or None."""
        return self._chain.get(node)

    def input_of(self, product: WeightProduct) -> tuple[tuple[int, ...], GradientEdge]:
        """The shape of what a product multiplies its weight with, and where that comes from."""
        name, place = product.node.name(), 1 - product.weight.place
        if name.startswith(("Addmm", "Baddbmm")):
            place = 3 - product.weight.place
        edge = product.node.next_functions[place]
        return shape_of(*edge), GradientEdge(*edge)

    def data_beside(self, use: Use) -> Node | None:
        """The other operand where a parameter meets the data."""
        others = (before for place, (before, _) in enumerate(use.node.next_functions) if place != use.place)
        return next((before for before in others if before is not None), None)

    @cached_property
    def from_data(self) -> set[Node]:
        """Nodes that depend on the inputs, not on parameters alone."""
        found: set[Node] = set()
        for node in self.nodes:
            befores = [before for before, _ in node.next_functions]
            looked_up = node.name() in LOOKUPS and self.lookup_kind(node) == "tokens"
            data = any(b in found or (b is not None and b.name() == _LEAF and b not in self.leaves) for b in befores)
            if looked_up or data:
                found.add(node)
        return found

    def lookup_kind(self, node: Node) -> str:
        """What a table is indexed with: "tokens", "positions" (the same in all rows), "types" (always one), "table"."""
        indices = getattr(node, "_saved_indices", None)
        if indices is None:
            indices = getattr(node, "_saved_index", None)
        if isinstance(indices, tuple | list):
            indices = next((one for one in indices if one is not None), None)
        if not isinstance(indices, Tensor) or not indices.numel():
            return "tokens"
        flat = indices.flatten()
        if any(flat.numel() == one.numel() and torch.equal(flat, one.flatten().to(flat.dtype)) for one in self.inputs):
            return "tokens"
        if int(flat.min()) == int(flat.max()) and len(flat) > 1:
            return "types"
        row = indices.flatten(0, -2)[0] if indices.ndim > 1 else indices
        steps = row.diff()
        if bool((indices == row).all()) and len(row) > 1 and bool((steps == steps[0]).all()):
            return "positions"
        square = indices.ndim == 2 and indices.shape[0] == indices.shape[1]
        return "table" if square or node.name() != "EmbeddingBackward0" else "tokens"

    # ---- which entries of a parameter

    def zeros(self, shape: Iterable[int]) -> Tensor:
        """Zeros of the type of the parameters."""
        return next(iter(self.parameters.values())).new_zeros(tuple(shape))

    def gradient(self, start: GradientEdge, end: GradientEdge, cotangent: Tensor) -> Tensor | None:
        """The vector-Jacobian product from one edge of the graph to an earlier one."""
        found = torch.autograd.grad([start], [end], [cotangent], retain_graph=True, allow_unused=True)[0]
        return None if found is None else found.detach()

    def operand(self, use: Use) -> Piece | None:
        """The part of a parameter that a product multiplies with, read as W (a, p) in `x @ W`, or None if it is none.

        Found by the derivative of the operand's rows and columns with respect to the parameter, which is exact: it
        moves integers.
        """
        parameter = self.parameters[use.parameter]
        if use.node.name().startswith("Convolution"):
            return Piece.whole(use.parameter, parameter.shape, Layout(tuple(range(1, parameter.ndim)), (0,)))
        before, number = use.node.next_functions[use.place]
        if use.node.name() == "LinearBackward0":
            return self._seen(use, before, number, (parameter.shape[0], parameter.shape[1]), turned=True)
        if parameter.ndim == 2 and before.name() == _LEAF:
            shape = (int(parameter.shape[0]), int(parameter.shape[1]))
        elif parameter.ndim == 2 and before.name() == "TBackward0" and before.next_functions[0][0].name() == _LEAF:
            shape = (int(parameter.shape[1]), int(parameter.shape[0]))
        else:
            found = shape_of(before, number)
            if len(found) not in (2, 3) or (len(found) == 3 and found[0] != 1):
                return None
            shape = (found[-2], found[-1])
        weight_first = use.place == (1 if use.node.name().startswith(("Addmm", "Baddbmm")) else 0)
        return self._seen(use, before, number, shape, turned=weight_first)

    def _seen(self, use: Use, before: Node, number: int, shape: tuple[int, int], turned: bool) -> Piece | None:
        parameter = self.parameters[use.parameter]
        short = before.name() == _LEAF or (
            before.name() == "TBackward0" and before.next_functions[0][0].name() == _LEAF
        )
        if parameter.ndim == 2 and short:
            straight = (before.name() == _LEAF) != turned
            return Piece.whole(use.parameter, parameter.shape, Layout((0,), (1,)) if straight else Layout((1,), (0,)))
        if parameter.dtype not in (torch.float32, torch.float64) or max(shape) > _EXACT:
            return None
        like = parameter.new_ones(shape_of(before, number))
        rows, columns = (torch.arange(1, n + 1, dtype=like.dtype, device=like.device) for n in shape)
        leaf = next(leaf for leaf, name in self.leaves.items() if name == use.parameter)
        found = []
        for numbers in (rows[:, None], columns[None]):
            cotangent = like * numbers
            if before is leaf:
                found.append(cotangent.reshape(parameter.shape))
                continue
            one = self.gradient(GradientEdge(before, number), GradientEdge(leaf, 0), cotangent)
            if one is None:
                return None
            found.append(one)
        row, column = reversed(found) if turned else found
        return _piece(use.parameter, row, column)

    def heads(self, operands: Iterable[tuple[Node, int]], weight: WeightProduct) -> list[list[int]] | None:
        """Which outputs of `weight` make which head of operands of batched products, in the order of the heads.

        None if an output reaches several heads: then something mixes them.
        """
        found: list[list[int]] = []
        for node, operand in operands:
            before, number = node.next_functions[operand - 2]
            shape, end = shape_of(before, number), self.cut(before, weight)
            everything = self._reached(before, number, shape, slice(None), weight, end)
            seen: set[int] = set()
            for head in range(shape[0]):
                columns = sorted(self._reached(before, number, shape, slice(head, head + 1), weight, end))
                if columns and columns not in found:
                    if any(not set(columns).isdisjoint(other) for other in found):
                        return None
                    found.append(columns)
                seen |= set(columns)
                if seen == everything and head:
                    break
        return found or None

    def _reached(
        self, before: Node, number: int, shape: tuple[int, ...], chosen: slice, weight: WeightProduct, end: Node
    ) -> set[int]:
        """The outputs of a weight that reach some matrices of a batched product's operand."""
        cotangent = self.parameters[weight.parameter].new_zeros(shape)
        cotangent[chosen] = self._numbers(shape[1:], cotangent)
        gradient = self.gradient(GradientEdge(before, number), GradientEdge(end, 0), cotangent)
        if gradient is None:
            return set()
        channels = gradient.transpose(1, -1) if weight.is_convolution else gradient
        return set((channels.flatten(0, -2) != 0).any(0).nonzero().flatten().tolist())

    def reaches(self, later: WeightProduct, weight: WeightProduct, columns: Iterable[int]) -> bool:
        """Whether all these outputs of a weight reach the input of a later one."""
        shape, edge = self.input_of(later)
        found = self._reached(edge.node, edge.output_nr, shape, slice(None), weight, weight.node)
        return found.issuperset(columns)

    def _numbers(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Numbers that no operation cancels, the same on every run."""
        if shape not in self._drawn:
            generator = torch.Generator().manual_seed(0)
            self._drawn[shape] = (0.5 + torch.rand(shape, generator=generator)).to(like)
        return self._drawn[shape]

    def cut(self, before: Node, weight: WeightProduct) -> Node:
        """Where heads are looked for: the output of the weight, or that of a norm over all heads behind it."""
        between = self.followed(weight.node, lambda node: node in self.products)
        width = self.width(weight)
        for node in sorted(between, key=lambda one: -one._sequence_nr()):
            sizes = [self.parameters[use.parameter].numel() for use in self.at(node) if use.kind in ("gamma", "scale")]
            together = width in sizes and shape_of(node, 0)[-1] == width  # not heads with a gamma of their own
            if together and node in self.passed([before], lambda one: one is weight.node):
                return node
        return weight.node

    def width(self, weight: WeightProduct) -> int:
        """Outputs of a product."""
        piece = self.operand(weight.weight)
        return 0 if piece is None else piece.shape[1]


def _softmax(node: Node) -> tuple[GradientEdge, int] | None:
    """Where the logits of a softmax come from and the axis that it normalises, or None if the node is none.

    It is an operation of torch, or the last one of exp(x) / exp(x).sum(axis).
    """
    if node.name() in _SOFTMAX:
        return GradientEdge(*node.next_functions[0]), _axis(node._saved_dim)
    above, below = [before for before, _ in node.next_functions] if node.name() == "DivBackward0" else (None, None)
    if above is None or below is None:
        return None
    if (above.name(), below.name()) != ("ExpBackward0", "SumBackward1") or len(below._saved_dim) != 1:
        return None
    if below.next_functions[0][0] != above:
        return None
    return GradientEdge(*above.next_functions[0]), _axis(below._saved_dim[0])


def _axis(saved: int) -> int:
    """An axis as autograd keeps it: negative numbers are unsigned ones of 64 bits."""
    return saved - 2**64 if saved >= 2**63 else saved


def _kind(node: Node, place: int) -> str:
    name = node.name()
    if name in _PRODUCTS:
        return "bias" if place == _PRODUCTS[name][2] else "weight"
    if name in _NORMS:
        return {1: "gamma", 2: "beta"}.get(place, "other")
    if name in LOOKUPS:
        return "lookup"
    if name.startswith("Mul"):
        return "scale"
    if name in ("AddBackward0", "SubBackward0"):
        return "shift"
    return "joined" if name == "CatBackward0" else "other"


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """The shape of an output of a node."""
    return tuple(int(length) for length in node._input_metadata[number].shape)


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


# ---- running the model


@contextmanager
def traced(model: nn.Module, batch: Any, standing: Mapping[str, Tensor] | None = None) -> Iterator[DataFlow]:
    """Run the model once on a batch, as it is, and give the graph; everything is put back at the end.

    Args:
        model: any module. It runs in evaluation mode.
        batch: (inputs, targets), a dict, with or without "labels", or inputs alone.
        standing: further weights that the pass uses, by name.
    """
    with undisturbed(model, own_kernels=False):
        model.eval()
        named = [*model.named_parameters(), *(standing or {}).items()]
        parameters = {name: one for name, one in named if one.is_floating_point()}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        like = next(iter(parameters.values()))
        inputs: list[Tensor] = []

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.detach().clone().to(like.device)
            if leaf.is_floating_point():
                return leaf.to(like.dtype).requires_grad_(True)
            inputs.append(leaf)
            return leaf

        arguments, keywords = tree_map(moved, _call(batch))
        yield data_flow(model(*arguments, **keywords), parameters, inputs)


def data_flow(outputs: Any, parameters: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> DataFlow:
    """The graph behind a model's outputs; `inputs`: the integers that it was called with."""
    return DataFlow([leaf.grad_fn for leaf in _tensors(outputs)], parameters, inputs)


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: arguments and keywords."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs = batch[0]
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
    raise BatchError("batch", f"got a {type(batch).__name__}, expected (inputs, targets), a tensor or a dict of inputs")


def _tensors(outputs: Any) -> list[Tensor]:
    found = []
    for leaf in tree_flatten(outputs)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            found += [one for one in tree_flatten(list(vars(leaf).values()))[0] if isinstance(one, Tensor)]
    return [one for one in found if one.grad_fn is not None]
