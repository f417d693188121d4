"""Hessian blocks in closed form for the layers of a model: `exact` at each layer, autodiff from its output on.

With F a layer's output, the loss is a function of F through the tail of the network, whose G = dl/dF and S = d2l/dF2
come from products with S, one for each entry of F that S couples. The layer itself is then in closed form. The parts
of the tail give those of the model: S = S_o + S_f with S_o = J^T S_out J, J = d out/dF, the Gauss-Newton part, and

    split at the layer     outer: outer(S)       functional: functional
    split at the model     outer: outer(S_o)     functional: outer(S_f) + functional
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count
from operator import add

import torch
from torch import Tensor

from curvoscope import checks, losses
from curvoscope.autodiff.batches import Batch, BatchError
from curvoscope.autodiff.engine import Autodiff, check_layer
from curvoscope.autodiff.graph import Graph
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.blocks import Block
from curvoscope.closed.layers import BlockPlace, ClosedFormLayers, LayerRecorder, ModelLayer, OutputSize
from curvoscope.closed.plan import Choice
from curvoscope.closed.rebuilding import Reading, Rebuilt, fitting, rebuild, shaken
from curvoscope.distributed.rank_sum import RankSum
from curvoscope.distributed.ranks import Group
from curvoscope.errors import ModelError
from curvoscope.losses import LossAt
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian

_MOST_PRODUCTS = 256  # through the tail of the network, for one layer, unless closed forms are asked for
_MOST_DENSE = 2048  # size of a block up to which all its entries are soon computed
_SMALL_GRAPH = 2**22  # bytes up to which many products are made at once
_KINDS = {"attn": "attention", "mlp": "feed-forward layer"}
_NOT_ONCE = "it does not run exactly once in a pass, from tensor to tensor"
_TOTAL = {"total": ("total", "total")}
_PARTS = {  # of the Hessian: which part of S, and which part of the layer's Hessian with it
    "model": {"outer": ("outer", "outer"), "functional": ("functional", "total"), **_TOTAL},
    "layer": {"outer": ("total", "outer"), "functional": ("total", "functional"), **_TOTAL},
}


@dataclass
class _Verified:
    """What the first runs tell of a layer: its reading and the shape of F for each micro-batch, or a reason why not."""

    reason: str | None = None
    readings: list[Reading] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, reading: Reading, record: LayerRecorder) -> None:
        """One more micro-batch."""
        rows, length, width = record.F.shape
        self.readings.append(reading)
        self.shapes.append((rows, length, width))


class ClosedForms:
    """The blocks of a Hessian that have a closed form, each made once. Nothing is computed before the first is asked
    for: until then sizes alone tell which layers may have one (`planned`), and then the layer is verified (`reason`).
    """

    def __init__(self, engine: Autodiff, layers: ClosedFormLayers, limited: bool) -> None:
        """`layers`: with the sizes of their outputs. `limited`: only where S takes few products through the tail of the
        network."""
        self._engine, self._layers, self._limited = engine, layers, limited
        self._parts = _PARTS[engine.split]
        self._chosen = {
            place.layer.name: place.layer
            for place in map(layers.place, engine.blocks.values())
            if isinstance(place, BlockPlace)
        }
        told = engine.ranks.exchange((layers.sizes, len(engine.survey.terms)))
        self._sizes = {name: reduce(OutputSize.joined, (sizes[name] for sizes, _ in told)) for name in self._chosen}
        self._batches = max(batches for _, batches in told)
        self._ruled_out = self._agreed({name: self._misfit(layer) for name, layer in self._chosen.items()})
        self._verified: dict[str, _Verified] = {}
        self._at: dict[tuple[str, str], list[tuple[Rebuilt, LossAt]]] = {}
        self._hessians: dict[tuple[str, str, bool], list[BlockHessian]] = {}

    # ---- before anything is computed

    def planned(self, block: Block) -> Choice:
        """Whether a closed form is tried, and what S at the layer's output will take."""
        place = self._layers.place(block)
        if isinstance(place, str):
            return Choice(False, place)
        reason = self._sized_out(place, block)
        if reason is not None:
            return Choice(False, reason)
        layer, size = place.layer, self._sizes[place.layer.name]
        coupled = self._coupled(layer)
        when = "verified when first used" if self._limited else "verified"
        return Choice(
            True,
            f"{_KINDS[layer.kind]} in closed form, {when}",
            coupled * size.width,
            self._bytes(layer, coupled, size.width, self._batches * size.tokens),
        )

    def _sized_out(self, place: BlockPlace, block: Block) -> str | None:
        """Why sizes alone rule out a closed form."""
        role = place.name.removeprefix("b_")[0]
        turned = self._sizes[place.layer.name].rotary and role == "K"
        if self._limited and turned and block.size > _MOST_DENSE:
            return "behind rotary positions its closed form gives products only"
        return self._ruled_out[place.layer.name]

    def _misfit(self, layer: ModelLayer) -> str | None:
        size = self._sizes[layer.name]
        if not size.once:
            return _NOT_ONCE
        return self._too_large(layer, self._coupled(layer), size.width, self._batches * size.tokens)

    def _agreed(self, reasons: dict[str, str | None]) -> dict[str, str | None]:
        """What rules out a closed form on one rank rules it out on all."""
        told = self._engine.ranks.exchange(reasons)
        return {name: next((other[name] for other in told if other[name] is not None), None) for name in reasons}

    def _coupled(self, layer: ModelLayer) -> int:
        """How many tokens S couples, by the layers that follow."""
        return self._sizes[layer.name].length if self._layers.mixed_after(layer) else 1

    def _too_large(self, layer: ModelLayer, coupled: int, width: int, tokens: int) -> str | None:
        """Why S is not computed, unless closed forms are asked for."""
        if not self._limited:
            return None
        if coupled * width > _MOST_PRODUCTS:
            takes = f"takes {coupled * width} products or more, the limit is {_MOST_PRODUCTS}"
            return f"the loss Hessian at its output {takes}"
        if len(self._chosen) * self._bytes(layer, coupled, width, tokens) > checks.memory_budget():
            return "the loss Hessian at its output does not fit into memory"
        return None

    def _bytes(self, layer: ModelLayer, coupled: int, width: int, tokens: int) -> int:
        """What S at a layer and the cores made of it take, for all tokens."""
        widest = max(max(block.shape) for block in layer.blocks.values()) if coupled > 1 else width
        return 2 * tokens * coupled * widest**2 * self._engine.dtype.itemsize

    # ---- which layers have a closed form

    def reason(self, block: Block) -> str | None:
        """Why the block is not computed in closed form; None if it is."""
        place = self._layers.place(block)
        if isinstance(place, str):
            return place
        return self._sized_out(place, block) or self._verify(place.layer).reason

    def _verify(self, layer: ModelLayer) -> _Verified:
        """Rebuild the layer, on all micro-batches and at shaken weights; see what S couples on the first."""
        if layer.name not in self._verified:
            found = _Verified()
            with self._engine.ranks.together():
                self._engine.walk(lambda weight, batch: self._read(layer, found, batch))
                if found.reason is None:
                    self._tails(layer, partial(self._probe, found), first=True)
            found.reason = self._agreed({layer.name: found.reason})[layer.name]
            self._verified[layer.name] = found
        return self._verified[layer.name]

    def _read(self, layer: ModelLayer, found: _Verified, batch: Batch) -> None:
        """See how the layer computes a micro-batch: in one run at its own weights, and in one at shaken weights."""
        snapshot, candidates = self._engine.snapshot, None
        for at in (lambda weights: weights, shaken):
            if found.reason is not None:
                return
            weights = at(snapshot.weights)
            with torch.no_grad(), LayerRecorder(self._engine.model, layer) as record:
                snapshot(weights, batch)
            if not record.once:
                found.reason = _NOT_ONCE
                return
            named = {name: weights[path] for name, path in snapshot.paths.items()}
            candidates, least = fitting(layer, named, record, candidates)
            if not candidates:
                found.reason = least
            elif at is shaken:
                found.add(candidates[0], record)

    def _probe(self, found: _Verified, number: int, tail: "DownstreamLoss") -> None:
        """See whether the weights act through F alone, and how many tokens S couples."""
        try:
            tail.check()
        except ModelError as problem:
            found.reason = str(problem)
            return
        if self._limited:  # to see what S couples takes products
            tokens = sum(rows * length for rows, length, _ in found.shapes)
            found.reason = self._too_large(tail.layer, tail.coupled("total"), found.shapes[0][2], tokens)

    # ---- closed forms

    @property
    def layers(self) -> list[ModelLayer]:
        """Those that hold the blocks of the Hessian."""
        return list(self._chosen.values())

    def tail(self, layer: ModelLayer) -> "tuple[DownstreamLoss, Rebuilt | None]":
        """The network behind a layer, and the layer in closed form if it has one, on the only micro-batch."""
        found, tails = self._verify(layer), list[DownstreamLoss]()
        self._tails(layer, lambda number, tail: tails.append(tail))
        if len(tails) != 1:
            raise BatchError("batches", f"got {len(tails)} micro-batches; a layer's output is of one batch: give one")
        return tails[0], tails[0].rebuilt(found.readings[0]) if found.reason is None else None

    def block(self, part: str, row: Block, column: Block) -> LinearOperator | None:
        """A block of a part of the Hessian, where both of its sides lie in one layer with a closed form."""
        places = self._layers.place(row), self._layers.place(column)
        if isinstance(places[0], str) or isinstance(places[1], str) or places[0].layer is not places[1].layer:
            return None
        if self.reason(row) is not None or self.reason(column) is not None:
            return None
        names = places[0].name, places[1].name
        of_loss, of_layer = self._parts[part]
        ranks, own, known = self._engine.ranks, None, True
        with ranks.together():
            for per_head in (False, True):
                hessians = self._of_layer(places[0].layer, of_loss, per_head)
                known = not hessians or set(names) <= set(hessians[0].names)
                if hessians and known:
                    own = reduce(add, (getattr(hessian, of_layer)[names] for hessian in hessians))
                    break
        if not isinstance(ranks, Group):
            return own
        if not all(ranks.exchange(known)):  # a weight with a single head of another
            return None
        like = torch.empty(0, dtype=self._engine.dtype, device=self._engine.device)
        return RankSum(own, row.shape, column.shape, like, row == column, ranks)

    def _of_layer(self, layer: ModelLayer, part: str, per_head: bool) -> list[BlockHessian]:
        """The layer's Hessian with a part of S, one summand for each micro-batch."""
        if (layer.name, part) not in self._at:
            readings = self._verified[layer.name].readings
            summands: list[tuple[Rebuilt, LossAt]] = []
            self._tails(layer, lambda i, tail: summands.append((tail.rebuilt(readings[i]), tail.loss(part))))
            self._at[layer.name, part] = summands
        key = (layer.name, part, per_head)
        if key not in self._hessians:
            made = self._at[layer.name, part]
            self._hessians[key] = [rebuilt.hessian(loss, per_head) for rebuilt, loss in made]
        return self._hessians[key]

    def _tails(self, layer: ModelLayer, visit: Callable[[int, "DownstreamLoss"], None], first: bool = False) -> None:
        """Call `visit` with each micro-batch's tail of the network behind the layer, or with the first alone."""
        numbers = count()

        def run(weight: float, batch: Batch) -> None:
            number = next(numbers)
            if not first or number == 0:
                visit(number, DownstreamLoss(self._engine, layer, weight, batch))

        self._engine.walk(run)


class DownstreamLoss:
    """The loss of one micro-batch, times its weight, as a function of a layer's output F (N, L, m)."""

    def __init__(self, engine: Autodiff, layer: ModelLayer, weight: float, batch: Batch) -> None:
        self.layer, self._weight = layer, weight
        weights, self._leaves = engine.snapshot.leaves(layer.parameters)
        with kept_derivatives(engine.model), LayerRecorder(engine.model, layer) as self._record:
            outputs = engine.snapshot(weights, batch)
        self._value = float(engine.objective(outputs, batch.targets).detach())
        self._end = engine.objective.gradient(outputs, batch.targets)
        cut, gradient = self._end
        F = self._record.written
        self._slope = torch.autograd.grad(cut, F, gradient, create_graph=True, materialize_grads=True)
        self.gradient = self._record.batched(self._slope[0].detach())
        self._graph = Graph({"F": F}, cut, gradient)
        engine.vouch(self._graph)
        self._together = self._graph.nbytes <= _SMALL_GRAPH

    def check(self) -> None:
        """Raise unless the layer's weights act on the loss through F alone."""
        check_layer(self.layer.output, self._leaves, self._end, ([self._record.written], self._slope))

    def rebuilt(self, reading: Reading) -> Rebuilt:
        """The layer in closed form."""
        weights = {name: leaf.detach() for name, leaf in self._leaves.items()}
        return rebuild(self.layer, weights, self._record, reading)

    def coupled(self, part: str) -> int:
        """How many tokens S couples."""
        return losses.group_size(lambda direction: self.products(part, direction[None])[0], self.gradient)

    def loss(self, part: str) -> LossAt:
        """G, and the part of S."""
        curvature = losses.curvature_of(partial(self.products, part), self.gradient, self.coupled(part))
        return LossAt(self._weight * self._value, self._weight * self.gradient, curvature)

    def products(self, part: str, directions: Tensor) -> Tensor:
        """The part of S, times the weight, times directions (n, N, L, m)."""
        moved = torch.stack([self._record.unbatched(direction) for direction in directions])
        if len(moved) > 1 and self._together:
            try:
                found = self._graph.product(part, {"F": moved}, ["F"], many=True).get("F", torch.zeros_like(moved))
            except (RuntimeError, NotImplementedError):  # an operation that torch cannot batch
                self._together = False
                return self.products(part, directions)
        else:
            singles = [self._graph.product(part, {"F": one}, ["F"], many=False).get("F") for one in moved]
            found = torch.stack([moved.new_zeros(moved.shape[1:]) if one is None else one for one in singles])
        return self._weight * torch.stack([self._record.batched(product) for product in found])
