"""One forward pass of a model, and the data flow behind its outputs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from curvoscope.autodiff.batches import BatchError, rows_of
from curvoscope.autodiff.safety import undisturbed
from curvoscope.autodiff.snapshot import call, device_of
from curvoscope.errors import EmptyError
from curvoscope.families.data_flow import DataFlow


@contextmanager
def traced(model: nn.Module, batch: Any, standing: Mapping[str, Tensor] | None = None) -> Iterator[DataFlow]:
    """Run the model once on a batch, as it is, and give the graph; everything is put back at the end.

    Args:
        model: any module. It runs in evaluation mode.
        batch: (inputs, targets), a dict, with or without "labels", or inputs alone.
        standing: further weights that the pass uses, by name.
    """
    device_of(model, "cpu")
    with undisturbed(model, own_kernels=False):
        model.eval()
        named = [*model.named_parameters(), *(standing or {}).items()]
        parameters = {name: one for name, one in named if one.is_floating_point()}
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        like = next(iter(parameters.values()))
        inputs: list[Tensor] = []

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.detach().clone().to(like.device)
            if leaf.is_floating_point():
                return leaf.to(like.dtype).requires_grad_(True)
            inputs.append(leaf)
            return leaf

        arguments, keywords = tree_map(moved, _called_with(batch))
        if not rows_of((arguments, keywords), "batch"):
            raise EmptyError("batch", "has no rows")
        yield data_flow(_outputs(model, arguments, keywords), parameters, inputs)


def _outputs(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What the model returns, without labels if it takes none."""
    try:
        return call(model, arguments, keywords)
    except TypeError as error:
        if "labels" not in keywords or "unexpected keyword argument 'labels'" not in str(error):
            raise
    return call(model, arguments, {name: value for name, value in keywords.items() if name != "labels"})


def data_flow(outputs: Any, parameters: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> DataFlow:
    """The graph behind a model's outputs; `inputs`: the integers that it was called with."""
    return DataFlow([leaf.grad_fn for leaf in _tensors(outputs)], parameters, inputs)


def _called_with(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: arguments and keywords."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs = batch[0]
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
    raise BatchError("batch", f"got a {type(batch).__name__}, expected (inputs, targets), a tensor or a dict of inputs")


def _tensors(outputs: Any) -> list[Tensor]:
    found = []
    for leaf in tree_flatten(outputs)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            found += [one for one in tree_flatten(list(vars(leaf).values()))[0] if isinstance(one, Tensor)]
    return [one for one in found if one.grad_fn is not None]
