"""Roles by structure: which weight is the query of which layer, read off one forward pass.

No names and no classes decide. Attention is a product of two activations, a softmax and a second product; its weights
are those behind the operands. What reads and feeds the same stream is a feed-forward layer; a norm is named after its
place. Which columns of a fused weight make which head is found by vector-Jacobian products.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch.autograd.graph import GradientEdge

from curvoscope.blocks import Piece
from curvoscope.families.attention_calls import AttentionCall, attention_calls
from curvoscope.families.data_flow import DataFlow, Node, WeightProduct
from curvoscope.families.norm_places import NormPlaces
from curvoscope.families.operands import heads_of, operand, output_width, reaches
from curvoscope.families.roles import Role, RoleTable, runs_of
from curvoscope.families.stacks import FeedForwardPath, StackLayer, Stacks, is_activation
from curvoscope.families.surroundings import Surroundings


class Recognition(RoleTable):
    """The roles of all parameters of a traced model."""

    def __init__(self, flow: DataFlow) -> None:
        super().__init__(flow)
        self._stacks = Stacks(flow, attention_calls(flow))
        if self._stacks.layers:
            for layer in self._stacks.layers:
                self._name_attention(layer)
                self._name_feedforward(layer)
            self._unknown = self._unknown_branches()
            self._name_inside()
            Surroundings(self, self._stacks, self._places.outside, self._unknown).name()
        self._say_why()

    # ---- attention

    def _name_attention(self, layer: StackLayer) -> None:
        for kind, call in (("attn", layer.attention), ("cross", layer.crossed)):
            if call is None:
                continue
            uses: dict[str, list[str]] = {}  # by the part of a parameter, which may be multiplied several times
            for role in "QKV":
                product = call.weights[role]
                uses.setdefault(f"{product.parameter}{operand(self.flow, product.weight)}", []).append(role)
            for roles in uses.values():
                self._name_projections(layer, kind, call, call.weights[roles[0]], roles)
            self._name_shifts(layer, kind, call)
            if "O" in call.weights:
                self._name_output(layer, kind, call)
            for name, product in (*call.latent.items(), *call.positions.items()):
                self.add_product(layer, f"{kind}.{name}", product)
            self._name_inner_products(layer, kind, call)

    def _name_projections(
        self, layer: StackLayer, kind: str, call: AttentionCall, product: WeightProduct, roles: Sequence[str]
    ) -> None:
        width = output_width(self.flow, product)
        found = {role: heads_of(self.flow, call.operands[role], call.weights[role]) for role in roles}
        if len(roles) == 1 and sum(map(len, found[roles[0]] or ())) in (0, width):
            self.add_product(layer, f"{kind}.{roles[0]}", product, found[roles[0]], heads=True)
            return
        columns = [column for heads in found.values() for head in heads or () for column in head]
        if any(not heads for heads in found.values()) or len(set(columns)) != len(columns):
            self.notes.setdefault(product.parameter, f"holds {', '.join(roles)} in columns that cannot be told apart")
            return
        for role in roles:
            self.add_product(layer, f"{kind}.{role}", product, found[role], heads=True)
        rest = sorted(set(range(width)) - set(columns))
        if rest:
            gates = "O" in call.weights and reaches(self.flow, call.weights["O"], product, rest)
            self.add_product(layer, f"{kind}.{'gate' if gates else 'rest'}", product, [rest])

    def _name_shifts(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        """Biases that are added after heads are cut, of contents and of positions."""
        flow = self.flow
        places = [(role, role, call.operand(role)) for role in "QKV"]
        others = [n for n in flow.behind([flow.softmaxes[call.softmax][0].node], flow.stops) if flow.is_plain(n)]
        places += [
            ("Q_positions", "Q", before) for n in others if n is not call.scores for before, _ in n.next_functions
        ]
        for name, role, start in places:
            weight = self.roles.get(f"{layer.name}.{kind}.{role}")
            for node in flow.passed([start], flow.stops):
                for use in (use for use in flow.at(node) if use.kind == "shift"):
                    piece = self.row(use.parameter)
                    if weight is not None and piece.size == sum(one.shape[1] for one in weight.pieces):
                        heads = None if weight.heads is None else (weight.heads, 1)
                        self.add(layer, f"{kind}.b_{name}", Role((piece,), *(heads or ())))

    def _name_output(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        product, queries = call.weights["O"], self.roles.get(f"{layer.name}.{kind}.Q")
        piece = operand(self.flow, product.weight)
        if piece is None:
            self.notes.setdefault(
                product.parameter, f"acts as {kind}.O, but its entries are not in the order of a matrix"
            )
            return
        heads = None if queries is None else queries.heads
        known = heads is not None and self._rows_are_heads(call, product, piece, heads)
        self.add(layer, f"{kind}.O", Role((piece,), heads if known else None, 0 if known else None))
        bias = None if product.bias is None else self.bias(product.bias.parameter, piece)
        if bias is not None:
            self.add(layer, f"{kind}.b_O", Role((bias,)))

    def _rows_are_heads(self, call: AttentionCall, product: WeightProduct, piece: Piece, heads: int) -> bool:
        """Whether equal parts of the rows of W_O read one head each, in the order of the heads."""
        shape, edge = self.flow.input_of(product)
        if shape[-1] != piece.shape[0] or piece.shape[0] % heads:
            return False
        seen = []
        for head in range(heads):
            cotangent = self.flow.parameters[product.parameter].new_zeros(shape)
            cotangent.unflatten(-1, (heads, -1))[..., head, :] = 1
            gradient = self.flow.gradient(edge, GradientEdge(call.mixed, 0), cotangent)
            if gradient is None or not bool(gradient.any()):
                return False
            seen.append((gradient.flatten(1) != 0).any(1).nonzero().flatten().tolist())
        apart = sum(map(len, seen)) == len(set().union(*seen))
        return apart and [min(one) for one in seen] == sorted(min(one) for one in seen)

    def _name_inner_products(self, layer: StackLayer, kind: str, call: AttentionCall) -> None:
        """What else stands between the stream and the output weight."""
        flow, start = self.flow, call.weights.get("O")
        if start is None:
            return
        inside = flow.passed(
            [start.before], lambda n: n in call.sources or n in self._stacks.ends or n in self._stacks.downs
        )
        others = [flow.products[n] for n in inside if n in flow.products and n not in self._stacks.used]
        for product in sorted(others, key=lambda one: one.order):
            if product.node in flow.from_data and not call.cross:
                piece = operand(flow, product.weight)
                if piece is not None:
                    self.add_next(layer, f"{kind}.inner", Role((piece,)))
                    bias = None if product.bias is None else self.bias(product.bias.parameter, piece)
                    if bias is not None:
                        self.add_next(layer, f"{kind}.b_inner", Role((bias,)))
                self._stacks.used.add(product.node)

    # ---- feed-forward layers

    def _name_feedforward(self, layer: StackLayer) -> None:
        routed = [path for path in layer.paths if path.routed]
        separate = list(dict.fromkeys(path.down.parameter for path in routed))
        for path in routed:
            piece = operand(self.flow, path.down.weight)
            stacked = piece is not None and len(piece.stored) == 3
            number = piece.index[0].start if piece is not None and stacked else separate.index(path.down.parameter)
            self._name_path(layer, f"mlp.experts.{number}.", path)
        self._name_other_experts(layer)
        for path in layer.paths:
            if not path.routed:
                self._name_path(layer, "mlp.shared." if routed else "mlp.", path)
        for product in layer.routers:
            shared = output_width(self.flow, product) == 1 and len(layer.routers) > 1
            self.add_product(layer, "mlp.shared.router" if shared else "mlp.router", product)

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
                self.add(layer, f"mlp.experts.{other}.{leaf}", replace(role, pieces=pieces))

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
                self.add_product(layer, f"{front}gate_up", up)
            else:
                self.add_product(layer, f"{front}gate", up, [columns[0]])
                self.add_product(layer, f"{front}up", up, [columns[1]])
        else:
            self.add_product(layer, f"{front}up", up)
        for name, product in (("gate", path.gate), ("inner", path.inner)):
            if product is not None:
                self.add_product(layer, f"{front}{name}", product)
        self.add_product(layer, f"{front}down", path.down)

    def _is_fused(self, up: WeightProduct, down: WeightProduct) -> bool:
        """Whether a product has twice the outputs that the next one reads."""
        piece = operand(self.flow, down.weight)
        return piece is not None and not down.is_convolution and output_width(self.flow, up) == 2 * piece.shape[0]

    def _gate_columns(self, path: FeedForwardPath) -> tuple[list[int], list[int]] | None:
        """Columns of a fused weight that pass the activation, and those that do not; None if they interleave."""
        flow, up = self.flow, path.ups[0]
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
                whole = sorted(gate + linear) == list(range(output_width(flow, up)))
                return (gate, linear) if whole and len(runs_of(gate)) == len(runs_of(linear)) == 1 else None
        return None

    # ---- norms, factors and positions inside of layers

    def _name_inside(self) -> None:
        self._places = NormPlaces(self.flow, self._stacks)
        for norm, layer, name in self._places.inside:
            self.add_norm(layer, name, norm)
        for layer, name, use in self._places.factors:
            self.add(layer, name, Role((self.row(use.parameter),)))
        for layer, name, use in self._places.on_scores:
            product = self.flow.products.get(use.node)
            if product is not None and use.kind == "weight":
                self._add_positions(layer, name, product)
            elif use.kind != "bias":
                self.add_next(layer, name, Role((self.table(use.parameter),)))

    def _add_positions(self, layer: StackLayer, name: str, product: WeightProduct) -> None:
        piece = operand(self.flow, product.weight)
        for one in (
            piece,
            None if product.bias is None or piece is None else self.bias(product.bias.parameter, piece),
        ):
            if one is not None:
                self.add_next(layer, name, Role((one,)))

    def _unknown_branches(self) -> set[Node]:
        """Products that add to a stream, neither as attention nor as a feed-forward layer, and what leads to them."""
        flow, used = self.flow, self._stacks.used
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
            before = self.flow.products[node].before if node in self.flow.products else None
            if before is not None:
                stack += self.flow.sources(before) - found
                found |= self.flow.sources(before)
        return found

    # ---- what has no role

    def _say_why(self) -> None:
        for parameter in self.flow.parameters:
            if parameter in self.taken or parameter in self.notes:
                continue
            uses = self.flow.uses.get(parameter, [])
            if not uses:
                why = "this batch does not reach it"
            elif not self._stacks.layers:
                why = "no attention was found, nor a recurrent layer of a known kind"
            elif any(use.node in self._unknown for use in uses):
                why = "adds to the stream, but neither as attention nor as a feed-forward layer"
            else:
                why = f"acts as a {uses[0].kind}, but not in a place that has a name"
            self.notes[parameter] = why
