"""Hessian blocks in closed form for the layers of a model: `exact` at each layer, autodiff from its output on.

With F a layer's output, the loss is a function of F through the tail of the network, with G = dl/dF from one backward
pass for all layers, and S = d2l/dF2 from products with S, one for each entry of F that S couples. The layer itself is
in closed form. The parts of the tail give those of the model: S = S_o + S_f with S_o = J^T S_out J, J = d out/dF, the
Gauss-Newton part, and

    split at the layer     outer: outer(S)       functional: functional, from G alone
    split at the model     outer: outer(S_o)     functional: outer(S_f) + functional

What needs no S is in closed form at any size; what does, if it costs less than the products that it saves.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import count
from operator import add

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.autodiff.batches import Batch, BatchError
from curvoscope.autodiff.engine import Autodiff
from curvoscope.blocks import Block
from curvoscope.closed.adapters import moved_block
from curvoscope.closed.layers import BlockPlace, ClosedFormLayers, ModelLayer, OutputSize
from curvoscope.closed.passes import NOT_ONCE, NOT_REACHED, DownstreamLoss, LayerPasses, passes_of
from curvoscope.closed.plan import Choice, LayerCosts
from curvoscope.closed.rebuilding import LayerAtBatch, Rebuilt, rebuilt_on
from curvoscope.closed.traced import TracedLayer, rebuilt_as_traced, rebuilt_latent, traced_layers
from curvoscope.distributed.rank_sum import RankSum
from curvoscope.distributed.ranks import Group
from curvoscope.errors import ModelError
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.losses import Curvature, LossAt, ScalarCurvature
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix

_MOST_DENSE = 2048  # size of a block up to which all its entries may be computed, and all its eigenvalues
_PRODUCTS_ONLY = (
    "behind rotary positions, norms or capped scores its closed form gives products only: all columns cost more than "
    "an estimate"
)
_KINDS = {"attn": "attention", "mlp": "feed-forward layer", "scale": "LayerScale", "cross": "cross-attention"}
_NO_CURVATURE = ScalarCurvature(0.0)  # stands for S in what does not read it
_TOTAL = {"total": ("total", "total")}
_PARTS: dict[str, dict[str, tuple[str | None, str]]] = {  # of the Hessian: which part of S, and of the layer's Hessian
    "model": {"outer": ("outer", "outer"), "functional": ("functional", "total"), **_TOTAL},
    "layer": {"outer": ("total", "outer"), "functional": (None, "functional"), **_TOTAL},
}


class ClosedForms:
    """The blocks of a Hessian that have a closed form, each made once. Nothing is computed before the first is asked
    for: until then sizes alone tell which layers may have one (`planned`), and then the layers are verified (`reason`).
    """

    def __init__(self, engine: Autodiff, layers: ClosedFormLayers, limited: bool) -> None:
        """`layers`: with the sizes of their outputs. `limited`: only where a closed form pays."""
        self._engine, self._layers, self._limited = engine, layers, limited
        self._parts = _PARTS[engine.split]
        held: dict[str, list[tuple[BlockPlace, Block]]] = {}
        self._chosen: dict[str, ModelLayer] = {}
        for block in engine.blocks.values():
            place = layers.place(block)
            if isinstance(place, BlockPlace):
                self._chosen[place.layer.name] = place.layer
                held.setdefault(place.layer.name, []).append((place, block))
        here = layers.sizes, len(engine.survey.terms), checks.memory_budget(), engine.product_bytes
        told = engine.ranks.exchange(here)
        self._sizes = {name: reduce(OutputSize.joined, (sizes[name] for sizes, *_ in told)) for name in self._chosen}
        _, terms, budgets, products = zip(*told, strict=True)
        batches, least, product = max(terms), min(budgets), max(products)
        whole = behind = sum(weight.numel() for weight in engine.snapshot.weights.values())
        self._costs: dict[str, LayerCosts] = {}
        for layer in layers.all:
            behind -= sum(block.size for block in layer.blocks.values())
            if layer.name in self._chosen:
                at = layer, held[layer.name], self._sizes[layer.name], batches, (max(0, behind), whole)
                self._costs[layer.name] = LayerCosts(*at, product, engine.dtype.itemsize)
        self._groups = self._passed_together(least // 4)
        self._ruled_out = {
            needs_s: self._agreed({name: self._misfit(name, needs_s) for name in self._chosen})
            for needs_s in (True, False)
        }
        self._reasons: dict[str, str | None] = {}
        self._coupling: dict[str, str | None] = {}
        self._passes: dict[str, LayerPasses] = {}
        # Roles whose closed forms give products only, of parts that need a Kronecker form and of others
        self._coreless: dict[bool, dict[str, str | None]] = {True: {}, False: {}}
        self._traced: dict[str, list[TracedLayer]] = {}
        self._batches: dict[str, tuple[str | None, list[LayerAtBatch]]] = {}
        self._made: dict[tuple[str, str], list[Curvature]] = {}
        self._hessians: dict[tuple[str, str | None, bool], list[BlockHessian]] = {}

    # ---- before anything is computed

    def planned(self, block: Block, part: str) -> Choice:
        """Whether a closed form is tried, or why it was tried in vain, and what it takes."""
        place = self._layers.place(block)
        if isinstance(place, str):
            return Choice(False, place)
        reason = self._sized_out(place, block, part)
        if reason is None and place.layer.name in self._reasons:
            reason = self._reasons[place.layer.name] or self._too_dear(place, block, part)
        if reason is None and self._needs_curvature(part):
            reason = self._coupling.get(place.layer.name)
        if reason is not None:
            return Choice(False, reason)
        layer, costs = place.layer, self._costs[place.layer.name]
        when = "verified when first used" if self._limited else "verified"
        if not self._needs_curvature(part):
            said = f"{_KINDS[layer.kind]} in closed form from the gradient at its output, {when}"
            return Choice(True, said, 0, costs.gradient_bytes)
        coupled = self._coupled(layer)
        said = f"{_KINDS[layer.kind]} in closed form, {when}"
        return Choice(True, said, costs.products(coupled), costs.curvature_bytes(coupled))

    @property
    def verified(self) -> int:
        """How many layers were looked at: the plan may change with them."""
        return len(self._reasons)

    def _needs_curvature(self, part: str) -> bool:
        return self._parts[part][0] is not None

    def _sized_out(self, place: BlockPlace, block: Block, part: str) -> str | None:
        """Why sizes alone rule out a closed form."""
        if self._products_only(place, part) and not self._may_be_formed(place, block, part):
            return _PRODUCTS_ONLY
        return self._ruled_out[self._needs_curvature(part)][place.layer.name]

    def _products_only(self, place: BlockPlace, part: str) -> bool:
        keys = any(name.removeprefix("b_")[0] == "K" for name in place.weights)
        return self._sizes[place.layer.name].rotary and keys and self._needs_cores(place, part)

    def _needs_cores(self, place: BlockPlace, part: str) -> bool:
        """Whether a norm needs a Kronecker form. The functional part of a key weight has another form."""
        return place.adapter is not None or place.name.startswith("b_") or self._needs_curvature(part)

    def _too_dear(self, place: BlockPlace, block: Block, part: str) -> str | None:
        """Why a block of a verified layer is left to autodiff: its closed form gives products only, and many columns
        are dearer than an estimate."""
        roles = {name.removeprefix("b_")[0] for name in place.weights}
        coreless = self._coreless[self._needs_cores(place, part)][place.layer.name] or ""
        formed = not roles & set(coreless) or self._may_be_formed(place, block, part)
        return None if formed else _PRODUCTS_ONLY

    def _may_be_formed(self, place: BlockPlace, block: Block, part: str) -> bool:
        """Whether all entries of a block are computed if its closed form gives products only."""
        coupled = self._coupled(place.layer) if self._needs_curvature(part) else 0
        pays = block.size <= _MOST_DENSE and self._costs[place.layer.name].pays_formed(block, coupled)
        return pays or not self._limited

    def _misfit(self, name: str, needs_curvature: bool) -> str | None:
        if not self._sizes[name].once:
            return NOT_REACHED if self._chosen[name].routed else NOT_ONCE
        if needs_curvature:
            return self._too_costly(name, self._coupled(self._chosen[name]))
        if self._limited and self._costs[name].gradient_bytes > checks.memory_budget():
            return "its closed form does not fit into memory"
        return None

    def _agreed(self, reasons: dict[str, str | None]) -> dict[str, str | None]:
        """What rules out a closed form on one rank rules it out on all."""
        told = self._engine.ranks.exchange(reasons)
        return {name: next((other[name] for other in told if other[name] is not None), None) for name in reasons}

    def _coupled(self, layer: ModelLayer) -> int:
        """How many tokens S couples, by the layers that follow."""
        return self._sizes[layer.name].length if self._layers.mixed_after(layer) else 1

    def _too_costly(self, name: str, coupled: int) -> str | None:
        """Why S is not computed, unless closed forms are asked for."""
        if not self._limited:
            return None
        costs = self._costs[name]
        if costs.closed(coupled) > costs.saved:
            takes = f"takes {costs.products(coupled):,} products, and with it a closed form costs more"
            return f"the loss Hessian at its output {takes} than the {costs.products_saved:,} products that it saves"
        if len(self._chosen) * costs.curvature_bytes(coupled) > checks.memory_budget():
            return "the loss Hessian at its output does not fit into memory"
        return None

    # ---- which layers have a closed form

    def reason(self, block: Block, part: str = "total") -> str | None:
        """Why a part of the block is not computed in closed form; None if it is."""
        place = self._layers.place(block)
        if isinstance(place, str):
            return place
        found = self._sized_out(place, block, part) or self._verify(place.layer) or self._too_dear(place, block, part)
        return self._couples(place.layer) if found is None and self._needs_curvature(part) else found

    def require(self, blocks: Mapping[str, Block]) -> None:
        """Raise unless every block has a closed form."""
        without: dict[str, list[str]] = {}
        for name, block in blocks.items():
            reason = self.reason(block)
            if reason is not None:
                without.setdefault(reason, []).append(name)
        if without:
            found = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in without.items())
            raise ModelError("method", f"{found}. Leave them out with `select`, or use method='auto'")

    def _verify(self, layer: ModelLayer) -> str | None:
        """Why the layer has no closed form: it is rebuilt, on all micro-batches and at shaken weights."""
        if layer.name not in self._reasons:
            with self._engine.ranks.together():
                reason, batches = self._rebuilt(layer)
            self._reasons |= self._agreed({layer.name: reason})
            own = batches[0].rebuilt.layer if batches else None
            for needed, known in self._coreless.items():
                roles = own.coreless(functional=not needed) if isinstance(own, SelfAttention) else ""
                known |= self._agreed({layer.name: roles or None})
        return self._reasons[layer.name]

    def _rebuilt(self, layer: ModelLayer) -> tuple[str | None, list[LayerAtBatch]]:
        """The layer on all micro-batches, or why not. Passes are made for its group, and kept of one group."""
        if layer.name not in self._batches:
            if layer.name not in self._passes:
                self._batches.clear()
                self._passes = passes_of(self._engine, self._groups[layer.name])
            snapshot, passes = self._engine.snapshot, self._passes.pop(layer.name)
            weights = snapshot.copies(layer.parameters)
            found = rebuilt_on(layer, weights, snapshot.paths, passes)
            if found[0] is not None and layer.kind == "attn" and passes.reason is None:
                found = self._rebuilt_from_graph(layer, weights, passes)
            if found[0] is None and found[1]:
                bent = found[1][0].bent(passes.slopes, passes.passes[0].own.size)
                found = found if bent is None else (bent, [])
            self._batches[layer.name] = found
        return self._batches[layer.name]

    def _rebuilt_from_graph(
        self, layer: ModelLayer, weights: Mapping[str, Tensor], passes: LayerPasses
    ) -> tuple[str | None, list[LayerAtBatch]]:
        """Attention as the graph of a pass says that it is computed. One pass serves all layers of a group."""
        attending = [one for one in self._chosen.values() if one.kind == "attn"]
        if sum(self._costs[one.name].gradient_bytes for one in attending) > checks.memory_budget():
            return "its call does not tell how it makes its scores, and their graph does not fit into memory", []
        if layer.name not in self._traced:
            self._traced = traced_layers(self._engine, [one for one in self._groups[layer.name] if one in attending])
        at = layer, weights, self._engine.snapshot.paths, passes
        moved = self._traced.pop(layer.name)
        if layer.latent:
            return rebuilt_latent(*at, (traced_layers(self._engine, [layer], shake=False)[layer.name], moved))
        return rebuilt_as_traced(*at, moved)

    def _passed_together(self, room: int) -> dict[str, list[ModelLayer]]:
        """Layers that the same passes serve, by the name of each: all of them, or as many as there is room for."""
        groups: dict[str, list[ModelLayer]] = {}
        group, used = list[ModelLayer](), 0
        for name, layer in self._chosen.items():
            needed = self._costs[name].record_bytes
            if used + needed > room:
                group, used = [], 0
            group.append(layer)
            used += needed
            groups[name] = group
        return groups

    def _couples(self, layer: ModelLayer) -> str | None:
        """Why S is not computed once it is known, from products, how many tokens it couples."""
        if layer.name not in self._coupling:
            found: dict[str, str | None] = {layer.name: None}

            def probe(tail: DownstreamLoss) -> None:
                found[layer.name] = self._too_costly(layer.name, tail.coupled("total"))

            with self._engine.ranks.together():
                if self._limited:
                    self._tails(layer, probe, first=True)
            self._coupling |= self._agreed(found)
        return self._coupling[layer.name]

    # ---- closed forms

    @property
    def layers(self) -> list[ModelLayer]:
        """Those that hold the blocks of the Hessian."""
        return list(self._chosen.values())

    def tail(self, layer: ModelLayer) -> tuple[DownstreamLoss, Rebuilt | None]:
        """The network behind a layer, and the layer in closed form if it has one, on the only micro-batch."""
        reason, tails = self._verify(layer), list[DownstreamLoss]()
        self._tails(layer, tails.append)
        if len(tails) != 1:
            raise BatchError("batches", f"got {len(tails)} micro-batches; a layer's output is of one batch: give one")
        return tails[0], self._rebuilt(layer)[1][0].rebuilt if reason is None else None

    def block(self, part: str, row: Block, column: Block) -> LinearOperator | None:
        """A block of a part of the Hessian, where both of its sides lie in one layer with a closed form."""
        first, second = self._layers.place(row), self._layers.place(column)
        if isinstance(first, str) or isinstance(second, str) or first.layer is not second.layer:
            return None
        with self._engine.ranks.together():
            self._engine.snapshot.check()
        if self.reason(row, part) is not None or self.reason(column, part) is not None:
            return None
        of_loss, of_layer = self._parts[part]
        ranks, own, known = self._engine.ranks, None, True
        with ranks.together():
            for per_head in (False, True):
                hessians = self._of_layer(first.layer, of_loss, per_head)
                known = not hessians or {*first.weights, *second.weights} <= set(hessians[0].names)
                if hessians and known:
                    matrices = (getattr(hessian, of_layer) for hessian in hessians)
                    own = reduce(add, (self._between(first, second, one) for one in matrices))
                    break
            if own is not None and of_layer != "outer":
                own = self._with_gradient(own, first, second)
        if not isinstance(ranks, Group):
            return own
        if not all(ranks.exchange(known)):  # a weight with a single head of another
            return None
        like = torch.empty(0, dtype=self._engine.dtype, device=self._engine.device)
        return RankSum(own, row.shape, column.shape, like, row == column, ranks)

    def _between(self, first: BlockPlace, second: BlockPlace, matrix: BlockMatrix) -> LinearOperator:
        """The block of two places, from the blocks of the layer's weights."""
        if first.adapter is None and second.adapter is None:
            return matrix[first.name, second.name]
        weights = self._engine.snapshot.parameters(self._engine.snapshot.weights)
        rows = first.moves(weights)
        return moved_block(matrix, rows, rows if first is second else second.moves(weights), first is second)

    def _with_gradient(self, block: LinearOperator, row: BlockPlace, column: BlockPlace) -> LinearOperator:
        """The block, with what the gradient at a weight gives to that of the two factors of one adapter."""
        adapter, role = row.adapter, row.role or column.role
        if adapter is None or adapter is not column.adapter or (row.role is None) == (column.role is None):
            return block
        assert role is not None
        name = row.layer.exact_name(role)
        gradients = (at.weight_gradient(name) for at in self._rebuilt(row.layer)[1])
        found = adapter.bilinear(reduce(add, gradients))
        return block + (found if row.role is None else found.T)

    def _of_layer(self, layer: ModelLayer, part: str | None, per_head: bool) -> list[BlockHessian]:
        """The layer's Hessian with a part of S, or without S, one summand for each micro-batch."""
        key = (layer.name, part, per_head)
        if key not in self._hessians:
            batches = self._rebuilt(layer)[1]
            summands = zip(batches, self._curvatures(layer, part, len(batches)), strict=True)
            self._hessians[key] = [
                at.rebuilt.hessian(LossAt(at.value, at.gradient, curvature), per_head) for at, curvature in summands
            ]
        return self._hessians[key]

    def _curvatures(self, layer: ModelLayer, part: str | None, batches: int) -> list[Curvature]:
        """A part of S on each micro-batch; nothing is computed if none is asked for."""
        if part is None:
            return [_NO_CURVATURE] * batches
        if (layer.name, part) not in self._made:
            made: list[Curvature] = []
            self._tails(layer, lambda tail: made.append(tail.curvature(part)))
            self._made[layer.name, part] = made
        return self._made[layer.name, part]

    def _tails(self, layer: ModelLayer, visit: Callable[[DownstreamLoss], None], first: bool = False) -> None:
        """Call `visit` with each micro-batch's tail of the network behind the layer, or with the first alone."""
        numbers = count()

        def run(weight: float, batch: Batch) -> None:
            if next(numbers) == 0 or not first:
                visit(DownstreamLoss(self._engine, layer, weight, batch))

        self._engine.walk(run)
