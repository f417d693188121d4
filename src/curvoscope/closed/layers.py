"""The attention and feed-forward layers of a model: their weights, and where their inputs and outputs can be read.

A layer is what lies between the input of its first projection (Q, up) and the output of its last one (O, down), so
the blocks say where it is. Two kinds of modules keep several projections in one module and are listed here.

What a closed form of a layer costs follows from sizes. The loss Hessian S at its output takes one product through the
tail of the network for each entry of F that it couples, and cores and norms of the blocks are made of it. It saves the
products of the four usual questions (norm, trace, diagonal, extreme eigenvalues) to each block of the layer. Both are
counted in floating-point operations; a byte that is moved counts as a few of them.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from curvoscope.autodiff.hooks import ActivationHook, ShapeHook, Site
from curvoscope.blocks import Block, Blocks, Piece, layer_and_role
from curvoscope.estimate.products import DEFAULT_MATVECS
from curvoscope.families.direct import is_direct

_ENDS = {"attn": ("Q", "O"), "mlp": ("up", "down")}  # first and last projection
_NEEDED = {"attn": ("Q", "K", "V", "O"), "mlp": ("up", "down")}
# Roles of a feed-forward layer's blocks, and their names in closed form; attention has the same in both
_FEEDFORWARD = {"up": "W1", "b_up": "b1", "down": "W2", "b_down": "b2", "gate": "W_gate", "b_gate": "b_gate"}
_ROLES = {"attn": tuple(f"{b}{w}" for w in "QKVO" for b in ("", "b_")), "mlp": tuple(_FEEDFORWARD)}
_ROTARY = "position_embeddings"  # the argument with the tables of rotary positions
_TOLD = ("attention_mask", "attn_mask", "key_padding_mask", _ROTARY)  # arguments of a call that say what is computed
_QUESTIONS = 4
_PER_WEIGHT = 8  # operations of a product for a weight and a token: two for each of four passes
_PER_BYTE = 4  # operations that take as long as moving a byte
_SCORES = 4  # matrices of the scores' size while a closed form of attention is made
_KEPT_SCORES = 2  # those that it keeps: A, and the gradient at the scores
_HIDDEN = 6  # vectors of the hidden units that a feed-forward layer keeps
_DIRECT = {  # weights without modules: input, output, and the stream that is added to the output
    "attn": (("norm1", "output"), ("norm2", "input"), ("norm1", "input")),
    "mlp": (("norm2", "output"), ("", "output"), ("norm2", "input")),
}


@dataclass(frozen=True)
class ModelLayer:
    """An attention ("attn") or feed-forward ("mlp") layer: its blocks by role ("Q", "b_Q", "up", ...), where it reads
    X and writes F, and the site whose tensor is added to F there, if any.

    `caller`: path of the module that is called with masks and rotary tables. `tokens_first`: X is (L, N, d). `beside`:
    roles of its further blocks, such as "q_norm".
    """

    name: str
    blocks: Mapping[str, Block]
    input: Site
    output: Site
    added: Site | None
    caller: str
    tokens_first: bool = False
    beside: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """ "attn" or "mlp"."""
        return self.name.rpartition(".")[2]

    @property
    def input_width(self) -> int:
        """The width of X."""
        return self.blocks[_ENDS[self.kind][0]].shape[0]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters."""
        return sorted({piece.parameter for block in self.blocks.values() for piece in block.pieces})

    def overlaps(self, other: "ModelLayer") -> bool:
        """Whether the two share weights."""
        pieces = [piece for block in other.blocks.values() for piece in block.pieces]
        return any(one.overlaps(piece) for block in self.blocks.values() for one in block.pieces for piece in pieces)

    def exact_name(self, role: str) -> str:
        """The name of a block in closed form."""
        return _FEEDFORWARD[role] if self.kind == "mlp" else role

    def matrices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights W (a, p) by role, from tensors shaped like the parameters."""
        return {role: block.matrix(tensors) for role, block in self.blocks.items()}


@dataclass(frozen=True)
class BlockPlace:
    """Where a block stands: in which layer, and under which name in its closed form."""

    layer: ModelLayer
    name: str


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


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer.

    Args:
        layer: the layer.
        held: those of its blocks that the Hessian has, by their names in the layer's closed form.
        size: of its largest output in a pass.
        batches: number of micro-batches.
        weights: numbers of weights behind the layer, and of those in the whole model.
        product_bytes: what a product with the whole Hessian moves.
        itemsize: bytes of a number.
    """

    layer: ModelLayer
    held: Mapping[str, Block]
    size: OutputSize
    batches: int
    weights: tuple[int, int]
    product_bytes: int
    itemsize: int

    @property
    def _tokens(self) -> int:
        return self.batches * self.size.tokens

    @property
    def _heads(self) -> int:
        return self.layer.blocks["Q"].heads or 1 if self.layer.kind == "attn" else 1

    @property
    def _widest(self) -> int:
        return max(max(block.shape) for block in self.layer.blocks.values())

    # ---- from G alone

    @property
    def record_bytes(self) -> int:
        """X and F of the passes that verify the layer, and G."""
        return 4 * self._tokens * max(self.size.width, self.layer.input_width) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """What a closed form takes that needs G and no S."""
        numbers = 0
        if self.layer.kind == "attn":
            scores = self._heads * self.size.length
            numbers = scores * (_SCORES * self.size.tokens + _KEPT_SCORES * self._tokens)
        else:
            numbers = _HIDDEN * self._tokens * self._widest
        return numbers * self.itemsize + self.record_bytes

    # ---- with S

    def products(self, coupled: int) -> int:
        """Products that S takes when it couples so many tokens."""
        return coupled * self.size.width

    def curvature_bytes(self, coupled: int) -> int:
        """What S and the cores made of it take, for all tokens."""
        width = self._widest if coupled > 1 else self.size.width
        return 2 * self._tokens * coupled * width**2 * self.itemsize

    @property
    def products_saved(self) -> int:
        """Those of the usual questions to the blocks of the Hessian."""
        return _QUESTIONS * sum(min(block.size, DEFAULT_MATVECS) for block in self.held.values())

    @property
    def saved(self) -> float:
        """What those cost, in operations."""
        own = sum(block.size for block in self.layer.blocks.values())
        return self.products_saved * self._product(self.weights[0] + own)

    def closed(self, coupled: int) -> float:
        """What a closed form costs, in operations: the products for S, the cores and the norms."""
        summands = self._tokens * coupled
        made = 0
        for name, block in self.held.items():
            core = self._core_width(name, block)
            made += 2 * summands * core * self.size.width * (core + self.size.width)
            made += 2 * min((summands * core) ** 2, summands * block.size**2)
        moved = _PER_BYTE * self.curvature_bytes(coupled)
        return self.products(coupled) * self._product(self.weights[0]) + made + moved

    def _product(self, weights: int) -> float:
        """One product through so many weights, in operations."""
        moved = self.product_bytes * weights / max(1, self.weights[1])
        return _PER_WEIGHT * weights * self._tokens + _PER_BYTE * moved

    def _core_width(self, name: str, block: Block) -> int:
        """The cores of a block are square: of the outputs of its weight, or of the inputs for the keys of each head."""
        if name.removeprefix("b_")[0] != "K":
            return block.shape[1]
        return block.shape[0] * (1 if "." in name else self._heads)


class ClosedFormLayers:
    """The layers of a model that may have a closed form, and which blocks they hold."""

    def __init__(self, model: nn.Module, *maps: Blocks) -> None:
        """`maps`: all blocks of the model, as they are named in different ways; a layer is that of the first."""
        self._model, self.all = model, list[ModelLayer]()
        for layer in (layer for blocks in maps for layer in layers_of(model, blocks)):
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

    def mixed_after(self, layer: ModelLayer) -> bool:
        """Whether an attention layer follows, so that tokens mix between the layer and the loss."""
        return any(other.kind == "attn" for other in self.all[self.all.index(layer) + 1 :])

    @property
    def sites(self) -> dict[str, Site]:
        """Where each layer ends, by the names of its parameters."""
        return {name: layer.output for layer in self.all for name in layer.parameters}

    def place(self, block: Block) -> BlockPlace | str:
        """Where the block stands, or why it stands in no layer."""
        found = self._places.get(block.pieces)
        if block.tied:
            return f"it is tied to {', '.join(block.tied)}"
        return "no closed form is known for it" if found is None else found

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, every pass of the model adds to `sizes`: no pass is made for them, and no tensor is kept."""
        with ExitStack() as stack:
            hooks = {layer.name: ShapeHook(self._model, layer.output) for layer in self.all}
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
                if _arguments(module, inputs, keywords).get(_ROTARY) is not None:
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


def layers_of(model: nn.Module, blocks: Blocks) -> list[ModelLayer]:
    """The layers among all the blocks of a model."""
    groups: dict[str, dict[str, Block]] = {}
    for name, block in blocks.items():
        layer, role = layer_and_role(name) or ("", "")
        kind, dot, leaf = role.partition(".")
        if dot and name == f"{layer}.{role}":  # not a single head
            groups.setdefault(f"{layer}.{kind}", {})[leaf] = block
    if any(type(module).__module__.startswith("transformer_lens.") for module in model.modules()):
        return []  # its modules cannot be run at other weights than their own
    found = (_layer(model, name, group, groups) for name, group in groups.items())
    return [layer for layer in found if layer is not None]


def _layer(
    model: nn.Module, name: str, group: dict[str, Block], groups: dict[str, dict[str, Block]]
) -> ModelLayer | None:
    stem, _, kind = name.rpartition(".")
    if not set(_NEEDED.get(kind, ("unknown",))) <= set(group):
        return None
    beside = frozenset(group) - set(_ROLES[kind])
    group = {role: block for role, block in group.items() if role in _ROLES[kind]}
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
    query = groups.get(f"{stem}.attn".lstrip("."), {}).get("Q")
    neighbour = None if query is None else model.get_submodule(_owner(query))
    tokens_first = isinstance(neighbour, nn.MultiheadAttention) and not neighbour.batch_first
    caller = first.rpartition(".")[0]
    return ModelLayer(name, group, Site(first, "input"), Site(last), None, caller, tokens_first, beside)


def _owner(block: Block) -> str:
    return block.pieces[0].parameter.rpartition(".")[0]


def _arguments(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """What a module is called with, by name."""
    bound = inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments
    return {**bound, **bound.get("kwargs", {})}


@dataclass(frozen=True)
class LayerRecord:
    """What one pass of the model tells of a layer, without its graph.

    X and F (N, L, .); `size`: the largest entry of the tensor that holds F; `arguments`: masks and rotary tables that
    `module` was called with; `with_keys`: it was called with keys of their own, as `nn.MultiheadAttention` is.
    """

    X: Tensor
    F: Tensor
    size: float
    module: nn.Module
    arguments: Mapping[str, Any]
    with_keys: bool

    @property
    def rotary(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, if the module was called with some."""
        given = self.arguments.get(_ROTARY)
        return given if isinstance(given, tuple) and len(given) == 2 else None


class LayerRecorder:
    """Hooks that note what passes through a layer while the model runs inside."""

    def __init__(self, model: nn.Module, layer: ModelLayer) -> None:
        self._layer, self._module = layer, model.get_submodule(layer.caller)
        self._read, self._written = ActivationHook(model, layer.input), ActivationHook(model, layer.output)
        self._added = None if layer.added is None else ActivationHook(model, layer.added)
        self._taps = [tap for tap in (self._read, self._written, self._added) if tap is not None]
        self._arguments: dict[str, Any] = {}
        self._with_keys = False

    def __enter__(self) -> "LayerRecorder":
        self._stack = ExitStack()
        for tap in self._taps:
            self._stack.enter_context(tap)
        handle = self._module.register_forward_pre_hook(self._call, with_kwargs=True)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _call(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = _arguments(module, inputs, keywords)
        self._arguments, self._with_keys = {name: given[name] for name in _TOLD if name in given}, "key" in given

    @property
    def once(self) -> bool:
        """Whether the layer ran exactly once, from tensor to tensor."""
        return all(tap.once for tap in self._taps)

    @property
    def record(self) -> LayerRecord:
        """What the last pass told."""
        written = self.written.detach()
        return LayerRecord(
            self.batched(self._read.tensor.detach()),
            self.batched(written if self._added is None else written - self._added.tensor.detach()),
            float(written.abs().max()),
            self._module,
            self._arguments,
            self._with_keys,
        )

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
