"""The loss Hessian S as two weights see it, each through its port to the layer's output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.losses import Curvature, PerToken, Port, ScalarCurvature, through


@dataclass(frozen=True)
class ProjectedCurvature:
    """P S_t P'^T: one matrix for all tokens, `shared` (e, e'), or `blocks(start, stop)` -> (t, e, e').

    `diagonal(start, stop)` -> (t, e) if both ports are the same. `factor`: the matrix is this multiple of I.
    """

    shared: Tensor | None
    factor: float | None
    blocks: Callable[[int, int], Tensor]
    diagonal: Callable[[int, int], Tensor] | None
    shape: tuple[int, int]
    workspace: int
    words: tuple[Tensor, Tensor, Callable[[int, int], Tensor]] | None = None  # B, B', E with blocks B^T E_t B'

    def kernel(self, values: Tensor, others: Tensor, start: int, stop: int) -> Tensor:
        """V P S_t P'^T V'^T for whole sequences of tokens, values (n, L, e) and (n, L, e'): (n, L or 1, L, L)."""
        if self.shared is not None:
            return (values @ self.shared @ others.mT)[:, None]
        n, length = values.shape[:2]
        if self.words is not None:
            left, right, covariance = self.words
            inner = covariance(start, stop).unflatten(0, (n, length))
            return (values @ left.mT)[:, None] @ (inner @ (others @ right.mT).mT[:, None])
        blocks = self.blocks(start, stop).unflatten(0, (n, length))
        return values[:, None] @ blocks @ others.mT[:, None]

    def times(self, matrices: Tensor, start: int, stop: int) -> Tensor:
        """P S_t P'^T M_t for matrices (t, e', q): (t, e, q)."""
        return self.factor * matrices if self.factor is not None else self.blocks(start, stop) @ matrices

    @property
    def symmetric(self) -> bool:
        """Whether both ports are the same."""
        return self.diagonal is not None


def seen_through(curvature: Curvature, left: Port, right: Port, width: int, like: Tensor) -> ProjectedCurvature:
    """S, c I or with one block per token, through two ports to an output of the given width."""
    sizes = tuple(through(like.new_empty(1, width), port).shape[1] for port in (left, right))
    shape, same = (sizes[0], sizes[1]), _same(left, right)
    if isinstance(curvature, ScalarCurvature):
        shared = curvature.between(left, right, torch.eye(width, dtype=like.dtype, device=like.device))
        diagonal = (lambda start, stop: shared.diagonal().expand(stop - start, -1)) if same else None
        factor = curvature.factor if same and not isinstance(left, Tensor) else None
        return ProjectedCurvature(shared, factor, lambda start, stop: shared, diagonal, shape, 0)
    assert isinstance(curvature, PerToken)
    first = curvature.by_words(left)
    words = first, first if same else curvature.by_words(right)
    return ProjectedCurvature(
        None,
        None,
        lambda start, stop: curvature.between(left, right, start, stop),
        (lambda start, stop: curvature.diagonal(left, start, stop)) if same else None,
        shape,
        curvature.workspace(left, right) + shape[0] * shape[1],
        None if words[0] is None or words[1] is None else (words[0], words[1], curvature.word_covariance),
    )


def _same(left: Port, right: Port) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.data_ptr() == right.data_ptr()
    return left == right if isinstance(left, slice) and isinstance(right, slice) else left is right
