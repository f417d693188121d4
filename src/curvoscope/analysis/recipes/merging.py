"""Recipes that join other weights with those of a model: adapters, another checkpoint, a change per block."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from curvoscope.analysis.changes import Change, changed_state
from curvoscope.analysis.recipes.rewriting import completed, detached_parameters, rewritten
from curvoscope.blocks import Block
from curvoscope.errors import ShapeError
from curvoscope.families.block_maps import blocks_of


def merge_lora(
    model: nn.Module, adapters: Mapping[str, tuple[Tensor, Tensor]], scale: float = 1.0
) -> dict[str, Tensor]:
    """Add the products of low-rank adapters: W + scale A B.

    Args:
        model: any module.
        adapters: A (a, r) and B (r, p) by the names of the blocks W (a, p).
        scale: usually alpha / r.

    Returns:
        The state dict with merged weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8)
        >>> merged = cv.analysis.recipes.merge_lora(model, {"h.0.mlp.up": (torch.ones(4, 1), torch.ones(1, 8))})
        >>> torch.allclose(merged["linear1.weight"], model.linear1.weight + 1)
        True
    """

    def merged(block: Block, W: Tensor) -> Tensor:
        A, B = adapters[block.name]
        if A.ndim != 2 or B.ndim != 2 or (A.shape[0], B.shape[1]) != W.shape or A.shape[1] != B.shape[0]:
            shapes = f"A {tuple(A.shape)} and B {tuple(B.shape)}"
            raise ShapeError(
                "adapters", f"{block.name!r}: {shapes} do not make {tuple(W.shape)}; expected (a, r) and (r, p)"
            )
        return W + scale * A.to(W) @ B.to(W)

    return rewritten(model, merged, list(adapters))


def average(model: nn.Module, other: Change, weight: float = 0.5) -> dict[str, Tensor]:
    """The weighted mean of two checkpoints: (1 - weight) w + weight w'.

    Args:
        model: gives w.
        other: gives w': anything that `cv.analysis.sensitivity` takes for `changed`.
        weight: of the other.

    Returns:
        The state dict with averaged weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> torch.allclose(cv.analysis.recipes.average(one, other)["weight"], (one.weight + other.weight) / 2)
        True
    """
    target = changed_state(model, other)
    return completed(model, {name: torch.lerp(p, target[name].to(p), weight) for name, p in detached_parameters(model)})


def mix(model: nn.Module, changes: Mapping[str, Change]) -> dict[str, Tensor]:
    """Change each block in its own way; blocks that are not named stay.

    Args:
        model: any module.
        changes: by block name, anything that `cv.analysis.sensitivity` takes for `changed`.

    Returns:
        The state dict with the blocks of several changes.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, recipes = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), cv.analysis.recipes
        >>> mixed = recipes.mix(model, {"0.weight": recipes.int3, "1.weight": recipes.int8})
        >>> torch.equal(mixed["0.weight"], recipes.int3(model)["0.weight"])
        True
    """
    blocks, parameters = blocks_of(model), dict(detached_parameters(model))
    states: dict[int, dict[str, Tensor]] = {}
    mixed: dict[str, Tensor] = {}
    for name, change in changes.items():
        if id(change) not in states:
            states[id(change)] = changed_state(model, change)
        block = blocks[name]
        mixed |= {p.parameter: parameters[p.parameter].clone() for p in block.pieces if p.parameter not in mixed}
        block.scatter(block.gather(states[id(change)]), mixed)
    return completed(model, mixed)
