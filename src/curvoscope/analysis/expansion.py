"""The loss to second order in displacements of single blocks, unit by unit of the data."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.autodiff.batches import Batch, Batches
from curvoscope.autodiff.engine import Autodiff, BatchProduct
from curvoscope.blocks import Block, Blocks
from curvoscope.errors import LossError, NonFiniteError
from curvoscope.losses import LossFunction, objective_of

UnitForm = Callable[[Tensor, BatchProduct], Tensor]  # of a unit's gradient (P,) and of products with its Hessian
_AGREE = 1e3  # units of rounding that the loss of a batch and that of its rows may differ by


@dataclass(frozen=True, eq=False)
class Move:
    """A displacement d (size,) of one block."""

    block: Block
    vector: Tensor


class Expansion:
    """g_i·d and ½ d·H_i d' for moves d, d' of the blocks, and the loss after any sum of them, for each unit i.

    A unit is a micro-batch of the engine that has loss terms; N is their number, m that of the moves. A form is a
    function of the unit's gradient and of products with its Hessian. All results are float64.
    """

    def __init__(self, engine: Autodiff, moves: Sequence[Move]) -> None:
        self.engine = engine
        self.moves = [Move(one.block, one.vector.to(engine.device, engine.dtype)) for one in moves]
        survey = engine.survey
        places = [i for i, weight in enumerate(survey.weights) if weight]
        self.weights, self.losses = (
            torch.tensor([values[i] for i in places], dtype=torch.float64) for values in (survey.weights, survey.losses)
        )

    def forms(self, *wanted: UnitForm) -> list[Tensor]:
        """Each of the forms `first`, `parts` and `pairs` for all units, (N, ...), from one graph per unit."""
        found: list[list[Tensor]] = [[] for _ in wanted]

        def visit(gradient: Tensor, product: BatchProduct) -> None:
            for form, values in zip(wanted, found, strict=True):
                values.append(form(gradient, product))

        self.engine.each(visit)
        return [torch.stack(values) for values in found]

    def first(self, gradient: Tensor, product: BatchProduct) -> Tensor:
        """g·d for each move, (m,)."""
        slopes = self._by_block(gradient)
        return _numbers(_dot(slopes[move.block.name], move.vector) for move in self.moves)

    def parts(self, gradient: Tensor, product: BatchProduct) -> Tensor:
        """½ d_b·(H Σ d)_b for each move d_b and the sum of all, its outer and its functional part, (2, m).

        No two moves may be of one block.
        """
        blocks = [move.block for move in self.moves]
        whole = torch.cat([move.vector for move in self.moves])[None]
        halves = product("both", blocks, blocks, whole)[0].chunk(2)
        return torch.stack([_halves(self.moves, half.split([block.size for block in blocks])) for half in halves])

    def pairs(self, gradient: Tensor, product: BatchProduct) -> Tensor:
        """½ d·H d' for all pairs of moves, (m, m). One product per move; symmetry gives half of the pairs."""
        order = list(self.engine.blocks)
        places = [order.index(move.block.name) for move in self.moves]
        found = torch.zeros(len(self.moves), len(self.moves), dtype=torch.float64)
        for i, (move, place) in enumerate(zip(self.moves, places, strict=True)):
            rows = [self.engine.blocks[name] for name in order[place:]]
            pieces = product("total", rows, [move.block], move.vector[None])[0].split([row.size for row in rows])
            later = [j for j, other in enumerate(places) if other > place or (other == place and j >= i)]
            halves = _halves([self.moves[j] for j in later], [pieces[places[j] - place] for j in later])
            found[i, later] = found[later, i] = halves
        return found

    def changes(self, coefficients: Tensor) -> Tensor:
        """L_i(w + Σ c d) - L_i(w) for k rows of coefficients c (k, m), by forward passes: (N, k)."""
        return torch.stack([self._change(row) for row in coefficients.tolist()], 1)

    def _change(self, coefficients: Sequence[float]) -> Tensor:
        snapshot = self.engine.snapshot
        weights = dict(snapshot.weights)
        for move, coefficient in zip(self.moves, coefficients, strict=True):
            for piece, part in move.block.parts(move.vector) if coefficient else ():
                path = snapshot.paths[piece.parameter]
                if weights[path] is snapshot.weights[path]:
                    weights[path] = weights[path].clone()
                region = piece.of(weights[path])
                region.add_(part.reshape(region.shape), alpha=coefficient)

        values: list[float] = []

        def visit(weight: float, batch: Batch) -> None:
            with torch.no_grad():
                values.append(float(self.engine.loss(weights, batch)))

        self.engine.walk(visit)
        found = torch.tensor(values, dtype=torch.float64)
        if not bool(torch.isfinite(found).all()):
            raise NonFiniteError("changed", "the loss is NaN or infinite after the change; scale it down")
        return found - self.losses

    def _by_block(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector over all blocks of the engine, cut."""
        blocks = self.engine.blocks
        return dict(zip(blocks, vector.split(list(blocks.sizes.values())), strict=True))


def engine_of(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    blocks: Blocks,
    unit: str,
    device: torch.device | str | None,
) -> tuple[Autodiff, str]:
    """The engine, and its unit: "sequence" if that is wanted and each row has a loss of its own, else "batch"."""
    whole = Autodiff(model, objective_of(loss_fn), Batches(batches), blocks, device=device)
    if unit == "batch" or whole.objective.couples_rows:
        return whole, "batch"
    objective, survey = whole.objective, whole.survey
    del whole  # its copy of the weights makes room for that of the rows
    with suppress(LossError):  # rows meet in the loss, or a part of a batch has none
        rows = Autodiff(model, objective, Batches(batches, 1), blocks, device=device)
        limit = _AGREE * torch.finfo(rows.dtype).eps * max(map(abs, survey.losses))
        if abs(rows.survey.loss - survey.loss) <= limit:
            return rows, "sequence"
    return Autodiff(model, objective, Batches(batches), blocks, device=device), "batch"


def _halves(moves: Sequence[Move], products: Sequence[Tensor]) -> Tensor:
    """½ d·p for each move and its part of a product."""
    return _numbers(_dot(move.vector, product) / 2 for move, product in zip(moves, products, strict=True))


def _numbers(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double() @ other.double())
