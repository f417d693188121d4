"""The autograd graph of one forward pass, read as a data flow between weights.

Attention appears in it as product, softmax, product, whatever a model calls its parts. A `Use` is a place where a
parameter meets the data; between the parameter and that place stand only views and operations with constants.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvoscope.families.softmaxes import softmax_of

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
LEAF = "torch::autograd::AccumulateGrad"
_PRODUCTS = {  # places of (input, weight, bias) among the operands
    **{"MmBackward0": (0, 1, None), "AddmmBackward0": (1, 2, 0), "LinearBackward0": (0, 1, 2)},
    **{"BmmBackward0": (0, 1, None), "BaddbmmBackward0": (1, 2, 0), "GroupedMmBackward0": (0, 1, None)},
    **{"ConvolutionBackward0": (0, 1, 2), "MvBackward0": (0, 1, None)},
}
_BATCHED = frozenset({"BmmBackward0", "BaddbmmBackward0"})
LOOKUPS = frozenset({"EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0"})
_NORMS = frozenset(
    {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0", "FusedRmsNormBackward0"}
    | {"CudnnBatchNormBackward0", "MkldnnBatchNormBackward0"}
)
_SUMS = frozenset({"AddBackward0"})


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
            if node.name() == LEAF:
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
        self._known_sources: dict[Node | None, frozenset[Node]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.gains: dict[str, str] = {}  # of weight norms: direction -> length
        self._at: dict[Node, list[Use]] = {}
        self._find_uses()
        self.products = {product.node: product for product in self._products()}
        self.softmaxes = {node: found for node in self.nodes if (found := softmax_of(node)) is not None}

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
        """Whether a node is a batched product of two tensors that are not weights."""
        return node.name() in _BATCHED and node not in self.products and node not in self._chain

    def is_sum(self, node: Node) -> bool:
        """Whether a node adds two tensors that depend on the data."""
        befores = [before for before, _ in node.next_functions]
        return node.name() in _SUMS and len(befores) == 2 and not any(map(self.is_constant, befores))

    def is_constant(self, node: Node | None) -> bool:
        """Whether a node is a parameter, or several joined."""
        return node is None or node in self._chain or node in self._parted

    def behind(self, starts: Iterable[Node | None], stop: Callable[[Node], bool]) -> dict[Node, None]:
        """The nearest nodes before `starts`, including them, for which `stop` holds."""
        return _backward(starts, stop)[0]

    def passed(self, starts: Iterable[Node | None], stop: Callable[[Node], bool]) -> set[Node]:
        """All nodes before `starts`, including them, up to those for which `stop` holds, without these."""
        return _backward(starts, stop)[1]

    def ahead(self, start: Node, stop: Callable[[Node], bool]) -> dict[Node, None]:
        """The nearest nodes after `start` for which `stop` holds."""
        return self._forward(start, stop)[0]

    def followed(self, start: Node, stop: Callable[[Node], bool]) -> set[Node]:
        """All nodes after `start` up to those for which `stop` holds, without these."""
        return self._forward(start, stop)[1]

    def _forward(self, start: Node, stop: Callable[[Node], bool]) -> tuple[dict[Node, None], set[Node]]:
        """Where a walk towards the outputs ends, and what it passes."""
        ends, seen, stack = dict[Node, None](), set[Node](), [start]
        while stack:
            for node, _ in self.consumers.get(stack.pop(), []):
                if node in seen or node in ends:
                    continue
                if stop(node):
                    ends[node] = None
                else:
                    seen.add(node)
                    stack.append(node)
        return ends, seen

    def stops(self, node: Node) -> bool:
        """Whether a node ends a part of the graph: a product with a weight, one of two activations, or a softmax."""
        return node in self.products or node in self.softmaxes or self.is_plain(node)

    def is_start(self, node: Node) -> bool:
        """Whether a node looks tokens up in a parameter, or is an input."""
        return (node.name() in LOOKUPS and bool(self.at(node))) or (node.name() == LEAF and node not in self.leaves)

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
            data = any(b in found or (b is not None and b.name() == LEAF and b not in self.leaves) for b in befores)
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

    # ---- derivatives between nodes

    def zeros(self, shape: Iterable[int]) -> Tensor:
        """Zeros of the type of the parameters."""
        return next(iter(self.parameters.values())).new_zeros(tuple(shape))

    def gradient(self, start: GradientEdge, end: GradientEdge, cotangent: Tensor) -> Tensor | None:
        """The vector-Jacobian product from one edge of the graph to an earlier one."""
        found = torch.autograd.grad([start], [end], [cotangent], retain_graph=True, allow_unused=True)[0]
        return None if found is None else found.detach()


def _backward(starts: Iterable[Node | None], stop: Callable[[Node], bool]) -> tuple[dict[Node, None], set[Node]]:
    """Where walks towards the inputs end, and what they pass."""
    ends, seen, stack = dict[Node, None](), set[Node](), list(starts)
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in ends:
            continue
        if stop(node):
            ends[node] = None
        else:
            seen.add(node)
            stack += [before for before, _ in node.next_functions]
    return ends, seen


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
