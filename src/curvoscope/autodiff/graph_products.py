"""Products of the graph of one micro-batch with vectors over named blocks."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvoscope.autodiff.graph import Graph, unless_unbatched
from curvoscope.autodiff.snapshot import Snapshot
from curvoscope.blocks import Block, Piece, parameters_of

_AT_ONCE = 2**23  # bytes of a graph and a vector up to which several at once are faster than one after the other
_WORKSPACE = 2**28  # bytes for vectors at once
_MOST_AT_ONCE = 64


class GraphProducts:
    """From vectors (n, C) over blocks to tensors like the parameters, through a graph, and back to vectors (n, R).

    `Autodiff` sums these products over micro-batches; what differs between ways to multiply, it overrides.
    """

    snapshot: Snapshot
    dtype: torch.dtype
    device: torch.device
    _can_batch: bool  # whether several vectors pass a graph at once

    def length(self, blocks: Sequence[Block]) -> int:
        """Entries of a vector that lives in the blocks."""
        return sum(block.size for block in blocks)

    def _products(
        self, graph: Graph, part: str, rows: Sequence[Block], wanted: Sequence[str], vectors: Mapping[str, Tensor]
    ) -> Tensor:
        """One batch's products, (n, R): several vectors at once if the overhead of a call would dominate."""
        count = next(iter(vectors.values())).shape[0]
        size = graph.nbytes + sum(vector.nbytes for vector in vectors.values()) // count
        if count > 1 and self._can_batch and size <= _AT_ONCE:
            step = min(_MOST_AT_ONCE, max(1, _WORKSPACE // max(1, size)))

            def together() -> Tensor:
                found = []
                for start in range(0, count, step):
                    some = {name: vector[start : start + step] for name, vector in vectors.items()}
                    found.append(self._multiplied(graph, part, rows, wanted, some, (min(step, count - start),)))
                return torch.cat(found)

            products = unless_unbatched(together)
            if products is not None:
                return products
            self._can_batch = False
        singles = []
        for i in range(count):
            one = {name: vector[i] for name, vector in vectors.items()}
            singles.append(self._multiplied(graph, part, rows, wanted, one, ()))
        return singles[0][None] if count == 1 else torch.stack(singles)

    def _multiplied(
        self,
        graph: Graph,
        part: str,
        rows: Sequence[Block],
        wanted: Sequence[str],
        vectors: Mapping[str, Tensor],
        lead: tuple[int, ...],
    ) -> Tensor:
        """The products (*lead, R) with vectors that have the leading axes `lead`, in one call."""
        found = self._passes(graph, part, vectors, wanted, bool(lead))
        flat = [self._flat(rows, wanted, one, lead) for one in found]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)

    def _passes(
        self, graph: Graph, part: str, vectors: Mapping[str, Tensor], wanted: Sequence[str], many: bool
    ) -> Sequence[dict[str, Tensor]]:
        """What the graph makes of the vectors, by name of parameter: one product, or those of both parts."""
        return graph.parts(vectors, wanted, many) if part == "both" else [graph.product(part, vectors, wanted, many)]

    def _spread(self, columns: Sequence[Block], vectors: Tensor) -> dict[str, Tensor]:
        """Vectors (n, C) as tensors (n, *shape) like the parameters."""
        placed = self._placed(columns, vectors.contiguous())  # columns of a matrix are scattered
        given = Counter[str]()
        for piece, _ in placed:
            given[piece.parameter] += piece.size
        spread: dict[str, Tensor] = {}
        for piece, part in placed:
            name, stored = piece.parameter, piece.stored
            size = self.snapshot.weight(name).numel()
            if piece.size == size:
                order = piece.layout.rows + piece.layout.columns
                back = sorted(range(len(order)), key=order.__getitem__)
                ordered = part.reshape(-1, *(stored[axis] for axis in order))
                found = ordered.permute(0, *(1 + axis for axis in back))
                spread[name] = found if len(stored) == 2 else found.contiguous()  # products of matrices take any layout
            else:
                if name not in spread:
                    make = vectors.new_empty if given[name] == size else vectors.new_zeros
                    spread[name] = make(vectors.shape[0], *stored)
                region = piece.of(spread[name])
                region.copy_(part.reshape(region.shape))
        return spread

    def _placed(self, columns: Sequence[Block], vectors: Tensor) -> list[tuple[Piece, Tensor]]:
        """The pieces of the blocks, each with its part of the vectors."""
        cut = vectors.split([block.size for block in columns], 1)
        return [one for block, vector in zip(columns, cut, strict=True) for one in block.parts(vector)]

    def _flat(
        self, rows: Sequence[Block], wanted: Sequence[str], found: dict[str, Tensor], lead: tuple[int, ...]
    ) -> Tensor:
        """Products by parameter as vectors (*lead, R) over the blocks `rows`; those that are missing are zero.

        `found` is emptied on the way, so that the products do not take their memory twice.
        """
        for name in wanted:
            if name not in found:
                weight = self.snapshot.weight(name)
                found[name] = weight.new_zeros(()).expand(*lead, *weight.shape)
        flat = torch.empty(*lead, self.length(rows), dtype=self.dtype, device=self.device)
        last = {name: block for block in rows for name in parameters_of([block])}
        for block, part in zip(rows, flat.split([block.size for block in rows], -1), strict=True):
            block.gather_into(part, found)
            for name in parameters_of([block]):
                if last[name] is block:
                    del found[name]
        return flat
