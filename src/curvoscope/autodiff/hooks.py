"""The layer that a block belongs to, for the split at the layer's own output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from curvoscope.blocks import Block
from curvoscope.errors import ModelError

_COMPOSITE = (".attn.", ".mlp.")  # names of blocks whose layer is more than the projection that holds the weight


@dataclass(frozen=True)
class Site:
    """A tensor inside a model: the "output" or the first "input" of the module at `path`."""

    path: str
    side: str = "output"


def layer_of(model: nn.Module, paths: Mapping[str, str], block: Block) -> Site:
    """The output of the module at which the Hessian of `block` is split.

    It is the module that owns the weight; `paths` says where a parameter stands. Where that is a mere projection of an
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
