"""The tensors inside what a model returns: tuples, lists, dicts, Hugging Face outputs and dataclasses, nested."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Rebuild = Callable[[Sequence[Any]], Any]


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """The leaves of a tree, and the function that puts other leaves in their places.

    Dataclasses that torch does not know are taken apart by their fields; any other object is a leaf.
    """
    leaves, structure = tree_flatten(tree)
    flat: list[Any] = []
    parts: list[tuple[int, Rebuild | None]] = []
    for leaf in leaves:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            inner, rebuild = _fields(leaf)
            parts.append((len(inner), rebuild))
            flat += inner
        else:
            parts.append((1, None))
            flat.append(leaf)

    def put_back(new: Sequence[Any]) -> Any:
        rest = iter(new)
        found = []
        for count, rebuild in parts:
            some = [next(rest) for _ in range(count)]
            found.append(some[0] if rebuild is None else rebuild(some))
        return tree_unflatten(found, structure)

    return flat, put_back


def _fields(instance: Any) -> tuple[list[Any], Rebuild]:
    names = [field.name for field in fields(instance) if hasattr(instance, field.name)]
    leaves, rebuild_values = flatten([getattr(instance, name) for name in names])

    def rebuild(new: Sequence[Any]) -> Any:
        other = copy.copy(instance)
        for name, value in zip(names, rebuild_values(new), strict=True):
            object.__setattr__(other, name, value)  # also in frozen dataclasses
        return other

    return leaves, rebuild


def has_derivatives(tree: Any) -> bool:
    """Whether one of the tensors of a tree is part of a graph; unless it has none, as inside an unknown object."""
    found = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
    return not found or any(leaf.requires_grad for leaf in found)


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree that have at least one axis."""
    return (leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.ndim)


def change(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The tree with `function` applied to each of its tensors."""
    leaves, rebuild = flatten(tree)
    return rebuild([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def cut(tree: Any, axis: int, start: int, stop: int, size: int) -> Any:
    """Entries `start` to `stop` along `axis` of the tensors that have `size` there; other tensors stay whole."""

    def part(tensor: Tensor) -> Tensor:
        fits = tensor.ndim > axis and tensor.shape[axis] == size
        return tensor.narrow(axis, start, stop - start) if fits else tensor

    return change(tree, part)


def joined(trees: Sequence[Any]) -> Any:
    """One tree with the tensors of all along their first axes. They must differ in nothing else."""
    flat, rebuilds = zip(*(flatten(tree) for tree in trees), strict=True)
    found = []
    for leaves in zip(*flat, strict=True):
        together = isinstance(leaves[0], Tensor) and leaves[0].ndim > 0
        found.append(torch.cat(leaves) if together else leaves[0])
    rebuild: Rebuild = rebuilds[0]
    return rebuild(found)
