"""Where the vectors of an estimator live: whole in this process, or a part of each in each of several.

All that an estimator does with vectors is linear, row by row, apart from what `Space` does: sums over the n entries,
orthonormal bases, random vectors and unit vectors. An operator with an attribute `spaces` (of its rows, of its columns)
gives spaces of its own; its products take and give the rows that this process holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Space:
    """R^n, vectors being columns (or rows) with all n entries."""

    def __init__(self, size: int) -> None:
        self.size = size  # n
        self.length = size  # entries of a vector in this process
        self.longest = size  # and in the process that has the most

    def total(self, sums: Tensor) -> Tensor:
        """Sums over the entries in this process, added up over all processes: total(x^T y) is <x, y>."""
        return sums

    def norm(self, vectors: Tensor, dim: int) -> Tensor:
        """Lengths of vectors whose entries lie along `dim`."""
        return vectors.norm(dim=dim)

    def factor(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Q R = columns (n, k), Q orthonormal."""
        Q, R = torch.linalg.qr(columns)
        return Q, R

    def triangle(self, columns: Tensor) -> Tensor:
        """R alone."""
        return torch.linalg.qr(columns, mode="r").R

    def random(self, draw: Callable[[int], Tensor]) -> Tensor:
        """n rows of `draw(rows)`, which gives the next rows of a random matrix."""
        return draw(self.size)

    def units(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Columns `start` to `stop` of the identity, in float64."""
        unit = torch.zeros(self.size, stop - start, dtype=torch.float64, device=device)
        unit[torch.arange(start, stop), torch.arange(stop - start)] = 1
        return unit

    def whole(self, columns: Tensor) -> Tensor:
        """All n entries of columns, for matrices small enough to be dense."""
        return columns

    def least(self, number: int) -> int:
        """The least of the numbers of all processes: what depends on it is decided alike by all."""
        return number
