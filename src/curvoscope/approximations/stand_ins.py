"""Approximations of the blocks of a model as preconditioners of its Hessian."""

from collections.abc import Sequence
from functools import cached_property, partial

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.enumeration import directions, enumerated, sampled
from curvoscope.approximations.names import approximation, check_name
from curvoscope.autodiff.engine import Autodiff
from curvoscope.errors import ModelError
from curvoscope.solve.preconditioning import BlockDiagonal, Candidate, Preconditioner

_MOST = 2048  # backward passes for exact gradients
_SAMPLES = 8  # random ones, if those are more
_PASSES = 2  # backward passes that cost as much as a product
_COMPARED = ("kfac", "ekfac")


class ModelStandIns:
    """Makes a preconditioner of some blocks of a model: block-diagonal, of one kind of approximation.

    The approximations are of the Gauss-Newton part, whatever part of the Hessian is solved with: it is positive. They
    are made of all gradients of a block if these cost at most 2,048 backward passes, otherwise of 8 random ones.

    Args:
        engine: the model, the loss and the batches.
    """

    def __init__(self, engine: Autodiff) -> None:
        self._engine = engine

    @cached_property
    def _passes(self) -> int:
        """Backward passes for the gradients of a block."""
        found = directions(self._engine)
        return found if found <= _MOST else _SAMPLES

    def compared(self, names: Sequence[str]) -> tuple[Candidate, ...]:
        """The kinds to compare with no preconditioner."""
        if self._engine.ranks.size > 1 or not self._engine.objective.convex:
            return ()
        return tuple(self.candidate(kind, names) for kind in _COMPARED)

    def candidate(self, kind: str, names: Sequence[str]) -> Candidate:
        """The block-diagonal approximation of a kind, not made yet."""
        check_name(kind)
        made_of = f"{_SAMPLES} random gradients" if self._passes == _SAMPLES else "all gradients"
        return Candidate(kind, partial(self.make, kind, names), self._passes * len(names) / _PASSES, made_of)

    def make(self, kind: str, names: Sequence[str]) -> Preconditioner:
        """The block-diagonal approximation of a kind, such as "kfac" or "kronecker:2".

        A kind that needs the inputs of a linear layer is replaced in blocks that have none: by the block itself if it
        is a vector, such as a bias, which a nearest Kronecker product is, and otherwise by its diagonal.
        """
        return BlockDiagonal([self._one(kind, name) for name in names])

    def _one(self, kind: str, name: str) -> Approximation:
        block = self._engine.blocks[name]
        few = self._passes == _SAMPLES
        source = sampled(self._engine, block, _SAMPLES) if few else enumerated(self._engine, block)
        try:
            return approximation(source, kind)
        except ModelError:
            return approximation(source, "kronecker" if 1 in source.shape else "diagonal")
