"""A change of a model's weights, given as another model, a state dict, a folder or a recipe: δ by parameter."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.blocks import Blocks
from curvoscope.errors import DtypeError, EmptyError, ModelError, NonFiniteError, ShapeError
from curvoscope.families import loading

StateDict = Mapping[str, Tensor]
Recipe = Callable[[nn.Module], StateDict]
Change = nn.Module | StateDict | Recipe | str | os.PathLike[str]  # what says what the weights become


def changed_state(model: nn.Module, changed: Change) -> dict[str, Tensor]:
    """The tensors of `model` after the change, by the names of its parameters; tied ones once.

    Every parameter must be there, with its shape and in floating point; what is tied must stay equal, and buffers
    must stay as they are.
    """
    found = _state(model, changed)
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    known = named.keys() | buffers.keys() | model.state_dict().keys()
    foreign = next((name for name in found if name not in known), None)
    if foreign is not None:
        raise ModelError(
            "changed", f"has {foreign!r}, which is not in the model; give weights of the same architecture"
        )
    for name, buffer in buffers.items():
        if name in found and not _equal(buffer, found[name]):
            raise ModelError(
                "changed",
                f"{name!r} is a buffer with changed values; only parameters may change, so pass the model's own values",
            )
    state: dict[str, Tensor] = {}
    for first, names in _aliases(named).items():
        given = [name for name in names if name in found]
        if not given:
            raise ModelError("changed", f"has no tensor {first!r}; give a value for every parameter of the model")
        for name in given:
            _check(name, named[name], found[name])
            if not _equal(found[given[0]], found[name]):
                raise ModelError(
                    "changed",
                    f"{name!r} is tied to {given[0]!r} in the model, but the two change apart; untie them in the model "
                    "first, or give both the same values",
                )
        state[first] = found[given[0]]
    return state


def displacement(model: nn.Module, state: StateDict) -> dict[str, Tensor]:
    """δ by parameter from the tensors of `changed_state`, in the precision of the parameter, float32 at least."""
    delta: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        difference = state[name].detach().to(parameter.device, torch.float64) - parameter.detach().double()
        delta[name] = difference.to(torch.promote_types(torch.float32, parameter.dtype))
    if not any(bool(tensor.any()) for tensor in delta.values()):
        raise EmptyError("changed", "every tensor is the model's own: nothing changes")
    return delta


def check_covered(blocks: Blocks, delta: StateDict) -> None:
    """Raise if a parameter changes that no block has."""
    outside = next((name for name, tensor in delta.items() if name not in blocks.parameters and tensor.any()), None)
    if outside is not None:
        raise ModelError(
            "changed", f"{outside!r} changes but is frozen or in no block; call requires_grad_(True), or give blocks="
        )


def _state(model: nn.Module, changed: Change) -> StateDict:
    if isinstance(changed, str | os.PathLike):
        widest = max((p.dtype for p in model.parameters() if p.is_floating_point()), key=lambda one: one.itemsize)
        return loading.load(Path(changed), widest).model.state_dict()
    if isinstance(changed, nn.Module):
        return changed.state_dict()
    found: Any = changed if isinstance(changed, Mapping) else changed(model) if callable(changed) else None
    if not isinstance(found, Mapping):
        kind = type(changed if found is None else found).__name__
        raise ModelError("changed", f"got {kind}; expected a model, a state dict, a folder or a recipe")
    return found


def _aliases(named: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """The names of each parameter, by the first of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    return {several[0]: several for several in names.values()}


def _check(name: str, parameter: Tensor, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not parameter.is_floating_point():
        seen = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        seen = seen if parameter.is_floating_point() else f"{parameter.dtype} in the model"
        raise DtypeError("changed", f"{name!r} is {seen}, expected floating point: give weights that are dequantised")
    if tensor.shape != parameter.shape:
        shapes = f"{tuple(parameter.shape)} in the model and {tuple(tensor.shape)} after the change"
        raise ShapeError("changed", f"{name!r} is {shapes}; give weights of the same architecture and vocabulary")
    if not checks.all_finite(tensor):
        raise NonFiniteError("changed", f"{name!r} has entries that are NaN or infinite")


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and bool(torch.equal(one, other.to(one))))
