"""The loss Hessian S as two weights see it, each through its port to the layer's output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.losses import Curvature, PerToken, Port, ScalarCurvature, through
from curvoscope.operators.cores import Core


@dataclass(frozen=True)
class Seen:
    """P S_t P'^T: one matrix for all tokens, `shared` (e, e'), or `blocks(start, stop)` -> (t, e, e').

    `diagonal(start, stop)` -> (t, e) where both ports are the same. `factor`: the matrix is this multiple of I.
    """

    shared: Tensor | None
    factor: float | None
    blocks: Callable[[int, int], Tensor]
    diagonal: Callable[[int, int], Tensor] | None
    shape: tuple[int, int]
    workspace: int

    def times(self, matrices: Tensor, start: int, stop: int) -> Tensor:
        """P S_t P'^T M_t for matrices (t, e', q): (t, e, q)."""
        return self.factor * matrices if self.factor is not None else self.blocks(start, stop) @ matrices

    @property
    def symmetric(self) -> bool:
        """Whether both ports are the same."""
        return self.diagonal is not None


def seen_through(curvature: Curvature, left: Port, right: Port, width: int, like: Tensor) -> Seen:
    """S, c I or with one block a token, through two ports to an output of the given width."""
    sizes = tuple(through(like.new_empty(1, width), port).shape[1] for port in (left, right))
    shape, same = (sizes[0], sizes[1]), _same(left, right)
    if isinstance(curvature, ScalarCurvature):
        shared = curvature.between(left, right, torch.eye(width, dtype=like.dtype, device=like.device))
        diagonal = (lambda start, stop: shared.diagonal().expand(stop - start, -1)) if same else None
        factor = curvature.factor if same and not isinstance(left, Tensor) else None
        return Seen(shared, factor, lambda start, stop: shared, diagonal, shape, 0)
    assert isinstance(curvature, PerToken)
    return Seen(
        None,
        None,
        lambda start, stop: curvature.between(left, right, start, stop),
        (lambda start, stop: curvature.diagonal(left, start, stop)) if same else None,
        shape,
        curvature.workspace(left, right) + shape[0] * shape[1],
    )


class Plain(Core):
    """C_t = P S_t P'^T: two weights that reach the output linearly."""

    def __init__(self, seen: Seen, period: int) -> None:
        super().__init__(seen.shape, period, seen.workspace, seen.symmetric)
        self._seen = seen

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, e, e')."""
        return self._seen.blocks(start, stop)

    def diagonal(self, start: int, stop: int) -> Tensor:
        """(t, e), without the blocks where both ports are the same."""
        return super().diagonal(start, stop) if self._seen.diagonal is None else self._seen.diagonal(start, stop)


def _same(left: Port, right: Port) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.data_ptr() == right.data_ptr()
    return left == right if isinstance(left, slice) and isinstance(right, slice) else left is right
