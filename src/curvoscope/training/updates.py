"""The update lens: what an optimizer's own step did to the loss, by block, by head and by part of the curvature."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Block


@dataclass(frozen=True)
class BlockUpdate:
    """The part δ_b of a step δ in one block or head, with gradient g and Hessian H at the weights after the step.

    Args:
        length: |δ_b|.
        slope: g_b·δ_b.
        outer: δ_b·(H_o δ)_b, which sums to δ·H_o δ over the blocks.
        functional: δ_b·(H_f δ)_b.
        own_curvature: δ_b·H_bb δ_b; None if it was not measured, as for heads.
        change: L(w) - L(w - δ_b), the effect of this block's part of the step, measured by a forward pass; None if not
            measured.

    Example:
        >>> from curvoscope.training import BlockUpdate
        >>> one = BlockUpdate(length=0.5, slope=-0.5, outer=1.0, functional=0.0, own_curvature=1.0, change=-1.0)
        >>> one.curvature, one.sharpness, one.predicted, one.predicted_alone
        (1.0, 4.0, -1.0, -1.0)
    """

    length: float
    slope: float
    outer: float
    functional: float
    own_curvature: float | None = None
    change: float | None = None

    @property
    def curvature(self) -> float:
        """δ_b·(H δ)_b."""
        return self.outer + self.functional

    @property
    def sharpness(self) -> float | None:
        """δ_b·(H δ)_b / |δ_b|²; None for a block that did not move."""
        return self.curvature / self.length**2 if self.length else None

    @property
    def predicted(self) -> float:
        """g_b·δ_b - ½ δ_b·(H δ)_b: the block's share of the change of the loss to second order."""
        return self.slope - self.curvature / 2

    @property
    def predicted_alone(self) -> float | None:
        """g_b·δ_b - ½ δ_b·H_bb δ_b, to be compared with `change`."""
        return None if self.own_curvature is None else self.slope - self.own_curvature / 2


@dataclass(frozen=True)
class Update:
    """The effect of the last step δ on the loss of the probe. Sums over the blocks are those of the whole step.

    Args:
        change: L(w) - L(w - δ), measured; negative if the step lowered the loss. w are the weights after the step.
        blocks: the part of each block.
        heads: the part of each head of the blocks that have several, "h.0.attn.Q.2" for head 2.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> probe = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1))]
        >>> monitor = CurvatureMonitor(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), probe)
        >>> update = monitor.measure(move=torch.tensor([0.1, 0.0])).update  # H is diag(4, 1)
        >>> round(update.curvature, 4), round(update.sharpness, 4), abs(update.change - update.predicted) < 1e-6
        (0.04, 4.0, True)
    """

    change: float
    blocks: dict[str, BlockUpdate]
    heads: dict[str, BlockUpdate]

    @property
    def length(self) -> float:
        """|δ|."""
        return sum(one.length**2 for one in self.blocks.values()) ** 0.5

    @property
    def slope(self) -> float:
        """g·δ."""
        return sum(one.slope for one in self.blocks.values())

    @property
    def curvature(self) -> float:
        """δ·Hδ."""
        return sum(one.curvature for one in self.blocks.values())

    @property
    def functional(self) -> float:
        """δ·H_f δ, the functional part of `curvature`."""
        return sum(one.functional for one in self.blocks.values())

    @property
    def sharpness(self) -> float:
        """δ·Hδ / |δ|², the directional sharpness: the curvature that the step met, at most λ_max."""
        return self.curvature / self.length**2

    @property
    def predicted(self) -> float:
        """g·δ - ½ δ·Hδ: `change` to second order."""
        return self.slope - self.curvature / 2

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "Update":
        """An update from the values that `dataclasses.asdict` made of one.

        Args:
            facts: "change", "blocks" and "heads".

        Returns:
            The update.
        """
        read = {kind: {name: BlockUpdate(**one) for name, one in facts[kind].items()} for kind in ("blocks", "heads")}
        return cls(facts["change"], **read)


def update_of(surface: Surface, move: Tensor) -> Update | None:
    """What the step `move` (P,), by which the weights of the surface were reached, did; None for no step at all.

    It takes a product with both parts and two forward passes.
    """
    if not bool(move.any()):
        return None
    engine, blocks = surface.engine, list(surface.blocks.values())
    step = move.to(engine.device, torch.float64)
    outer, functional = engine.product("both", blocks, blocks, step.to(engine.dtype)[None])[0].double().chunk(2)
    factors = {"square": step, "slope": surface.gradient(), "outer": outer, "functional": functional}
    sums = {kind: _sums(surface, step * factor) for kind, factor in factors.items()}
    parts = {
        name: BlockUpdate(square**0.5, *(sums[kind][name] for kind in ("slope", "outer", "functional")))
        for name, square in sums["square"].items()
    }
    rows = {block.name: _joined([parts[head.name] for head in _heads(block)]) for block in blocks}
    heads = {one.name: parts[one.name] for block in blocks if len(_heads(block)) > 1 for one in _heads(block)}
    return Update(_change(surface, step), rows, heads)


def alone(surface: Surface, move: Tensor, update: Update) -> Update:
    """The update, with what each block's part of the step did alone: a product and two forward passes per block."""
    step = move.to(surface.engine.device, torch.float64)
    rows, start = {}, 0
    for name, block in surface.blocks.items():
        mine = torch.zeros_like(step)
        place = slice(start, start := start + block.size)
        mine[place] = step[place]
        vector = mine[place].to(surface.engine.dtype)[None]
        own = float(mine[place] @ surface.engine.product("total", [block], [block], vector)[0].double())
        rows[name] = replace(update.blocks[name], own_curvature=own, change=_change(surface, mine))
    return replace(update, blocks=rows)


def _sums(surface: Surface, values: Tensor) -> dict[str, float]:
    """The sums of values (P,) over each head, and over each block without heads."""
    spread = {name: torch.zeros_like(surface.engine.snapshot.weight(name)).double() for name in surface.names}
    surface.blocks.scatter(values, spread)
    return {name: float(block.gather(spread).sum()) for name, block in surface.blocks.per_head().items()}


def _heads(block: Block) -> list[Block]:
    return [block] if block.heads is None else [block.head(number) for number in range(block.heads)]


def _joined(heads: list[BlockUpdate]) -> BlockUpdate:
    length = sum(one.length**2 for one in heads) ** 0.5
    return BlockUpdate(length, *(sum(getattr(one, kind) for one in heads) for kind in ("slope", "outer", "functional")))


def _change(surface: Surface, step: Tensor) -> float:
    """L(w) - L(w - δ)."""
    after, before = (float(surface.losses(one[None])[0]) for one in (torch.zeros_like(step), -step))
    return after - before
