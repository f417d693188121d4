"""Attention in the graph of a forward pass: a product of two activations, a softmax, a second product."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.autograd.graph import GradientEdge

from curvoscope.families.data_flow import DataFlow, Node, WeightProduct, shape_of
from curvoscope.families.operands import heads_of


@dataclass(eq=False)
class AttentionCall:
    """One attention: the products that make scores and mix values, and the weights by role, "Q", "K", "V" and "O".

    `operands`: role -> products of activations and the numbers of their operands. `latent`: weights before those, in
    series ("Q_latent", "KV_latent", "reduction"); `positions`: weights of positions that make further scores.
    `sources`: what the queries are made of. `cross`: keys are made of something else.
    """

    scores: Node
    softmax: Node
    mixed: Node
    operands: dict[str, list[tuple[Node, int]]]
    weights: dict[str, WeightProduct]
    latent: dict[str, WeightProduct] = field(default_factory=dict)
    positions: dict[str, WeightProduct] = field(default_factory=dict)
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

    def operand(self, role: str) -> Node:
        """The node that makes the queries, keys or values that are multiplied."""
        node, number = self.operands[role][0]
        return node.next_functions[number - 2][0]  # a bias may stand before the two


def attention_calls(flow: DataFlow) -> list[AttentionCall]:
    """All attention in the graph whose weights can be told apart, in the order in which it ran."""
    calls = [call for call in (_call(flow, node) for node in flow.softmaxes) if call is not None]
    found: dict[tuple[Node, ...], AttentionCall] = {}
    for call in sorted(calls, key=lambda one: one.order):
        key = tuple(call.weights[role].node for role in "QKV")
        if key in found and not _is_again(flow, found[key], call):  # more of the heads of one layer
            for role in "QKV":
                found[key].operands[role] += call.operands[role]
        else:
            found.setdefault(key, call)
    return list(found.values())


def _is_again(flow: DataFlow, first: AttentionCall, call: AttentionCall) -> bool:
    """Whether two calls with the same weights have the same values."""
    values = [heads_of(flow, one.operands["V"], one.weights["V"]) for one in (first, call)]
    return values[0] == values[1]


def _call(flow: DataFlow, softmax: Node) -> AttentionCall | None:
    logits, axis = flow.softmaxes[softmax]
    scores = [n for n in flow.behind([logits.node], flow.stops) if flow.is_plain(n)]
    values = [n for n in flow.ahead(softmax, flow.stops) if flow.is_plain(n)]
    if not scores or not values:
        return None
    of_contents = [n for n in scores if all(before in flow.from_data for before, _ in n.next_functions[-2:])]
    score, mixed = (of_contents or scores)[0], min(values, key=lambda node: node._sequence_nr())
    first, second = (0, 1) if _rows_are_queries(flow, logits, axis, score) else (1, 0)
    weighs_first = softmax in flow.behind([mixed.next_functions[-2][0]], flow.stops)
    operands = {"Q": [(score, first)], "K": [(score, second)], "V": [(mixed, 1 if weighs_first else 0)]}
    call = AttentionCall(score, softmax, mixed, operands, {})
    for role in "QKV":
        several = flow.products_behind(call.operand(role))
        main = [p for p in several if not any(p.node in flow.sources(q.before) for q in several if q is not p)]
        main = [p for p in main if p.node in flow.from_data] or main
        if len(main) != 1:
            return None
        call.weights[role] = main[0]
        call.latent |= {"Q_latent" if role == "Q" else "KV_latent": p for p in several if p not in main}
    _read_streams(flow, call)
    output = _output_weight(flow, call)
    if output is not None:
        call.weights["O"] = output
    _read_positions(flow, call, [n for n in scores if n is not score])
    return call


def _rows_are_queries(flow: DataFlow, logits: GradientEdge, axis: int, scores: Node) -> bool:
    """Whether the softmax normalises rows of the scores: then their first operand holds the queries."""
    shape = shape_of(logits.node, logits.output_nr)
    place: list[int | slice] = [0] * len(shape)
    place[axis] = slice(None)
    cotangent = flow.zeros(shape)
    cotangent[tuple(place)] = 1
    gradient = flow.gradient(logits, GradientEdge(scores, 0), cotangent)
    if gradient is None:
        return True
    rows, columns = (int((gradient != 0).any(0).any(axis).sum()) for axis in (1, 0))
    return rows <= columns


def _read_streams(flow: DataFlow, call: AttentionCall) -> None:
    """What queries and keys are made of. Weights in series count as one if then both read the same."""
    query, key = (flow.sources(call.weights[role].before) for role in "QK")
    before = {}
    for role, found in (("Q", query), ("K", key)):
        product = flow.products.get(next(iter(found))) if len(found) == 1 else None
        if product is not None:
            before[role] = product
    if query != key:
        options: list[tuple[str, ...]] = [("Q",), ("K",), ("Q", "K")]
        for roles in options:
            if not all(role in before for role in roles):
                continue
            sides = {"Q": query, "K": key} | {role: flow.sources(before[role].before) for role in roles}
            if sides["Q"] and sides["Q"] == sides["K"]:
                for role in roles:
                    name = "Q_latent" if role == "Q" else "KV_latent"
                    call.latent["reduction" if before[role].is_convolution else name] = before[role]
                query = key = sides["Q"]
                break
    call.sources, call.cross = query, query != key


def _output_weight(flow: DataFlow, call: AttentionCall) -> WeightProduct | None:
    """W_O: the next product, if nothing of the stream is added before it."""
    after = [n for n in flow.ahead(call.mixed, flow.stops) if n in flow.products]
    if not after:
        return None
    product = flow.products[min(after, key=lambda node: node._sequence_nr())]
    for source in flow.sources(product.before):
        gates = source in flow.products and flow.sources(flow.products[source].before) == call.sources
        if not flow.is_plain(source) and not gates:
            return None
    return product


def _read_positions(flow: DataFlow, call: AttentionCall, scores: Sequence[Node]) -> None:
    """Weights of positions in further scores: those that meet the queries act as keys, and the other way round."""
    for node in scores:
        for own, other in ((0, 1), (1, 0)):
            weights = flow.products_behind(node.next_functions[own - 2][0])
            if len(weights) == 1 and weights[0].node not in flow.from_data:
                for role, opposite in (("K_positions", "Q"), ("Q_positions", "K")):
                    if _is_same(flow, (node, other), call, opposite):
                        call.positions.setdefault(role, weights[0])


def _is_same(flow: DataFlow, operand: tuple[Node, int], call: AttentionCall, role: str) -> bool:
    """Whether an operand of a product holds the queries or keys of a call."""
    weight = call.weights[role]
    if flow.products_behind(operand[0].next_functions[operand[1] - 2][0]) != [weight]:
        return False
    fused = call.weights["Q"].node is call.weights["K"].node
    return not fused or heads_of(flow, [operand], weight) == heads_of(flow, call.operands[role], weight)
