"""Where the vectors of an estimator live: whole in this process, or a part of each in each of several.

All that an estimator does with vectors is linear, row by row, apart from what `Space` does: sums over the n entries,
orthonormal bases, random vectors and unit vectors. An operator with an attribute `spaces` (of its rows, of its columns)
gives spaces of its own; its products take and give the rows that this process holds.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**16  # entries of a vector that are summed in single precision
_SMALL = 1e-15  # length of so many entries below which some of their squares may not be normal numbers
_INDEPENDENT = 1e-4  # of the largest column, what each must add for inner products to be enough
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

RandomFill = Callable[[Tensor], Tensor]
"""Fills a vector in single precision with the next entries of a random one, and returns it."""


class Space:
    """R^n, vectors being columns (or rows) with all n entries."""

    def __init__(self, size: int) -> None:
        self.size = size  # n
        self.length = size  # entries of a vector in this process
        self.longest = size  # and in the process that has the most

    def total(self, sums: Tensor) -> Tensor:
        """Sums over the entries in this process, added up over all processes: total(x^T y) is <x, y>."""
        return sums

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """<x_i, y_j> of columns x (n, c) and y (n, c'): (c, c'), in float64."""
        if x.dtype == torch.float64:
            return self.total(x.T @ y)
        found = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64, device=x.device)
        for some, others in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
            found += some.T @ others
        return self.total(found)

    def norm(self, vectors: Tensor, dim: int) -> Tensor:
        """Lengths of vectors whose entries lie along `dim`."""
        return self.total(_squares(vectors, dim)).sqrt().to(vectors.dtype)

    def factor(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Q R = columns (n, k). Q is orthonormal to rounding after it has been factored once more."""
        R = self._cholesky(columns)
        if R is None:
            return self._qr(columns)
        inverse = torch.linalg.solve_triangular(R, torch.eye(len(R), dtype=R.dtype, device=R.device), upper=True)
        Q = empty(columns.shape[1], len(columns), columns.dtype, columns.device)
        return torch.mm(inverse.T.to(columns.dtype), columns.T, out=Q).T, R

    def triangle(self, columns: Tensor) -> Tensor:
        """R alone."""
        R = self._cholesky(columns)
        return self._qr_triangle(columns) if R is None else R

    def _cholesky(self, columns: Tensor) -> Tensor | None:
        """R from the inner products of the columns, many times faster than by reflections; None if it is not safe."""
        R, failed = torch.linalg.cholesky_ex(self.inner(columns, columns), upper=True)
        sizes = R.diagonal()
        safe = columns.shape[1] and not int(failed) and bool(sizes.min() > _INDEPENDENT * sizes.max())
        return R if safe else None

    def _qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        Q, R = torch.linalg.qr(columns)
        return Q, R.double()

    def _qr_triangle(self, columns: Tensor) -> Tensor:
        return torch.linalg.qr(columns, mode="r").R.double()

    def random(self, draw: RandomFill, out: Tensor) -> None:
        """Write a random vector to `out`, (length,)."""
        if out.dtype == torch.float32 and out.device.type == "cpu":
            draw(out)
        else:
            out.copy_(draw(torch.empty(self.size)))

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


def _squares(vectors: Tensor, dim: int) -> Tensor:
    """The squared lengths, in float64: over millions of entries a sum in single precision is off by 1e-4 and more."""
    if vectors.dtype == torch.float64:
        return vectors.norm(dim=dim).square()
    lengths = torch.stack([some.norm(dim=dim).double() for some in vectors.split(_CHUNK, dim)])
    if not bool((lengths.isfinite() & (lengths > _SMALL)).all()):  # squares may have left the range
        lengths = torch.stack([some.double().norm(dim=dim) for some in vectors.split(_CHUNK, dim)])
    return lengths.square().sum(0)


def empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix. On the CPU from numpy, which asks for huge pages: large results are written faster."""
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty((rows, columns), _NUMPY[dtype]))
    return torch.empty(rows, columns, dtype=dtype, device=device)
