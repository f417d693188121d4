"""Roles by structure: which weight is the query of which layer, read off one forward pass.

No names and no classes decide. Attention is a product of two activations, a softmax and a second product; its weights
are those behind the operands. What reads and feeds the same stream as attention is a feed-forward layer; a norm is named
after its place. Paths of parameters serve for numbers of layers and to tell stacks apart.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.autograd.graph import GradientEdge

from curvoscope.blocks import ROW, STORED, Block, Layout, Piece
from curvoscope.families.tracing import LOOKUPS, SOFTMAX, DataFlow, Node, Product, Use

_ACTIVATIONS = re.compile(
    "^(Gelu|Relu|Silu|Sigmoid|Tanh|Erf|LeakyRelu|Elu|Threshold|Hardtanh|Mish|Softplus|Hardswish|HardtanhBackward|Prelu)"
)
_NORMALISING = re.compile("^(Rsqrt|Sqrt|Reciprocal|LinalgVectorNorm|Norm|NativeLayerNorm|FusedRmsNorm|Var|Std)")
_CHOOSING = re.compile("^(Index|Gather|Topk|GroupedMm|Scatter)")
_MANY_PIECES = 256


@dataclass(eq=False)
class AttentionCall:
    """One attention in the graph: the products of scores and of values, and the weights by role."""

    scores: Node
    softmax: Node
    mixed: Node
    operands: dict[str, tuple[Node, int]]  # role -> product and number of the operand
    weights: dict[str, Product]
    latent: dict[str, Product] = field(default_factory=dict)
    sources: frozenset[Node] = frozenset()
    cross: bool = False

    @property
    def order(self) -> int:
        """When it happened."""
        return int(self.mixed._sequence_nr())

    @property
    def end(self) -> Node:
        """What it gives to the stream."""
        return self.weights["O"].node if "O" in self.weights else self.mixed


@dataclass(eq=False)
class FeedForwardPath:
    """Two or three products: down, and those that it reads."""

    down: Product
    ups: list[Product]
    gate: Product | None = None
    routed: bool = False


@dataclass(eq=False)
class Layer:
    """A layer of a stack: its attention, cross-attention and feed-forward paths."""

    number: int
    attention: AttentionCall | None = None
    crossed: AttentionCall | None = None
    paths: list[FeedForwardPath] = field(default_factory=list)
    routers: list[Product] = field(default_factory=list)
    front: str = ""
    post: bool = False

    @property
    def name(self) -> str:
        """Such as "encoder.h.0"."""
        return f"{self.front}h.{self.number}"


@dataclass(frozen=True)
class Role:
    """A block that was found: its pieces, side by side or one below the other, and its heads."""

    pieces: tuple[Piece, ...]
    heads: int | None = None
    axis: int | None = None
    side_by_side: bool = False

    def block(self, name: str, tied: tuple[str, ...]) -> Block:
        """The block of that name."""
        return Block(name, self.pieces, tied, self.heads, self.axis, self.side_by_side)


class Recognition:
    """The roles of all parameters of a traced model: `roles` by name, and in `notes` why a parameter has none."""

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self.roles: dict[str, Role] = {}
        self.homes: dict[str, str] = {}  # block -> its layer
        self.notes: dict[str, str] = {}
        self._taken: dict[str, list[Piece]] = {}
        self._used: set[Node] = set()
        calls = self._calls()
        self._layers = self._stacked(calls)
        self._by_call = {id(call): layer for layer in self._layers for call in (layer.attention, layer.crossed) if call}
        if not self._layers:
            self._say_why()
            return
        self._find_feedforward()
        self._number()
        for layer in self._layers:
            self._name_attention(layer)
            self._name_feedforward(layer)
        self._name_norms()
        self._name_around()
        self._say_why()

    # ---- attention

    def _calls(self) -> list[AttentionCall]:
        flow = self._flow
        found = []
        for softmax in (node for node in flow.nodes if node.name() in SOFTMAX):
            call = self._call(softmax)
            if call is not None:
                found.append(call)
        for call in found:
            self._used |= {product.node for product in (*call.weights.values(), *call.latent.values())}
        del flow
        return found

    def _call(self, softmax: Node) -> AttentionCall | None:
        flow = self._flow
        scores = [
            node
            for node in flow.behind([softmax.next_functions[0][0]], lambda n: self._stops(n) or flow.is_plain(n))
            if flow.is_plain(node)
        ]
        values = [n for n in flow.ahead(softmax, lambda n: self._stops(n) or flow.is_plain(n)) if flow.is_plain(n)]
        if not scores or not values:
            return None
        both = [n for n in scores if all(b in flow.from_data for b, _ in n.next_functions[-2:])]
        score, mixed = (both or scores)[0], min(values, key=lambda node: node._sequence_nr())
        first, second = (0, 1) if self._rows_are_queries(softmax, score) else (1, 0)
        reached = flow.behind([mixed.next_functions[-2][0]], self._stops)
        operands = {"Q": (score, first), "K": (score, second), "V": (mixed, 1 if softmax in reached else 0)}
        weights: dict[str, Product] = {}
        latent: dict[str, Product] = {}
        for role, (node, operand) in operands.items():
            several = self._products_behind(node.next_functions[operand - 2][0])
            main = [p for p in several if not any(p.node in self._sources(q) for q in several if q is not p)]
            main = [p for p in main if p.node in flow.from_data] or main
            if len(main) != 1:
                return None
            weights[role] = main[0]
            latent |= {"KV_latent" if role != "Q" else "Q_latent": p for p in several if p not in main}
        call = AttentionCall(score, softmax, mixed, operands, weights, latent)
        self._place(call)
        output = self._output_weight(call)
        if output is not None:
            weights["O"] = output
        return call

    def _stops(self, node: Node) -> bool:
        return node in self._flow.products or node.name() in SOFTMAX

    def _rows_are_queries(self, softmax: Node, scores: Node) -> bool:
        """Whether a row of the scores is what the softmax normalises."""
        flow = self._flow
        result = softmax._saved_result
        cotangent = result.new_zeros(result.shape)
        place: list[int | slice] = [0] * result.ndim
        place[softmax._saved_dim % result.ndim if softmax._saved_dim < result.ndim else -1] = slice(None)
        cotangent[tuple(place)] = 1
        before, number = softmax.next_functions[0]
        gradient = flow.gradient(GradientEdge(before, number), GradientEdge(scores, 0), cotangent)
        if gradient is None:
            return True
        rows, columns = ((gradient != 0).any(axis).any(0).sum() for axis in (2, 1))
        return bool(rows <= columns)

    def _products_behind(self, node: Node) -> list[Product]:
        flow = self._flow
        found = flow.behind([node], lambda n: self._stops(n) or flow.is_plain(n))
        return [flow.products[one] for one in found if one in flow.products]

    def _sources(self, product: Product) -> frozenset[Node]:
        return self._sources_of(product.before)

    def _sources_of(self, node: Node | None) -> frozenset[Node]:
        """What a tensor is made of: the nearest products, mixed values, tables and inputs before it."""
        if node not in self.__dict__.setdefault("_known_sources", {}):
            flow = self._flow

            def stop(one: Node) -> bool:
                return one in flow.products or flow.is_plain(one) or flow.is_constant(one) or one.name() in LOOKUPS and bool(flow.at(one)) or one.name().endswith("AccumulateGrad")

            found = flow.behind([node], stop)
            self.__dict__["_known_sources"][node] = frozenset(n for n in found if not flow.is_constant(n))
        return self.__dict__["_known_sources"][node]

    def _place(self, call: AttentionCall) -> None:
        """What the call reads, and whether queries and keys read different streams."""
        query, key = (self._sources(call.weights[role]) for role in "QK")
        if query != key:
            deeper = {}
            for role, found in (("Q", query), ("K", key)):
                alone = [self._flow.products[n] for n in found if n in self._flow.products]
                if len(found) == 1 and alone:
                    deeper[role] = alone[0]
            wider = {role: self._sources(product) for role, product in deeper.items()}
            pairs = [(wider.get("Q", query), key, ("Q",)), (query, wider.get("K", key), ("K",))]
            pairs.append((wider.get("Q", query), wider.get("K", key), ("Q", "K")))
            for one, other, roles in pairs:
                if one == other and one and all(role in deeper for role in roles):
                    names = {"Q": "Q_latent", "K": "KV_latent"}
                    for role in roles:
                        product = deeper[role]
                        reduced = product.is_convolution
                        call.latent["reduction" if reduced else names[role]] = product
                    query = key = one
                    break
        call.sources, call.cross = query, query != key

    def _output_weight(self, call: AttentionCall) -> Product | None:
        """W_O: the next product, if nothing of the stream is added before."""
        flow = self._flow
        after = [n for n in flow.ahead(call.mixed, lambda n: self._stops(n) or flow.is_plain(n)) if n in flow.products]
        if not after:
            return None
        product = flow.products[min(after, key=lambda node: node._sequence_nr())]
        for source in self._sources(product):
            if flow.is_plain(source):
                continue
            gates = source in flow.products and self._sources(flow.products[source]) == call.sources
            if not gates:
                return None
        return product

    # ---- stacks and layers

    def _stacked(self, calls: Sequence[AttentionCall]) -> list[Layer]:
        """Calls that read each other's outputs from one stream, as layers; shared weights are one layer."""
        stacks: list[list[AttentionCall]] = []
        for call in sorted(calls, key=lambda one: one.order):
            home = next((s for s in stacks if any(other.end in call.sources for other in s)), None)
            if home is None:
                stacks.append([call])
            else:
                home.append(call)
        self._stacks: list[list[Layer]] = []
        for stack in stacks:
            layers: list[Layer] = []
            only_crossed = all(call.cross for call in stack)
            seen: set[str] = set()
            for call in stack:
                key = call.weights["Q"].parameter + str(self._flow.operand(call.weights["Q"].weight))
                if key in seen:
                    continue
                seen.add(key)
                if call.cross and not only_crossed and layers and layers[-1].crossed is None:
                    layers[-1].crossed = call
                else:
                    layers.append(Layer(len(layers), call))
            if layers:
                self._stacks.append(layers)
        return [layer for stack in self._stacks for layer in stack]

    def _number(self) -> None:
        """Numbers of layers from the paths of their weights, if these count them; and names of stacks."""
        fronts = []
        for stack in self._stacks:
            paths = [self._path(layer).split(".") for layer in stack]
            places = [i for i, part in enumerate(paths[0]) if part.isdigit()]
            if len(stack) > 1:
                places = [i for i in places if all(len(p) > i and p[i].isdigit() for p in paths)]
                places = [i for i in places if len({p[i] for p in paths}) == len(paths)]
            numbers = [int(path[places[-1 if len(stack) == 1 else 0]]) for path in paths] if places else []
            if numbers and numbers == sorted(numbers):
                for layer, number in zip(stack, numbers, strict=True):
                    layer.number = number
                parts = paths[0][: places[-1 if len(stack) == 1 else 0]]
            else:
                parts = os.path.commonprefix(paths) if len(stack) > 1 else paths[0]
            fronts.append(".".join(parts))
        for stack, front in zip(self._stacks, _fronts(fronts), strict=True):
            for layer in stack:
                layer.front = front
        self._whole_fronts = dict(zip((id(stack) for stack in self._stacks), fronts, strict=True))

    def _path(self, layer: Layer) -> str:
        """The path of the module that holds the queries and the output."""
        call = layer.attention or layer.crossed
        if call is None:
            return ""
        names = [call.weights[role].parameter.split(".")[:-1] for role in ("Q", "O") if role in call.weights]
        return ".".join(os.path.commonprefix(names))

    # ---- feed-forward layers

    def _find_feedforward(self) -> None:
        flow = self._flow
        ends = {call.end: call for layer in self._layers for call in (layer.attention, layer.crossed) if call}
        for product in sorted(flow.products.values(), key=lambda one: one.order):
            if product.node in self._used:
                continue
            sources = self._sources(product)
            ups = [flow.products[n] for n in sources if n in flow.products]
            if not ups or len(ups) != len(sources) or any(up.node in ends for up in ups):
                continue
            between = flow.passed([product.before], lambda node: node in flow.products)
            if not any(_ACTIVATIONS.match(node.name()) for node in between) and len(ups) < 2:
                continue
            stream = frozenset[Node]().union(*(self._sources(up) for up in ups))
            routers = [up for up in ups if up.node in stream]
            ups = [up for up in ups if up not in routers]
            if not self._joins(product, stream, ends):
                continue
            layer = self._layer_of(stream, ends)
            if layer is None:
                continue
            layer.paths.append(FeedForwardPath(product, sorted(ups, key=lambda one: one.order)))
            self._used |= {product.node, *(up.node for up in ups)}
        for layer in self._layers:
            for path in layer.paths:
                self._split_gate(path)
                stream = self._sources(path.ups[0])
                reached = flow.passed([up.before for up in path.ups], lambda node: node in flow.products)
                inside = {n for up in path.ups for n in self._until_sum(up.before)}
                path.routed = any(_CHOOSING.match(node.name()) for node in inside & reached)
            self._find_routers(layer)

    def _until_sum(self, node: Node | None) -> set[Node]:
        flow = self._flow
        return flow.passed([node], lambda one: one in flow.products or flow.is_sum(one) or bool(flow.at(one)))

    def _joins(self, product: Product, stream: frozenset[Node], ends: Iterable[Node]) -> bool:
        """Whether the output of a product is added to the stream that it came from."""
        flow = self._flow
        after = {product.node, *flow.followed(product.node, lambda node: self._stops(node) or flow.is_plain(node))}
        wanted = stream | set(ends)
        for node in after:
            if flow.is_sum(node):
                for before, _ in node.next_functions:
                    if before not in after and self._sources_of(before) & wanted:
                        return True
        return False

    def _layer_of(self, stream: frozenset[Node], ends: dict[Node, AttentionCall]) -> Layer | None:
        beside = [layer for layer in self._layers if layer.attention and layer.attention.sources == stream]
        if beside:
            return beside[0]
        before = [ends[node] for node in stream if node in ends]
        return self._by_call.get(id(max(before, key=lambda call: call.order))) if before else None

    def _split_gate(self, path: FeedForwardPath) -> None:
        """Of two products that meet in a product entry by entry, the one that passes the activation is the gate."""
        flow = self._flow
        if len(path.ups) != 2:
            return
        between = flow.passed([path.down.before], lambda node: node in flow.products)
        bent = []
        for up in path.ups:
            own = flow.followed(up.node, lambda node: node in flow.products) & between
            other = next(one for one in path.ups if one is not up)
            own -= flow.followed(other.node, lambda node: node in flow.products)
            bent.append(any(_ACTIVATIONS.match(node.name()) or node.name().startswith("Pow") for node in own))
        if bent[0] != bent[1]:
            path.gate = path.ups.pop(bent.index(True))

    def _find_routers(self, layer: Layer) -> None:
        flow = self._flow
        for path in layer.paths:
            stream = self._sources(path.ups[0])
            after = {path.down.node, *flow.followed(path.down.node, lambda n: n in flow.products)}
            for product in flow.products.values():
                if product.node in self._used or self._sources(product) != stream:
                    continue
                beyond = flow.followed(product.node, lambda n: n in flow.products)
                if any(n.name().startswith("Mul") for n in beyond & after) or any(
                    _CHOOSING.match(n.name()) for n in beyond
                ):
                    layer.routers.append(product)
                    self._used.add(product.node)

    # ---- names

    def _add(self, layer: Layer | None, name: str, role: Role) -> bool:
        """Take the pieces for a block, unless they are in one already."""
        full = f"{layer.name}.{name}" if layer is not None else name
        for piece in role.pieces:
            if any(piece.overlaps(other) for other in self._taken.get(piece.parameter, ())):
                return False
        if full in self.roles:
            return False
        self.roles[full] = role
        if layer is not None:
            self.homes[full] = layer.name
        for piece in role.pieces:
            self._taken.setdefault(piece.parameter, []).append(piece)
        return True

    def _whole(self, parameter: str, layout: Layout | None = None) -> Piece:
        shape = self._flow.parameters[parameter].shape
        return Piece.whole(parameter, shape, layout or Layout((), tuple(range(len(shape)))))

    def _add_product(
        self, layer: Layer | None, name: str, product: Product, columns: list[list[int]] | None = None, heads: bool = False
    ) -> None:
        """A weight and its bias; of some columns alone, in groups that are heads."""
        piece = self._flow.operand(product.weight)
        group, dot, leaf = name.rpartition(".")
        if piece is None:
            self.notes.setdefault(product.parameter, f"is {name}, in an order of entries that is not a block's")
            return
        bias = None
        if product.bias is not None:
            bias = self._bias(product, piece)
        for one, key in ((piece, name), (bias, f"{group}{dot}b_{leaf}")):
            if one is not None:
                role = _columns(one, columns, heads)
                if role is None:
                    self.notes.setdefault(product.parameter, f"holds {name} in columns that interleave too often")
                else:
                    self._add(layer, key, role)

    def _bias(self, product: Product, piece: Piece) -> Piece | None:
        assert product.bias is not None
        name = product.bias.parameter
        stored = self._flow.parameters[name].shape
        layout = Layout((), tuple(range(len(stored))))
        if stored.numel() == piece.shape[1]:
            return Piece.whole(name, stored, layout)
        if len(stored) == len(piece.stored) == 1 or len(stored) == 1:  # a part of a fused bias, as of its weight
            axis = piece.layout.columns[0]
            return Piece(name, tuple(stored), (piece.index[axis],), ROW) if piece.stored[axis] == stored[0] else None
        if len(stored) == 2 and len(piece.stored) == 3:  # of experts, one row each
            inside = next((a for a in piece.layout.columns if piece.stored[a] == stored[1] and a), None)
            if inside is not None and piece.stored[0] == stored[0]:
                return Piece(name, tuple(stored), (piece.index[0], piece.index[inside]), layout)
        return None

    def _name_attention(self, layer: Layer) -> None:
        for kind, call in (("attn", layer.attention), ("cross", layer.crossed)):
            if call is None:
                continue
            uses: dict[Node, list[str]] = {}
            for role in "QKV":
                uses.setdefault(call.weights[role].node, []).append(role)
            for node, roles in uses.items():
                self._name_projections(layer, kind, call, self._flow.products[node], roles)
            if "O" in call.weights:
                self._name_output(layer, kind, call)
            for name, product in call.latent.items():
                self._add_product(layer, f"{kind}.{name}", product)

    def _name_projections(
        self, layer: Layer, kind: str, call: AttentionCall, product: Product, roles: Sequence[str]
    ) -> None:
        width = self._flow.width(product)
        found: dict[str, list[list[int]] | None] = {
            role: self._flow.heads(*call.operands[role], product) for role in roles
        }
        if len(roles) == 1 and sum(map(len, found[roles[0]] or ())) in (0, width):
            self._add_product(layer, f"{kind}.{roles[0]}", product, found[roles[0]], heads=True)
            return
        columns = [c for heads in found.values() for head in heads or () for c in head]
        if any(not heads for heads in found.values()) or len(set(columns)) != len(columns):
            self.notes.setdefault(product.parameter, f"holds {', '.join(roles)} in columns that cannot be told apart")
            return
        for role in roles:
            self._add_product(layer, f"{kind}.{role}", product, found[role], heads=True)
        rest = sorted(set(range(width)) - set(columns))
        if rest:
            self._add_product(layer, f"{kind}.gate", product, [rest])

    def _name_output(self, layer: Layer, kind: str, call: AttentionCall) -> None:
        product = call.weights["O"]
        piece = self._flow.operand(product.weight)
        count = None
        queries = self.roles.get(f"{layer.name}.{kind}.Q")
        if piece is not None and queries is not None and queries.heads and piece.shape[0] % queries.heads == 0:
            count = queries.heads if self._rows_are_heads(call, product, piece, queries.heads) else None
        if piece is None:
            self.notes.setdefault(product.parameter, f"is {kind}.O, in an order of entries that is not a block's")
            return
        role = Role((piece,), count, None if count is None else 0)
        self._add(layer, f"{kind}.O", role)
        if product.bias is not None:
            bias = self._bias(product, piece)
            if bias is not None:
                self._add(layer, f"{kind}.b_O", Role((bias,)))

    def _rows_are_heads(self, call: AttentionCall, product: Product, piece: Piece, heads: int) -> bool:
        """Whether equal parts of the rows of W_O read one head each, in the order of the heads."""
        flow = self._flow
        place = 1 if product.node.name() == "AddmmBackward0" else 0
        before, number = product.node.next_functions[place]
        saved = getattr(product.node, "_saved_mat1", None) if place else getattr(product.node, "_saved_self", None)
        if saved is None or saved.shape[-1] != piece.shape[0]:
            return False
        width, seen = piece.shape[0] // heads, []
        for head in range(heads):
            cotangent = saved.new_zeros(saved.shape)
            cotangent[..., head * width : (head + 1) * width] = 1
            gradient = flow.gradient(GradientEdge(before, number), GradientEdge(call.mixed, 0), cotangent)
            if gradient is None:
                return False
            seen.append(set((gradient.flatten(1) != 0).any(1).nonzero().flatten().tolist()))
        firsts = [min(one, default=-1) for one in seen]
        disjoint = sum(map(len, seen)) == len(set().union(*seen))
        return disjoint and -1 not in firsts and firsts == sorted(firsts)

    def _name_feedforward(self, layer: Layer) -> None:
        routed = [path for path in layer.paths if path.routed]
        dense = [path for path in layer.paths if not path.routed]
        experts: dict[str, list[FeedForwardPath]] = {}
        for path in routed:
            experts.setdefault(path.down.parameter, []).append(path)
        for number, paths in enumerate(experts.values()):
            for path in paths:
                piece = self._flow.operand(path.down.weight)
                place = piece.index[0].start if piece is not None and len(piece.stored) == 3 else number
                self._name_path(layer, f"mlp.experts.{place}.", path)
        for path in dense:
            self._name_path(layer, "mlp.shared." if routed else "mlp.", path)
        for product in layer.routers:
            narrow = self._flow.width(product) == 1
            self._add_product(layer, "mlp.shared.router" if narrow else "mlp.router", product)

    def _name_path(self, layer: Layer, front: str, path: FeedForwardPath) -> None:
        flow = self._flow
        down = flow.operand(path.down.weight)
        up = path.ups[0]
        width = flow.width(up)
        if path.gate is None and down is not None and len(path.ups) == 1 and width == 2 * down.shape[0]:
            columns = self._gate_columns(path)
            if columns is None:
                self._add_product(layer, f"{front}gate_up", up)
            else:
                self._add_product(layer, f"{front}gate", up, [columns[0]])
                self._add_product(layer, f"{front}up", up, [columns[1]])
        else:
            if path.gate is not None:
                self._add_product(layer, f"{front}gate", path.gate)
            if len(path.ups) == 1:
                self._add_product(layer, f"{front}up", up)
            else:
                for one in path.ups:
                    self.notes.setdefault(one.parameter, "is one of several weights of a feed-forward layer, in no order")
        self._add_product(layer, f"{front}down", path.down)

    def _gate_columns(self, path: FeedForwardPath) -> tuple[list[int], list[int]] | None:
        """Columns of a fused weight that pass the activation, and those that do not; None if they interleave."""
        flow, up = self._flow, path.ups[0]
        between = flow.passed([path.down.before], lambda node: node in flow.products)
        for node in sorted(between, key=lambda one: -one._sequence_nr()):
            befores = node.next_functions
            if not node.name().startswith("Mul") or len(befores) != 2 or any(b is None for b, _ in befores):
                continue
            sides = []
            for before, number in befores:
                inside = flow.passed([before], lambda one: one in flow.products)
                bent = any(_ACTIVATIONS.match(one.name()) for one in inside)
                saved = node._saved_self if len(sides) == 0 else node._saved_other
                gradient = flow.gradient(GradientEdge(before, number), GradientEdge(up.node, 0), saved.new_ones(saved.shape))
                if gradient is None:
                    break
                sides.append((bent, sorted((gradient.flatten(0, -2) != 0).any(0).nonzero().flatten().tolist())))
            if len(sides) == 2 and sides[0][0] != sides[1][0] and not set(sides[0][1]) & set(sides[1][1]):
                gate, linear = (columns for _, columns in sorted(sides, key=lambda side: not side[0]))
                total = len(gate) + len(linear)
                if total == flow.width(up) and len(_runs(gate)) == len(_runs(linear)) == 1:
                    return gate, linear
        return None

    # ---- norms, scales and what else acts inside a layer

    def _name_norms(self) -> None:
        flow = self._flow
        self._ends = {call.end: call for layer in self._layers for call in (layer.attention, layer.crossed) if call}
        self._downs = {path.down.node: layer for layer in self._layers for path in layer.paths}
        self._readers: dict[Node, tuple[Layer, str]] = {}
        for layer in self._layers:
            for path in layer.paths:
                for up in (*path.ups, *([path.gate] if path.gate else [])):
                    self._readers[up.node] = (layer, "norm2")
            for router in layer.routers:
                self._readers[router.node] = (layer, "norm2")
            if layer.crossed is not None:
                for role in ("Q", "Q_latent"):
                    product = layer.crossed.weights.get(role) or layer.crossed.latent.get(role)
                    if product is not None:
                        self._readers[product.node] = (layer, "norm_cross")
            if layer.attention is not None:
                for product in (layer.attention.weights["Q"], *layer.attention.latent.values()):
                    self._readers[product.node] = (layer, "norm1")
        inner = self._inner_places()
        self._last_norms: list[tuple[Norm, str]] = []
        for norm in self._norms():
            place = inner.get(norm.node)
            if place is not None:
                self._add_norm(place[0], place[1], norm)
            else:
                self._name_norm(norm)
        for use in (use for uses in flow.uses.values() for use in uses):
            place = inner.get(use.node)
            if use.kind in ("shift", "scale", "joined", "lookup", "weight") and place is not None and place[1] == "attn.":
                names = {"joined": "sinks", "scale": "temperature"}
                self._add_inside(place[0], f"attn.{names.get(use.kind, 'positions')}", use)
            elif use.kind == "scale":
                self._name_scale(use)

    def _inner_places(self) -> dict[Node, tuple[Layer, str]]:
        """Nodes inside of attention and feed-forward layers, with the role of a norm there."""
        flow = self._flow
        found: dict[Node, tuple[Layer, str]] = {}

        def add(layer: Layer, role: str, starts: Iterable[Node | None]) -> None:
            for node in flow.passed(starts, lambda n: self._stops(n) or flow.is_plain(n)):
                found.setdefault(node, (layer, role))

        for layer in self._layers:
            for kind, call in (("attn", layer.attention), ("cross", layer.crossed)):
                if call is None:
                    continue
                for role, (node, operand) in call.operands.items():
                    add(layer, f"{kind}.{role.lower()}_norm", [node.next_functions[operand - 2][0]])
                if "O" in call.weights:
                    add(layer, f"{kind}.o_norm", [call.weights["O"].before])
                for latent, role in (("Q_latent", "Q"), ("KV_latent", "V"), ("reduction", "V")):
                    if latent in call.latent:
                        inside = flow.followed(call.latent[latent].node, self._stops)
                        for node in inside & flow.passed([call.weights[role].before], self._stops):
                            found.setdefault(node, (layer, f"{kind}.{latent.lower()}_norm"))
                below = [call.softmax.next_functions[0][0]]
                for node in flow.passed(below, lambda n: n is call.scores or flow.is_plain(n)):
                    if node not in flow.from_data or call.scores in flow.passed([node], lambda n: n in flow.products):
                        found.setdefault(node, (layer, f"{kind}."))
            for path in layer.paths:
                add(layer, "mlp.norm", [path.down.before])
        return found

    def _norms(self) -> list["Norm"]:
        flow, found = self._flow, []
        for node in flow.nodes:
            uses = {use.kind: use for use in flow.at(node)}
            gamma, beta, end = uses.get("gamma"), uses.get("beta"), node
            if gamma is None and beta is None:
                gamma = uses.get("scale")
                if gamma is None:
                    continue
                data = next((b for i, (b, _) in enumerate(node.next_functions) if i != gamma.place), None)
                inside = flow.passed([data], lambda n: n in flow.products or flow.is_sum(n) or bool(flow.at(n)))
                if not any(_NORMALISING.match(n.name()) or n.name().startswith("Pow") for n in inside):
                    continue
                after = flow.consumers.get(node, [])
                while len(after) == 1 and after[0][0].name().startswith(("View", "ToCopy", "UnsafeView")):
                    after = flow.consumers.get(after[0][0], [])
                shift = next((u for n, _ in after for u in flow.at(n) if u.kind == "shift"), None)
                if len(after) == 1 and shift is not None:
                    beta, end = shift, shift.node
                before = data
            else:
                before = node.next_functions[0][0]
            rows = [use.parameter for use in (gamma, beta) if use is not None]
            found.append(Norm(node, end, before, rows))
        return found

    def _add_norm(self, layer: Layer | None, name: str, norm: "Norm") -> None:
        pieces = tuple(self._whole(parameter) for parameter in norm.rows)
        if len({piece.size for piece in pieces}) == 1:
            self._add(layer, name, Role(pieces))

    def _name_norm(self, norm: "Norm") -> None:
        flow = self._flow

        def stop(node: Node) -> bool:
            return node in flow.products or flow.is_plain(node) or flow.is_sum(node)

        readers = flow.ahead(norm.end, stop)
        on_stream = any(flow.is_sum(node) for node in readers)
        behind = flow.behind([norm.before], stop)
        direct = [node for node in behind if not flow.is_sum(node)]
        if len(behind) == 1 and direct and direct[0] in self._ends:
            call = self._ends[direct[0]]
            self._add_norm(self._by_call[id(call)], "norm_cross_post" if self._is_second(call) else "norm1_post", norm)
            return
        if behind and len(direct) == len(behind) and all(node in self._downs for node in direct):
            self._add_norm(self._downs[direct[0]], "norm2_post", norm)
            return
        roles = [self._readers[node] for node in readers if node in self._readers]
        first = next((role for role in roles if role[1] == "norm1"), None)
        if not on_stream and roles:
            layer, role = first or roles[0]
            self._add_norm(layer, role, norm)
            return
        branch = self._branch(behind)
        sources = self._sources_of(norm.before)
        inside = [node for node in sources if node in self._ends or node in self._downs]
        if isinstance(branch, AttentionCall) and on_stream:
            layer = self._by_call[id(branch)]
            layer.post = True
            self._add_norm(layer, "norm_cross" if self._is_second(branch) else "norm1", norm)
        elif isinstance(branch, Layer) and branch.post and f"{branch.name}.norm2" not in self.roles:
            self._add_norm(branch, "norm2", norm)
        elif not inside:
            self._outside_norms.append((norm, "embed_norm" if on_stream or roles else "input.norm"))
        else:
            self._outside_norms.append((norm, "final_norm"))

    @property
    def _outside_norms(self) -> list[tuple["Norm", str]]:
        return self._last_norms

    def _is_second(self, call: AttentionCall) -> bool:
        return self._by_call[id(call)].crossed is call

    def _branch(self, behind: Iterable[Node]) -> AttentionCall | Layer | None:
        """What was added to the stream last: an attention call, or the feed-forward part of a layer."""
        flow = self._flow
        for node in behind:
            if not flow.is_sum(node):
                continue
            for before, _ in node.next_functions:
                found = flow.behind([before], lambda n: n in flow.products or flow.is_plain(n) or n is node or flow.is_sum(n) or bool(n.name() in LOOKUPS and flow.at(n)))
                ends = [n for n in found if n in self._ends]
                downs = [n for n in found if n in self._downs]
                if len(found) == 1 and ends:
                    return self._ends[ends[0]]
                if downs and len(downs) == len(found):
                    return self._downs[downs[0]]
                if len(found) == 1 and next(iter(found)) in self._mixing():
                    return self._mixing()[next(iter(found))]
        return None

    def _mixing(self) -> dict[Node, Layer]:
        """Sums inside of a feed-forward part: of experts."""
        flow, found = self._flow, dict[Node, Layer]()
        for node, layer in self._downs.items():
            for after in flow.ahead(node, lambda n: n in flow.products or flow.is_sum(n)):
                if flow.is_sum(after):
                    parts = self._sources_of(after)
                    if parts and all(n in self._downs or n in {r.node for r in layer.routers} for n in parts):
                        found[after] = layer
        return found

    def _add_inside(self, layer: Layer, name: str, use: Use) -> None:
        stored = self._flow.parameters[use.parameter].shape
        layout = STORED if len(stored) == 2 else Layout(tuple(range(len(stored) - 1)), (len(stored) - 1,)) if stored else Layout((), ())
        self._add_numbered(layer, name, Role((self._whole(use.parameter, layout),)))

    def _add_numbered(self, layer: Layer | None, name: str, role: Role) -> None:
        """Under the name, or with the next free number behind it."""
        front = f"{layer.name}." if layer is not None else ""
        number = 0
        while f"{front}{name}{f'.{number}' if number else ''}" in self.roles:
            number += 1
        self._add(layer, f"{name}.{number}" if number else name, role)

    def _name_scale(self, use: Use) -> None:
        """A factor on what a layer adds to the stream."""
        flow = self._flow
        parameter = flow.parameters[use.parameter]
        data = next((b for i, (b, _) in enumerate(use.node.next_functions) if i != use.place), None)
        found = flow.behind([data], lambda n: n in flow.products or flow.is_plain(n) or flow.is_sum(n))
        if len(found) == 1 and parameter.ndim <= 1:
            node = next(iter(found))
            if node in self._ends:
                call = self._ends[node]
                kind = "cross" if self._is_second(call) else "attn"
                self._add(self._by_call[id(call)], f"{kind}.scale", Role((self._whole(use.parameter),)))
            elif node in self._downs:
                self._add(self._downs[node], "mlp.scale", Role((self._whole(use.parameter),)))

    # ---- around the layers

    def _name_around(self) -> None:
        flow = self._flow
        inside = {*self._used, *self._ends, *self._downs, *self._readers}
        outer = [product for product in sorted(flow.products.values(), key=lambda p: p.order) if product.node not in inside]
        after: dict[Node, set[Node]] = {}
        reads: set[Node] = set()
        firsts = {n: layer for layer in self._layers for call in (layer.attention, layer.crossed) if call for n in self._inputs(call)}
        leading: dict[Node, Layer] = dict(firsts)
        for product in reversed(outer):  # those that lead into a stack
            if product.node in leading:
                for source in self._sources(product):
                    if source not in self._ends and source not in self._downs:
                        leading.setdefault(source, leading[product.node])
        del after, reads
        self._name_tables(leading)
        inputs = [p for p in outer if p.node in leading and not self._is_free(p, leading)]
        for product in inputs:
            front = self._front(product.parameter, leading[product.node])
            beside = [p for p in inputs if leading[p.node].front == leading[product.node].front]
            raw = product.before is not None and product.before not in flow.from_data or self._reads_input(product)
            name = "patch" if raw and len(beside) == 1 and product.is_convolution else f"input.{beside.index(product)}"
            self._add_product(None, f"{front}{name}", product)
        heads = [p for p in outer if p.node not in leading and self._follows_layers(p)]
        for number, product in enumerate(heads):
            self._name_head(product, number, heads)
        for norm, name in self._last_norms:
            self._name_outer_norm(norm, name, leading)

    def _inputs(self, call: AttentionCall) -> set[Node]:
        found = set(call.sources)
        for role in "KV":
            found |= self._sources(call.weights[role])
        return {n for n in found if n not in self._ends and n not in self._downs and n not in {p.node for p in call.latent.values()}}

    def _is_free(self, product: Product, leading: dict[Node, Layer]) -> bool:
        return False

    def _reads_input(self, product: Product) -> bool:
        sources = self._sources(product)
        return all(node.name().endswith("AccumulateGrad") for node in sources)

    def _follows_layers(self, product: Product) -> bool:
        stack, seen = [product.before], set[Node]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._ends or node in self._downs:
                return True
            stack += [before for before, _ in node.next_functions]
        return False

    def _front(self, parameter: str, layer: Layer | None) -> str:
        """The stack's name, if the parameter stands in the stack's module."""
        if layer is None or not layer.front:
            return ""
        stack = next(stack for stack in self._stacks if layer in stack)
        scope = self._scopes[id(stack)]
        return layer.front if parameter.startswith(f"{scope}.") else ""

    @property
    def _scopes(self) -> dict[int, str]:
        """The module around each stack that holds no other."""
        found = {}
        whole = list(self._whole_fronts.values())
        for key, path in self._whole_fronts.items():
            parts = path.split(".")
            scope = path
            for n in range(len(parts), 0, -1):
                front = ".".join(parts[:n])
                if sum(other == front or other.startswith(f"{front}.") for other in whole) > 1:
                    break
                scope = front
            found[key] = scope
        return found

    def _name_tables(self, leading: dict[Node, Layer]) -> None:
        flow = self._flow
        starts = {"tokens": "embed", "positions": "positions", "types": "token_types", "table": "positions"}
        for parameter, uses in flow.uses.items():
            for use in uses:
                if use.kind == "lookup" and use.node in leading:
                    kind = flow.lookup_kind(use.node)
                elif use.kind in ("shift", "joined") and self._at_start(use, leading):
                    kind = "positions" if use.kind == "shift" else "cls"
                else:
                    continue
                layer = leading.get(use.node) or self._start_layer(use, leading)
                stored = flow.parameters[parameter].shape
                if kind == "positions" and stored.numel() <= stored[-1]:
                    continue
                lead = tuple(range(len(stored) - 1))
                role = Role((self._whole(parameter, Layout(lead, (len(stored) - 1,))),))
                front = self._front(parameter, layer)
                self._add_numbered(None, f"{front}{starts.get(kind, kind)}", role)

    def _start_layer(self, use: Use, leading: dict[Node, Layer]) -> Layer | None:
        found = self._sources_of(use.node)
        return next((leading[node] for node in found if node in leading), None)

    def _at_start(self, use: Use, leading: dict[Node, Layer]) -> bool:
        """Whether a parameter is added or joined to what a stack of layers reads first."""
        found = self._sources_of(use.node)
        return bool(found) and all(node in leading for node in found)

    def _name_head(self, product: Product, number: int, heads: Sequence[Product]) -> None:
        flow = self._flow
        last = not any(p.node in flow.ahead(product.node, lambda n: n in flow.products) for p in heads)
        layer = self._last_layer(product)
        front = self._front(product.parameter, layer)
        tables = {piece.parameter: piece.shape[0] for name, role in self.roles.items() if name.rpartition(".")[2] == "embed" for piece in role.pieces}
        if product.parameter in tables:
            if product.bias is not None:
                self._add(None, f"{front}b_unembed", Role((self._whole(product.bias.parameter),)))
            return
        if last and flow.width(product) in tables.values():
            self._add_product(None, f"{front}unembed", product)
        else:
            self._add_product(None, f"{front}head.{number}", product)

    def _last_layer(self, product: Product) -> Layer | None:
        stack, seen, found = [product.before], set[Node](), list[AttentionCall | Layer]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._ends:
                found.append(self._ends[node])
                continue
            stack += [before for before, _ in node.next_functions]
        calls = [one for one in found if isinstance(one, AttentionCall)]
        return self._by_call[id(max(calls, key=lambda call: call.order))] if calls else None

    def _name_outer_norm(self, norm: "Norm", name: str, leading: dict[Node, Layer]) -> None:
        sources = self._sources_of(norm.before)
        layer = next((leading[node] for node in sources if node in leading), None)
        if name == "final_norm":
            calls = [self._ends[node] for node in sources if node in self._ends]
            layer = self._by_call[id(max(calls, key=lambda call: call.order))] if calls else None
            if layer is None:
                layer = next((self._downs[node] for node in sources if node in self._downs), None)
        front = self._front(norm.rows[0], layer)
        if name == "final_norm" and f"{front}final_norm" in self.roles:
            name = "head.norm"
        pieces = tuple(self._whole(parameter) for parameter in norm.rows)
        if len({piece.size for piece in pieces}) == 1:
            self._add_numbered(None, f"{front}{name}", Role(pieces))

    # ---- what has no role

    def _say_why(self) -> None:
        flow = self._flow
        for parameter in flow.parameters:
            if parameter in self._taken:
                continue
            uses = flow.uses.get(parameter, [])
            if not uses:
                why = "not reached from the output on this batch"
            elif not self._layers:
                why = "no attention was found"
            else:
                what = {"weight": "a product", "lookup": "a table"}.get(uses[0].kind, f"used as {uses[0].kind}")
                why = f"{what} whose place beside attention is not clear"
            self.notes.setdefault(parameter, why)


@dataclass(eq=False)
class Norm:
    """A norm in the graph: where it begins and ends, what it reads, and its parameters, gamma before beta."""

    node: Node
    end: Node
    before: Node | None
    rows: list[str]


def _runs(columns: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for column in columns:
        if found and found[-1][1] == column:
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _columns(piece: Piece, groups: Sequence[Sequence[int]] | None, heads: bool) -> Role | None:
    """The columns of a piece in groups, one after the other."""
    if not groups:
        return Role((piece,))
    ordered = [column for group in groups for column in group]
    runs = _runs(ordered)
    count = len(groups) if heads and len({len(group) for group in groups}) == 1 else None
    together = _runs(sorted(ordered))
    if len(runs) > max(len(groups), 1) and len(together) == 1:  # heads interleave: as one weight without heads
        runs, count = together, None
    if len(runs) > _MANY_PIECES:
        return None
    if runs == [(0, piece.shape[1])]:
        pieces: tuple[Piece, ...] = (piece,)
    else:
        pieces = tuple(piece.between(1, start, stop) for start, stop in runs)
    return Role(pieces, count, None if count is None else 1, len(pieces) > 1)


def _fronts(paths: Sequence[str]) -> list[str]:
    """What tells stacks apart by their paths, with a dot; nothing for one alone."""
    if len(paths) == 1:
        return [""]
    parts = [path.split(".") for path in paths]
    shared = len(os.path.commonprefix(parts))
    if any(len(part) == shared or part[shared].isdigit() for part in parts):
        return [f"{_own(path, paths)}." for path in paths]
    found = []
    for part in parts:
        n = shared + 1
        while sum(other[:n] == part[:n] for other in parts) > 1 and n < len(part):
            n += 1
        found.append(f"{'.'.join(part[shared:n])}.")
    return found if len(set(found)) == len(found) else [f"{path or i}." for i, path in enumerate(paths)]


def _own(path: str, paths: Sequence[str]) -> str:
    parent, parents = path.rpartition(".")[0], [other.rpartition(".")[0] for other in paths]
    return parent if parent and parents.count(parent) == 1 else path
