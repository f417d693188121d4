"""A model whose parameters are spread over ranks (DTensors, as `fully_shard` makes them), evaluated at its weights.

The hooks of `fully_shard` write gradients, which cannot be differentiated again, so they are left out. Hooks of our own
gather the parameters of a module when it begins and drop them when it ends. A graph keeps a note of them. What fits
into memory stays whole, and is gathered once for all products; of the others, a rank holds whole only those of the
module that runs.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from curvoscope.autodiff.snapshot import Snapshot
from curvoscope.blocks import Blocks
from curvoscope.distributed.mesh import Mesh
from curvoscope.distributed.ranks import RankError
from curvoscope.distributed.shards import Sharding, gather, gathered

_FSDP = "torch.distributed.fsdp"

Place = tuple[nn.Module, str]  # a module, and the name of its own parameter
Note = tuple[tuple[str, ...], tuple[Tensor, ...], int]  # paths and parts that are gathered together, which of them
_Packed = tuple[Note, tuple[int, ...], tuple[int, ...], int]  # and which view of it

_AT_ONCE = 2**24  # bytes of whole parameters that are gathered together, if there are several


class ShardedSnapshot(Snapshot):
    """As `Snapshot`; weights are this rank's parts, in calls too. What is not spread is cut in the same way."""

    def __init__(self, model: nn.Module, blocks: Blocks, device: torch.device, group: Mesh) -> None:
        self._group = group
        self._notes: dict[int, tuple[StorageWeakRef, Note]] = {}  # of parameters that are whole now, by address
        self._wholes: OrderedDict[object, tuple[tuple[Tensor, ...], list[Tensor]]] = OrderedDict()  # after their parts
        self.room = 0  # bytes for them; the last ones may exceed it
        self._peeking = False
        self.shardings = {
            path: self._sharding(path, tensor)
            for path, tensor in nn.Module.named_parameters(model, remove_duplicate=True)
        }
        super().__init__(model, blocks, device, copied=True)
        self._units = _units(model)

    def _sharding(self, path: str, tensor: Tensor) -> Sharding:
        if not _is_spread(tensor):
            return Sharding(tuple(tensor.shape), 0, self._group)
        sharding = Sharding(tuple(tensor.shape), _axis(tensor), self._group)
        local = tuple(_local(tensor).shape)
        if local != sharding.local:
            raise RankError(
                path, f"has {local} on rank {self._group.rank}, expected {sharding.local} of {tensor.shape}"
            )
        return sharding

    def _copy(self, tensor: Tensor) -> Tensor:
        if _is_spread(tensor):
            tensor = _local(tensor)
        elif isinstance(tensor, nn.Parameter):
            tensor = Sharding(tuple(tensor.shape), 0, self._group).cut(tensor.detach())
        return super()._copy(tensor)

    @property
    def common(self) -> dict[str, Tensor]:
        """What every rank has whole."""
        whole = {
            path: tensor
            for path, tensor in nn.Module.named_parameters(self._model, remove_duplicate=True)
            if not _is_spread(tensor)
        }
        return {**whole, **self._buffers}

    def sharding(self, name: str) -> Sharding:
        """How a parameter is spread."""
        return self.shardings[self.paths[name]]

    def _run(self, weights: Mapping[str, Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """At the weights whose parts are given; all ranks call at once, each with its batch."""
        with ExitStack() as stack:
            stack.enter_context(_without_hooks(self._model))
            for unit, places in self._units.items():
                stack.enter_context(self._gathering(unit, places, weights))
            for path, buffer in self._buffers.items():
                stack.enter_context(_put(self._model, path, buffer.clone()))
            return self._model(*arguments, **keywords)

    @contextmanager
    def _gathering(
        self, unit: nn.Module, places: Mapping[str, list[Place]], weights: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Inside, the unit has its parameters whole for as long as it runs."""
        own = [(owner, name, owner._parameters[name]) for found in places.values() for owner, name in found]
        together = self._together(list(places))

        def begin(module: nn.Module, inputs: Any) -> None:
            for paths in together:
                parts = [weights[path] for path in paths]
                known = self._gathered(paths, tuple(part.detach() for part in parts))
                wholes = gathered(parts, [self.shardings[path] for path in paths], known)
                for path, whole in zip(paths, wholes, strict=True):
                    for owner, name in places[path]:
                        owner._parameters[name] = whole  # type: ignore[assignment]

        def end(*_: Any) -> None:
            for owner, name, parameter in own:
                owner._parameters[name] = parameter

        handles = [unit.register_forward_pre_hook(begin, prepend=True), unit.register_forward_hook(end)]
        try:
            yield
        finally:
            end()
            for handle in handles:
                handle.remove()

    def _together(self, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """Paths of parameters that are gathered in one go: several small ones, or a large one."""
        found: list[tuple[str, ...]] = [()]
        room = _AT_ONCE
        for path in paths:
            room -= math.prod(self.shardings[path].shape) * self.dtype.itemsize
            if room < 0 and found[-1]:
                found.append(())
                room = _AT_ONCE - math.prod(self.shardings[path].shape) * self.dtype.itemsize
            found[-1] += (path,)
        return found

    def _take_note(self, wholes: Sequence[Tensor], paths: tuple[str, ...], parts: tuple[Tensor, ...]) -> None:
        self._notes = {key: note for key, note in self._notes.items() if not note[0].expired()}
        for number, whole in enumerate(wholes):
            storage = whole.untyped_storage()
            self._notes[storage._cdata] = StorageWeakRef(storage), (paths, parts, number)

    def _gathered(self, paths: tuple[str, ...], parts: tuple[Tensor, ...]) -> list[Tensor]:
        """The whole parameters: those at hand, or gathered now."""
        key = paths, *(part.data_ptr() for part in parts)
        if key not in self._wholes:
            if self._exceed():
                self._wholes.popitem()  # before there is more
            with torch.no_grad():
                wholes = gather(parts, [self.shardings[path] for path in paths])
            self._take_note(wholes, paths, parts)
            self._wholes[key] = parts, wholes
        return self._wholes[key][1]

    def _exceed(self) -> bool:
        """Whether the whole parameters take more than the room for them."""
        return sum(whole.nbytes for _, wholes in self._wholes.values() for whole in wholes) > self.room

    def keep_what_fits(self) -> None:
        """Drop whole parameters that there is no room for, the last ones first."""
        while self._exceed():
            self._wholes.popitem()

    def forget(self) -> None:
        """Drop the whole parameters."""
        self._wholes.clear()
        self.room = 0

    # ---- what graphs keep

    def light_graphs(self) -> saved_tensors_hooks:
        """Inside, graphs keep a note of a whole parameter instead of its numbers."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def peeking(self) -> Iterator[None]:
        """Inside, noted parameters are not gathered when a graph is looked at."""
        self._peeking = True
        try:
            yield
        finally:
            self._peeking = False

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        found = self._notes.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return found[1], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        (paths, parts, number), size, stride, offset = packed
        if self._peeking:
            return parts[number].new_empty(0)
        return self._gathered(paths, parts)[number].as_strided(size, stride, offset)


def _is_spread(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _axis(spread: Any) -> int:
    return int(spread.placements[0].dim) % int(spread.ndim)


def _local(spread: Any) -> Tensor:
    part: Tensor = spread.to_local().detach()
    return part


def _units(model: nn.Module) -> dict[nn.Module, dict[str, list[Place]]]:
    """Modules that `fully_shard` was called for, and the outermost one: the places of their own parameters by path."""
    from torch.distributed.fsdp import FSDPModule

    first: dict[int, str] = {}
    found: dict[nn.Module, dict[str, list[Place]]] = {}
    for full, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        path = first.setdefault(id(parameter), full)
        parents, _, name = full.rpartition(".")
        owner = unit = model.get_submodule(parents)
        while parents and not isinstance(unit, FSDPModule):
            parents = parents.rpartition(".")[0]
            unit = model.get_submodule(parents)
        found.setdefault(unit, {}).setdefault(path, []).append((owner, name))
    return found


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, the hooks of `fully_shard` are not called."""
    kept: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                kept.append((hooks, dict(hooks)))
                for key, hook in list(hooks.items()):
                    if type(getattr(hook, "__self__", None)).__module__.startswith(_FSDP):
                        del hooks[key]
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


@contextmanager
def _put(model: nn.Module, path: str, buffer: Tensor) -> Iterator[None]:
    """Inside, the model has another buffer."""
    parents, _, name = path.rpartition(".")
    module = model.get_submodule(parents)
    own, module._buffers[name] = module._buffers[name], buffer
    try:
        yield
    finally:
        module._buffers[name] = own
