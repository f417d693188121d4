"""A parameter spread over ranks: each holds some of its rows, and the whole exists only while it is used.

With the local losses L_r and the loss L = sum_r L_r, w = gather(shards) and its transpose, which sums over ranks,

    dL/dshard = scatter(dL_r/dw)        d2L/dshard2 v = scatter(d2L_r/dw2 gather(v))

are exact for derivatives of any order: gather and scatter are each other's derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvoscope.distributed.mesh import Mesh
from curvoscope.distributed.ranks import collective

# torch 2.13 renamed them
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, eq=False)
class Sharding:
    """Rows of one axis, ceil(rows / ranks) on each rank and fewer or none on the last, as torch.chunk cuts."""

    shape: tuple[int, ...]
    axis: int
    group: Mesh

    @property
    def span(self) -> tuple[int, int]:
        """The first row of this rank, and the row after its last."""
        start = min(self.group.rank * self.step, self._rows)
        return start, min(start + self.step, self._rows)

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

    @property
    def step(self) -> int:
        """Rows of each rank but the last ones."""
        return -(-self._rows // self.group.size)


def gather(parts: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """The whole parameters from all ranks' parts, in one collective; views of the parts if there is one rank."""
    group = shardings[0].group
    if group.size == 1:
        return [part.reshape(s.shape) for part, s in zip(parts, shardings, strict=True)]
    flat = [_padded(part.movedim(s.axis, 0), s.step).flatten() for part, s in zip(parts, shardings, strict=True)]
    sent = flat[0] if len(flat) == 1 else torch.cat(flat)
    found = sent.new_empty(group.size * len(sent))
    group.meet()
    with collective():
        _all_gather(found, sent, group=group.group)
    wholes = found.view(group.size, -1).split([len(one) for one in flat], 1)
    return [
        whole.reshape(-1, *s.moved[1:])[: s.moved[0]].movedim(0, s.axis).reshape(s.shape)
        for whole, s in zip(wholes, shardings, strict=True)
    ]


def scatter(wholes: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """This rank's parts of the sums of all ranks' parameters, in one collective; views of them if there is one rank."""
    group = shardings[0].group
    if group.size == 1:
        return [whole.reshape(s.lengths) for whole, s in zip(wholes, shardings, strict=True)]
    rows = [
        _padded(whole.reshape(s.lengths).movedim(s.axis, 0), group.size * s.step).view(group.size, -1)
        for whole, s in zip(wholes, shardings, strict=True)
    ]
    sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
    found = sent.new_empty(sent.shape[1])
    group.meet()
    with collective():
        _reduce_scatter(found, sent.flatten(), group=group.group)
    return [
        part.view(s.step, *s.moved[1:])[: s.span[1] - s.span[0]].movedim(0, s.axis).contiguous()
        for part, s in zip(found.split([one.shape[1] for one in rows]), shardings, strict=True)
    ]


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


def _padded(rows: Tensor, length: int) -> Tensor:
    """Rows, with zeros up to a length."""
    if len(rows) == length:
        return rows.contiguous()
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
