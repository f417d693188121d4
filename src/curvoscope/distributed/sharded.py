"""The Hessian of a model whose parameters are spread over ranks: vectors are spread alike, each rank holds its part.

A rank's part of a vector has, block by block in the order of the names, the entries of the block whose parameters it
holds, in the order of the block. Each rank has batches of its own. All ranks run the model at once: one with fewer
batches repeats one of them, which counts for nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.batches import Batch, Batches
from curvoscope.autodiff.differences import Differences
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.graph import Graph
from curvoscope.autodiff.hooks import Site
from curvoscope.autodiff.safety import undisturbed
from curvoscope.autodiff.snapshot import Losses, LossSummary, check_same, evaluate, summary
from curvoscope.blocks import Block, Piece, parameters_of
from curvoscope.distributed.mesh import Mesh
from curvoscope.distributed.ranks import hashes
from curvoscope.distributed.sharded_model import ShardedSnapshot
from curvoscope.errors import EmptyError, ModelError
from curvoscope.estimate.space import Space
from curvoscope.losses.objectives import Objective


class Aligned(Batches):
    """The same number of micro-batches on every rank: its own, then repeats that count for nothing."""

    def __init__(self, own: Batches, ranks: Mesh) -> None:
        self._own = own
        with ranks.together():
            count = sum(1 for _ in own)
            first = next(iter(own), None)
        self.count = max(ranks.exchange(count))
        if not self.count:
            raise EmptyError("batches", "no rank has any")
        self._spare, self._blank = _any_of(first, ranks), set(range(count, self.count))

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of its own batches."""
        return self._own.generators

    def leave_out(self, blank: set[int], ranks: Mesh) -> None:
        """Put one with loss terms in place of those that have none."""
        self._blank |= blank
        self._spare = _any_of(next((b for i, b in enumerate(self._own) if i not in self._blank), None), ranks)

    def counts(self, position: int) -> bool:
        """Whether the micro-batch there is one of its own."""
        return position not in self._blank

    def __iter__(self) -> Iterator[Batch]:
        own = iter(self._own)
        for position in range(self.count):
            batch = next(own, self._spare)
            yield self._spare if position in self._blank else batch
        for _ in own:  # to the end, which is where a loader is seen to have changed
            pass


def _any_of(batch: Batch | None, ranks: Mesh) -> Batch:
    """The batch, or that of another rank if there is none here."""
    if all(ranks.exchange(batch is not None)):
        assert batch is not None
        return batch
    found = next((other for other in ranks.exchange(batch) if other is not None), None)
    if found is None:
        raise EmptyError("batches", "every target is ignored: the mean has no terms")
    return found if batch is None else batch


class _Weighted(Objective):
    """A loss times the weight of the batch at hand: gradients are summed over ranks as soon as they are made."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self.weight = objective, 1.0

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self._objective(outputs, targets) * self.weight

    def terms(self, outputs: Any, targets: Any) -> int | float:
        return self._objective.terms(outputs, targets)

    def gradient(self, outputs: Any, targets: Any) -> tuple[list[Tensor], list[Tensor]]:
        cut, gradient = self._objective.gradient(outputs, targets)
        return cut, [G * self.weight for G in gradient]

    def seen(self, outputs: Any, parameters: Mapping[str, Tensor]) -> Any:
        return self._objective.seen(outputs, parameters)


class _Graph(Graph):
    """A graph whose parameters are gathered when it is used, not when it is measured."""

    def __init__(self, snapshot: ShardedSnapshot, *arguments: Any) -> None:
        self._snapshot = snapshot
        super().__init__(*arguments)

    def _measured(self) -> int:
        with self._snapshot.peeking():
            return super()._measured()


class Sharded(Autodiff):
    """Products from this rank's parts of vectors (n, its entries) to those of the products."""

    snapshot: ShardedSnapshot
    ranks: Mesh
    _batches: Aligned

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.spaces: dict[tuple[str, ...], Space] = {}  # of vectors, by the names of their blocks
        self._can_batch = False  # collectives take one vector at a time
        self._budget = self.ranks.least(self._budget)
        self.objective = self._weighted = _Weighted(self.objective)

    def _snapshot(self) -> ShardedSnapshot:
        return ShardedSnapshot(self.model, self.blocks, self.device, self.ranks)

    def _fingerprint(self) -> dict[str, str]:
        """Parameters that are spread by their shapes, the others by their numbers."""
        spread = {
            path: f"{sharding.shape} by axis {sharding.axis}" for path, sharding in self.snapshot.shardings.items()
        }
        return {**spread, **hashes(self.snapshot.common)}

    def _survey(self) -> LossSummary:
        found, own = Losses(self.objective), list[int]()
        with self.ranks.together():
            for position, batch in enumerate(self._batches):
                batch = self.snapshot.moved(batch)
                several = [evaluate(self.snapshot, self.objective, batch) for _ in range(1 if position else 2)]
                if self._batches.counts(position):
                    value = found.add(*several[0], batch)
                    check_same(value, found.again(several[-1][1], batch), self.dtype)
                    own.append(position)
        self.snapshot.forget()
        self.objective, values, numbers = found.conclude(self.ranks)
        losses, counts = [0.0] * self._batches.count, [0.0] * self._batches.count
        for position, value, number in zip(own, values, numbers, strict=True):
            losses[position], counts[position] = value, number
        self._batches.leave_out({i for i, count in enumerate(counts) if not count}, self.ranks)
        return summary(self.objective, losses, counts, self.ranks, found)

    def product(self, part: str, rows: Sequence[Block], columns: Sequence[Block], vectors: Tensor) -> Tensor:
        """From this rank's parts of the vectors to its parts of the products."""
        try:
            return super().product(part, rows, columns, vectors)
        except Exception:  # on all ranks; but they may not have come equally far
            self._kept.clear()
            self.snapshot.forget()
            raise

    # ---- this rank's part of a vector

    def pieces(self, block: Block) -> list[Piece]:
        """The parts of the block in this rank's parts of the parameters."""
        if block.side_by_side:
            raise ModelError(block.name, "has its columns in several places, which sharded models cannot spread")
        found = []
        for piece in block.pieces:
            sharding = self.snapshot.sharding(piece.parameter)
            index, (start, stop) = list(piece.index), sharding.span
            if index:
                within = index[sharding.axis]
                first, last = max(within.start, start), min(within.stop, stop)
                index[sharding.axis] = slice(first - start, last - start)
            else:
                first, last = start, stop
            if first < last:
                stored = sharding.local if piece.stored else ()
                found.append(Piece(piece.parameter, stored, tuple(index), piece.layout))
        return found

    def numbers(self, blocks: Sequence[Block]) -> Tensor:
        """Where this rank's entries stand in the whole vector, ascending."""
        found, filled, start = torch.empty(self.length(blocks), dtype=torch.long), 0, 0
        for block in blocks:
            for piece in block.pieces:
                sharding = self.snapshot.sharding(piece.parameter)
                numbers, stride = torch.tensor([start]), 1
                first, last = sharding.span
                for axis in reversed(piece.layout.rows + piece.layout.columns):
                    within = piece.index[axis]
                    steps = torch.arange(within.stop - within.start)
                    if axis == sharding.axis:
                        steps = steps[max(0, first - within.start) : max(0, last - within.start)]
                    numbers = (stride * steps[:, None] + numbers).flatten()
                    stride *= within.stop - within.start
                if piece.stored or first < last:
                    found[filled : filled + len(numbers)] = numbers
                    filled += len(numbers)
                start += piece.size
        return found

    def length(self, blocks: Sequence[Block]) -> int:
        """Entries of the vector on this rank."""
        return sum(piece.size for block in blocks for piece in self.pieces(block))

    def _spread(self, columns: Sequence[Block], vectors: Tensor) -> dict[str, Tensor]:
        """As in `Autodiff`, in the shapes of this rank's parts; also of those in which the blocks have no entry."""
        spread = super()._spread(columns, vectors)
        shapes = {name: (len(vectors), *self.snapshot.weight(name).shape) for name in parameters_of(columns)}
        return {
            name: spread[name].reshape(shape) if name in spread else vectors.new_zeros(shape)
            for name, shape in shapes.items()
        }

    def _placed(self, columns: Sequence[Block], vectors: Tensor) -> list[tuple[Piece, Tensor]]:
        pieces = [piece for block in columns for piece in self.pieces(block)]
        return list(zip(pieces, vectors.split([piece.size for piece in pieces], 1), strict=True))

    def _flat(
        self, rows: Sequence[Block], wanted: Sequence[str], found: dict[str, Tensor], lead: tuple[int, ...]
    ) -> Tensor:
        parts = [torch.empty(0, dtype=self.dtype, device=self.device)]
        for piece in (piece for block in rows for piece in self.pieces(block)):
            product = found.get(piece.parameter)
            region = parts[0].new_zeros(piece.size) if product is None else piece.of(product.reshape(piece.stored))
            parts.append(region.reshape(-1))
        return torch.cat(parts)

    # ---- graphs

    def _weight(self, position: int) -> float:
        return 1.0  # it is in the objective

    def _examine(self, *arguments: Any) -> None:
        """Nothing: differences of the loss would need passes of all ranks."""

    def check_loss(self, *arguments: Any) -> None:
        """Nothing: a second look would need a pass of all ranks."""

    def _visit(self, names: frozenset[str], layer: Site | None, visit: Callable[[int, Graph], None]) -> None:
        """As in `Autodiff`; all ranks keep the graphs of the same batches."""
        self.snapshot.room = max(0, self._budget - self._used()) // 2  # the rest is for graphs
        kept = self._kept.get((names, layer), {})
        for position, graph in kept.items():
            visit(position, graph)

        def run(position: int, batch: Batch) -> None:
            if position not in kept:
                graph = self._graph(batch, names, layer)
                graph.nbytes = max(self.ranks.exchange(graph.nbytes))  # what follows from it is the same for all
                visit(position, graph)
                if self._make_room((names, layer), graph.nbytes):
                    self._kept.setdefault((names, layer), {})[position] = graph

        if len(kept) < self._batches.count:
            kept = dict(kept)
            self._walk(run)
        self.snapshot.room = max(0, self._budget - self._used())
        self.snapshot.keep_what_fits()

    def walk(self, visit: Callable[[float, Batch], None], own_kernels: bool = True, every: bool = False) -> None:
        """As in `Autodiff`; the weights are in the objective."""
        with self.snapshot.light_graphs():
            self._walk(lambda position, batch: visit(1.0, self.snapshot.moved(batch)), own_kernels)
        self.snapshot.forget()  # they may be those of other weights

    def _walk(self, visit: Callable[[int, Batch], None], own_kernels: bool = True) -> None:
        with undisturbed(self.model, self._batches.generators, own_kernels):
            for position, batch in enumerate(self._batches):
                self._weighted.weight = self.survey.weights[position]
                visit(position, batch)

    def _graph(self, batch: Batch, names: frozenset[str], layer: Site | None) -> Graph:
        with self.snapshot.light_graphs():
            return super()._graph(batch, names, layer)

    def _kept_graph(self, leaves: Mapping[str, Tensor], cut: Sequence[Tensor], gradient: Sequence[Tensor]) -> Graph:
        return _Graph(self.snapshot, leaves, cut, gradient)


class ShardedDifferences(Sharded, Differences):
    """The same from first derivatives of the model."""

    def _lengths(self, vectors: Tensor) -> Tensor:
        return self.ranks.add(vectors.double().square().sum(1)).sqrt()

    def _random(self, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.ranks.rank)
        return torch.randn(1, like.shape[1], generator=generator, dtype=torch.float64).to(like)
