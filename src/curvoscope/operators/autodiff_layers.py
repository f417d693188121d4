"""The layer that a block belongs to, for the split at the layer's own output."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from curvoscope.blocks import Block
from curvoscope.errors import ModelError

_COMPOSITE = (".attn.", ".mlp.")  # names of blocks whose layer is more than the projection that holds the weight


def layer_of(model: nn.Module, paths: Mapping[str, str], block: Block) -> str:
    """Path of the module at whose output the Hessian of `block` is split.

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
    return found.pop()


class Tap:
    """Takes down the output of a module while the model runs."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self._path, self._outputs = path, list[Tensor]()
        self._module = model.get_submodule(path)

    def __enter__(self) -> "Tap":
        self._handle = self._module.register_forward_hook(self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _take(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        first = getattr(first, "last_hidden_state", first)
        if not isinstance(first, Tensor):
            raise ModelError(self._path, f"returns {type(output).__name__}, not a tensor; use split='model'")
        self._outputs.append(first)

    @property
    def output(self) -> Tensor:
        """The output."""
        if len(self._outputs) != 1:
            raise ModelError(self._path, f"ran {len(self._outputs)} times in one pass; use split='model'")
        return self._outputs[0]
