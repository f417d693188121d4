"""Approximations of the blocks of a model as preconditioners of its Hessian."""

from collections.abc import Sequence
from functools import partial

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.enumeration import enumerated, sampled
from curvoscope.approximations.names import approximation, check_name
from curvoscope.autodiff.engine import Autodiff
from curvoscope.errors import ModelError
from curvoscope.solve.preconditioning import BlockDiagonal, Candidate, Preconditioner

_MOST = 65_536  # backward passes for exact gradients
_COMPARED_MOST = 2048  # the same if nobody asked for them
_SAMPLES = 8  # random gradients, if exact ones are more
_PASSES = 2  # backward passes that cost as much as a product
_COMPARED = ("kfac", "ekfac")


class ModelStandIns:
    """Makes a preconditioner of some blocks of a model: block-diagonal, of one kind of approximation.

    The approximations are of the Gauss-Newton part, whatever part of the Hessian is solved with: it is positive. They
    are made of all gradients of a block, or of 8 random ones if those cost too many backward passes: more than 65,536,
    or than 2,048 for those that are compared without being asked for.

    Args:
        engine: the model, the loss and the batches.
    """

    def __init__(self, engine: Autodiff) -> None:
        self._engine = engine

    def compared(self, names: Sequence[str]) -> tuple[Candidate, ...]:
        """The kinds to compare with no preconditioner."""
        if self._engine.ranks.size > 1 or not self._engine.objective.convex:
            return ()
        return tuple(self.candidate(kind, names, _COMPARED_MOST) for kind in _COMPARED)

    def candidate(self, kind: str, names: Sequence[str], most: int | None = None) -> Candidate:
        """The block-diagonal approximation of a kind, such as "kfac" or "kronecker:2", not made yet.

        A kind that needs the inputs of a linear layer is replaced in blocks that have none: by the block itself if it
        is a vector, such as a bias, which a nearest Kronecker product is, and otherwise by its diagonal. A nearest sum
        of Kronecker products has no more terms in a block than make it exact: one for a vector.
        """
        check_name(kind)
        directions = self._engine.survey.outputs  # backward passes for all gradients of a block
        exact = directions <= (most or _MOST)
        passes = directions if exact else _SAMPLES
        made_of = "all gradients" if exact else f"{_SAMPLES} random gradients"
        return Candidate(kind, partial(self._made, kind, names, exact), passes * len(names) / _PASSES, made_of)

    def _made(self, kind: str, names: Sequence[str], exact: bool) -> Preconditioner:
        return BlockDiagonal([self._one(kind, name, exact) for name in names])

    def _one(self, kind: str, name: str, exact: bool) -> Approximation:
        block = self._engine.blocks[name]
        source = enumerated(self._engine, block) if exact else sampled(self._engine, block, _SAMPLES)
        base, _, rank = kind.partition(":")
        if base == "kronecker" and rank.isdecimal():
            kind = f"kronecker:{min(int(rank), min(source.shape) ** 2)}"
        try:
            return approximation(source, kind)
        except ModelError:
            return approximation(source, "kronecker" if 1 in source.shape else "diagonal")
