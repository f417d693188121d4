"""Roles by structure: which weight is the query of which layer, read off one forward pass.

No names and no classes decide. Attention is a product of two activations, a softmax and a second product; its weights
are those behind the operands. What reads and feeds the same stream is a feed-forward layer; a norm is named after its
place. Which columns of a fused weight make which head is found by vector-Jacobian products.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.autograd.graph import GradientEdge

from curvoscope.blocks import ROW, Block, Layout, Piece
from curvoscope.families.attention_calls import AttentionCall, attention_calls
from curvoscope.families.norm_places import NormPlaces, NormUse
from curvoscope.families.stacks import FeedForwardPath, StackLayer, Stacks, is_activation
from curvoscope.families.tracing import DataFlow, Node, Use, WeightProduct

_MANY_PIECES = 256
_TABLES = {"tokens": "embed", "positions": "positions", "types": "token_types", "table": "positions"}


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
    """The roles of all parameters of a traced model.

    `roles`: by the names of their blocks, `homes`: the layers that these stand in, `fronts`: the names of stacks before
    those outside of layers, `notes`: why a parameter has no role.
    """

    def __init__(self, flow: DataFlow) -> None:
        self._flow = flow
        self.roles: dict[str, Role] = {}
        self.homes: dict[str, str] = {}
        self.fronts: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._taken: dict[str, list[Piece]] = {}
        self._stacks = Stacks(flow, attention_calls(flow))
        if self._stacks.layers:
            for layer in self._stacks.layers:
                self._name_attention(layer)
                self._name_feedforward(layer)
            self._unknown = self._unknown_branches()
            self._name_inside()
            self._name_around()
        self._say_why()

    @property
    def layer_parameters(self) -> dict[str, set[str]]:
        """The parameters of each layer, by its name."""
        found: dict[str, set[str]] = {}
        for name, home in self.homes.items():
            found.setdefault(home, set()).update(piece.parameter for piece in self.roles[name].pieces)
        return found

    # ---- blocks

    def _add(self, layer: StackLayer | None, name: str, role: Role, front: str = "") -> bool:
        """Take the pieces for a block, unless they are in one already."""
        full = f"{layer.name}.{name}" if layer is not None else f"{front}{name}"
        taken = (piece.overlaps(other) for piece in role.pieces for other in self._taken.get(piece.parameter, ()))
        if full in self.roles or any(taken):
            return False
        self.roles[full] = role
        if layer is not None:
            self.homes[full] = layer.name
        else:
            self.fronts[full] = front
        for piece in role.pieces:
            self._taken.setdefault(piece.parameter, []).append(piece)
        return True

    def _add_next(self, layer: StackLayer | None, name: str, role: Role, front: str = "") -> None:
        """Under the name, or with the next free number behind it."""
        before = f"{layer.name}." if layer is not None else front
        number = next(
            i for i in range(len(self.roles) + 1) if f"{before}{name}{f'.{i}' if i else ''}" not in self.roles
        )
        self._add(layer, f"{name}.{number}" if number else name, role, front)

    def _row(self, parameter: str) -> Piece:
        """All entries of a parameter, as one row."""
        shape = self._flow.parameters[parameter].shape
        return Piece.whole(parameter, shape, Layout((), tuple(range(len(shape)))))

    def _table(self, parameter: str) -> Piece:
        """All entries of a parameter, with its last axis as columns."""
        shape = self._flow.parameters[parameter].shape
        last = len(shape) - 1
        return Piece.whole(
            parameter, shape, Layout(tuple(range(last)), (last,)) if last > 0 else self._row(parameter).layout
        )

    def _add_product(
        self,
        layer: StackLayer | None,
        name: str,
        product: WeightProduct,
        columns: Sequence[Sequence[int]] | None = None,
        heads: bool = False,
        front: str = "",
    ) -> None:
        """A weight and its bias; of some columns alone, in groups that are heads."""
        piece = self._flow.operand(product.weight)
        if piece is None:
            self.notes.setdefault(
                product.parameter, f"acts as {name}, but its entries are not in the order of a matrix"
            )
            return
        group, dot, leaf = name.rpartition(".")
        bias = None if product.bias is None else self._bias(product.bias.parameter, piece)
        for one, key in ((piece, name), (bias, f"{group}{dot}b_{leaf}")):
            if one is None:
                continue
            role = _columns(one, columns, heads)
            if role is None:
                self.notes.setdefault(product.parameter, f"holds {name} in more than {_MANY_PIECES} places")
            else:
                self._add(layer, key, role, front)

    def _bias(self, name: str, piece: Piece) -> Piece | None:
        """The part of a bias that goes with a part of a weight."""
        stored = tuple(self._flow.parameters[name].shape)
        if self._flow.parameters[name].numel() == piece.shape[1]:
            return self._row(name)
        axes = [axis for axis in piece.layout.columns if piece.index[axis].stop - piece.index[axis].start > 1]
        if len(axes) != 1:
            return None
        if len(stored) == 1 and stored[0] == piece.stored[axes[0]]:  # a fused bias
            return Piece(name, stored, (piece.index[axes[0]],), ROW)
        if len(piece.stored) == 3 and stored == (piece.stored[0], piece.stored[axes[0]]):  # of experts, a row for each
            return Piece(name, stored, (piece.index[0], piece.index[axes[0]]), Layout((), (0, 1)))
        return None

    # ---- attention

    def _name_attention(self, layer: StackLayer) -> None:
        for kind, call in (("attn", layer.attention), ("cross", layer.crossed)):
            if call is None:
                continue
            uses: dict[str, list[str]] = {}  # by the part of a parameter, which may be multiplied several times
            for role in "QKV":
                product = call.weights[role]
                uses.setdefault(f"{product.parameter}{self._flow.operand(product.weight)}", []).append(role)
            for roles in uses.values():
                self._name_projections(layer, kind, call, call.weights[roles[0]], roles)
            self._name_shifts(layer, kind, call)
            if "O" in call.weights:
                self._name_output(layer, kind, call)
            for name, product in (*call.latent.items(), *call.positions.items()):
                self._add_product(layer, f"{kind}.{name}", product)
            self._name_inner_products(layer, kind, call)

    def _name_projections(
        self, layer: StackLayer, kind: str, call: AttentionCall, product: WeightProduct, roles: Sequence[str]
    ) -> None:
        width = self._flow.width(product)
        found = {role: self._flow.heads(call.operands[role], call.weights[role]) for role in roles}
        if len(roles) == 1 and sum(map(len, found[roles[0]] or ())) in (0, width):
            self._add_product(layer, f"{kind}.{roles[0]}", product, found[roles[0]], heads=True)
            return
        columns = [column for heads in found.values() for head in heads or () for column in head]
        if any(not heads for heads in found.values()) or len(set(columns)) != len(columns):
            self.notes.setdefault(product.parameter, f"holds {', '.join(roles)} in columns that cannot be told apart")
            return
        for role in roles:
            self._add_product(layer, f"{kind}.{role}", product, found[role], heads=True)
        rest = sorted(set(range(width)) - set(columns))
        if rest:
            gates = "O" in call.weights and self._flow.reaches(call.weights["O"], product, rest)
            self._add_product(layer, f"{kind}.{'gate' if gates else 'rest'}", product, [rest])

    def _name_shifts(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        """Biases that are added after heads are cut, of contents and of positions."""
        flow = self._flow
        places = [(role, role, call.operand(role)) for role in "QKV"]
        others = [n for n in flow.behind([flow.softmaxes[call.softmax][0].node], flow.stops) if flow.is_plain(n)]
        places += [
            ("Q_positions", "Q", before) for n in others if n is not call.scores for before, _ in n.next_functions
        ]
        for name, role, start in places:
            weight = self.roles.get(f"{layer.name}.{kind}.{role}")
            for node in flow.passed([start], flow.stops):
                for use in (use for use in flow.at(node) if use.kind == "shift"):
                    piece = self._row(use.parameter)
                    if weight is not None and piece.size == sum(one.shape[1] for one in weight.pieces):
                        heads = None if weight.heads is None else (weight.heads, 1)
                        self._add(layer, f"{kind}.b_{name}", Role((piece,), *(heads or ())))

    def _name_output(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        product, queries = call.weights["O"], self.roles.get(f"{layer.name}.{kind}.Q")
        piece = self._flow.operand(product.weight)
        if piece is None:
            self.notes.setdefault(
                product.parameter, f"acts as {kind}.O, but its entries are not in the order of a matrix"
            )
            return
        heads = None if queries is None else queries.heads
        known = heads is not None and self._rows_are_heads(call, product, piece, heads)
        self._add(layer, f"{kind}.O", Role((piece,), heads if known else None, 0 if known else None))
        bias = None if product.bias is None else self._bias(product.bias.parameter, piece)
        if bias is not None:
            self._add(layer, f"{kind}.b_O", Role((bias,)))

    def _rows_are_heads(self, call: AttentionCall, product: WeightProduct, piece: Piece, heads: int) -> bool:
        """Whether equal parts of the rows of W_O read one head each, in the order of the heads."""
        shape, edge = self._flow.input_of(product)
        if shape[-1] != piece.shape[0] or piece.shape[0] % heads:
            return False
        seen = []
        for head in range(heads):
            cotangent = self._flow.parameters[product.parameter].new_zeros(shape)
            cotangent.unflatten(-1, (heads, -1))[..., head, :] = 1
            gradient = self._flow.gradient(edge, GradientEdge(call.mixed, 0), cotangent)
            if gradient is None or not bool(gradient.any()):
                return False
            seen.append((gradient.flatten(1) != 0).any(1).nonzero().flatten().tolist())
        apart = sum(map(len, seen)) == len(set().union(*seen))
        return apart and [min(one) for one in seen] == sorted(min(one) for one in seen)

    def _name_inner_products(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        """What else stands between the stream and the output weight."""
        flow, start = self._flow, call.weights.get("O")
        if start is None:
            return
        inside = flow.passed(
            [start.before], lambda n: n in call.sources or n in self._stacks.ends or n in self._stacks.downs
        )
        others = [flow.products[n] for n in inside if n in flow.products and n not in self._stacks.used]
        for product in sorted(others, key=lambda one: one.order):
            if product.node in flow.from_data and not call.cross:
                piece = flow.operand(product.weight)
                if piece is not None:
                    self._add_next(layer, f"{kind}.inner", Role((piece,)))
                    bias = None if product.bias is None else self._bias(product.bias.parameter, piece)
                    if bias is not None:
                        self._add_next(layer, f"{kind}.b_inner", Role((bias,)))
                self._stacks.used.add(product.node)

    # ---- feed-forward layers

    def _name_feedforward(self, layer: StackLayer) -> None:
        routed = [path for path in layer.paths if path.routed]
        separate = list(dict.fromkeys(path.down.parameter for path in routed))
        for path in routed:
            piece = self._flow.operand(path.down.weight)
            stacked = piece is not None and len(piece.stored) == 3
            number = piece.index[0].start if piece is not None and stacked else separate.index(path.down.parameter)
            self._name_path(layer, f"mlp.experts.{number}.", path)
        self._name_other_experts(layer)
        for path in layer.paths:
            if not path.routed:
                self._name_path(layer, "mlp.shared." if routed else "mlp.", path)
        for product in layer.routers:
            shared = self._flow.width(product) == 1 and len(layer.routers) > 1
            self._add_product(layer, "mlp.shared.router" if shared else "mlp.router", product)

    def _name_other_experts(self, layer: StackLayer) -> None:
        """Experts that no token of the batch has reached, in tensors that hold all of them."""
        front = f"{layer.name}.mlp.experts."
        for name, role in [(name, role) for name, role in self.roles.items() if name.startswith(front)]:
            number, _, leaf = name.removeprefix(front).partition(".")
            first = role.pieces[0]
            if first.index[0] != slice(int(number), int(number) + 1):
                continue
            for other in range(first.stored[0]):
                place = slice(other, other + 1)
                pieces = tuple(replace(piece, index=(place, *piece.index[1:])) for piece in role.pieces)
                self._add(layer, f"mlp.experts.{other}.{leaf}", replace(role, pieces=pieces))

    def _name_path(self, layer: StackLayer, front: str, path: FeedForwardPath) -> None:
        up = path.ups[0]
        if len(path.ups) > 1:
            for one in path.ups:
                self.notes.setdefault(
                    one.parameter, "is one of several weights of a feed-forward layer, in no clear order"
                )
        elif path.gate is None and self._is_fused(up, path.down):
            columns = self._gate_columns(path)
            if columns is None:
                self._add_product(layer, f"{front}gate_up", up)
            else:
                self._add_product(layer, f"{front}gate", up, [columns[0]])
                self._add_product(layer, f"{front}up", up, [columns[1]])
        else:
            self._add_product(layer, f"{front}up", up)
        for name, product in (("gate", path.gate), ("inner", path.inner)):
            if product is not None:
                self._add_product(layer, f"{front}{name}", product)
        self._add_product(layer, f"{front}down", path.down)

    def _is_fused(self, up: WeightProduct, down: WeightProduct) -> bool:
        """Whether a product has twice the outputs that the next one reads."""
        piece = self._flow.operand(down.weight)
        return piece is not None and not down.is_convolution and self._flow.width(up) == 2 * piece.shape[0]

    def _gate_columns(self, path: FeedForwardPath) -> tuple[list[int], list[int]] | None:
        """Columns of a fused weight that pass the activation, and those that do not; None if they interleave."""
        flow, up = self._flow, path.ups[0]
        between = flow.passed([path.down.before], flow.stops)
        products = [n for n in between if n.name() == "MulBackward0" and all(before for before, _ in n.next_functions)]
        for node in sorted(products, key=lambda one: -one._sequence_nr()):
            sides = []
            for edge, saved in zip(node.next_functions, (node._saved_other, node._saved_self), strict=True):
                inside = flow.passed([edge[0]], flow.stops)
                gradient = flow.gradient(GradientEdge(*edge), GradientEdge(up.node, 0), saved.new_ones(saved.shape))
                if gradient is not None:
                    reached = (gradient.flatten(0, -2) != 0).any(0).nonzero().flatten().tolist()
                    sides.append((any(map(is_activation, inside)), reached))
            if len(sides) == 2 and sides[0][0] != sides[1][0]:
                gate, linear = (columns for _, columns in sorted(sides, reverse=True))
                whole = sorted(gate + linear) == list(range(flow.width(up)))
                return (gate, linear) if whole and len(_runs(gate)) == len(_runs(linear)) == 1 else None
        return None

    # ---- norms, factors and positions inside of layers

    def _name_inside(self) -> None:
        self._places = NormPlaces(self._flow, self._stacks)
        for norm, layer, name in self._places.inside:
            self._add_norm(layer, name, norm)
        for layer, name, use in self._places.factors:
            self._add(layer, name, Role((self._row(use.parameter),)))
        for layer, name, use in self._places.on_scores:
            product = self._flow.products.get(use.node)
            if product is not None and use.kind == "weight":
                self._add_positions(layer, name, product)
            elif use.kind != "bias":
                self._add_next(layer, name, Role((self._table(use.parameter),)))

    def _add_positions(self, layer: StackLayer, name: str, product: WeightProduct) -> None:
        piece = self._flow.operand(product.weight)
        for one in (
            piece,
            None if product.bias is None or piece is None else self._bias(product.bias.parameter, piece),
        ):
            if one is not None:
                self._add_next(layer, name, Role((one,)))

    def _add_norm(self, layer: StackLayer | None, name: str, norm: NormUse, front: str = "") -> None:
        pieces = tuple(self._row(parameter) for parameter in norm.rows)
        if len({piece.size for piece in pieces}) == 1:
            if layer is None:
                self._add_next(None, name, Role(pieces), front)
            else:
                self._add(layer, name, Role(pieces))

    def _unknown_branches(self) -> set[Node]:
        """Products that add to a stream, neither as attention nor as a feed-forward layer, and what leads to them."""
        flow, used = self._flow, self._stacks.used
        others = sorted((p for p in flow.products.values() if p.node not in used), key=lambda p: -p.order)
        found: set[Node] = set()
        for product in others:
            after = flow.ahead(product.node, lambda node: node in flow.products)
            joins = not product.is_convolution and self._stacks.joins(product, self._all_sources(product))
            if joins or (after and found.issuperset(after)):
                found.add(product.node)
        return found

    def _all_sources(self, product: WeightProduct) -> set[Node]:
        """What a product is made of, through all products before it."""
        found, stack = set[Node](), [product.node]
        while stack:
            node = stack.pop()
            before = self._flow.products[node].before if node in self._flow.products else None
            if before is not None:
                stack += self._flow.sources(before) - found
                found |= self._flow.sources(before)
        return found

    def _is_elsewhere(self, norm: NormUse) -> bool:
        """Whether a norm is read by an unknown branch alone."""
        after = self._flow.ahead(norm.end, lambda node: node in self._flow.products)
        return bool(after) and self._unknown.issuperset(after)

    # ---- around the layers

    def _name_around(self) -> None:
        flow, stacks = self._flow, self._stacks
        leading = self._leading()
        self._name_tables(leading)
        outer = [p for p in flow.products.values() if p.node not in stacks.used and p.node not in self._unknown]
        outer.sort(key=lambda product: product.order)
        inputs = [p for p in outer if p.node in leading]
        names: dict[str, str] = {}
        for product in inputs:
            layer = leading[product.node]
            beside = [p for p in inputs if leading[p.node].front == layer.front]
            reads_data = not any(node in flow.products for node in flow.sources(product.before))
            is_patch = product.is_convolution and reads_data and len([p for p in beside if p.is_convolution]) == 1
            name = "patch" if is_patch else f"input.{beside.index(product)}"
            front = self._front(product.parameter, layer)
            self._add_product(None, name, product, front=front)
            names[product.parameter] = f"{front}{name}"
        heads = [p for p in outer if p.node not in leading and self._last_call(p.before) is not None]
        for number, product in enumerate(heads):
            self._name_head(product, number, heads)
        for norm, name in self._places.outside:
            self._name_outer_norm(norm, name, leading, {p.node for p in heads})
        for parameter, gain in flow.gains.items():
            if parameter in names:
                self._add(None, f"{names[parameter]}.gain", Role((self._row(gain),)))

    def _leading(self) -> dict[Node, StackLayer]:
        """Products, tables and inputs before a stack, with its first layer that reads them."""
        flow, stacks = self._flow, self._stacks
        found: dict[Node, StackLayer] = {}
        for call, layer in stacks.layer_of.items():
            for role in "QKV":
                own = {p.node for p in (*call.latent.values(), *call.weights.values())}
                before = flow.sources(call.weights[role].before) if role != "Q" else call.sources
                for node in before - own:
                    if node not in stacks.ends and node not in stacks.downs and (role == "Q" or not call.cross):
                        found.setdefault(node, layer)
        for product in sorted(flow.products.values(), key=lambda one: -one.order):
            if product.node in found and product.node not in stacks.used:
                for source in flow.sources(product.before):
                    if source not in stacks.ends and source not in stacks.downs and source not in stacks.used:
                        found.setdefault(source, found[product.node])
        return found

    def _front(self, parameter: str, layer: StackLayer | None) -> str:
        """The name of a stack, if the parameter stands in a module that holds no other stack."""
        if layer is None or not layer.front:
            return ""
        return layer.front if parameter.startswith(f"{self._stacks.scope(layer)}.") else ""

    def _name_tables(self, leading: dict[Node, StackLayer]) -> None:
        flow = self._flow
        for parameter, uses in flow.uses.items():
            for use in uses:
                layer: StackLayer | None = leading.get(use.node)
                if use.kind == "lookup" and layer is not None:
                    name = _TABLES[flow.lookup_kind(use.node)]
                elif use.kind in ("shift", "joined") and flow.products.get(use.node) is None:
                    sources = flow.sources(use.node)
                    layer = next((leading[node] for node in sources if node in leading), None)
                    if layer is None or not all(node in leading for node in sources):
                        continue
                    name = "positions" if use.kind == "shift" else "cls"
                elif use.kind == "other" and self._is_constant_input(use):
                    layer, name = None, "positions"
                else:
                    continue
                piece = self._table(parameter)
                if name != "positions" or piece.shape[0] > 1:
                    self._add_next(None, name, Role((piece,)), self._front(parameter, layer))
        for call, layer in self._stacks.layer_of.items():
            read = {"queries": call.weights["Q"], "memory": call.weights["K"]}
            for name, product in (*read.items(), *(("positions", product) for product in call.positions.values())):
                owner = flow.owner(product.before)
                if owner is not None:
                    self._add_next(None, name, Role((self._table(owner),)), self._front(owner, layer))

    def _is_constant_input(self, use: Use) -> bool:
        """Whether a table of positions is normalised before it makes scores."""
        read = [n for n in self._flow.ahead(use.node, self._flow.stops) if n in self._flow.products]
        made = {p.node for call in self._stacks.layer_of for p in (*call.positions.values(), *call.weights.values())}
        return use.place == 0 and bool(read) and all(node in made for node in read)

    def _name_head(self, product: WeightProduct, number: int, heads: Sequence[WeightProduct]) -> None:
        flow = self._flow
        call = self._last_call(product.before)
        front = self._front(product.parameter, None if call is None else self._stacks.layer_of[call])
        tables = {
            piece.parameter: piece.shape[0]
            for name, role in self.roles.items()
            if name.removeprefix(self.fronts.get(name, "")) == "embed"
            for piece in role.pieces
        }
        last = not any(other.node in flow.ahead(product.node, flow.stops) for other in heads)
        if product.parameter in tables:
            if product.bias is not None:
                self._add(None, "b_unembed", Role((self._row(product.bias.parameter),)), front)
        elif last and flow.width(product) in tables.values():
            self._add_product(None, "unembed", product, front=front)
        else:
            self._add_product(None, f"head.{number}", product, front=front)

    def _last_call(self, node: Node | None) -> AttentionCall | None:
        """The last attention before a node."""
        found = self._flow.behind([node], lambda one: one in self._stacks.ends)
        calls = [self._stacks.ends[one] for one in found if one in self._stacks.ends]
        return max(calls, key=lambda call: call.order) if calls else None

    def _name_outer_norm(self, norm: NormUse, name: str, leading: dict[Node, StackLayer], heads: set[Node]) -> None:
        if self._is_elsewhere(norm):
            return
        sources = self._flow.sources(norm.before)
        call = self._last_call(norm.before)
        layer = next((leading[node] for node in sources if node in leading), None)
        at_head = bool(sources & heads)
        if name == "final_norm" or at_head:
            layer = None if call is None else self._stacks.layer_of[call]
        front = self._front(norm.rows[0], layer)
        if (
            name == "final_norm" and call is not None and not self._has_width(norm, call)
        ):  # of what is made of the stream
            after = self._flow.ahead(norm.end, lambda node: node in self._flow.products)
            name = "input.norm" if any(node in leading for node in after) else "head.norm"
        if at_head or (name == "final_norm" and f"{front}final_norm" in self.roles):
            name = "head.norm"
        self._add_norm(None, name, norm, front)

    def _has_width(self, norm: NormUse, call: AttentionCall) -> bool:
        """Whether a norm has as many entries as the stream that a call adds to."""
        output = call.weights.get("O")
        return output is None or self._flow.parameters[norm.rows[0]].numel() == self._flow.width(output)

    # ---- what has no role

    def _say_why(self) -> None:
        for parameter in self._flow.parameters:
            if parameter in self._taken or parameter in self.notes:
                continue
            uses = self._flow.uses.get(parameter, [])
            if not uses:
                why = "this batch does not reach it"
            elif not self._stacks.layers:
                why = "no attention was found, nor a recurrent layer of a known kind"
            elif any(use.node in self._unknown for use in uses):
                why = "adds to the stream, but neither as attention nor as a feed-forward layer"
            else:
                why = f"acts as a {uses[0].kind}, but not in a place that has a name"
            self.notes[parameter] = why


def _runs(columns: Iterable[int]) -> list[tuple[int, int]]:
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
    runs, together = _runs(ordered), _runs(sorted(ordered))
    count = len(groups) if heads and len({len(group) for group in groups}) == 1 else None
    if len(runs) > len(groups) and len(together) == 1:  # heads interleave: one weight, whose heads are not told
        runs, count = together, None
    if len(runs) > _MANY_PIECES:
        return None
    whole = runs == [(0, piece.shape[1])]
    pieces = (piece,) if whole else tuple(piece.between(1, start, stop) for start, stop in runs)
    return Role(pieces, count, None if count is None else 1, len(pieces) > 1)
