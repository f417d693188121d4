"""Passes of the model that tell of its layers: what goes through them, and the loss behind them.

The same passes serve all layers: for every micro-batch one forward and one backward pass give X, F and G = dl/dF at
each of them, and one forward pass gives X and F at shaken weights. No second derivative is needed. The loss as a
function of F, which has one, is `DownstreamLoss`, of one layer and one micro-batch.
"""

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import losses
from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import Graph, unless_unbatched
from curvoscope.autodiff.hooks import check_gradients
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.closed.layers import ROTARY, ModelLayer, arguments_of
from curvoscope.errors import ModelError
from curvoscope.losses import Curvature

NOT_ONCE = "it does not run exactly once in a pass, from tensor to tensor"
NOT_REACHED = (
    "a batch sends no token to this expert, or its experts run together: Hugging Face's models take "
    "model.set_experts_implementation('eager')"
)
_SMALL_GRAPH = 2**22  # bytes up to which many products are made at once
_TOLD = ("attention_mask", "mask", "attn_mask", "key_padding_mask", ROTARY)  # arguments that say what is computed


@dataclass(frozen=True)
class LayerRecord:
    """What one pass of the model tells of a layer, without its graph.

    X and F (N, L, .); `size`: the largest entry of the tensor that holds F; `arguments`: masks and rotary tables that
    `module` was called with; `with_keys`: it was called with keys of their own, as `nn.MultiheadAttention` is; `memory`
    (N, L', .): what cross-attention makes its keys of.
    """

    X: Tensor
    F: Tensor
    size: float
    module: nn.Module
    arguments: Mapping[str, Any]
    with_keys: bool
    memory: Tensor | None = None

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, if the module was called with some."""
        given = self.arguments.get(ROTARY)
        return given if isinstance(given, tuple) and len(given) == 2 else None


class LayerRecorder:
    """Hooks that note what passes through a layer while the model runs inside."""

    def __init__(self, model: nn.Module, layer: ModelLayer) -> None:
        self.layer, self._module = layer, model.get_submodule(layer.caller)
        self._read, self._written = layer.input.hook(model), layer.output.hook(model)
        self._added = None if layer.added is None else layer.added.hook(model)
        self._memory = None if layer.memory is None else layer.memory.hook(model)
        self._taps = [tap for tap in (self._read, self._written, self._added, self._memory) if tap is not None]
        self._arguments: dict[str, Any] = {}
        self._key: Any = None
        self._with_keys = False

    def __enter__(self) -> "LayerRecorder":
        self._stack = ExitStack()
        for tap in self._taps:
            self._stack.enter_context(tap)
        handle = self._module.register_forward_pre_hook(self._call, with_kwargs=True)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _call(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = arguments_of(module, inputs, keywords)
        self._arguments, self._with_keys = {name: given[name] for name in _TOLD if name in given}, "key" in given
        self._key = given.get("key")

    @property
    def once(self) -> bool:
        """Whether the layer ran exactly once, from tensor to tensor."""
        return all(tap.once for tap in self._taps)

    @property
    def record(self) -> LayerRecord:
        """What the last pass told."""
        written = self.written.detach()
        return LayerRecord(
            self.batched(self._read.tensor.detach()),
            self.batched(written if self._added is None else written - self._added.tensor.detach()),
            float(written.abs().max()),
            self._module,
            self._arguments,
            self._with_keys,
            self._seen_memory(),
        )

    def _seen_memory(self) -> Tensor | None:
        if self.layer.kind != "cross" and self._memory is None:
            return None
        memory = self._key if self._memory is None else self._memory.tensor
        return self.batched(memory.detach()) if isinstance(memory, Tensor) else None

    @property
    def written(self) -> Tensor:
        """The tensor that holds F, in the model's own shape, with its graph."""
        return self._written.tensor

    def batched(self, values: Tensor) -> Tensor:
        """From the model's shape to (N, L, .)."""
        if self.layer.tokens_first and values.ndim == 3:
            return values.transpose(0, 1)
        return values.reshape(-1, *values.shape[-2:]) if values.ndim > 1 else values[None, None]

    def unbatched(self, values: Tensor) -> Tensor:
        """Back from (N, L, m) to the shape of `written`."""
        shape = self.written.shape
        return values.transpose(0, 1) if self.layer.tokens_first and len(shape) == 3 else values.reshape(shape)


@dataclass(frozen=True)
class LayerPass:
    """One micro-batch at a layer: what passes through at the model's own weights and at shaken ones, and the loss and
    G (N, L, m) at its output, times the weight of the micro-batch. An expert may see no token at shaken weights."""

    own: LayerRecord
    moved: LayerRecord | None
    value: float
    gradient: Tensor


@dataclass
class LayerPasses:
    """All micro-batches at a layer, or a reason why the layer cannot be cut out of the model.

    `slopes`: of <R, F> in each weight of the layer by its name in closed form, on the first micro-batch, R being
    `random_cotangent`: torch's gradient is that of the function, unless something in the layer is detached or a hook
    changes it.
    """

    reason: str | None = None
    passes: list[LayerPass] = field(default_factory=list)
    slopes: Mapping[str, Tensor] = field(default_factory=dict)


def passes_of(engine: Autodiff, layers: Sequence[ModelLayer]) -> dict[str, LayerPasses]:
    """Run the model on all micro-batches, for all the layers at once: what is found, by their names."""
    found = {layer.name: LayerPasses() for layer in layers}
    moved: dict[str, Tensor] = {}  # the shaken weights: as large as the model, so made once

    def visit(weight: float, batch: Batch) -> None:
        moved.update({} if moved else shaken(engine.snapshot.weights))
        before = {name: at.reason for name, at in found.items()}
        with torch.no_grad():
            records, _, _ = recorded(engine, moved, batch, found, layers)
        for layer in (layer for layer in layers if layer.routed):
            found[layer.name].reason = before[layer.name]
        left = [layer for layer in layers if layer.name in records or layer.routed]
        if left:
            _add_passes(engine, left, weight, batch, records, found)

    engine.walk(visit)
    return found


def recorded(
    engine: Autodiff,
    weights: Mapping[str, Tensor],
    batch: Batch,
    found: Mapping[str, LayerPasses],
    layers: Sequence[ModelLayer],
) -> tuple[dict[str, LayerRecord], dict[str, LayerRecorder], Any]:
    """Records and recorders of the layers that ran once, and the outputs."""
    with ExitStack() as stack:
        recorders = {
            layer.name: stack.enter_context(LayerRecorder(engine.model, layer))
            for layer in layers
            if found[layer.name].reason is None
        }
        outputs = engine.snapshot(weights, batch)
    for name, recorder in recorders.items():
        if not recorder.once:
            found[name].reason = NOT_ONCE if not recorder.layer.routed else NOT_REACHED
    recorders = {name: recorder for name, recorder in recorders.items() if recorder.once}
    return {name: recorder.record for name, recorder in recorders.items()}, recorders, outputs


def _add_passes(
    engine: Autodiff,
    layers: Sequence[ModelLayer],
    weight: float,
    batch: Batch,
    moved: Mapping[str, LayerRecord],
    found: Mapping[str, LayerPasses],
) -> None:
    """Add a micro-batch: G at all layers by one backward pass. On the first one, weights must act through F alone."""
    weights, leaves = engine.snapshot.leaves(sorted({name for layer in layers for name in layer.parameters}))
    own, recorders, outputs = recorded(engine, weights, batch, found, layers)
    layers = [layer for layer in layers if layer.name in own]
    if not layers:
        return
    engine.check_loss(weights, outputs, batch)
    value = weight * float(engine.objective(outputs, batch.targets).detach())
    ends = list(zip(*engine.objective.gradient(outputs, batch.targets), strict=True))
    cut, back = [F for F, _ in ends if F.requires_grad], [G.detach() for F, G in ends if F.requires_grad]
    first = not any(found[layer.name].passes for layer in layers)
    written = [recorders[layer.name].written for layer in layers]
    wanted = [*written, *(leaves.values() if first else ())]
    gradients = torch.autograd.grad(cut, wanted, back, retain_graph=first, materialize_grads=True)
    whole = dict(zip(leaves, gradients[len(layers) :], strict=True)) if first else {}
    for layer, F, G in zip(layers, written, gradients, strict=False):
        at, recorder = found[layer.name], recorders[layer.name]
        if first:
            its = [leaves[name] for name in layer.parameters]
            found_through = torch.autograd.grad(F, its, G, retain_graph=True, materialize_grads=True)
            through = dict(zip(layer.parameters, found_through, strict=True))
            names = [block.pieces[0].parameter for block in layer.all_blocks]
            both = ([block.gather(one) for block in layer.all_blocks] for one in (whole, through))
            try:
                check_gradients(layer.output, names, *both)
            except ModelError as problem:
                at.reason = str(problem)
            R = recorder.unbatched(random_cotangent(own[layer.name].F))
            found_through = torch.autograd.grad(F, its, R, retain_graph=True, materialize_grads=True)
            through = dict(zip(layer.parameters, found_through, strict=True))
            at.slopes = slopes_of({layer.exact_name(role): b.matrix(through) for role, b in layer.blocks.items()})
        at.passes.append(LayerPass(own[layer.name], moved.get(layer.name), value, weight * recorder.batched(G)))


def random_cotangent(F: Tensor) -> Tensor:
    """R, shaped like F, always the same."""
    return torch.randn(F.shape, generator=torch.Generator().manual_seed(0), dtype=F.dtype).to(F.device)


def slopes_of(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each gradient (a, p) or (p,) times a vector (p,), always the same: little to keep, and different for others."""
    matrices = {name: one.reshape(-1, one.shape[-1]) for name, one in gradients.items()}
    return {name: matrix @ random_cotangent(matrix[0]) for name, matrix in matrices.items()}


def shaken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights moved by random amounts of about half their size, zeros as well; each always by the same."""
    moved = {}
    for name, weight in weights.items():
        moved[name] = weight.detach()
        if weight.is_floating_point() and weight.numel():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
            size = weight.detach().square().mean().sqrt() + weight.shape[-1] ** -0.5 if weight.ndim else 0.1
            moved[name] = weight.detach() + 0.5 * size * noise
    return moved


class DownstreamLoss:
    """The loss of one micro-batch, times its weight, as a function of a layer's output F (N, L, m)."""

    def __init__(self, engine: Autodiff, layer: ModelLayer, weight: float, batch: Batch) -> None:
        self._weight = weight
        weights, _ = engine.snapshot.leaves(layer.parameters)
        with kept_derivatives(engine.model), LayerRecorder(engine.model, layer) as self._record:
            outputs = engine.snapshot(weights, batch)
        engine.check_loss(weights, outputs, batch)
        cut, gradient = engine.objective.gradient(outputs, batch.targets)
        F = self._record.written
        slope = torch.autograd.grad(cut, F, gradient, materialize_grads=True, retain_graph=True)
        self.gradient = self._record.batched(slope[0])
        self._graph = Graph({"F": F}, cut, gradient)
        engine.vouch(self._graph)
        self._together = self._graph.nbytes <= _SMALL_GRAPH

    def coupled(self, part: str) -> int:
        """How many tokens S couples."""
        return losses.group_size(lambda direction: self.products(part, direction[None])[0], self.gradient)

    def curvature(self, part: str) -> Curvature:
        """The part of S, times the weight."""
        return losses.curvature_of(partial(self.products, part), self.gradient, self.coupled(part))

    def products(self, part: str, directions: Tensor) -> Tensor:
        """The part of S, times the weight, times directions (n, N, L, m)."""
        moved = torch.stack([self._record.unbatched(direction) for direction in directions])
        found = None
        if len(moved) > 1 and self._together:
            found = unless_unbatched(lambda: self._product(part, moved, many=True))
            self._together = found is not None
        if found is None:
            found = torch.stack([self._product(part, one, many=False) for one in moved])
        return self._weight * torch.stack([self._record.batched(product) for product in found])

    def _product(self, part: str, directions: Tensor, many: bool) -> Tensor:
        found = self._graph.product(part, {"F": directions}, ["F"], many).get("F")
        return torch.zeros_like(directions) if found is None else found
