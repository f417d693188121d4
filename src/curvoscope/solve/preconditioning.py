"""Stand-ins for an operator that can be inverted at once, and the choice among them."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Preconditioner(Protocol):
    """A symmetric positive semidefinite stand-in A for B, to be inverted with the same damping."""

    def solve(self, b: Tensor, damping: float) -> Any:
        """(A + damping)^-1 b for columns b (n, c): a tensor, or something with a tensor `value`."""
        ...


class Diagonal:
    """The diagonal of an operator, its negative entries taken by their size.

    Args:
        values: the diagonal (n,).
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values.abs()

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """b / (diagonal + damping)."""
        smallest = torch.finfo(self.values.dtype).eps * self.values.max()
        return b / (self.values + damping).clamp_min(float(smallest))[:, None]


class BlockDiagonal:
    """Stand-ins for the diagonal blocks of a matrix.

    Args:
        blocks: in the order of rows; each has a `shape`.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """The solutions of all blocks, one below the other."""
        parts = b.split([block.shape[0] for block in self._blocks])
        return torch.cat([block.solve(part, damping) for block, part in zip(self._blocks, parts, strict=True)])


class StandIns(Protocol):
    """What makes preconditioners for named blocks."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Kinds that are compared if none is asked for."""
        ...

    def make(self, kind: str, names: Sequence[str]) -> Preconditioner:
        """That of a kind for the blocks together."""
        ...


def applied(preconditioner: Preconditioner, rows: Tensor, damping: float, unit: float, like: Tensor) -> Tensor:
    """(M / unit)^-1 of rows (c, n), in their own precision; the preconditioner gets columns that are like `like`."""
    found = preconditioner.solve(rows.T.to(like), damping)
    value: Tensor = found if isinstance(found, Tensor) else found.value
    return (value.T * unit).to(rows)
