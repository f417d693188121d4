"""Activations computed anew, layer by layer: a graph keeps the inputs of each layer, not what happens inside of it.

A layer y = f(x, θ) is one operation of the graph. Its passes run the layer themselves, each with a graph of its own:

    y = f(x, θ)                   one run without a graph
    (gx, gθ) = J^T g              a run and a backward pass
    directions (a, c) of (gx, gθ) go back to
        g:        J (a, c)
        (x, θ):   d<J^T g, (a, c)>/d(x, θ)
                                  a run and two backward passes
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from curvoscope.autodiff.graph import Operation, check_differentiable, operations, tangents_alone
from curvoscope.autodiff.kernels import kept_derivatives
from curvoscope.autodiff.layer_calls import NotRepeatableError, listed_layers, replaced_forward, without_cache
from curvoscope.autodiff.safety import undisturbed, within
from curvoscope.autodiff.uses import nodes_below
from curvoscope.errors import ModelError

_SAME = 1e-3  # relative difference of the sums of two runs that is none


class _RecomputedCall:
    """One call of a layer, as a function of the tensors among its arguments and of its parameters."""

    def __init__(
        self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, found: set[Operation]
    ) -> None:
        self._layer, self._forward, self._found = layer, forward, found
        values, self._structure = tree_flatten((args, kwargs))
        self._constants = [None if isinstance(value, Tensor) else value for value in values]
        self._places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        own = dict(layer.named_parameters(remove_duplicate=False))
        self._paths = list(own)
        self._buffers = {path: buffer.clone() for path, buffer in layer.named_buffers(remove_duplicate=False)}
        self.tensors = [*(values[i] for i in self._places), *own.values()]
        self._sums: list[float] = []
        self._checked = False

    def first(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run as the pass does, without a graph; the tensors that the layer returns."""
        with torch.no_grad():
            returned, self._returned = tree_flatten(self._run(tensors))
        found = [value for value in returned if isinstance(value, Tensor)]
        self._outputs = [(True, None) if isinstance(value, Tensor) else (False, value) for value in returned]
        self._sums = [float(value.sum()) if value.is_floating_point() else 0.0 for value in found]
        return tuple(value.clone() for value in found)  # not a view of an input: the model may go on in place

    def returned(self, found: Sequence[Tensor]) -> Any:
        """What the layer returned, with these tensors in it."""
        tensors = iter(found)
        values = [next(tensors) if tensor else value for tensor, value in self._outputs]
        return tree_unflatten(values, self._returned)

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run with a graph, as the engine runs the model."""
        with undisturbed(self._layer), kept_derivatives(self._layer):
            paths = zip(self._paths, tensors[len(self._places) :], strict=True)
            weights = {**dict(paths), **{path: buffer.clone() for path, buffer in self._buffers.items()}}
            returned = within(self._layer, weights, lambda: self._run(tensors))
        found = [value for value in tree_flatten(returned)[0] if isinstance(value, Tensor)]
        sums = [float(value.detach().sum()) if value.is_floating_point() else 0.0 for value in found]
        sizes = [math.sqrt(value.numel()) * float(value.detach().norm()) for value in found]
        if len(sums) != len(self._sums) or any(
            abs(now - then) > _SAME * size for now, then, size in zip(sums, self._sums, sizes, strict=True)
        ):
            raise NotRepeatableError(
                "recompute",
                "got 'layer', but a layer returns different outputs when run twice; remove its randomness or state",
            )
        return found

    def note(self, outputs: Sequence[Tensor]) -> None:
        """Note the operations inside, for the test of products."""
        if not self._checked:
            self._found |= operations([output.grad_fn for output in outputs if output.grad_fn is not None])

    def check(self, gradients: Sequence[Tensor]) -> None:
        """Raise, the first time, if an operation inside has no second derivative."""
        if not self._checked:
            check_differentiable([get_gradient_edge(one) for one in gradients if one.requires_grad])
            self._checked = True

    def _run(self, tensors: Sequence[Tensor]) -> Any:
        values = list(self._constants)
        for i, tensor in zip(self._places, tensors, strict=False):
            values[i] = tensor
        args, kwargs = tree_unflatten(values, self._structure)
        return self._forward(*args, **kwargs)


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)]


class _Recomputed(torch.autograd.Function):
    """(x, θ) -> y."""

    @staticmethod
    def forward(ctx: Any, call: _RecomputedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        found = call.first(tensors)
        ctx.mark_non_differentiable(*(value for value in found if not value.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        places = [i for i, g in enumerate(cotangents) if g is not None]
        if not places:
            return (None,) * (1 + len(tensors))
        given = [g for g in cotangents if g is not None]
        return None, *_RecomputedGradient.apply(ctx.call, wanted, places, *tensors, *given)


class _RecomputedGradient(torch.autograd.Function):
    """(x, θ, g) -> (gx, gθ) = J^T g, as far as they are wanted."""

    @staticmethod
    def forward(
        ctx: Any, call: _RecomputedCall, wanted: Sequence[bool], places: Sequence[int], *given: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.wanted, ctx.places = call, wanted, places
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return tuple(_gradient(call, wanted, places, given, twice=False)[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = list(ctx.needs_input_grad[3:])
        if tangents_alone():
            needed[: len(ctx.wanted)] = [False] * len(ctx.wanted)
        leaves, gradients = _gradient(ctx.call, ctx.wanted, ctx.places, ctx.saved_tensors, twice=True)
        ctx.call.check([one for one in gradients if one is not None])
        pairs = [
            (one, direction)
            for one, direction in zip(gradients, directions, strict=True)
            if one is not None and direction is not None and one.requires_grad
        ]
        ends = [leaf for leaf, need in zip(leaves, needed, strict=True) if need and leaf.requires_grad]
        if not pairs or not ends:
            return (None,) * (3 + len(needed))
        found = iter(torch.autograd.grad([a for a, _ in pairs], ends, [b for _, b in pairs], allow_unused=True))
        own = [next(found) if need and leaf.requires_grad else None for leaf, need in zip(leaves, needed, strict=True)]
        return None, None, None, *own


def _gradient(
    call: _RecomputedCall, wanted: Sequence[bool], places: Sequence[int], given: Sequence[Tensor], twice: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Fresh leaves (x, θ, g), and J^T g, with a graph if it is to be differentiated `twice`."""
    leaves = _leaves(given, [*wanted, *[twice] * len(places)])
    tensors, cotangents = leaves[: len(wanted)], leaves[len(wanted) :]
    with torch.enable_grad():
        outputs = call.again(tensors)
        call.note(outputs)
        starts = [(outputs[i], g) for i, g in zip(places, cotangents, strict=True) if outputs[i].requires_grad]
        ends = [leaf for leaf, want in zip(tensors, wanted, strict=True) if want]
        if not starts or not ends:
            return leaves, [None] * len(tensors)
        found = iter(
            torch.autograd.grad(
                [F for F, _ in starts], ends, [g for _, g in starts], create_graph=twice, allow_unused=True
            )
        )
    return leaves, [next(found) if want else None for want in wanted]


class Recomputation:
    """Runs of a model whose layers are single operations; `operations` are those found inside of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._layers = model, listed_layers(model)
        self.count = len(self._layers)
        self.operations: set[Operation] = set()
        self._checked = False
        if not self._layers:
            raise ModelError("recompute", "got 'layer', but the model has no nn.ModuleList of layers; leave it out")

    @contextmanager
    def by_layer(self) -> Iterator[None]:
        """Inside, the model's graph keeps the inputs of its layers alone."""

        def call(path: str, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            one = _RecomputedCall(layer, forward, args, kwargs, self.operations)
            return one.returned(_Recomputed.apply(one, *one.tensors))

        with without_cache(self._model), replaced_forward(self._layers, call):
            yield

    def check(self, run: Callable[[], Sequence[Tensor]]) -> None:
        """Raise, the first time, if tensors with derivatives enter or leave a layer in another way than as arguments
        and results: through an attribute, a hook or a closure. A layer that runs without a graph would lose them.

        Args:
            run: the model, all of whose parameters have derivatives; what the loss reads.
        """
        if self._checked:
            return
        inner: dict[int, tuple[str, Tensor]] = {}  # leaves inside of layers, which are cut out of the model

        def call(path: str, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            def inside(value: Any) -> Any:
                found = _cut_off(value)
                inner[id(found)] = path, found
                own.add(id(found))
                return found

            own: set[int] = set()
            args, kwargs = tree_map(inside, (args, kwargs))
            weights = {name: inside(weight) for name, weight in layer.named_parameters(remove_duplicate=False)}
            returned = within(layer, weights, lambda: forward(*args, **kwargs))
            if not own.issuperset(map(id, _leaves_below(tree_leaves(returned)))):
                raise _escaping(path, "reads")
            return tree_map(_cut_off, returned)

        with without_cache(self._model), replaced_forward(self._layers, call):
            outputs = run()
        found = next((inner[id(leaf)][0] for leaf in _leaves_below(outputs) if id(leaf) in inner), None)
        if found is not None:
            raise _escaping(found, "hands on")
        self._checked = True


def _cut_off(value: Any) -> Any:
    """A tensor as a leaf of its own; anything else as it is."""
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _leaves_below(values: Sequence[Any]) -> list[Tensor]:
    """The leaves from which tensors with derivatives were computed."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    nodes = nodes_below([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])
    alone = [tensor for tensor in tensors if tensor.grad_fn is None]
    return [*alone, *(node.variable for node in nodes if hasattr(node, "variable"))]


def _escaping(path: str, does: str) -> ModelError:
    return ModelError(
        "recompute",
        f"got 'layer', but {path!r} {does} tensors otherwise than as arguments and results (by an attribute, a hook or "
        "a closure): their derivatives would be missing. Leave it out",
    )
