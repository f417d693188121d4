"""Approximations of the blocks of a model as preconditioners of its Hessian."""

from collections.abc import Sequence
from functools import cached_property

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.enumeration import directions
from curvoscope.approximations.gradients import GivesGradients
from curvoscope.approximations.names import approximation
from curvoscope.approximations.source import source_of
from curvoscope.autodiff.engine import Autodiff
from curvoscope.errors import ModelError
from curvoscope.solve.preconditioning import BlockDiagonal, Preconditioner

_MOST = 2048  # backward passes for which preconditioners are compared without being asked for
_COMPARED = ("kfac", "ekfac")


class ModelStandIns:
    """Makes a preconditioner of some blocks of a model: block-diagonal, of one kind of approximation.

    The approximations are of the Gauss-Newton part, whatever part of the Hessian is solved with: it is positive.

    Args:
        source: gives the gradients of a block.
        engine: the model, the loss and the batches.
    """

    def __init__(self, source: GivesGradients, engine: Autodiff) -> None:
        self._source, self._engine = source, engine

    @cached_property
    def compared(self) -> tuple[str, ...]:
        """The kinds to compare with no preconditioner: none if their gradients cost too many backward passes."""
        if self._engine.ranks.size > 1 or not self._engine.objective.convex:
            return ()
        return _COMPARED if directions(self._engine) <= _MOST else ()

    def make(self, kind: str, names: Sequence[str]) -> Preconditioner:
        """The block-diagonal approximation of a kind, such as "kfac" or "kronecker:2".

        A kind that needs the inputs of a linear layer is replaced in blocks that have none: by the block itself if it
        is a vector, such as a bias, which a nearest Kronecker product is, and otherwise by its diagonal.
        """
        return BlockDiagonal([self._one(kind, name) for name in names])

    def _one(self, kind: str, name: str) -> Approximation:
        source = source_of(self._source, name)
        try:
            return approximation(source, kind)
        except ModelError:
            return approximation(source, "kronecker" if 1 in source.shape else "diagonal")
