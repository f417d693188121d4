"""What is seen of a model as it runs: the tensors at a layer, for the split at its own output, and what is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvoscope.blocks import Block
from curvoscope.errors import ModelError

_HALF = (torch.float16, torch.bfloat16)
_COMPOSITE = (".attn.", ".mlp.")  # names of blocks whose layer is more than the projection that holds the weight


@dataclass(frozen=True)
class Site:
    """A tensor inside a model: the "output" or the first "input" of the module at `path`."""

    path: str
    side: str = "output"

    def hook(self, model: nn.Module) -> "ActivationHook":
        """What takes down the tensor while the model runs."""
        return ActivationHook(model, self)

    def shape_hook(self, model: nn.Module) -> "ShapeHook":
        """What takes down its shapes."""
        return ShapeHook(model, self)


def layer_of(model: nn.Module, paths: Mapping[str, str], block: Block) -> Site:
    """The output of the module at which the Hessian of `block` is split.

    It is the module that owns the weight; `paths` says where a parameter stands. If that is a mere projection of an
    attention or feed-forward layer ("h.0.attn.Q" in nn.Linear or Conv1D), it is the module around it.
    """
    found = set()
    for piece in block.pieces:
        path = paths[piece.parameter].rpartition(".")[0]
        owner = model.get_submodule(path)
        inside = any(part in f".{block.name}." for part in _COMPOSITE)
        found.add(path.rpartition(".")[0] if inside and not any(owner.children()) else path)
    if len(found) > 1:
        raise ModelError(block.name, f"lies in several modules, {', '.join(sorted(found))}; use split='model'")
    return Site(found.pop())


def check_layer(
    layer: Site,
    leaves: Mapping[str, Tensor],
    model: tuple[Sequence[Tensor], Sequence[Tensor]],
    output: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """The blocks must act on the loss through the layer's output alone: the gradients from there are all there is."""
    whole, through = (
        torch.autograd.grad(F, list(leaves.values()), G, retain_graph=True, materialize_grads=True)
        for F, G in (model, output)
    )
    check_gradients(layer, leaves, whole, through)


def check_gradients(layer: Site, names: Iterable[str], whole: Sequence[Tensor], through: Sequence[Tensor]) -> None:
    """Raise unless the gradients of the whole loss are those through the layer's output."""
    for name, expected, found in zip(names, whole, through, strict=True):
        if float((found - expected).abs().max()) > torch.finfo(found.dtype).eps ** 0.5 * float(expected.abs().max()):
            raise ModelError(
                name,
                f"also affects the loss other than through the {layer.side} of {layer.path!r}; is it tied? Use "
                "split='model'",
            )


class ActivationHook:
    """Takes down the tensor at a site while the model runs. The model goes on with a copy of an output: what it adds to
    it in place, as Falcon does, is not in the tensor here."""

    _keeps_tensors = True

    def __init__(self, model: nn.Module, site: Site) -> None:
        self._path, self._side, self._found = site.path, site.side, list[Any]()
        self._module = model.get_submodule(site.path)

    def __enter__(self) -> "ActivationHook":
        if self._side == "input":
            self._handle = self._module.register_forward_pre_hook(self._take_input, with_kwargs=True)
        else:
            self._handle = self._module.register_forward_hook(self._take_output)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _take_input(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._take(next(iter((*inputs, *keywords.values())), None))

    def _take_output(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        first = output[0] if isinstance(output, tuple | list) else output
        self._take(getattr(first, "last_hidden_state", first))
        return output.clone() if self._keeps_tensors and isinstance(output, Tensor) else None

    def _take(self, value: Any) -> None:
        self._found.append(value)

    @property
    def once(self) -> bool:
        """Whether there was one tensor there."""
        return len(self._found) == 1 and isinstance(self._found[0], Tensor)

    @property
    def tensor(self) -> Tensor:
        """What was found there."""
        if len(self._found) != 1:
            raise ModelError(self._path, f"ran {len(self._found)} times in one pass; use split='model'")
        found = self._found[0]
        if not isinstance(found, Tensor):
            does = "returns" if self._side == "output" else "is called with"
            raise ModelError(self._path, f"{does} {type(found).__name__}, not a tensor; use split='model'")
        return found


class ShapeHook(ActivationHook):
    """Takes down the shapes of the tensors at a site, None for anything else, since the last `clear()`."""

    _keeps_tensors = False

    def _take(self, value: Any) -> None:
        super()._take(tuple(value.shape) if isinstance(value, Tensor) else None)

    def clear(self) -> None:
        """Forget what was seen."""
        self._found.clear()

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """One for each call of the module."""
        return self._found


class Written(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make inside; `most` is the largest count between two `begin`.

    `half`: whether one of them had half precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self.half = False

    def begin(self) -> None:
        """Count from zero."""
        self._now = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; what it wrote into its arguments, or returns a view of, is not new."""
        found = func(*args, **(kwargs or {}))
        held = {_storage(tensor) for tensor in _tensors((*args, *(kwargs or {}).values()))}
        made = list(_tensors((found,)))
        self._now += sum(tensor.nbytes for tensor in made if _storage(tensor) not in held)
        self.half = self.half or any(tensor.dtype in _HALF for tensor in made)
        self.most = max(self.most, self._now)
        return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
