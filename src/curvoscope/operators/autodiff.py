"""Matrix-free Hessian of any torch model: total, outer and functional part of the same blocks from one forward pass.

The model is evaluated at copies of its weights, made when the Hessian is: it stays as it was, and the Hessian is that
of these weights, whatever becomes of the model later.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvoscope import checks
from curvoscope.blocks import Block, Blocks
from curvoscope.errors import DeviceError, EmptyError, LossError, ModelError, NonFiniteError
from curvoscope.operators.autodiff_graph import Graph
from curvoscope.operators.autodiff_layers import Tap, layer_of
from curvoscope.operators.batches import Batch, Batches
from curvoscope.operators.objectives import CrossEntropy, MeanSquaredError, Objective
from curvoscope.operators.pointwise import kept_derivatives
from curvoscope.operators.safety import check_mode, undisturbed

_AT_ONCE = 2**25  # bytes of a graph up to which several vectors at once are faster than one after the other
_WORKSPACE = 2**28  # bytes for vectors at once


@dataclass(frozen=True)
class Survey:
    """The loss, the mean over all terms, and the number of terms of each micro-batch."""

    loss: float
    terms: tuple[float, ...]

    @property
    def weights(self) -> list[float]:
        """Share of each micro-batch in the mean."""
        total = sum(self.terms)
        return [count / total for count in self.terms]


class Autodiff:
    """Products with the Hessian of the mean loss over all batches, and with its two parts."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None,
        batches: Batches,
        blocks: Blocks,
        split: str = "model",
        device: torch.device | str | None = None,
        memory_limit: int | None = None,
    ) -> None:
        check_mode(model)
        blocks.check(model)
        self.blocks, self.split = blocks, checks.choice("split", split, ("model", "layer"))
        self._model, self._batches = model, batches
        self._budget = checks.memory_budget(memory_limit)
        self._paths = _paths(model, blocks)
        self.device = _device(model, device)
        self.dtype = _dtype(model, blocks)
        self._weights = {
            name: self._own(tensor) for name, tensor in nn.Module.named_parameters(model, remove_duplicate=True)
        }
        self._buffers = {
            name: self._own(tensor) for name, tensor in nn.Module.named_buffers(model, remove_duplicate=True)
        }
        self._kept: OrderedDict[tuple[frozenset[str], str | None], dict[int, Graph]] = OrderedDict()
        self._can_batch = True
        with undisturbed(model, batches.generators):
            self.objective = objective or self._objective_of_model()
            self.survey = self._survey()

    # ---- products

    def product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """Rows of the Hessian (or its `part`) times vectors (n, C) that live in the blocks `columns`: (n, R)."""
        layer = self._layer(part, [*rows, *columns])
        spread = self._spread(columns, vectors)
        wanted = list(dict.fromkeys(piece.parameter for block in rows for piece in block.pieces))
        totals: list[Tensor] = []

        def add(weight: float, graph: Graph) -> None:
            found = self._products(graph, part, rows, wanted, spread)
            if weight != 1:
                found *= weight
            totals[:] = [totals[0].add_(found) if totals else found]

        self._visit(frozenset(spread).union(wanted), layer, add)
        return totals[0]

    def _products(
        self, graph: Graph, part: str, rows: Sequence[Block], wanted: Sequence[str], vectors: Mapping[str, Tensor]
    ) -> Tensor:
        """One batch's products, (n, R): all vectors at once where the overhead of a call would dominate."""
        count = next(iter(vectors.values())).shape[0]
        if count > 1 and self._can_batch and graph.nbytes <= _AT_ONCE:
            step = max(1, min(64, _WORKSPACE // max(1, graph.nbytes)))
            try:
                return torch.cat(
                    [
                        self._flat(rows, wanted, graph.product(part, _taken(vectors, chunk), wanted, many=True), chunk)
                        for chunk in (range(start, min(start + step, count)) for start in range(0, count, step))
                    ]
                )
            except (RuntimeError, NotImplementedError):  # an operation that torch cannot batch
                self._can_batch = False
        found = [
            self._flat(rows, wanted, graph.product(part, {name: v[i] for name, v in vectors.items()}, wanted, many=False))
            for i in range(count)
        ]
        return found[0][None] if count == 1 else torch.stack(found)

    def _spread(self, columns: Sequence[Block], vectors: Tensor) -> dict[str, Tensor]:
        """Vectors (n, C) as tensors (n, *shape) like the parameters; views where a block is a whole parameter."""
        pieces = [piece for block in columns for piece in block.pieces]
        spread: dict[str, Tensor] = {}
        for piece, part in zip(pieces, vectors.split([piece.size for piece in pieces], 1), strict=True):
            name, stored = piece.parameter, piece.stored
            if piece.size == self._weights[self._paths[name]].numel():
                order = piece.layout.rows + piece.layout.columns
                back = sorted(range(len(order)), key=order.__getitem__)
                ordered = part.reshape(-1, *(stored[axis] for axis in order))
                spread[name] = ordered.permute(0, *(1 + axis for axis in back))
            else:
                if name not in spread:
                    spread[name] = vectors.new_zeros(vectors.shape[0], *stored)
                region = piece.of(spread[name])
                region.copy_(part.reshape(region.shape))
        return spread

    def _flat(
        self, rows: Sequence[Block], wanted: Sequence[str], found: dict[str, Tensor], many: range | None = None
    ) -> Tensor:
        """Products by parameter as vectors over the blocks `rows`; those that are missing are zero."""
        lead = () if many is None else (len(many),)
        for name in wanted:
            if name not in found:
                weight = self._weights[self._paths[name]]
                found[name] = weight.new_zeros(()).expand(*lead, *weight.shape)
        return torch.cat([block.gather(found) for block in rows], -1)

    # ---- graphs

    def _visit(self, names: frozenset[str], layer: str | None, visit: Callable[[float, Graph], None]) -> None:
        """Call `visit` with the weight and the graph of each micro-batch: kept graphs first, the others made anew."""
        key = next((key for key in self._kept if key[0] >= names and key[1] == layer), (names, layer))
        kept = self._kept.setdefault(key, {})
        self._kept.move_to_end(key)
        weights = self.survey.weights
        for i, graph in kept.items():
            visit(weights[i], graph)
        missing = {i for i, weight in enumerate(weights) if weight} - set(kept)
        if not missing:
            return
        with undisturbed(self._model, self._batches.generators):
            for i, batch in enumerate(self._batches):
                if i in missing:
                    graph = self._graph(batch, key[0], layer)
                    visit(weights[i], graph)
                    if self._make_room(key, graph.nbytes):
                        kept[i] = graph
                    del graph

    def _make_room(self, key: tuple[frozenset[str], str | None], nbytes: int) -> bool:
        """Whether a graph of this size may be kept; graphs of other selections, the oldest first, give way."""

        def used() -> int:
            return sum(graph.nbytes for graphs in self._kept.values() for graph in graphs.values())

        for other in list(self._kept):
            if other != key and used() + nbytes > self._budget:
                del self._kept[other]
        return used() + nbytes <= self._budget

    def _graph(self, batch: Batch, names: frozenset[str], layer: str | None) -> Graph:
        batch = batch.to(self.device, self.dtype)
        chosen = {self._paths[name]: name for name in names}
        weights = {path: tensor.detach().requires_grad_(path in chosen) for path, tensor in self._weights.items()}
        leaves = {name: weights[self._paths[name]] for name in sorted(names)}
        if layer is None:
            with kept_derivatives(self._model):
                outputs = self._call(weights, batch)
            return Graph(leaves, *self.objective.gradient(outputs, batch.targets))
        with kept_derivatives(self._model), Tap(self._model, layer) as tap:
            outputs = self._call(weights, batch)
        cut, gradient = self.objective.gradient(outputs, batch.targets)
        inner = torch.autograd.grad(cut, tap.output, gradient, create_graph=True)
        self._check_layer(layer, leaves, cut, gradient, tap.output, inner[0])
        return Graph(leaves, [tap.output], inner)

    def _check_layer(
        self,
        layer: str,
        leaves: Mapping[str, Tensor],
        cut: Sequence[Tensor],
        gradient: Sequence[Tensor],
        output: Tensor,
        inner: Tensor,
    ) -> None:
        """The blocks must act on the loss through the layer's output alone."""
        tensors = list(leaves.values())
        whole = torch.autograd.grad(cut, tensors, gradient, retain_graph=True, allow_unused=True)
        through = torch.autograd.grad(output, tensors, inner, retain_graph=True, allow_unused=True)
        for name, a, b in zip(leaves, whole, through, strict=True):
            if a is None and b is None:
                continue
            zero = torch.zeros_like(leaves[name])
            a, b = zero if a is None else a, zero if b is None else b
            if float((a - b).abs().max()) > torch.finfo(self.dtype).eps ** 0.5 * float(a.abs().max()):
                raise ModelError(
                    name, f"acts on the loss also beside the output of {layer!r}, is it tied? Use split='model'"
                )

    def _call(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        buffers = {path: buffer.clone() for path, buffer in self._buffers.items()}
        return functional_call(
            self._model, {**weights, **buffers}, batch.arguments, batch.keywords, tie_weights=True, strict=False
        )

    # ---- the first look

    def _survey(self) -> Survey:
        """Loss and number of terms of each micro-batch; the first one is run twice, to see whether it changes."""
        losses, counts = [], []
        for position, batch in enumerate(self._batches):
            batch = batch.to(self.device, self.dtype)
            value, count = self._value(batch)
            if position == 0 and count:
                again, _ = self._value(batch)
                if abs(again - value) > 64 * torch.finfo(self.dtype).eps * max(abs(value), 1e-30):
                    raise LossError(
                        "model", f"two identical calls gave {value:.8g} and {again:.8g}; call model.eval(), or seed it"
                    )
            losses.append(value)
            counts.append(float(count))
        total = sum(counts)
        if not total:
            raise EmptyError("batches", "every target is ignored: the mean has no terms")
        loss = sum(value * count for value, count in zip(losses, counts, strict=True) if count) / total
        return Survey(loss, tuple(counts))

    def _value(self, batch: Batch) -> tuple[float, int | float]:
        with torch.no_grad():
            outputs = self._call(self._weights, batch)
        count = self.objective.terms(outputs, batch.targets)
        if not count:
            return 0.0, 0
        value = self.objective(outputs, batch.targets)
        if value.requires_grad:
            raise LossError(
                "loss_fn", "uses parameters of its own, beside the outputs: return a penalty from the model instead"
            )
        if not bool(torch.isfinite(value)):
            raise NonFiniteError("loss_fn", f"is {float(value)} on batch {batch.index}")
        return float(value), count

    def _objective_of_model(self) -> Objective:
        """For loss_fn=None: the objective that agrees with the loss the model computes from its labels."""
        batch = next(iter(self._batches)).to(self.device, self.dtype)
        labels = {**batch.keywords, "labels": batch.targets}
        with torch.no_grad():
            outputs = self._call(self._weights, Batch(batch.arguments, labels, None, batch.index))
            expected = getattr(outputs, "loss", None)
            if not isinstance(expected, Tensor):
                raise LossError("loss_fn", "is None, and the model returns no `loss`; give loss_fn(outputs, targets)")
            for candidate in (CrossEntropy(shift=True), CrossEntropy(), MeanSquaredError()):
                try:
                    value = candidate(outputs, batch.targets)
                except (ValueError, TypeError, RuntimeError):
                    continue
                if torch.allclose(value, expected.to(value), rtol=1e-4):
                    return candidate
        raise LossError("loss_fn", "is None, and the model's loss is none that is known; give loss_fn(outputs, labels)")

    # ---- parameters

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy on the device; half precision becomes that of the computation."""
        copy = tensor.detach().to(self.device, copy=True)
        return copy.to(self.dtype) if copy.is_floating_point() else copy

    def _layer(self, part: str, blocks: Sequence[Block]) -> str | None:
        """Where to cut: the layer of all the blocks, or the model's output (None), also for the total."""
        if self.split == "model" or part == "total":
            return None
        layers = {layer_of(self._model, block): block.name for block in blocks}
        if len(layers) > 1:
            (one, first), (two, second), *_ = layers.items()
            raise ModelError(
                "split",
                f"{first!r} lies in {one!r} and {second!r} in {two!r}: between layers split='layer' has no parts; "
                "ask for the total, or use split='model'",
            )
        return next(iter(layers))


def _taken(vectors: Mapping[str, Tensor], chunk: range) -> dict[str, Tensor]:
    return {name: vector[chunk.start : chunk.stop] for name, vector in vectors.items()}


def _paths(model: nn.Module, blocks: Blocks) -> dict[str, str]:
    """Where the parameters of the blocks stand in the tree of modules, by the names that the model gives them."""
    places = {id(tensor): path for path, tensor in nn.Module.named_parameters(model, remove_duplicate=True)}
    named = dict(model.named_parameters())
    return {name: places[id(named[name])] for name in sorted(blocks.parameters)}


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = {tensor.device for tensor in model.parameters()}
    if len(found) > 1:
        seen = ", ".join(sorted(map(str, found)))
        raise DeviceError("model", f"has parameters on {seen}; move it with model.to(...), or give device=")
    return found.pop()


def _dtype(model: nn.Module, blocks: Blocks) -> torch.dtype:
    """That of the widest selected parameter, float32 at least."""
    dtype = torch.float32
    for name, parameter in model.named_parameters():
        if name in blocks.parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype
