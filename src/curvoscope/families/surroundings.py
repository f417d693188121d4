"""Roles of what stands around the layers of a model: tables of tokens and positions, inputs, heads and outer norms."""

from collections.abc import Sequence

from curvoscope.families.attention_calls import AttentionCall
from curvoscope.families.data_flow import DataFlow, Node, Use, WeightProduct
from curvoscope.families.norm_places import NormUse
from curvoscope.families.operands import output_width
from curvoscope.families.roles import Role, RoleTable
from curvoscope.families.stacks import StackLayer, Stacks

_TABLES = {"tokens": "embed", "positions": "positions", "types": "token_types", "table": "positions"}


class Surroundings:
    """What stands around the layers: named in a table of roles by its place.

    `norms`: those outside of layers, with the names that their places suggest; `unknown`: products that add to a stream
    in no known way.
    """

    def __init__(
        self, table: RoleTable, stacks: Stacks, norms: Sequence[tuple[NormUse, str]], unknown: set[Node]
    ) -> None:
        self._table, self._stacks, self._norms, self._unknown = table, stacks, norms, unknown
        self._flow: DataFlow = table.flow

    def name(self) -> None:
        """Add the blocks."""
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
            self._table.add_product(None, name, product, front=front)
            names[product.parameter] = f"{front}{name}"
        heads = [p for p in outer if p.node not in leading and self._last_call(p.before) is not None]
        for number, product in enumerate(heads):
            self._name_head(product, number, heads)
        for norm, name in self._norms:
            self._name_outer_norm(norm, name, leading, {p.node for p in heads})
        for parameter, gain in flow.gains.items():
            if parameter in names:
                self._table.add(None, f"{names[parameter]}.gain", Role((self._table.row(gain),)))

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
                piece = self._table.table(parameter)
                if name != "positions" or piece.shape[0] > 1:
                    self._table.add_next(None, name, Role((piece,)), self._front(parameter, layer))
        for call, layer in self._stacks.layer_of.items():
            read = {"queries": call.weights["Q"], "memory": call.weights["K"]}
            for name, product in (*read.items(), *(("positions", product) for product in call.positions.values())):
                owner = flow.owner(product.before)
                if owner is not None:
                    self._table.add_next(None, name, Role((self._table.table(owner),)), self._front(owner, layer))

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
            for name, role in self._table.roles.items()
            if name.removeprefix(self._table.fronts.get(name, "")) == "embed"
            for piece in role.pieces
        }
        last = not any(other.node in flow.ahead(product.node, flow.stops) for other in heads)
        if product.parameter in tables:
            if product.bias is not None:
                self._table.add(None, "b_unembed", Role((self._table.row(product.bias.parameter),)), front)
        elif last and output_width(flow, product) in tables.values():
            self._table.add_product(None, "unembed", product, front=front)
        else:
            self._table.add_product(None, f"head.{number}", product, front=front)

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
        if at_head or (name == "final_norm" and f"{front}final_norm" in self._table.roles):
            name = "head.norm"
        self._table.add_norm(None, name, norm, front)

    def _has_width(self, norm: NormUse, call: AttentionCall) -> bool:
        """Whether a norm has as many entries as the stream that a call adds to."""
        output = call.weights.get("O")
        return output is None or self._flow.parameters[norm.rows[0]].numel() == output_width(self._flow, output)

    def _is_elsewhere(self, norm: NormUse) -> bool:
        """Whether a norm is read by an unknown branch alone."""
        after = self._flow.ahead(norm.end, lambda node: node in self._flow.products)
        return bool(after) and self._unknown.issuperset(after)
