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

_AGREE = 1e3  # units of rounding that the loss of a batch and that of its rows may differ by


@dataclass(frozen=True, eq=False)
class Move:
    """A displacement d (size,) of one block."""

    block: Block
    vector: Tensor


class Expansion:
    """g_i·d and ½ d·H_i d' for moves d, d' of the blocks, and the loss after any sum of them, for each unit i.

    A unit is a micro-batch of the engine that has loss terms; N is their number, m that of the moves. All results are
    float64.
    """

    def __init__(self, engine: Autodiff, moves: Sequence[Move]) -> None:
        self.engine = engine
        self.moves = [Move(one.block, one.vector.to(engine.device, engine.dtype)) for one in moves]
        survey = engine.survey
        self._positions = [i for i, weight in enumerate(survey.weights) if weight]
        self.weights = torch.tensor([survey.weights[i] for i in self._positions], dtype=torch.float64)
        self.losses = torch.tensor([survey.losses[i] for i in self._positions], dtype=torch.float64)

    def first(self) -> Tensor:
        """g_i·d for each move, (N, m)."""
        return self._gradients(_dot)

    def fisher(self) -> Tensor:
        """½ n_i Σ_j g_ij² d_j² for each move, (N, m), n_i loss terms: by the diagonal of the empirical Fisher."""
        terms = [self.engine.survey.terms[i] for i in self._positions]
        return (
            self._gradients(lambda gradient, vector: _dot(gradient.square(), vector.square()) / 2)
            * (torch.tensor(terms, dtype=torch.float64)[:, None])
        )

    def parts(self) -> tuple[Tensor, Tensor]:
        """½ d_b·(H_i Σ d)_b for each move d_b and the sum of all, its outer and its functional part, (N, m) each.

        No two moves may be of one block.
        """
        blocks = [move.block for move in self.moves]
        whole = torch.cat([move.vector for move in self.moves])[None]
        sizes = [block.size for block in blocks]
        found = self._table(2, len(self.moves))

        def visit(position: int, product: BatchProduct) -> None:
            halves = product("both", blocks, blocks, whole)[0].chunk(2)
            for part, half in enumerate(halves):
                found[position, part] = self._forms(self.moves, half.split(sizes))

        self._each(visit)
        return found[:, 0], found[:, 1]

    def pairs(self) -> Tensor:
        """½ d·H_i d' for all pairs of moves, (N, m, m). One product per move; symmetry gives half of the pairs."""
        order = list(self.engine.blocks)
        places = [order.index(move.block.name) for move in self.moves]
        found = self._table(len(self.moves), len(self.moves))

        def visit(position: int, product: BatchProduct) -> None:
            for i, (move, place) in enumerate(zip(self.moves, places, strict=True)):
                rows = [self.engine.blocks[name] for name in order[place:]]
                pieces = product("total", rows, [move.block], move.vector[None])[0].split([row.size for row in rows])
                later = [j for j, other in enumerate(places) if other > place or (other == place and j >= i)]
                forms = self._forms([self.moves[j] for j in later], [pieces[places[j] - place] for j in later])
                found[position, i, later] = found[position, later, i] = forms

        self._each(visit)
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

        def visit(batch: Batch) -> list[float]:
            with torch.no_grad():
                return [float(self.engine.loss(weights, batch))]

        found = self._walk(visit)[:, 0]
        if not bool(torch.isfinite(found).all()):
            raise NonFiniteError("changed", "the loss is NaN or infinite after the change; scale it down")
        return found - self.losses

    def _gradients(self, form: Callable[[Tensor, Tensor], float]) -> Tensor:
        """form(g_i, d) for the gradient in the block of each move, (N, m)."""
        names = sorted(self.engine.blocks.parameters)

        def visit(batch: Batch) -> list[float]:
            weights, leaves = self.engine.snapshot.leaves(names)
            value = self.engine.loss(weights, batch)
            found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            gradient = dict(zip(leaves, found, strict=True))
            return [form(move.block.gather(gradient), move.vector) for move in self.moves]

        return self._walk(visit)

    def _forms(self, moves: Sequence[Move], products: Sequence[Tensor]) -> Tensor:
        """½ d·p for each move and its part of a product."""
        halves = [_dot(move.vector, product) / 2 for move, product in zip(moves, products, strict=True)]
        return torch.tensor(halves, dtype=torch.float64)

    def _table(self, *shape: int) -> Tensor:
        return torch.zeros(len(self._positions), *shape, dtype=torch.float64)

    def _walk(self, visit: Callable[[Batch], list[float]]) -> Tensor:
        """What `visit` finds for each unit, (N, ...)."""
        found: list[list[float]] = []
        self.engine.walk(lambda weight, batch: found.append(visit(batch)))
        return torch.tensor(found, dtype=torch.float64)

    def _each(self, visit: Callable[[int, BatchProduct], None]) -> None:
        places = {position: i for i, position in enumerate(self._positions)}
        self.engine.each(lambda position, product: visit(places[position], product))


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


def _dot(one: Tensor, other: Tensor) -> float:
    return float(one.double() @ other.double())
