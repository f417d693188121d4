"""The attention and feed-forward layers of a model: their weights, and where their inputs and outputs can be read.

A layer is what lies between the input of its first projection (Q, up) and the output of its last one (O, down), so
the blocks say where it is. Two kinds of modules keep several projections in one module and are listed here.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvoscope.autodiff.hooks import Site
from curvoscope.blocks import Block, Blocks, Piece, layer_and_role
from curvoscope.closed.adapters import LayerAdapter
from curvoscope.closed.experts import StackedSite
from curvoscope.families.adapters import Adapter, adapters_of, weights_under
from curvoscope.families.direct import is_direct
from curvoscope.operators.contractions import Side

_ENDS = {  # first and last projection
    **dict.fromkeys(("attn", "cross"), ("Q", "O")),
    **{"mlp": ("up", "down"), "scale": ("scale", "scale")},
}
_NEEDED = {**_ENDS, **dict.fromkeys(("attn", "cross"), ("Q", "K", "V", "O"))}
# Roles of a feed-forward layer's blocks, and their names in closed form; attention has the same in both
_FEEDFORWARD = {"up": "W1", "b_up": "b1", "down": "W2", "b_down": "b2", "gate": "W_gate", "b_gate": "b_gate"}
_ROLES = {
    **dict.fromkeys(("attn", "cross"), tuple(f"{b}{w}" for w in "QKVO" for b in ("", "b_"))),
    **{"mlp": tuple(_FEEDFORWARD), "scale": ("scale",)},
}
_WITHOUT = {  # roles that have no closed form
    "router": "a router acts through its choice of experts, which has no closed form",
    "scale": "the scale is not the only weight of a module that multiplies with it",
    **dict.fromkeys(
        ("Q_latent", "KV_latent", "q_latent_norm", "kv_latent_norm"),
        "it makes latent vectors of queries or keys, a chain with a norm that has no closed form yet",
    ),
}
ROTARY = "position_embeddings"  # the argument with the tables of rotary positions
_DIRECT = {  # weights without modules: input, output, and the stream that is added to the output
    "attn": (("norm1", "output"), ("norm2", "input"), ("norm1", "input")),
    "mlp": (("norm2", "output"), ("", "output"), ("norm2", "input")),
}


@dataclass(frozen=True)
class ModelLayer:
    """Attention ("attn"), cross-attention ("cross"), a feed-forward layer ("mlp") or a LayerScale ("scale"): its blocks
    by role ("Q", "b_Q", "up", ...), where it reads X and writes F, and the site whose tensor is added to F, if any.

    `caller`: path of the module that is called with masks and rotary tables. `tokens_first`: X is (L, N, d). `beside`:
    roles of its further blocks, such as "q_norm". `adapters`: what is added to its weights. `memory`: where the keys of
    cross-attention are read, if that is a module.
    """

    name: str
    blocks: Mapping[str, Block]
    input: Site
    output: Site
    added: Site | None
    caller: str
    tokens_first: bool = False
    beside: frozenset[str] = frozenset()
    adapters: tuple[LayerAdapter, ...] = ()
    memory: Site | None = None

    @property
    def kind(self) -> str:
        """ "attn", "mlp", also of an expert "h.0.mlp.experts.3", or "scale" of a LayerScale "h.0.attn.scale"."""
        return _kind(self.name)

    @property
    def attends(self) -> bool:
        """Whether it is attention, to its own tokens or to others."""
        return self.kind in ("attn", "cross")

    @property
    def latent(self) -> bool:
        """Whether queries or keys are made of latent vectors."""
        return self.kind == "attn" and not self.beside.isdisjoint(("Q_latent", "KV_latent"))

    @property
    def routed(self) -> bool:
        """Whether it is an expert, which sees the tokens that are routed to it."""
        return ".mlp.experts." in f".{self.name}"

    @property
    def input_width(self) -> int:
        """The width of X."""
        return self.blocks[_ENDS[self.kind][0]].shape[0]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters."""
        return sorted({piece.parameter for block in self.all_blocks for piece in block.pieces})

    @property
    def all_blocks(self) -> list[Block]:
        """Its blocks and those of its adapters."""
        return [*self.blocks.values(), *(block for adapter in self.adapters for _, block in adapter.factors)]

    def overlaps(self, other: "ModelLayer") -> bool:
        """Whether the two share weights."""
        pieces = [piece for block in other.blocks.values() for piece in block.pieces]
        return any(one.overlaps(piece) for block in self.blocks.values() for one in block.pieces for piece in pieces)

    def exact_name(self, role: str) -> str:
        """The name of a block in closed form."""
        return _FEEDFORWARD[role] if self.kind == "mlp" else role

    def weight(self, name: str) -> Block:
        """The block of that name in closed form."""
        return next(block for role, block in self.blocks.items() if self.exact_name(role) == name)

    def matrices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights W (a, p) by role, with what adapters add to them, from tensors shaped like the parameters."""
        found = {role: block.matrix(tensors) for role, block in self.blocks.items()}
        for adapter in self.adapters:
            for role in adapter.B:
                found[role] = found[role] + adapter.change(role, tensors)
        return found


@dataclass(frozen=True)
class BlockPlace:
    """Where a block stands: in which layer, and under which name in its closed form.

    `adapter`: the one that it is a part of, B of the weight `role`, or A if that is None.
    """

    layer: ModelLayer
    name: str
    adapter: LayerAdapter | None = None
    role: str | None = None

    @property
    def weights(self) -> list[str]:
        """The blocks of the closed form that it moves."""
        if self.adapter is None:
            return [self.name]
        return [self.layer.exact_name(role) for role in (self.adapter.B if self.role is None else [self.role])]

    def moves(self, tensors: Mapping[str, Tensor]) -> dict[str, Side]:
        """How it moves them, from tensors shaped like the parameters."""
        if self.adapter is None:
            return {self.name: None}
        return dict(zip(self.weights, self.adapter.moves(self.role, tensors).values(), strict=True))


@dataclass(frozen=True)
class OutputSize:
    """The largest output (N, L, m) of a layer in a pass: N L tokens, L, m; `rotary`: its module was called with tables
    of rotary positions. `once`: in each pass there was one output. Without a pass the sizes are zero.
    """

    tokens: int = 0
    length: int = 0
    width: int = 0
    rotary: bool = False
    once: bool = True

    @classmethod
    def of(cls, layer: ModelLayer, shapes: Sequence[tuple[int, ...] | None], rotary: bool) -> "OutputSize":
        """From the shapes of the outputs of a layer in one pass, None being no tensor."""
        shape = shapes[0] if len(shapes) == 1 else None
        if shape is None:
            return cls(once=False)
        *lead, width = shape
        length = 1 if not lead else lead[0] if layer.tokens_first and len(lead) == 2 else lead[-1]
        return cls(math.prod(lead), length, width, rotary)

    def joined(self, other: "OutputSize") -> "OutputSize":
        """The larger of two."""
        return OutputSize(
            max(self.tokens, other.tokens),
            max(self.length, other.length),
            max(self.width, other.width),
            self.rotary or other.rotary,
            self.once and other.once,
        )


class ClosedFormLayers:
    """The layers of a model that may have a closed form, and which blocks they hold."""

    def __init__(self, model: nn.Module, *maps: Blocks) -> None:
        """`maps`: all blocks of the model, as they are named in different ways; a layer is that of the first."""
        self._model, self.all, adapters = model, list[ModelLayer](), adapters_of(model)
        for layer in (layer for blocks in maps for layer in layers_of(model, blocks, adapters)):
            if not any(layer.overlaps(other) for other in self.all):
                self.all.append(layer)
        self.sizes = {layer.name: OutputSize() for layer in self.all}
        self._places: dict[tuple[Piece, ...], BlockPlace] = {}
        for layer in self.all:
            for role, block in layer.blocks.items():
                parts = {layer.exact_name(role): block}
                if (block.heads or 1) > 1:
                    parts |= {f"{role}.{i}": block.head(i) for i in range(block.heads or 1)}
                self._places |= {part.pieces: BlockPlace(layer, name) for name, part in parts.items()}
            for one in layer.adapters:
                self._places |= {b.pieces: BlockPlace(layer, b.name, one, role) for role, b in one.factors}
        self._adapted = {name: adapter for adapter in adapters for name in adapter.parameters}

    def mixed_after(self, layer: ModelLayer) -> bool:
        """Whether an attention layer follows, so that tokens mix between the layer and the loss."""
        return any(other.attends for other in self.all[self.all.index(layer) + 1 :])

    @property
    def sites(self) -> dict[str, Site]:
        """Where each layer ends, by the names of its parameters; experts in one tensor have no place of their own."""
        alone = (layer for layer in self.all if not isinstance(layer.output, StackedSite))
        return {name: layer.output for layer in alone for name in layer.parameters}

    def place(self, block: Block) -> BlockPlace | str:
        """Where the block stands, or why it stands in no layer."""
        found = self._places.get(block.pieces)
        if block.tied:
            return f"it is tied to {', '.join(block.tied)}"
        if found is not None:
            return found
        adapter = self._adapted.get(block.pieces[0].parameter)
        if adapter is None:
            role = (layer_and_role(block.name) or ("", ""))[1].rpartition(".")[2].removeprefix("b_")
            return _WITHOUT.get(role, "no closed form is known for it")
        return adapter.why_not_closed or "the layer of the weight that it adapts has no closed form"

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, every pass of the model adds to `sizes`: no pass is made for them, and no tensor is kept."""
        with ExitStack() as stack:
            hooks = {layer.name: layer.output.shape_hook(self._model) for layer in self.all}
            for hook in hooks.values():
                stack.enter_context(hook)
            turned: set[str] = set()

            def begin(module: nn.Module, inputs: Any) -> None:
                for hook in hooks.values():
                    hook.clear()

            def end(module: nn.Module, inputs: Any, output: Any) -> None:
                for layer in self.all:
                    size = OutputSize.of(layer, hooks[layer.name].shapes, layer.name in turned)
                    self.sizes[layer.name] = self.sizes[layer.name].joined(size)

            def note(layer: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                if arguments_of(module, inputs, keywords).get(ROTARY) is not None:
                    turned.add(layer)

            handles: list[RemovableHandle] = [
                self._model.register_forward_pre_hook(begin),
                self._model.register_forward_hook(end),
            ]
            for layer in self.all:
                caller = self._model.get_submodule(layer.caller)
                handles.append(caller.register_forward_pre_hook(partial(note, layer.name), with_kwargs=True))
            for handle in handles:
                stack.callback(handle.remove)
            yield


def layers_of(model: nn.Module, blocks: Blocks, adapters: Sequence[Adapter] | None = None) -> list[ModelLayer]:
    """The layers among all the blocks of a model; `adapters`: those of the model, if they are known."""
    groups: dict[str, dict[str, Block]] = {}
    adapters = adapters_of(model) if adapters is None else adapters
    parts = {name for adapter in adapters for name in adapter.parameters}
    for name, block in blocks.items():
        layer, role = layer_and_role(name) or ("", "")
        kind, dot, leaf = role.rpartition(".")
        kind = f"{kind}.scale" if leaf == "scale" else kind  # LayerScale is a layer of its own, behind another
        whole = name == f"{layer}.{role}"  # not a single head
        if dot and whole and block.pieces[0].parameter not in parts:
            groups.setdefault(f"{layer}.{kind}", {})[leaf] = block
    if any(type(module).__module__.startswith("transformer_lens.") for module in model.modules()):
        return []  # its modules cannot be run at other weights than their own
    found = (_layer(model, name, group, groups, adapters) for name, group in groups.items())
    adapted = (_adapted(layer, blocks, adapters) for layer in found if layer is not None)
    return [layer for layer in adapted if layer is not None]


def _adapted(layer: ModelLayer, blocks: Blocks, adapters: Sequence[Adapter]) -> ModelLayer | None:
    """The layer with the low-rank adapters on its weights; None if another kind acts on one of them."""
    roles, own = {block.name: role for role, block in layer.blocks.items()}, []
    for adapter in adapters:
        weights = {roles[block.name]: block for block in weights_under(adapter, blocks) if block.name in roles}
        if weights:
            found = None if adapter.why_not_closed else LayerAdapter.of(adapter, weights, blocks)
            if found is None:
                return None
            own.append(found)
    return replace(layer, adapters=tuple(own))


def _layer(
    model: nn.Module,
    name: str,
    group: dict[str, Block],
    groups: dict[str, dict[str, Block]],
    adapters: Sequence[Adapter],
) -> ModelLayer | None:
    kind = _kind(name)
    stem = name[: name.rindex(f".{kind}")] if f".{kind}" in name else ""
    if not set(_NEEDED.get(kind, ("unknown",))) <= set(group):
        return None
    beside = frozenset(group) - set(_ROLES[kind])
    group = {role: block for role, block in group.items() if role in _ROLES[kind]}
    first, last = (_owner(group[role]) for role in _ENDS[kind])
    owner = model.get_submodule(first)
    read, written = (group[role].pieces[0] for role in _ENDS[kind])
    if len(read.stored) == len(written.stored) == 3 and ".mlp.experts." in name:
        sites = (_slice(read, "input"), _slice(written, "output"))
        return ModelLayer(name, group, *sites, None, first, False, beside)
    if first == last and is_direct(owner):
        at, out, added = (Site(f"{first}.{path}".strip("."), side) for path, side in _DIRECT[kind])
        return ModelLayer(
            name, group, at, out, added if kind == "mlp" or getattr(owner, "residual", True) else None, first
        )
    if isinstance(owner, nn.MultiheadAttention):
        return ModelLayer(name, group, Site(first, "input"), Site(first), None, first, not owner.batch_first)
    if any(owner.children()) or any(model.get_submodule(last).children()):
        return None
    query = groups.get(f"{stem}.attn".lstrip("."), {}).get("Q")
    neighbour = None if query is None else model.get_submodule(_owner(query))
    tokens_first = isinstance(neighbour, nn.MultiheadAttention) and not neighbour.batch_first
    around = {one.base.parameter.rpartition(".")[0]: one.path for one in adapters if one.base is not None}
    first, last = (around.get(path, path) for path in (first, last))
    caller = first.rpartition(".")[0]
    latent = kind == "attn" and "KV_latent" in beside
    memory = Site(_owner(group["K"]), "input") if kind == "cross" or latent else None
    ends = Site(first, "input"), Site(last)
    return ModelLayer(name, group, *ends, None, caller, tokens_first, beside, memory=memory)


def _kind(name: str) -> str:
    """ "mlp" for "h.0.mlp" and for "h.0.mlp.experts.3"."""
    return next((part for part in reversed(name.split(".")) if part in _ENDS), "")


def _slice(piece: Piece, side: str) -> StackedSite:
    """Where a slice of a stacked tensor multiplies."""
    path, _, leaf = piece.parameter.rpartition(".")
    return StackedSite(path, side, leaf, piece.index[0].start)


def _owner(block: Block) -> str:
    return block.pieces[0].parameter.rpartition(".")[0]


def arguments_of(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """What a module is called with, by name."""
    bound = inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments
    return {**bound, **bound.get("kwargs", {})}
