"""Stacks of layers in the graph of a forward pass: attention and feed-forward layers that share a stream.

Two attentions stand in one stack if one reads what the other adds to the stream. The paths of parameters give numbers
to layers and names to stacks, nothing else.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.autograd.function import BackwardCFunction

from curvoscope.families.attention_calls import AttentionCall
from curvoscope.families.data_flow import DataFlow, Node, WeightProduct
from curvoscope.families.operands import operand

_ACTIVATION = re.compile(
    "(Gelu|Relu|Silu|Sigmoid|Tanh|Erf|LeakyRelu|Elu|Threshold|Hardtanh|Mish|Softplus|Hardswish|Prelu)B"
)
_CHOICE = re.compile("Index|Gather|Topk|GroupedMm|Scatter")


def is_activation(node: Node) -> bool:
    """Whether a node is an activation function, of torch or of the model's own."""
    return bool(_ACTIVATION.match(node.name())) or isinstance(node, BackwardCFunction)


@dataclass(eq=False)
class FeedForwardPath:
    """A feed-forward layer: down, what it reads, and the gate, if there is one. `inner`: a convolution between up and
    down; `routed`: it reads some tokens only."""

    down: WeightProduct
    ups: list[WeightProduct]
    gate: WeightProduct | None = None
    inner: WeightProduct | None = None
    routed: bool = False

    @property
    def entrances(self) -> list[WeightProduct]:
        """The products that read the stream."""
        return [*self.ups, *([self.gate] if self.gate is not None else [])]


@dataclass(eq=False)
class StackLayer:
    """A layer: its attention, cross-attention, feed-forward paths and routers. `front`: the name of its stack.

    `post`: norms stand behind the sums. `pools`: it is not a layer, but a head that reads a stack by attention.
    """

    number: int
    attention: AttentionCall | None = None
    crossed: AttentionCall | None = None
    paths: list[FeedForwardPath] = field(default_factory=list)
    routers: list[WeightProduct] = field(default_factory=list)
    front: str = ""
    post: bool = False
    pools: bool = False

    @property
    def calls(self) -> list[AttentionCall]:
        """Self-attention and cross-attention."""
        return [call for call in (self.attention, self.crossed) if call is not None]

    @property
    def name(self) -> str:
        """Such as "encoder.h.0"."""
        return f"{self.front}pool" if self.pools else f"{self.front}h.{self.number}"

    @property
    def path(self) -> str:
        """The path of the module that holds query and output weight."""
        weights = [call.weights for call in self.calls[:1]]
        names = [each[role].parameter.split(".")[:-1] for each in weights for role in ("Q", "O") if role in each]
        return ".".join(common_path(names)) if names else ""


class Stacks:
    """The layers of a model, stack by stack."""

    def __init__(self, flow: DataFlow, calls: Sequence[AttentionCall]) -> None:
        self._flow = flow
        self.layer_of: dict[AttentionCall, StackLayer] = {}
        self.stacks = self._stacked(calls)
        self.ends = {call.end: call for call in self.layer_of}
        self.used = {
            p.node for c in self.layer_of for p in (*c.weights.values(), *c.latent.values(), *c.positions.values())
        }
        self._name()
        self._find_feedforward()
        self.downs = {path.down.node: layer for layer in self.layers for path in layer.paths}

    @property
    def layers(self) -> list[StackLayer]:
        """Those of all stacks."""
        return [layer for stack in self.stacks for layer in stack]

    def _stacked(self, calls: Sequence[AttentionCall]) -> list[list[StackLayer]]:
        groups: list[list[AttentionCall]] = []
        for call in calls:
            home = next((group for group in groups if any(other.end in call.sources for other in group)), None)
            if home is None:
                groups.append([call])
            else:
                home.append(call)
        found = []
        for group in groups:
            layers: list[StackLayer] = []
            only_crossed, seen = all(call.cross for call in group), dict[str, StackLayer]()
            for call in group:
                weight = f"{call.weights['Q'].parameter}{operand(self._flow, call.weights['Q'].weight)}"
                if weight in seen:  # a layer that runs several times
                    self.layer_of[call] = seen[weight]
                    continue
                if call.cross and not only_crossed and layers and layers[-1].crossed is None:
                    layers[-1].crossed = call
                else:
                    layers.append(StackLayer(len(layers), call))
                self.layer_of[call] = seen[weight] = layers[-1]
            found.append(layers)
        return found

    # ---- names

    def _name(self) -> None:
        self.paths = [_count(stack) for stack in self.stacks]
        pooled = {i: self._pooled(stack) for i, stack in enumerate(self.stacks)}
        whole = [i for i, other in pooled.items() if other is None]
        fronts = dict(zip(whole, _fronts([self.paths[i] for i in whole]), strict=True))
        for i, other in pooled.items():
            for layer in self.stacks[i]:
                layer.pools = other is not None
                layer.front = fronts[i] if other is None else fronts.get(other, "")

    def _pooled(self, stack: Sequence[StackLayer]) -> int | None:
        """The stack that another one pools: attention alone, whose queries are parameters."""
        call = stack[0].attention
        if len(stack) > 1 or call is None or not call.cross or call.sources:
            return None
        others = {one.end: i for i, s in enumerate(self.stacks) if s is not stack for layer in s for one in layer.calls}
        return next((others[node] for node in self._flow.sources(call.weights["K"].before) if node in others), None)

    def numbered(self, parameter: str) -> tuple[int, int] | None:
        """The stack, and the number of the layer there, that the path of a parameter tells."""
        for i, path in enumerate(self.paths):
            front = f"{path}." if path else ""
            number = parameter.removeprefix(front).partition(".")[0]
            if parameter.startswith(front) and number.isdigit():
                return i, int(number)
        return None

    def scope(self, layer: StackLayer) -> str:
        """The path of the outermost module around a stack that holds no other stack."""
        path = self.paths[next(i for i, stack in enumerate(self.stacks) if layer in stack)]
        others = [
            p for p, stack in zip(self.paths, self.stacks, strict=True) if layer not in stack and not stack[0].pools
        ]
        parts, scope = path.split("."), path
        for n in range(len(parts), 0, -1):
            front = ".".join(parts[:n])
            if any(f"{other}.".startswith(f"{front}.") for other in others):
                break
            scope = front
        return scope

    # ---- feed-forward layers

    def _find_feedforward(self) -> None:
        flow = self._flow
        for product in sorted(flow.products.values(), key=lambda one: one.order):
            sources = flow.sources(product.before)
            ups = [flow.products[node] for node in sources if node in flow.products]
            if product.node in self.used or not ups or len(ups) != len(sources):
                continue
            stream = frozenset[Node]().union(*(flow.sources(up.before) for up in ups))
            ups = [up for up in ups if up.node not in stream and up.node not in self.used]
            between = flow.passed([product.before], flow.stops)
            bent = any(map(is_activation, between)) or len(ups) > 1
            inner = ups[0] if len(ups) == 1 and ups[0].is_convolution and len(stream) == 1 else None
            outer = flow.products.get(next(iter(stream))) if inner is not None else None
            if inner is not None and outer is not None and self._joins_at(product, outer):
                ups, stream = [outer], flow.sources(outer.before)
            else:
                inner = None
            apart = {flow.sources(up.before) for up in ups}
            beside = {call.end for call in self.layer_of if call.sources == stream}
            if len(apart) != 1 or not bent or not self.joins(product, stream | beside):
                continue
            layer = self._counted(product, self._beside(stream))
            if layer is not None:
                path = FeedForwardPath(product, sorted(ups, key=lambda up: up.order), inner=inner)
                layer.paths.append(path)
                self._find_gate(path)
                path.routed = any(_CHOICE.match(node.name()) for up in ups for node in self._until_norm(up.before))
                self.used |= {product.node, *(up.node for up in ups), *([inner.node] if inner is not None else [])}
        for layer in self.layers:
            self._find_routers(layer)

    def joins(self, product: WeightProduct, stream: Iterable[Node]) -> bool:
        """Whether the output of a product is added to a stream."""
        flow, wanted = self._flow, frozenset(stream)
        after = {product.node, *flow.followed(product.node, flow.stops)}
        others = (b for node in after if flow.is_sum(node) for b, _ in node.next_functions if b not in after)
        return any(flow.sources(before) & wanted for before in others)

    def _joins_at(self, product: WeightProduct, outer: WeightProduct) -> bool:
        return outer.node not in self.used and self.joins(product, self._flow.sources(outer.before))

    def _beside(self, stream: frozenset[Node]) -> StackLayer | None:
        """The layer whose attention reads the same stream, or else the last one that has added to it."""
        parallel = [layer for layer in self.layers if layer.attention and layer.attention.sources == stream]
        before = [self.ends[node] for node in stream if node in self.ends]
        if parallel:
            return parallel[0]
        return self.layer_of[max(before, key=lambda call: call.order)] if before else None

    def _counted(self, product: WeightProduct, layer: StackLayer | None) -> StackLayer | None:
        """The layer given, unless it has a feed-forward part and paths count on: then one that has no attention."""
        found = self.numbered(product.parameter)
        if found is None or (layer is not None and layer not in self.stacks[found[0]]):
            return layer
        if layer is not None and all(self.numbered(path.down.parameter) == found for path in layer.paths):
            return layer
        stack, number = self.stacks[found[0]], found[1]
        same = next((one for one in stack if one.number == number), None)
        if same is None:
            same = StackLayer(number, front=stack[0].front)
            stack.append(same)
        return same

    def _until_norm(self, node: Node | None) -> set[Node]:
        flow = self._flow
        return flow.passed([node], lambda one: flow.stops(one) or flow.is_sum(one) or bool(flow.at(one)))

    def _find_gate(self, path: FeedForwardPath) -> None:
        """Of two products that are multiplied entry by entry, the one that passes the activation is the gate."""
        flow = self._flow
        if len(path.ups) != 2:
            return
        between = flow.passed([path.down.before], flow.stops)
        first, second = (flow.followed(up.node, flow.stops) & between for up in path.ups)
        bent = [
            any(is_activation(node) or node.name().startswith("Pow") for node in own)
            for own in (first - second, second - first)
        ]
        if bent[0] != bent[1]:
            path.gate = path.ups.pop(bent.index(True))

    def _find_routers(self, layer: StackLayer) -> None:
        """Products that read what the feed-forward paths read, and whose outputs are factors of theirs."""
        flow = self._flow
        for path in layer.paths:
            stream = flow.sources(path.ups[0].before)
            after = flow.followed(path.down.node, flow.stops)
            for node in (n for n in after if n.name().startswith("Mul") and len(n.next_functions) == 2):
                sides = [flow.sources(before) for before, _ in node.next_functions]
                for own, other in (sides, sides[::-1]):
                    product = flow.products.get(next(iter(other))) if len(other) == 1 else None
                    if product is None or path.down.node not in own - other or product.node in self.used:
                        continue
                    if flow.sources(product.before) == stream:
                        layer.routers.append(product)
                        self.used.add(product.node)


def common_path(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all paths begin with."""
    found = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return found


def _count(stack: Sequence[StackLayer]) -> str:
    """Number the layers as their paths do, if these count; return the path of the stack."""
    paths = [layer.path.split(".") for layer in stack]
    places = [i for i, part in enumerate(paths[0]) if part.isdigit()]
    if len(stack) > 1:
        counts = [i for i in places if all(len(path) > i and path[i].isdigit() for path in paths)]
        places = [i for i in counts if len({path[i] for path in paths}) == len(paths)][:1]
    numbers = [int(path[places[-1]]) for path in paths] if places else []
    if not numbers or numbers != sorted(numbers):
        return ".".join(common_path(paths) if len(stack) > 1 else paths[0])
    for layer, number in zip(stack, numbers, strict=True):
        layer.number = number
    return ".".join(paths[0][: places[-1]])


def _fronts(paths: Sequence[str]) -> list[str]:
    """What tells stacks apart by their paths, with a dot; nothing for one alone."""
    if len(paths) == 1:
        return [""]
    parts = [path.split(".") for path in paths]
    shared = len(common_path(parts))
    if any(len(part) == shared or part[shared].isdigit() for part in parts):
        parents = [path.rpartition(".")[0] for path in paths]
        own = [p if p and parents.count(p) == 1 else path for p, path in zip(parents, paths, strict=True)]
    else:
        own = []
        for part in parts:
            n = next(
                n
                for n in range(shared + 1, len(part) + 1)
                if n == len(part) or sum(o[:n] == part[:n] for o in parts) == 1
            )
            own.append(".".join(part[shared:n]))
    return [f"{one}." if one and own.count(one) == 1 else f"{i}." for i, one in enumerate(own)]
