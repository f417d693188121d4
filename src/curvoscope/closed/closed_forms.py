"""Hessian blocks in closed form for the layers of a model: `exact` at each layer, autodiff from its output on.

With F a layer's output, the loss is a function of F through the tail of the network, whose G = dl/dF and S = d2l/dF2
come from products with S, one for each entry of F that S couples. The layer itself is then in closed form. The parts
of the tail give those of the model: S = S_o + S_f with S_o = J^T S_out J, J = d out/dF, the Gauss-Newton part, and

    split at the layer     outer: outer(S)       functional: functional
    split at the model     outer: outer(S_o)     functional: outer(S_f) + functional
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count
from operator import add

import torch
from torch import Tensor, nn

from curvoscope import checks, losses
from curvoscope.autodiff.batches import Batch, BatchError
from curvoscope.autodiff.engine import Autodiff, check_layer
from curvoscope.autodiff.graph import Graph
from curvoscope.autodiff.hooks import Site
from curvoscope.autodiff.second_order import kept_derivatives
from curvoscope.blocks import Block, Blocks, Piece
from curvoscope.closed.layer_sites import LayerRecorder, ModelLayer, layers_of
from curvoscope.closed.rebuilding import Reading, Rebuilt, exact_name, fitting, rebuild, shaken
from curvoscope.distributed.rank_sum import RankSum
from curvoscope.distributed.ranks import Group
from curvoscope.errors import ModelError
from curvoscope.losses import LossAt
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian

_MOST_PRODUCTS = 256  # through the tail of the network, for one layer, unless closed forms are asked for
_MOST_DENSE = 2048  # size of a block up to which all its entries are soon computed
_SMALL_GRAPH = 2**22  # bytes up to which many products are made at once
_TOTAL = {"total": ("total", "total")}
_PARTS = {  # of the Hessian: which part of S, and which part of the layer's Hessian with it
    "model": {"outer": ("outer", "outer"), "functional": ("functional", "total"), **_TOTAL},
    "layer": {"outer": ("total", "outer"), "functional": ("total", "functional"), **_TOTAL},
}


@dataclass(frozen=True)
class _Place:
    """Where a block stands: in which layer, and under which name in its closed form."""

    layer: ModelLayer
    name: str


@dataclass
class _Found:
    """What the first runs tell of a layer: its reading and the shape of F for each micro-batch, or a reason why not."""

    reason: str | None = None
    rotary: bool = False
    readings: list[Reading] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, reading: Reading, record: LayerRecorder) -> None:
        """One more micro-batch."""
        rows, length, width = record.F.shape
        self.readings.append(reading)
        self.shapes.append((rows, length, width))
        self.rotary = self.rotary or record.rotary is not None


class ClosedFormLayers:
    """The layers of a model that may have a closed form, and which blocks they hold."""

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        """`blocks`: all of the model's."""
        self._all = layers_of(model, blocks)
        self._places: dict[tuple[Piece, ...], _Place] = {}
        for layer in self._all:
            for role, block in layer.blocks.items():
                parts = {exact_name(layer, role): block}
                if (block.heads or 1) > 1:
                    parts |= {f"{role}.{i}": block.head(i) for i in range(block.heads or 1)}
                self._places |= {part.pieces: _Place(layer, name) for name, part in parts.items()}

    def mixed_after(self, layer: ModelLayer) -> bool:
        """Whether an attention layer follows, so that tokens mix between the layer and the loss."""
        return any(other.kind == "attn" for other in self._all[self._all.index(layer) + 1 :])

    @property
    def sites(self) -> dict[str, Site]:
        """Where each layer ends, by the names of its parameters."""
        return {name: layer.output for layer in self._all for name in layer.parameters}

    def place(self, block: Block) -> _Place | str:
        """Where the block stands, or why it stands in no layer."""
        found = self._places.get(block.pieces)
        if block.tied:
            return f"it is tied to {', '.join(block.tied)}"
        return "no closed form is known for it" if found is None else found


class ClosedForms:
    """The blocks of a Hessian that have a closed form. Nothing is computed before the first of them is asked for."""

    def __init__(self, engine: Autodiff, layers: ClosedFormLayers, limited: bool) -> None:
        """`limited`: only where S takes few products through the tail of the network."""
        self._engine, self._layers, self._limited = engine, layers, limited
        self._parts = _PARTS[engine.split]
        self._chosen = {
            place.layer.name: place.layer
            for place in map(layers.place, engine.blocks.values())
            if isinstance(place, _Place)
        }
        self._found: dict[str, _Found] = {}
        self._was_read = False
        self._at: dict[tuple[str, str], list[tuple[Rebuilt, LossAt]]] = {}
        self._hessians: dict[tuple[str, str, bool], list[BlockHessian]] = {}

    def reason(self, block: Block) -> str | None:
        """Why the block is not computed in closed form; None if it is."""
        place = self._layers.place(block)
        if isinstance(place, str):
            return place
        found = self._seen(place.layer)
        role = place.name.removeprefix("b_")[0]
        if found.reason is None and self._limited and found.rotary and role == "K" and block.size > _MOST_DENSE:
            return "behind rotary positions its closed form gives products only"
        return found.reason

    @property
    def layers(self) -> list[ModelLayer]:
        """Those that hold the blocks of the Hessian."""
        return list(self._chosen.values())

    def tail(self, layer: ModelLayer) -> "tuple[DownstreamLoss, Rebuilt | None]":
        """The network behind a layer, and the layer in closed form if it has one, on the only micro-batch."""
        found, tails = self._seen(layer), list[DownstreamLoss]()
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

    # ---- which layers have a closed form

    def _seen(self, layer: ModelLayer) -> _Found:
        """What is known of a layer. Sizes alone rule most of them out; only then are the others read."""
        if not self._found:
            sized = {name: _Found() for name in self._chosen}
            with self._engine.ranks.together():
                self._engine.walk(lambda weight, batch: self._measure(sized, batch))
            self._agree(sized)
            self._found = sized
        if self._found[layer.name].reason is None and not self._was_read:
            found = {name: _Found(seen.reason) for name, seen in self._found.items()}
            with self._engine.ranks.together():
                self._engine.walk(lambda weight, batch: self._read(found, batch))
                for name, seen in found.items():
                    if seen.reason is None:
                        self._tails(self._chosen[name], partial(self._probe, seen), first=True)
            self._agree(found)
            self._found, self._was_read = found, True
        return self._found[layer.name]

    def _agree(self, found: dict[str, _Found]) -> None:
        """What rules out a closed form on one rank rules it out on all."""
        told = self._engine.ranks.exchange({name: (seen.reason, seen.rotary) for name, seen in found.items()})
        for name, seen in found.items():
            seen.reason = next((other[name][0] for other in told if other[name][0] is not None), None)
            seen.rotary = any(other[name][1] for other in told)

    def _measure(self, found: dict[str, _Found], batch: Batch) -> None:
        left = {name: layer for name, layer in self._chosen.items() if found[name].reason is None}
        if left:
            for name, record in self._recorded(left, self._engine.snapshot.weights, batch).items():
                found[name].reason = self._misfit(left[name], record)

    def _read(self, found: dict[str, _Found], batch: Batch) -> None:
        """See how the layers compute a micro-batch: all in one run at their own weights, and one at shaken weights."""
        snapshot, candidates = self._engine.snapshot, dict[str, Iterable[Reading]]()
        for at in (lambda weights: weights, shaken):
            left = {name: layer for name, layer in self._chosen.items() if found[name].reason is None}
            if not left:
                return
            weights = at(snapshot.weights)
            named = {name: weights[path] for name, path in snapshot.paths.items()}
            for name, record in self._recorded(left, weights, batch).items():
                seen = found[name]
                fits, least = fitting(left[name], named, record, candidates.get(name))
                candidates[name] = fits
                if not fits:
                    seen.reason = least
                elif at is shaken:
                    seen.add(fits[0], record)

    def _recorded(
        self, layers: Mapping[str, ModelLayer], weights: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, LayerRecorder]:
        with torch.no_grad(), ExitStack() as stack:
            records = {
                name: stack.enter_context(LayerRecorder(self._engine.model, layer)) for name, layer in layers.items()
            }
            self._engine.snapshot(weights, batch)
        return records

    def _misfit(self, layer: ModelLayer, record: LayerRecorder) -> str | None:
        """What rules out a closed form before it is tried."""
        if not record.once:
            return "it does not run exactly once in a pass, from tensor to tensor"
        length, width = record.F.shape[1:]
        return self._too_many((length if self._layers.mixed_after(layer) else 1) * width)

    def _probe(self, seen: _Found, number: int, tail: "DownstreamLoss") -> None:
        """See whether the weights act through F alone, and how many tokens S couples."""
        try:
            tail.check()
        except ModelError as problem:
            seen.reason = str(problem)
            return
        if self._limited:
            size, width = tail.coupled("total"), seen.shapes[0][2]
            seen.reason = self._too_many(size * width)
            widest = max(max(block.shape) for block in tail.layer.blocks.values()) if size > 1 else width
            tokens = sum(rows * length for rows, length, _ in seen.shapes)
            needed = 2 * len(self._chosen) * tokens * size * widest**2 * self._engine.dtype.itemsize
            if needed > checks.memory_budget():
                seen.reason = "the loss Hessian at its output does not fit into memory"

    def _too_many(self, products: int) -> str | None:
        if not self._limited or products <= _MOST_PRODUCTS:
            return None
        return f"the loss Hessian at its output takes {products} products or more, the limit is {_MOST_PRODUCTS}"

    # ---- closed forms

    def _of_layer(self, layer: ModelLayer, part: str, per_head: bool) -> list[BlockHessian]:
        """The layer's Hessian with a part of S, one summand for each micro-batch."""
        if (layer.name, part) not in self._at:
            readings = self._found[layer.name].readings
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
