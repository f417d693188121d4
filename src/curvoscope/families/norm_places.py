"""Norms, factors and biases of scores by their places: before or after attention, on its queries, behind a sum.

"norm1" and "norm2" stand before attention and before the feed-forward layer, or, if the stream itself is normalised,
behind the sums with their outputs. "norm1_post" and "norm2_post" normalise an output before it is added.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from curvoscope.families.attention_calls import AttentionCall
from curvoscope.families.data_flow import DataFlow, Node, Use
from curvoscope.families.stacks import StackLayer, Stacks

_NORMALISING = re.compile("(Rsqrt|Sqrt|Pow|Reciprocal|LinalgVectorNorm|Norm|NativeLayerNorm|FusedRmsNorm|Var|Std)")
_LIGHT = ("View", "ToCopy", "UnsafeView")
_ON_SCORES = {"joined": "sinks", "scale": "temperature"}


@dataclass(eq=False)
class NormUse:
    """A norm in the graph: where it begins and ends, what it reads, and its parameters, gamma before beta."""

    node: Node
    end: Node
    before: Node | None
    rows: list[str]


class NormPlaces:
    """Where the norms of a model stand: `inside` of layers with their roles, or `outside`.

    `factors`: parameters that scale what a layer adds. `on_scores`: those that act between the scores and the softmax.
    """

    def __init__(self, flow: DataFlow, stacks: Stacks) -> None:
        self._flow, self._stacks = flow, stacks
        self.inside: list[tuple[NormUse, StackLayer, str]] = []
        self.outside: list[tuple[NormUse, str]] = []
        self.factors: list[tuple[StackLayer, str, Use]] = []
        self.on_scores: list[tuple[StackLayer, str, Use]] = []
        self._readers = self._entrances()
        within = self._within()
        named: set[Node] = set()
        for norm in self._norms():
            named.add(norm.node)
            place = within.get(norm.node)
            if place is not None and not place[1].endswith("."):
                self.inside.append((norm, *place))
            elif place is None:
                self._place(norm)
        for use in sorted((use for uses in flow.uses.values() for use in uses), key=lambda use: use.order):
            place = within.get(use.node)
            if place is not None and place[1].endswith("."):
                self.on_scores.append((place[0], f"{place[1]}{_ON_SCORES.get(use.kind, 'positions')}", use))
            elif use.kind == "scale" and use.node not in named:
                self._place_factor(use)

    def _entrances(self) -> dict[Node, tuple[StackLayer, str]]:
        """The products that read the stream, and the role of a norm before each."""
        found: dict[Node, tuple[StackLayer, str]] = {}
        for layer in self._stacks.layers:
            for product in (*(p for path in layer.paths for p in path.entrances), *layer.routers):
                found[product.node] = (layer, "norm2")
        for call, layer in self._stacks.layer_of.items():
            role = "norm_cross" if self._is_second(call) else "norm1"
            latent = [call.latent[name] for name in call.latent if name != "KV_latent" or not call.cross]
            for product in (call.weights["Q"], *latent):
                found[product.node] = (layer, role)
        return found

    def _is_second(self, call: AttentionCall) -> bool:
        layer = self._stacks.layer_of[call]
        crossed = layer.crossed
        return crossed is not None and crossed.weights["Q"].parameter == call.weights["Q"].parameter

    def _within(self) -> dict[Node, tuple[StackLayer, str]]:
        """Nodes inside of attention and feed-forward layers, with the role of a norm there; between scores and softmax
        with the kind of attention alone, "attn."."""
        flow = self._flow
        found: dict[Node, tuple[StackLayer, str]] = {}

        def add(layer: StackLayer, role: str, nodes: Iterable[Node]) -> None:
            for node in nodes:
                found.setdefault(node, (layer, role))

        for call, layer in self._stacks.layer_of.items():
            kind = "cross" if self._is_second(call) else "attn"
            for latent, product in call.latent.items():
                after = flow.followed(product.node, flow.stops)
                for role in "QKV":
                    add(
                        layer,
                        f"{kind}.{latent.lower()}_norm",
                        after & flow.passed([call.weights[role].before], flow.stops),
                    )
            for role in "QKV":
                if flow.products_behind(call.operand(role)):
                    add(layer, f"{kind}.{role.lower()}_norm", flow.passed([call.operand(role)], flow.stops))
            if "O" in call.weights:
                add(layer, f"{kind}.o_norm", flow.passed([call.weights["O"].before], flow.stops))
            own = flow.followed(call.scores, flow.stops)
            starts = [flow.softmaxes[call.softmax][0].node, *(before for before, _ in call.scores.next_functions[:-2])]

            def ends_here(node: Node, call: AttentionCall = call) -> bool:
                return node is call.scores or flow.is_plain(node) or (node in flow.products and node in flow.from_data)

            above = flow.passed(starts, ends_here)
            add(layer, f"{kind}.", (n for n in above if n in own or n not in flow.from_data))
        for layer in self._stacks.layers:
            for path in layer.paths:
                add(layer, "mlp.norm", flow.passed([path.down.before], flow.stops))
        return found

    def _norms(self) -> list[NormUse]:
        flow, found = self._flow, []
        for node in flow.nodes:
            uses = {use.kind: use for use in flow.at(node)}
            gamma, beta = uses.get("gamma"), uses.get("beta")
            end: Node | None = node
            before = node.next_functions[0][0] if node.next_functions else None
            if gamma is None and beta is None:
                gamma = uses.get("scale")
                if gamma is None or flow.parameters[gamma.parameter].numel() == 1:
                    continue
                before = flow.data_beside(gamma)
                end = self._normalised(node, before)
                if end is None:
                    continue
                after = flow.consumers.get(end, [])
                while len(after) == 1 and after[0][0].name().startswith(_LIGHT):
                    after = flow.consumers.get(after[0][0], [])
                beta = next((use for n, _ in after for use in flow.at(n) if use.kind == "shift"), None)
                beta = beta if len(after) == 1 else None
                end = end if beta is None else beta.node
            found.append(NormUse(node, end, before, [use.parameter for use in (gamma, beta) if use is not None]))
        return found

    def _normalised(self, node: Node, before: Node | None) -> Node | None:
        """Where the product of a parameter and the data is normalised: there, or in a factor right behind; or None."""
        flow = self._flow

        def normalises(start: Node | None) -> bool:
            inside = flow.passed([start], lambda n: flow.stops(n) or flow.is_sum(n) or bool(flow.at(n)))
            return any(_NORMALISING.match(n.name()) for n in inside)

        if normalises(before):
            return node
        after = flow.consumers.get(node, [])
        if len(after) != 1 or not after[0][0].name().startswith(("Div", "Mul")):
            return None
        others = [other for other, _ in after[0][0].next_functions if other is not node]
        return after[0][0] if len(others) == 1 and normalises(others[0]) else None

    def _place(self, norm: NormUse) -> None:
        flow, stacks = self._flow, self._stacks

        def stop(node: Node) -> bool:
            return flow.stops(node) or flow.is_sum(node) or flow.is_start(node)

        after, behind = flow.ahead(norm.end, stop), flow.behind([norm.before], stop)
        behind = {node: None for node in behind if not flow.is_constant(node)}
        on_stream = any(flow.is_sum(node) for node in after)
        roles = sorted((self._readers[node] for node in after if node in self._readers), key=lambda role: role[1])
        if roles and not on_stream:
            self._put(norm, *roles[0])
        elif len(behind) == 1 and next(iter(behind)) in stacks.ends:
            call = stacks.ends[next(iter(behind))]
            self._put(norm, stacks.layer_of[call], "norm_cross_post" if self._is_second(call) else "norm1_post")
        elif behind and (layer := self._feedforward(behind)) is not None:
            self._put(norm, layer, "norm2_post")
        else:
            self._place_behind_sum(norm, behind, on_stream)

    def _place_behind_sum(self, norm: NormUse, behind: Iterable[Node], on_stream: bool) -> None:
        flow, stacks = self._flow, self._stacks
        added, read = self._added(behind), any(node in self._readers for node in flow.ahead(norm.end, flow.stops))
        if isinstance(added, AttentionCall) and on_stream:
            layer = stacks.layer_of[added]
            layer.post = True
            self._put(norm, layer, "norm_cross" if self._is_second(added) else "norm1")
        elif isinstance(added, StackLayer) and added.post and (read or not self._has_another(norm, added)):
            self._put(norm, added, "norm2")
        elif any(node in stacks.ends or node in stacks.downs for node in flow.sources(norm.before)):
            self.outside.append((norm, "final_norm"))
        else:
            tables = any(flow.is_start(node) and flow.at(node) for node in flow.sources(norm.before))
            self.outside.append((norm, "embed_norm" if read or tables else "input.norm"))

    def _has_another(self, norm: NormUse, layer: StackLayer) -> bool:
        """Whether a layer has a norm of other parameters behind its feed-forward part."""
        return any(one is layer and role == "norm2" and own.rows != norm.rows for own, one, role in self.inside)

    def _put(self, norm: NormUse, layer: StackLayer, role: str) -> None:
        self.inside.append((norm, layer, role))

    def _added(self, behind: Iterable[Node]) -> AttentionCall | StackLayer | None:
        """What was added to the stream last: an attention, or the feed-forward part of a layer."""
        flow, stacks = self._flow, self._stacks
        for node in (one for one in behind if flow.is_sum(one)):
            for before, _ in node.next_functions:
                found = flow.behind([before], lambda n: flow.stops(n) or flow.is_sum(n) or flow.is_start(n))
                found = {n: None for n in found if not flow.is_constant(n)}
                if len(found) == 1 and next(iter(found)) in stacks.ends:
                    return stacks.ends[next(iter(found))]
                layer = self._feedforward(found)
                if layer is not None:
                    return layer
        return None

    def _feedforward(self, nodes: Iterable[Node]) -> StackLayer | None:
        """The layer whose feed-forward part makes these nodes, which may be sums over its experts."""
        flow, stacks = self._flow, self._stacks
        made = frozenset[Node]().union(*(frozenset([n]) if n in flow.products else flow.sources(n) for n in nodes))
        layers = {stacks.downs[node] for node in made if node in stacks.downs}
        if len(layers) != 1:
            return None
        layer = layers.pop()
        routers = {product.node for product in layer.routers}
        return layer if all(node in stacks.downs or node in routers for node in made) else None

    def _place_factor(self, use: Use) -> None:
        """A factor on what a layer adds to the stream."""
        flow, stacks = self._flow, self._stacks
        found = flow.behind([flow.data_beside(use)], lambda n: flow.stops(n) or flow.is_sum(n))
        found = {node: None for node in found if not flow.is_constant(node)}
        if len(found) != 1:
            return
        node = next(iter(found))
        if node in stacks.ends:
            call = stacks.ends[node]
            kind = "cross" if self._is_second(call) else "attn"
            self.factors.append((stacks.layer_of[call], f"{kind}.scale", use))
        elif node in stacks.downs:
            self.factors.append((stacks.downs[node], "mlp.scale", use))
