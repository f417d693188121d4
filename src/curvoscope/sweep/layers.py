"""A forward pass cut at the layers of a model, so that one layer's graph exists at a time.

In the pass each layer (a member of an `nn.ModuleList`) runs without a graph, and what it returns starts the graph anew.
Later, from the top, each layer runs once more with a graph, on the inputs that were kept. Between the layers the pass
keeps its own graph, so that nothing is assumed about what happens there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvoscope.autodiff.layer_calls import NotRepeatableError, replaced_forward

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
                raise NotRepeatableError(
                    "model", "a layer returns different outputs when run twice; remove its randomness or state"
                )
        return leaves, outputs

    def _run(self, values: list[Any]) -> Any:
        args, kwargs = tree_unflatten(values, self._structure)
        return self._forward(*args, **kwargs)


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _SAME * float(other.abs().max()) if one.numel() else True


@contextmanager
def cut_at(layers: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, LayerCall]]]:
    """Inside, calls of the layers are cut out of the graph and noted, with the layers' paths, in their order."""
    calls: list[tuple[str, LayerCall]] = []

    def note(path: str, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append((path, LayerCall(forward, args, kwargs)))
        return calls[-1][1].returned()

    with replaced_forward(layers, note):
        yield calls
