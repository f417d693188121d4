"""A forward pass cut at the layers of a model, so that one layer's graph exists at a time.

In the pass each layer (a member of an `nn.ModuleList`) runs without a graph, and what it returns starts the graph anew.
Later, from the top, each layer runs once more with a graph, on the inputs that were kept. Between the layers the pass
keeps its own graph, so that nothing is assumed about what happens there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvoscope.errors import ModelError

_SAME = 1e-2  # relative difference of two runs of a layer that is none: in half precision the order of sums matters


class LayerCall:
    """One call of a layer: its inputs, and what it returned, as the start of a graph.

    `inputs` are the tensors of the pass that the layer was given and that have derivatives, by their places among
    all arguments; `outputs` the tensors that the pass goes on with.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        values, self._structure = tree_flatten((args, kwargs))
        self.inputs = {i: v for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad}
        self._values = [v.detach() if isinstance(v, Tensor) else v for v in values]
        with torch.no_grad():
            found, self._returned = tree_flatten(self._run(self._values))
        self.outputs = {
            i: v.detach().requires_grad_()
            for i, v in enumerate(found)
            if isinstance(v, Tensor) and v.is_floating_point()
        }
        self._found = found

    def returned(self) -> Any:
        """What the layer returned, for the pass to go on with: copies, which it may change in place."""
        found = [self.outputs[i].clone() if i in self.outputs else v for i, v in enumerate(self._found)]
        return tree_unflatten(found, self._returned)

    def again(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Run the layer with a graph: its inputs with derivatives, and its outputs, by their places."""
        leaves = {i: self._values[i].requires_grad_() for i in self.inputs}
        values = [leaves[i].clone() if i in leaves else v for i, v in enumerate(self._values)]
        with torch.enable_grad():
            found = tree_flatten(self._run(values))[0]
        outputs = {i: found[i] for i in self.outputs if i < len(found) and isinstance(found[i], Tensor)}
        for i, output in self.outputs.items():
            again = outputs.get(i)
            if again is None or again.shape != output.shape or not _same(again.detach(), output.detach()):
                raise NotRepeatableError("model", "a layer does not return the same twice")
        return leaves, outputs

    def _run(self, values: list[Any]) -> Any:
        args, kwargs = tree_unflatten(values, self._structure)
        return self._forward(*args, **kwargs)


class NotRepeatableError(ModelError):
    """A layer cannot be run a second time on its own."""


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _SAME * float(other.abs().max()) if one.numel() else True


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The members of the outermost module lists, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
    return found


@contextmanager
def cut_at(layers: dict[str, nn.Module]) -> Iterator[list[tuple[str, LayerCall]]]:
    """Inside, calls of the layers are cut out of the graph and noted, with the layers' paths, in their order."""
    calls: list[tuple[str, LayerCall]] = []
    inside = [False]

    def replaced(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return forward(*args, **kwargs)
            inside[0] = True
            try:
                calls.append((path, LayerCall(forward, args, kwargs)))
            finally:
                inside[0] = False
            return calls[-1][1].returned()

        return run

    chosen = {id(module): (path, module) for path, module in layers.items()}
    held = [(module, "forward" in vars(module), module.forward) for _, module in chosen.values()]
    try:
        for path, module in chosen.values():
            module.forward = replaced(path, module.forward)
        yield calls
    finally:
        for module, own, forward in held:
            if own:
                module.forward = forward
            else:
                del module.forward


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, a model of Hugging Face keeps no keys and values of the past: a layer run twice would see them twice."""
    found: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = [config for config in found if getattr(config, "use_cache", None) is True]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True
