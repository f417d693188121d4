"""Adapters on the weights of a model: LoRA by its structure, DoRA and IA3 by their names in PEFT.

A module is a LoRA layer if it computes x W + b + s x A B, with matrices A (a, r) and B (r, p) whose rank r is below
both widths of its own weight W (a, p). This is tested on random inputs, so that neither class nor names matter, and
W may be quantised. Several pairs A, B may act on one weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvoscope.autodiff.kernels import forward_replaced
from curvoscope.blocks import STORED, TRANSPOSED, Block, Blocks, Layout, Piece
from curvoscope.families.adapter_probe import AdapterProbe, FactorPair

_PEFT = {  # where PEFT keeps the parts of an adapter, and what they are called here
    **{"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B"},
    **{"lora_magnitude_vector": "magnitude", "ia3_l": "ia3"},
}
_WHY = {
    "dora": "DoRA divides the adapted weight by its norm, which has no closed form",
    "ia3": "IA3 multiplies activations, which has no closed form",
    "other": "its adapter is not of the form x W + s x A B",
}
_MOST_MATRICES = 9  # of a module that is tried: a weight and four adapters


@dataclass(frozen=True)
class Adapter:
    """An adapter on the weight of the module at `path`.

    `kind`: "lora" (x W + b + `scale` x A B), "dora", "ia3" or "other". `parts`: its parameters, as matrices, by the
    names "A" (a, r), "B" (r, p), "magnitude" or "ia3". `base`: W in the model, None if it is not a floating-point
    parameter; `shape`: (a, p) of a "lora". `number`: of several on one weight, from 1.
    """

    path: str
    kind: str
    parts: Mapping[str, Piece]
    base: Piece | None
    shape: tuple[int, int] = (0, 0)
    scale: float = 1.0
    number: int = 1

    @property
    def parameters(self) -> set[str]:
        """Names of the adapter's own parameters."""
        return {piece.parameter for piece in self.parts.values()}

    @property
    def wrappers(self) -> set[str]:
        """Modules between the adapter's and the one that holds the weight, such as PEFT's "base_layer"."""
        inside = "" if self.base is None else self.base.parameter.removeprefix(f"{self.path}.")
        return set(inside.split(".")[:-1])

    def label(self, part: str) -> str:
        """ "A" for the first adapter of a weight, "A2" for the second."""
        return part if self.number == 1 else f"{part}{self.number}"

    @property
    def why_not_closed(self) -> str | None:
        """Why its blocks have no closed form, as far as the adapter itself is concerned."""
        if self.kind != "lora":
            return _WHY[self.kind]
        return None if self.base is not None else "the weight that it adapts is quantised, or no parameter"


def adapters_of(model: nn.Module) -> list[Adapter]:
    """The adapters in a model, in the order of its modules. Modules that may be LoRA layers run on random numbers."""
    if any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters()):
        return []  # nothing can run
    modules = list(model.named_modules())
    found: dict[str, list[Adapter]] = {}
    for path, module in reversed(modules):  # the smallest module around an adapter is the layer
        if any(f"{other}.".startswith(f"{path}.") or not path for other in found):
            continue
        several = _low_rank(path, module) or _by_name(path, module)
        if several:
            found[path] = several
    return [adapter for path, _ in modules for adapter in found.get(path, [])]


def with_adapters(blocks: Blocks, adapters: Sequence[Adapter]) -> Blocks:
    """The blocks with those of adapters behind the weight that they act on, by its name: "h.0.attn.Q.A".

    A weight that is cut into several blocks has one A, "h.0.attn.QKV.A", and a B for each of them. Blocks of weights
    that are not parameters are left out.
    """
    taken = {name for adapter in adapters for name in adapter.parameters}
    behind: dict[str, list[Block]] = {}
    named: set[str] = set()
    for adapter in adapters:
        weights = weights_under(adapter, blocks)
        if weights:
            behind.setdefault(weights[-1].name, []).extend(_named(adapter, weights))
            named |= adapter.parameters
    standing = {stand_in(adapter) for adapter in adapters if adapter.base is None}
    found: list[Block] = []
    for name, block in blocks.items():
        parameters = {piece.parameter for piece in block.pieces}
        if not parameters & standing and not parameters & taken & named:
            found.append(block)
        found += behind.get(name, [])
    return Blocks(found)


def stand_in(adapter: Adapter) -> str:
    """The name under which the weight of an adapter is looked for if it is not a parameter."""
    return f"{adapter.path}.weight".removeprefix(".")


def stand_ins(adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """Tensors without numbers for weights that are not parameters, (p, a) as nn.Linear keeps them, by name."""
    found = (adapter for adapter in adapters if adapter.base is None and adapter.kind == "lora")
    return {stand_in(one): torch.empty(one.shape[::-1], device="meta") for one in found}


def weights_under(adapter: Adapter, blocks: Mapping[str, Block]) -> list[Block]:
    """The blocks of the weight that an adapter acts on."""
    name = stand_in(adapter) if adapter.base is None else adapter.base.parameter
    return [block for block in blocks.values() if any(piece.parameter == name for piece in block.pieces)]


def columns_of(block: Block) -> slice:
    """The columns of its parameter's matrix that a block of one piece holds."""
    piece = block.pieces[0]
    return piece.index[piece.layout.columns[0]]


def _named(adapter: Adapter, weights: Sequence[Block]) -> list[Block]:
    """The blocks of an adapter, by the names of the weights that it acts on."""
    if len(weights) == 1:
        return [Block(f"{weights[0].name}.{adapter.label(p)}", (piece,)) for p, piece in adapter.parts.items()]
    stem = weights[0].name.rpartition(".")[0]
    roles = [block.name.rpartition(".")[2] for block in weights]
    joined = f"{stem}.{('_' if max(map(len, roles)) > 1 else '').join(roles)}"
    found = []
    for part, piece in adapter.parts.items():
        if part == "B" and adapter.kind == "lora" and all(len(block.pieces) == 1 for block in weights):
            cut = [(block.name, columns_of(block)) for block in weights]
            found += [Block(f"{n}.{adapter.label(part)}", (piece.between(1, c.start, c.stop),)) for n, c in cut]
        else:
            found.append(Block(f"{joined}.{adapter.label(part)}", (piece,)))
    return found


# ---- by structure


def _low_rank(path: str, module: nn.Module) -> list[Adapter]:
    """The LoRA pairs of a module, if it computes x W + b + s x A B."""
    matrices = {name: one for name, one in module.named_parameters() if one.ndim == 2 and one.is_floating_point()}
    if not 2 <= len(matrices) <= _MOST_MATRICES:
        return []
    for base in (*matrices, None):
        if base is None and not _holds_integers(module):
            continue
        pairs = list(_pairs(matrices, base))
        if {name for pair in pairs for name in pair.names} != set(matrices) - {base}:
            continue
        found = AdapterProbe(module, pairs).acting()
        if found:
            return [_lora(path, matrices, number, *one) for number, one in enumerate(found, 1)]
    return []


def _pairs(matrices: Mapping[str, Tensor], base: str | None) -> Iterator[FactorPair]:
    """Pairs of matrices that fit as the factors of the weight `base`, by their shapes."""
    for first, second in product(matrices, matrices):
        if first == second or base in (first, second):
            continue
        for layouts in product((TRANSPOSED, STORED), (TRANSPOSED, STORED)):
            (a, r), (q, p) = (
                tuple(matrices[name].shape[axis] for axis in (*layout.rows, *layout.columns))
                for name, layout in zip((first, second), layouts, strict=True)
            )
            fits = base is None or tuple(matrices[base].shape) in ((a, p), (p, a))
            if r == q and r < min(a, p) and fits:
                yield FactorPair((first, second), layouts, (a, p), r, base)


def _lora(
    path: str, matrices: Mapping[str, Tensor], number: int, pair: FactorPair, scale: float, layout: Layout | None
) -> Adapter:
    """The adapter of a pair of factors; `layout`: that of its weight, if a parameter holds it."""

    def piece(name: str, layout: Layout) -> Piece:
        return Piece.whole(f"{path}.{name}".removeprefix("."), matrices[name].shape, layout)

    A, B = (piece(*factor) for factor in zip(pair.names, pair.layouts, strict=True))
    base = None if pair.base is None or layout is None else piece(pair.base, layout)
    return Adapter(path, "lora", {"A": A, "B": B}, base, pair.shape, scale, number)


def _holds_integers(module: nn.Module) -> bool:
    return any(one.numel() > 1 and not one.is_floating_point() for one in (*module.parameters(), *module.buffers()))


# ---- by name


def _by_name(path: str, module: nn.Module) -> list[Adapter]:
    """An adapter of PEFT that is not a plain LoRA, alone on its weight."""
    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    parts: dict[str, Piece] = {}
    for kept, part in _PEFT.items():
        inside = module._modules.get(kept, None)
        own = [
            (f"{path}.{kept}.{name}", one)
            for name, one in (() if inside is None else inside.named_parameters())
            if one.numel()
        ]
        if len(own) > 1:
            return []
        for name, one in own:
            layout = TRANSPOSED if part in "AB" else Layout((), tuple(range(one.ndim)))
            parts[part] = Piece.whole(name.removeprefix("."), one.shape, layout)
    if not parts or not isinstance(weight, Tensor):
        return []
    kind = "dora" if "magnitude" in parts else "ia3" if "ia3" in parts else "other"
    name = f"{path}.base_layer.weight".removeprefix(".")
    base = Piece.whole(name, weight.shape, STORED) if weight.is_floating_point() else None
    return [Adapter(path, kind, parts, base)]


# ---- without adapters


@contextmanager
def without_adapters(model: nn.Module, adapters: Sequence[Adapter]) -> Iterator[dict[str, Tensor]]:
    """Inside, the model runs without its adapters. What is given: weights that stand in for those that are no
    parameters, random ones, by name."""
    named, given = dict(model.named_parameters()), dict[str, Tensor]()
    with ExitStack() as stack:
        for adapter in {adapter.path: adapter for adapter in adapters}.values():
            module = model.get_submodule(adapter.path)
            if adapter.kind != "lora":
                plain = module.get_submodule("base_layer").forward
            elif adapter.base is not None:
                inside = adapter.base.parameter.removeprefix(f"{adapter.path}.")
                plain = _Plain(module, adapter.shape[1], inside, adapter.base.layout == TRANSPOSED)
            else:
                a, p = adapter.shape
                name, drawn = stand_in(adapter), torch.randn(p, a, generator=torch.Generator().manual_seed(0))
                given[name] = nn.Parameter(drawn.to(named[adapter.parts["A"].parameter]))
                plain = _Plain(module, p, given[name], turned=True)
            stack.enter_context(forward_replaced(module, plain))
        yield given


class _Plain:
    """x W + b, whatever else a module is called with; W and b are those that the module holds when it is called.

    `weight`: its path below the module, or a tensor; `turned`: it is (p, a).
    """

    def __init__(self, module: nn.Module, width: int, weight: str | Tensor, turned: bool) -> None:
        self._module, self._weight, self._turned = module, weight, turned
        self._bias = next((name for name, one in module.named_parameters() if tuple(one.shape) == (width,)), None)

    def __call__(self, x: Tensor, *others: object, **more: object) -> Tensor:
        weight = self._weight if isinstance(self._weight, Tensor) else self._held(self._weight)
        bias = None if self._bias is None else self._held(self._bias)
        if self._turned:
            return nn.functional.linear(x, weight, bias)
        found = x.flatten(0, -2) @ weight
        found = found if bias is None else found + bias
        return found.unflatten(0, x.shape[:-1])

    def _held(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        held: Tensor = getattr(self._module.get_submodule(path), leaf)
        return held
