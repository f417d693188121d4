"""The attention and feed-forward layers of a model: their weights, and where their inputs and outputs can be read.

A layer is what lies between the input of its first projection (Q, up) and the output of its last one (O, down), so
the blocks say where it is. Two kinds of modules keep several projections in one module and are listed here.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from curvoscope.autodiff.hooks import ActivationHook, Site
from curvoscope.blocks import Block, Blocks, layer_and_role
from curvoscope.families.direct import is_direct

_ENDS = {"attn": ("Q", "O"), "mlp": ("up", "down")}  # first and last projection
_NEEDED = {"attn": ("Q", "K", "V", "O"), "mlp": ("up", "down")}
_DIRECT = {  # weights without modules: input, output, and the stream that is added to the output
    "attn": (("norm1", "output"), ("norm2", "input"), ("norm1", "input")),
    "mlp": (("norm2", "output"), ("", "output"), ("norm2", "input")),
}


@dataclass(frozen=True)
class ModelLayer:
    """An attention ("attn") or feed-forward ("mlp") layer: its blocks by role ("Q", "b_Q", "up", ...), where it reads
    X and writes F, and the site whose tensor is added to F there, if any.

    `caller`: path of the module that is called with masks and rotary tables. `tokens_first`: X is (L, N, d).
    """

    name: str
    blocks: Mapping[str, Block]
    input: Site
    output: Site
    added: Site | None
    caller: str
    tokens_first: bool = False

    @property
    def kind(self) -> str:
        """ "attn" or "mlp"."""
        return self.name.rpartition(".")[2]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters."""
        return sorted({piece.parameter for block in self.blocks.values() for piece in block.pieces})

    def matrices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights W (a, p) by role, from tensors shaped like the parameters."""
        return {role: block.matrix(tensors) for role, block in self.blocks.items()}


def layers_of(model: nn.Module, blocks: Blocks) -> list[ModelLayer]:
    """The layers among all the blocks of a model."""
    groups: dict[str, dict[str, Block]] = {}
    for name, block in blocks.items():
        layer, role = layer_and_role(name) or ("", "")
        kind, dot, leaf = role.partition(".")
        if dot:
            groups.setdefault(f"{layer}.{kind}", {})[leaf] = block
    if any(type(module).__module__.startswith("transformer_lens.") for module in model.modules()):
        return []  # its modules cannot be run at other weights than their own
    found = (_layer(model, name, group, groups) for name, group in groups.items())
    return [layer for layer in found if layer is not None]


def _layer(
    model: nn.Module, name: str, group: dict[str, Block], groups: dict[str, dict[str, Block]]
) -> ModelLayer | None:
    stem, _, kind = name.rpartition(".")
    if not set(_NEEDED[kind]) <= set(group):
        return None
    first, last = (_owner(group[role]) for role in _ENDS[kind])
    owner = model.get_submodule(first)
    if is_direct(owner):
        read, written, added = (Site(f"{first}.{path}".strip("."), side) for path, side in _DIRECT[kind])
        return ModelLayer(
            name, group, read, written, added if kind == "mlp" or getattr(owner, "residual", True) else None, first
        )
    if isinstance(owner, nn.MultiheadAttention):
        return ModelLayer(name, group, Site(first, "input"), Site(first), None, first, not owner.batch_first)
    if any(owner.children()) or any(model.get_submodule(last).children()):
        return None
    beside = groups.get(f"{stem}.attn".lstrip("."), {}).get("Q")
    neighbour = None if beside is None else model.get_submodule(_owner(beside))
    tokens_first = isinstance(neighbour, nn.MultiheadAttention) and not neighbour.batch_first
    return ModelLayer(name, group, Site(first, "input"), Site(last), None, first.rpartition(".")[0], tokens_first)


def _owner(block: Block) -> str:
    return block.pieces[0].parameter.rpartition(".")[0]


class LayerRecorder:
    """What passes through a layer while the model runs inside: X and F (N, L, .), and the call's arguments."""

    def __init__(self, model: nn.Module, layer: ModelLayer) -> None:
        self._layer, self.module = layer, model.get_submodule(layer.caller)
        self._read, self._written = ActivationHook(model, layer.input), ActivationHook(model, layer.output)
        self._added = None if layer.added is None else ActivationHook(model, layer.added)
        self._taps = [tap for tap in (self._read, self._written, self._added) if tap is not None]
        self.arguments: dict[str, Any] = {}

    def __enter__(self) -> "LayerRecorder":
        self._stack = ExitStack()
        for tap in self._taps:
            self._stack.enter_context(tap)
        handle = self.module.register_forward_pre_hook(self._call, with_kwargs=True)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _call(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments
        self.arguments = {**bound, **bound.get("kwargs", {})}

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, where the module was called with some."""
        return self.arguments.get("position_embeddings")

    @property
    def once(self) -> bool:
        """Whether the layer ran exactly once, from tensor to tensor."""
        return all(tap.once for tap in self._taps)

    @property
    def X(self) -> Tensor:
        """The input, (N, L, d)."""
        return self.batched(self._read.tensor.detach())

    @property
    def F(self) -> Tensor:
        """The output, (N, L, m)."""
        written = self._written.tensor.detach()
        return self.batched(written if self._added is None else written - self._added.tensor.detach())

    @property
    def written(self) -> Tensor:
        """The tensor that holds F, in the model's own shape, with its graph."""
        return self._written.tensor

    def batched(self, values: Tensor) -> Tensor:
        """From the model's shape to (N, L, .)."""
        if self._layer.tokens_first and values.ndim == 3:
            return values.transpose(0, 1)
        return values.reshape(-1, *values.shape[-2:]) if values.ndim > 1 else values[None, None]

    def unbatched(self, values: Tensor) -> Tensor:
        """Back from (N, L, m) to the shape of `written`."""
        shape = self.written.shape
        return values.transpose(0, 1) if self._layer.tokens_first and len(shape) == 3 else values.reshape(shape)
