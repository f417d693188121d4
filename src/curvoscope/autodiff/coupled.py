"""The Hessian of a loss in which the rows of a batch meet, while the model runs on a few rows at a time.

With F_m = F_m(θ) the outputs of micro-batch m, J_m = dF_m/dθ, and G and S the derivatives of the loss at the outputs of
all rows together,

    functional v = sum_m d<J_m^T G_m, v>/dθ, G constant        outer v = sum_m J_m^T (S u)_m,   u_m = J_m v.

Outputs of all rows are computed first, without a graph; G is kept from then on, and S by the graph of the loss alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.batches import Batch
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import Graph, derivative
from curvoscope.autodiff.snapshot import Losses, LossSummary, check_same, evaluate, summary
from curvoscope.blocks import Block, parameters_of
from curvoscope.errors import LossError, ModelError
from curvoscope.losses.objectives import MeanLoss
from curvoscope.losses.outputs import flatten, joined


class Coupled(Autodiff):
    """Products from micro-batches whose rows meet in the loss of their batch."""

    objective: MeanLoss

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._losses: dict[int, _LossOfBatch] = {}  # by the index of the batch
        self._rows: list[tuple[int, slice]] = []  # of each micro-batch: its batch, and where in it
        super().__init__(*arguments, **options)
        if self.split != "model":
            raise ModelError("split", "got 'layer', but the loss compares rows; use whole batches, without micro_batch")

    def _survey(self) -> LossSummary:
        """As for whole batches; each micro-batch has the weight of its batch."""
        losses = Losses(self.objective)
        with self.ranks.together():
            for index, parts in groupby(self._batches, key=lambda batch: batch.index):
                micro = [self.snapshot.moved(part) for part in parts]
                whole = Batch((), {}, joined([part.targets for part in micro]), index)
                outputs = self._outputs(micro)
                value = losses.add(outputs, outputs, whole)
                if not self._losses:
                    check_same(value, losses.again(self._outputs(micro, again=True), whole), self.dtype)
                self._losses[index] = _LossOfBatch(self.objective, outputs, whole.targets)
                self._rows += [(index, slice(part.start, part.start + part.rows)) for part in micro]
        _, values, counts = losses.conclude(self.ranks)
        found = summary(self.objective, values, counts, self.ranks, losses)
        terms = dict(zip(self._losses, found.terms, strict=True))
        return replace(found, terms=tuple(terms[index] for index, _ in self._rows))

    def _outputs(self, parts: Sequence[Batch], again: bool = False) -> Any:
        """The model's outputs for all rows of a batch; `again`: see `evaluate`."""
        return joined([evaluate(self.snapshot, self.objective, part, again)[0] for part in parts])

    def check_loss(self, weights: Mapping[str, Tensor], outputs: Any, batch: Batch) -> None:
        """Nothing: a micro-batch has no loss of its own."""

    def _gradient(
        self, weights: Mapping[str, Tensor], outputs: Any, batch: Batch
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """F of the micro-batch, and the rows of G, a constant."""
        loss, rows = self._losses[batch.index], slice(batch.start, batch.start + batch.rows)
        leaves = flatten(outputs)[0]
        return [leaves[i] for i in loss.read], [G[rows].detach() for G in loss.gradient]

    def _own_product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        if part == "both":
            return torch.cat([self._own_product(one, rows, columns, vectors) for one in ("outer", "functional")], 1)
        spread = self._spread(columns, vectors)
        wanted = parameters_of(rows)
        names = frozenset(spread).union(wanted)
        total = vectors.new_zeros(len(vectors), self.length(rows))
        singles = [{name: vector[i] for name, vector in spread.items()} for i in range(len(vectors))]
        moved: dict[int, list[list[Tensor | None]]] = {}  # J v, by micro-batch and vector

        def forth(position: int, graph: Graph) -> None:
            if part != "outer":
                total.add_(self._products(graph, "functional", rows, wanted, spread), alpha=self._weight(position))
            if part != "functional":
                moved[position] = [graph.pushed(single, many=False) for single in singles]

        self._visit(names, None, forth)
        if part == "functional":
            return total
        curved = self._curved(moved, len(vectors))

        def back(position: int, graph: Graph) -> None:
            for i, directions in enumerate(curved[position]):
                found = self._flat(rows, wanted, graph.pulled(directions, wanted, many=False), ())
                total[i].add_(found, alpha=self._weight(position))

        self._visit(names, None, back)
        return total

    def _curved(
        self, moved: Mapping[int, Sequence[Sequence[Tensor | None]]], count: int
    ) -> dict[int, list[list[Tensor]]]:
        """S u by micro-batch and vector, from u by micro-batch and vector."""
        found: dict[int, list[list[Tensor]]] = {position: [] for position in moved}
        for index, loss in self._losses.items():
            places = [(position, self._rows[position][1]) for position in moved if self._rows[position][0] == index]
            for i in range(count):
                directions = [torch.zeros_like(G) for G in loss.gradient]
                for position, rows in places:
                    for direction, u in zip(directions, moved[position][i], strict=True):
                        if u is not None:
                            direction[rows] = u
                products = loss.product(directions)
                for position, rows in places:
                    found[position].append([product[rows] for product in products])
        return found


class _LossOfBatch:
    """G and S of the loss at the outputs of a whole batch. `read`: which of the output's leaves the loss reads."""

    def __init__(self, objective: MeanLoss, outputs: Any, targets: Any) -> None:
        leaves, rebuild = flatten(outputs)
        with torch.enable_grad():
            floating = {
                i: leaf.detach().requires_grad_()
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            }
            value = objective(rebuild([floating.get(i, leaf) for i, leaf in enumerate(leaves)]), targets)
            if not value.requires_grad:
                raise LossError("loss_fn", "does not depend on the model's outputs, or detaches them")
            found = torch.autograd.grad(value, list(floating.values()), create_graph=True, allow_unused=True)
        used = [(i, G) for i, G in zip(floating, found, strict=True) if G is not None]
        self.read, self.gradient = [i for i, _ in used], [G for _, G in used]
        self._outputs = [floating[i] for i in self.read]

    def product(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """S u."""
        return derivative(self.gradient, self._outputs, directions, retain=True)
