"""Entries of a block, strip by strip of its rows, and of symmetric matrices each entry once.

A strip is small enough to stay in the cache while it is added up and copied to its places.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

_STRIP = 2**18  # numbers
_ROWS = 128  # that are transposed at a time


def row_strips(shape: tuple[int, ...]) -> list[slice]:
    """Ranges of the first axis of a block (r0, r1, c0, c1)."""
    step = max(1, _STRIP // math.prod(shape[1:]))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


@lru_cache(maxsize=64)
def upper(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries on and above the diagonal of a (width, width) matrix."""
    rows, columns = torch.triu_indices(width, width, device=device)
    return rows, columns


@lru_cache(maxsize=64)
def upper_numbers(width: int, device: torch.device) -> Tensor:
    """The number among the `upper` entries of every entry of a symmetric matrix, (width, width)."""
    rows, columns = upper(width, device)
    numbers = torch.empty(width, width, dtype=torch.int64, device=device)
    numbers[rows, columns] = numbers[columns, rows] = torch.arange(len(rows), device=device)
    return numbers


def packed_upper(matrices: Tensor) -> Tensor:
    """The `upper` entries of symmetric matrices (T, p, p), as (entries, T)."""
    rows, columns = upper(matrices.shape[1], matrices.device)
    return matrices.flatten(1).T.contiguous().index_select(0, rows * matrices.shape[1] + columns)


def write_upper(target: Tensor, moments: Tensor, add: bool = False) -> None:
    """Write moments (upper pairs of a, upper entries of p) to all their places in `target` (a, a, p, p)."""
    a, p = target.shape[0], target.shape[2]
    columns = moments.index_select(1, upper_numbers(p, target.device).flatten())
    numbers = upper_numbers(a, target.device)
    for rows in row_strips(tuple(target.shape)):
        values = columns.index_select(0, numbers[rows].flatten()).view(-1, a, p, p)
        put(target[rows], values, add)


def put(target: Tensor, values: Tensor, add: bool) -> None:
    """Write values to `target`, or add them to it."""
    if add:
        target += values
    else:
        target.copy_(values)


def write_transposed(mirror: Tensor, out: Tensor) -> None:
    """Write the transpose of a block (r0, r1, c0, c1), which is a view into some larger matrix, to `mirror`."""
    step = max(1, _ROWS // out.shape[1])
    for start in range(0, out.shape[0], step):  # strips that stay in the cache: twice as fast
        mirror[:, :, start : start + step] = out[start : start + step].permute(2, 3, 0, 1)
