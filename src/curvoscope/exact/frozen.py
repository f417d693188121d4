"""Copies of layers and inputs: a Hessian keeps what it was made of, and autograd does not differentiate it further."""

import copy
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value")


def frozen(value: Value) -> Value:
    """A copy of a tensor, a layer or a collection of them: detached, and not changed by what happens to the original.

    Blocks are computed when they are asked for. By then an optimizer may have changed the weights in place.
    """
    return _frozen(value, {})


def _frozen(value: Any, known: dict[int, Any]) -> Any:
    if id(value) not in known:  # what is shared stays shared
        known[id(value)] = _copied(value, known)
    return known[id(value)]


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_frozen(item, known) for item in value)
    if isinstance(value, dict):
        return {name: _frozen(item, known) for name, item in value.items()}
    if not any(base.__module__.startswith("curvoscope.") for base in type(value).__mro__):
        return value
    result = copy.copy(value)
    vars(result).update({name: _frozen(item, known) for name, item in vars(value).items()})
    return result
