"""A parameter spread over ranks: each holds some of its rows, and the whole exists only while it is used.

With the local losses L_r and the loss L = sum_r L_r, w = gather(shards) and its transpose, which sums over ranks,

    dL/dshard = scatter(dL_r/dw)        d2L/dshard2 v = scatter(d2L_r/dw2 gather(v))

are exact for derivatives of any order: gather and scatter are each other's derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from curvoscope.distributed.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Sharding:
    """Rows of one axis, ceil(rows / ranks) on each rank and fewer or none on the last, as torch.chunk cuts."""

    shape: tuple[int, ...]
    axis: int
    group: Mesh

    @property
    def span(self) -> tuple[int, int]:
        """The first row of this rank, and the row after its last."""
        return self.span_of(self.group.rank)

    def span_of(self, rank: int) -> tuple[int, int]:
        """The same for any rank."""
        step = -(-self._rows // self.group.size)
        start = min(rank * step, self._rows)
        return start, min(start + step, self._rows)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this rank's part; a number is a vector of one row."""
        start, stop = self.span
        return tuple(stop - start if i == self.axis else length for i, length in enumerate(self.lengths))

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that it has."""
        start, stop = self.span
        return whole.reshape(self.lengths).narrow(self.axis, start, stop - start)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape, a number being a vector of one row."""
        return self.shape or (1,)

    @property
    def moved(self) -> tuple[int, ...]:
        """The shape with the axis that is cut first."""
        return self._rows, *(length for i, length in enumerate(self.lengths) if i != self.axis)

    @property
    def _rows(self) -> int:
        return self.lengths[self.axis]


def gather(parts: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """The whole parameters from all ranks' parts; views of the parts if there is one rank."""
    group = shardings[0].group
    if group.size == 1:
        return [part.reshape(s.shape) for part, s in zip(parts, shardings, strict=True)]
    mine = [part.movedim(s.axis, 0).contiguous() for part, s in zip(parts, shardings, strict=True)]
    wholes = [part.new_empty(s.moved) for part, s in zip(parts, shardings, strict=True)]
    places = _rows_by_rank(wholes, shardings)
    for place, own in zip(places[group.rank], mine, strict=True):
        place.copy_(own)
    group.swap([mine] * group.size, places)
    return [whole.movedim(0, s.axis).reshape(s.shape) for whole, s in zip(wholes, shardings, strict=True)]


def scatter(wholes: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """This rank's parts of the sums of all ranks' parameters; views of them if there is one rank."""
    group = shardings[0].group
    if group.size == 1:
        return [whole.reshape(s.lengths) for whole, s in zip(wholes, shardings, strict=True)]
    moved = [
        whole.reshape(s.lengths).movedim(s.axis, 0).contiguous() for whole, s in zip(wholes, shardings, strict=True)
    ]
    sent = _rows_by_rank(moved, shardings)
    mine = sent[group.rank]
    received = [[torch.empty_like(part) for part in mine] if r != group.rank else mine for r in range(group.size)]
    group.swap(sent, received)
    sums = [reduce(Tensor.add_, others, one + other) for one, other, *others in zip(*received, strict=True)]
    return [part.movedim(0, s.axis).contiguous() for part, s in zip(sums, shardings, strict=True)]


def _rows_by_rank(wholes: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[list[Tensor]]:
    """The rows of each rank in parameters whose axis that is cut comes first."""
    ranks = range(shardings[0].group.size)
    return [[whole[slice(*s.span_of(rank))] for whole, s in zip(wholes, shardings, strict=True)] for rank in ranks]


def gathered(
    parts: Sequence[Tensor], shardings: Sequence[Sharding], wholes: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`gather`, differentiable to any order. `wholes`: what it gives, if that is known."""
    found: tuple[Tensor, ...] = _Gather.apply(shardings, wholes, *parts)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shardings: Sequence[Sharding], wholes: Sequence[Tensor] | None, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        found = gather(parts, shardings) if wholes is None else [whole.detach() for whole in wholes]
        ctx.shardings, ctx.needed = shardings, ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(whole for whole, need in zip(found, ctx.needed, strict=True) if not need))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_needed(ctx, directions, lambda some, *given: _Scatter.apply(some, *given))


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shardings: Sequence[Sharding], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.shardings, ctx.needed = shardings, ctx.needs_input_grad[1:]
        return tuple(scatter(wholes, shardings))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_needed(ctx, directions, lambda some, *given: gathered(given, some))


def _needed(ctx: Any, directions: Sequence[Tensor], function: Callable[..., Sequence[Tensor]]) -> list[Tensor | None]:
    """Apply the other function to the directions whose result is needed."""
    chosen = [i for i, need in enumerate(ctx.needed) if need]
    found: list[Tensor | None] = [None] * len(directions)
    results = function([ctx.shardings[i] for i in chosen], *(directions[i] for i in chosen))
    for i, result in zip(chosen, results, strict=True):
        found[i] = result
    return found
