"""From the parameter names of a model to named blocks: the part that all families share.

A `Family` is a table of paths: where a layer of that kind of model keeps its query weight, its norms and so on. A
layer is found wherever a model has parameters under a family's attention paths, so that a model inside another module
and a compiled or otherwise wrapped one are recognised as well. What no table names, or what turns out to be something
else than its path says, becomes one block per parameter.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvoscope.blocks import LAYER_ROLES, STORED, TRANSPOSED, Block, Blocks, Layout, Piece, flat
from curvoscope.errors import EmptyError, ModelError
from curvoscope.families.adapters import Adapter, stand_ins
from curvoscope.families.wiring import norm_roles

Paths = Mapping[str, tuple[str, ...]]

_LENS = "_original_component"
_WRAPPERS = {_LENS, "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_WEIGHTS, _BIASES = ("", ".weight", "_weight", ".w", ".gamma"), (".bias", "_bias", ".b", ".beta")
HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "n_key_value_heads")
_NUMBER = re.compile(r"(^|\.)\d+(\.|$)")
_ATTENDING = re.compile("attn|attention|query|qkv|q_proj")
BEFORE, LAYERS, AFTER, END = range(4)  # where a block stands in the order of the model
STAGES = {"final_norm": AFTER, "unembed": END, "b_unembed": END}


def paths(**where: str) -> Paths:
    """A table of paths. `attn_Q` stands for the block "attn.Q"; spaces part alternatives."""
    return {re.sub("^(attn|mlp|mixer|channel)_", r"\1.", name): tuple(path.split()) for name, path in where.items()}


Shapes = Callable[[str], tuple[int, int]]  # of a block (a, p), by name
Cut = Callable[[Shapes], Sequence[tuple[str, int]]]  # the blocks in the columns of a fused weight, and their widths


@dataclass(frozen=True)
class Family:
    """Where one kind of model keeps its blocks.

    `layer`: paths under a layer; "attn.QKV" is a fused projection with the outputs Q, K, V one after the other.
    `outside`: paths beside the stack of layers or, unless `beside`, further out. `accepts` looks at the modules
    around the query weight, from its owner outwards. `heads`: their number, where the modules do not tell. `needs`:
    what a layer without attention must have, `fused`: how its fused weights are cut.
    """

    layer: Paths
    outside: Paths
    beside: bool = False
    accepts: Callable[[Sequence[nn.Module]], bool] = lambda modules: True
    heads: int | None = None
    needs: tuple[str, ...] = ()
    fused: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def first(self) -> tuple[str, ...]:
        """The paths that a layer is found by."""
        if self.needs:
            return self.layer[self.needs[0]]
        return (*self.layer.get("attn.QKV", ()), *self.layer.get("attn.Q", ()))


@dataclass(frozen=True)
class FoundLayer:
    """A layer: its path, the stack that it belongs to and its number there."""

    path: str
    family: Family

    @property
    def number(self) -> int:
        """The last number in its path."""
        return next((int(part) for part in reversed(self.path.split(".")) if part.isdigit()), 0)

    @property
    def stack(self) -> str:
        """Its path without that number."""
        return re.sub(r"(^|\.)\d+((\.[^.\d][^.]*)*)$", r"\2", self.path).lstrip(".")


class Assembly:
    """Claims parameters for blocks. Names and paths in here are bare, without those of wrappers."""

    def __init__(self, model: nn.Module, adapters: Sequence[Adapter]) -> None:
        lens = any(kind.__name__ == "TransformerBridge" for kind in type(model).__mro__)
        inner = getattr(model, "original_model", None) if lens else None
        self._root = inner if isinstance(inner, nn.Module) else model  # where the parameters' names lead
        self._parameters: dict[str, Tensor] = {}
        self._actual: dict[str, str] = {}
        self._wrappers = _WRAPPERS.union(*(adapter.wrappers for adapter in adapters))
        for name, parameter in (*model.named_parameters(), *stand_ins(adapters).items()):
            if is_lazy(parameter):
                raise ModelError(name, "is not initialised yet: run the model on one batch first")
            if parameter.numel():
                bare = ".".join(part for part in name.split(".") if part not in self._wrappers)
                bare = name if bare in self._parameters else bare
                self._parameters[bare], self._actual[bare] = parameter, name
        if not self._parameters:
            raise EmptyError("model", "has no parameters")
        self._bare = {actual: bare for bare, actual in self._actual.items()}
        self._position = {name: i for i, name in enumerate(self._parameters)}
        self._tied = self._ties(model)
        self._claimed: set[str] = set()
        self._blocks: dict[str, Block] = {}
        self._place: dict[str, tuple[int, int]] = {}

    def blocks(self, families: Sequence[Family]) -> Blocks:
        """Layers first, then what stands around them, then the rest; sorted into the order of the model."""
        layers = self._add_layers(families)
        self._add_outside(layers)
        self._add_rest(layers)
        return self._sorted()

    def _add_layers(self, families: Sequence[Family]) -> list[FoundLayer]:
        """All layers that one of the families fits."""
        layers = self._layers(families)
        stacks = _stacks(layers)
        for layer in layers:
            self._add_layer(layer, _prefix(layer.stack, stacks))
        return layers

    def _sorted(self) -> Blocks:
        return Blocks(self._blocks[name] for name in sorted(self._blocks, key=self._place.__getitem__))

    def _layers(self, families: Sequence[Family]) -> list[FoundLayer]:
        found: dict[str, Family] = {}
        for family in families:
            ends = [path + kind for path in family.first for kind in _WEIGHTS]
            for name in (name for name in self._parameters if name not in self._claimed):
                end = next((end for end in ends if f".{name}".endswith(f".{end}")), None)
                path = "" if end is None else name.removesuffix(end).removesuffix(".")
                if end is None or any(_within(path, other) for other in found):
                    continue
                fits = self._has_recurrence if family.needs else self._has_attention
                if fits(family, path) and family.accepts(self._around(name)):
                    found[path] = family
        layers = [FoundLayer(path, family) for path, family in found.items() if not self._is_aside(path)]
        return sorted(layers, key=lambda layer: self._begin(layer.path))

    def _is_aside(self, path: str) -> bool:
        """Whether something without a number, such as a head that pools by attention, stands beside numbered layers."""
        if _NUMBER.search(path):
            return False
        others = (name for name in self._parameters if not _within(name, path))
        return any(_NUMBER.search(name) and _ATTENDING.search(name) for name in others)

    def _has_attention(self, family: Family, scope: str) -> bool:
        weights = {key: self._find(family.layer.get(f"attn.{key}", ()), scope, _WEIGHTS) for key in ("QKV", *"QKVO")}
        fused = weights.pop("QKV")
        if fused is None:
            shapes = {key: self._shape(name, f"attn.{key}") for key, name in weights.items() if name is not None}
            # As many value heads for each output head as key heads for each query: else a weight holds more than its
            # name says, such as queries and gates.
            return len(shapes) == 4 and shapes["Q"][1] * shapes["V"][1] == shapes["K"][1] * shapes["O"][0]
        small, large = sorted(self._parameters[fused].shape)
        return weights["O"] is not None and large == 3 * small

    def _has_recurrence(self, family: Family, scope: str) -> bool:
        """Whether all parts are there, and the widths of what fused weights hold add up to theirs."""
        found = {key: self._find(family.layer[key], scope, _WEIGHTS) for key in family.needs}
        if None in found.values():
            return False
        shapes = {key: self._shape(name, key) for key, name in found.items() if name is not None}
        for key, cut in family.fused.items():
            widths = [width for _, width in cut(shapes.__getitem__)]
            if min(widths) < 1 or sum(widths) != shapes[key][1]:
                return False
        return True

    def _shape(self, name: str, key: str) -> tuple[int, int]:
        return Piece.whole(name, self._parameters[name].shape, self._layout(name, key)).shape

    def _add_layer(self, layer: FoundLayer, prefix: str) -> None:
        made: dict[str, Block] = {}
        family = layer.family
        cuts = self._cuts(family, layer.path)  # before any part is claimed
        for key, alternatives in family.layer.items():
            if "norm" not in key:
                self._read(key, alternatives, layer.path, made, cuts.get(key))
        query = self._bare[made[family.needs[0] if family.needs else "attn.Q"].pieces[0].parameter]
        for key, path in self._norms(layer, query):
            self._read(key, (path,), layer.path, made)
        modules = self._around(query)
        for key in (key for key in LAYER_ROLES if key in made):
            place = (LAYERS, self._begin(layer.path))
            self._add(f"{prefix}h.{layer.number}.{key}", _with_heads(key, made[key], modules, layer.family), place)

    def _cuts(self, family: Family, scope: str) -> dict[str, Sequence[tuple[str, int]]]:
        """How the fused weights of a layer without attention are cut."""

        def shape(key: str) -> tuple[int, int]:
            name = self._find(family.layer[key], scope, _WEIGHTS)
            assert name is not None
            return self._shape(name, key)

        return {key: cut(shape) for key, cut in family.fused.items()}

    def _norms(self, layer: FoundLayer, query: str) -> Iterator[tuple[str, str]]:
        """Which norm of a layer is at which path: what the table says or, if a path may stand for two norms, what the
        order tells in which the layer's module runs them. Where that cannot be read, such a path has no name."""
        table = [(key, path) for key, paths in layer.family.layer.items() if "norm" in key for path in paths]
        different = dict.fromkeys(path for _, path in table)
        if len(different) == len(table):
            yield from table
            return
        inside = query.removeprefix(layer.path).strip(".").split(".")
        roles = norm_roles(self._module(query, len(inside)), inside[0], inside[-2]) if len(inside) > 2 else None
        for path in different:
            keys: list[str | None] = [key for key, other in table if other == path]
            if roles is not None and "." not in path:
                keys = [roles.get(path)]
            if len(keys) == 1 and keys[0] is not None:
                yield keys[0], path

    def _add_outside(self, layers: Sequence[FoundLayer]) -> None:
        """What stands around a stack has the stack's name in front; around several of them, none."""
        stacks = _stacks(layers)
        made: dict[str, dict[str, Block]] = {}
        for layer in {layer.stack: layer for layer in layers}.values():
            parts = layer.path.split(".")
            scopes = [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)]
            for key, alternatives in layer.family.outside.items():
                for scope in scopes[:2] if layer.family.beside else scopes:
                    alone = len({other.stack for other in layers if _within(other.path, scope)}) == 1
                    prefix = _prefix(layer.stack, stacks) if alone else ""
                    self._read(key, alternatives, scope, made.setdefault(prefix, {}))
        for prefix, blocks in made.items():
            for key, block in blocks.items():
                first = min(self._position[self._bare[piece.parameter]] for piece in block.pieces)
                self._add(f"{prefix}{key}", block, (STAGES.get(key, BEFORE), first))

    def _add_rest(self, layers: Sequence[FoundLayer]) -> None:
        begin = min((self._begin(layer.path) for layer in layers), default=0)
        for name, parameter in self._parameters.items():
            if name in self._claimed:
                continue
            actual = self._actual[name]
            originals = [block for block in self._blocks.values() if self._is_shadow(actual, block)]
            for block in originals:
                self._blocks[block.name] = replace(block, tied=(*block.tied, actual))
            if originals:
                continue
            home = next((layer.path for layer in layers if _within(name, layer.path)), None)
            place = (BEFORE if self._position[name] < begin else AFTER, self._position[name])
            piece = Piece.whole(actual, parameter.shape, flat(parameter.ndim))
            free = f"{actual} (parameter)" if actual in self._blocks else actual
            self._add(free, self._block(piece), place if home is None else (LAYERS, self._begin(home)))

    def _add(self, name: str, block: Block, place: tuple[int, int]) -> None:
        self._blocks[name], self._place[name] = replace(block, name=name), place

    def _read(
        self,
        key: str,
        alternatives: Sequence[str],
        scope: str,
        made: dict[str, Block],
        cut: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        """Make block `key`, and the bias that goes with it, of what is found at one of the paths under `scope`; of a
        fused weight the blocks that it is cut into."""
        weight, bias = self._find(alternatives, scope, _WEIGHTS), self._find(alternatives, scope, _BIASES)
        group, dot, leaf = key.rpartition(".")
        if "norm" in key:
            if key not in made and (weight or bias):
                made[key] = self._block(*(self._piece(name, key) for name in (weight, bias) if name))
        elif cut is not None:
            for name, start in ((weight, ""), (bias, "b_")):
                if name:
                    whole, column = self._piece(name, start or key), 0
                    for part, width in cut:
                        made[f"{group}{dot}{start}{part}"] = self._block(whole.between(1, column, column + width))
                        column += width
        elif leaf == "QKV":
            for name, start in ((weight, "attn."), (bias, "attn.b_")):
                if name:
                    whole = self._piece(name, start)
                    made |= {start + part: self._block(whole.part(1, i, 3)) for i, part in enumerate("QKV")}
        else:
            for name, wanted in ((weight, key), (bias, f"{group}{dot}b_{leaf}")):
                if name and wanted not in made:
                    made[wanted] = self._block(self._piece(name, wanted))

    def _find(self, alternatives: Sequence[str], scope: str, kinds: Sequence[str]) -> str | None:
        """The first parameter at one of the paths under `scope` that no block has claimed."""
        names = (f"{scope}.{path}{kind}".removeprefix(".") for path in alternatives for kind in kinds)
        return next((name for name in names if name in self._parameters and name not in self._claimed), None)

    def _piece(self, name: str, key: str) -> Piece:
        self._claimed.add(name)
        return Piece.whole(self._actual[name], self._parameters[name].shape, self._layout(name, key))

    def _block(self, *pieces: Piece) -> Block:
        tied = dict.fromkeys(other for piece in pieces for other in self._tied.get(piece.parameter, ()))
        return Block("", pieces, tuple(tied))

    def _layout(self, name: str, key: str) -> Layout:
        """`weight` is (out, in), as nn.Linear keeps it, but for the two classes below; `W` is (in, out)."""
        dimensions = self._parameters[name].ndim
        if dimensions < 2 or "norm" in key or key.rpartition(".")[2].startswith("b_"):
            return Layout((), tuple(range(dimensions)))
        if dimensions == 3:  # (heads, d, d_head), but (heads, d_head, d) for O and (1, n, d) for positions
            return Layout((1,), (0, 2)) if key in ("attn.Q", "attn.K", "attn.V") else Layout((0, 1), (2,))
        owner = self._around(name)[0]
        as_stored = isinstance(owner, nn.Embedding) or type(owner).__name__ == "Conv1D"
        return TRANSPOSED if name.endswith("weight") and not as_stored else STORED

    def _around(self, name: str) -> list[nn.Module]:
        """The modules around a parameter, from its owner to the model itself."""
        parts = self._actual[name].split(".")
        return [self._root.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]

    def _module(self, name: str, inside: int) -> nn.Module:
        """The module that has a parameter `inside` steps below it, not counting wrappers."""
        parts = self._actual[name].split(".")
        while inside:
            inside -= parts.pop() not in self._wrappers
        return self._root.get_submodule(".".join(parts))

    def _begin(self, path: str) -> int:
        """Position of the first parameter of a layer."""
        return next(i for name, i in self._position.items() if _within(name, path))

    def _ties(self, model: nn.Module) -> dict[str, list[str]]:
        """Other names of each parameter. TransformerLens lists a module under many names: those are not ties."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)

        def owner(name: str) -> nn.Module:
            return self._root.get_submodule(name.rpartition(".")[0])

        return {
            first: [name for name in others if _LENS not in name or owner(name) is not owner(first)]
            for first, *others in names.values()
        }

    def _is_shadow(self, name: str, block: Block) -> bool:
        """Whether TransformerLens keeps the block's memory as part of another parameter, which its model never uses."""
        if _LENS not in name:
            return False
        start, stop = _span(self._parameters[self._bare[name]])
        spans = [_span(self._parameters[self._bare[piece.parameter]]) for piece in block.pieces]
        return any(start < other_stop and other_start < stop for other_start, other_stop in spans)


def _with_heads(key: str, block: Block, modules: Sequence[nn.Module], family: Family) -> Block:
    """The block with its number of heads: the tensor's own axis of heads, or what the modules around it say."""
    leaf = key.removeprefix("attn.").removeprefix("b_")
    if not key.startswith("attn.") or key == "attn.b_O":
        return block
    axis = 0 if leaf == "O" else 1
    axes, stored = block.pieces[0].layout[axis], block.pieces[0].stored
    count = number_of(modules, HEADS) or family.heads
    if len(axes) > 1:
        count = stored[axes[0]]
    elif leaf in ("K", "V"):
        count = number_of(modules, _KV_HEADS) or count
    return block if not count or block.shape[axis] % count else replace(block, heads=count, axis=axis)


def number_of(modules: Sequence[nn.Module], attributes: Sequence[str]) -> int | None:
    """The first of the attributes that a module, or its configuration, has."""
    for module in modules:
        for holder in (module, getattr(module, "config", None), getattr(module, "cfg", None)):
            for attribute in attributes:
                value = getattr(holder, attribute, None)
                if isinstance(value, int) and value > 0:
                    return value
    return None


def _stacks(layers: Iterable[FoundLayer]) -> list[str]:
    return list(dict.fromkeys(layer.stack for layer in layers))


def _prefix(stack: str, stacks: Sequence[str]) -> str:
    """What tells the stack from the model's others, with a dot; nothing when there are none."""
    if len(stacks) == 1:
        return ""
    beside = [other.rpartition(".")[0] for other in stacks]
    parent = stack.rpartition(".")[0]
    return f"{parent if parent and beside.count(parent) == 1 else stack}."


def _within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in memory, and the one behind its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
