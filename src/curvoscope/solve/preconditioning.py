"""Stand-ins for an operator that can be inverted at once, and the choice among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, ShapeError


@runtime_checkable
class Preconditioner(Protocol):
    """A symmetric positive semidefinite stand-in A for B, to be inverted with the same damping."""

    def damped_solve(self, b: Tensor, damping: float) -> Tensor:
        """(A + damping)^-1 b for columns b (n, c)."""
        ...


class Diagonal:
    """The diagonal of an operator, its negative entries taken by their size.

    Args:
        values: the diagonal (n,).
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values.abs()

    def damped_solve(self, b: Tensor, damping: float) -> Tensor:
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

    def damped_solve(self, b: Tensor, damping: float) -> Tensor:
        """The solutions of all blocks, one below the other."""
        parts = b.split([block.shape[0] for block in self._blocks])
        return torch.cat([block.damped_solve(part, damping) for block, part in zip(self._blocks, parts, strict=True)])


@dataclass(frozen=True)
class Candidate:
    """A preconditioner that has not been made yet.

    Args:
        name: such as "kfac".
        make: makes it.
        products: what making it costs, in products with the operator.
        made_of: what it is made of, in words: "exact gradients", or "16 sampled gradients".
    """

    name: str
    make: Callable[[], Preconditioner]
    products: float = 0.0
    made_of: str = ""


class StandIns(Protocol):
    """What makes preconditioners for named blocks."""

    def candidate(self, kind: str, names: Sequence[str]) -> Candidate:
        """That of a kind for the blocks together."""
        ...

    def compared(self, names: Sequence[str]) -> tuple[Candidate, ...]:
        """Those to compare if none is asked for."""
        ...


def applied(preconditioner: Preconditioner, rows: Tensor, damping: float, unit: float, like: Tensor) -> Tensor:
    """(M / unit)^-1 of rows (c, n), in their own precision; the preconditioner gets columns that are like `like`."""
    found = preconditioner.damped_solve(rows.T.to(like), damping)
    if found.shape != rows.T.shape:
        raise ShapeError("preconditioner", f"gave shape {tuple(found.shape)}, expected {tuple(rows.T.shape)}")
    if not checks.all_finite(found):
        raise NonFiniteError("preconditioner", "gave NaN or infinity; give a larger damping, or another preconditioner")
    return (found.T * unit).to(rows)
