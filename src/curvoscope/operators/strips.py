"""Entries of a block, strip by strip of its rows, and of symmetric matrices each entry once.

A strip is small enough to stay in the cache while it is added up and copied to its places.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

_STRIP = 2**18  # numbers
_ROWS = 32  # that are transposed at a time


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
    return matrices.flatten(1).index_select(1, rows * matrices.shape[1] + columns).T


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
    step = out.shape[0] if out.numel() <= _STRIP else max(1, _ROWS // out.shape[1])
    for start in range(0, out.shape[0], step):  # strips that stay in the cache: twice as fast
        mirror[:, :, start : start + step] = out[start : start + step].permute(2, 3, 0, 1)


# ---- sum_t l_t[a] r_t[b] C_t[p, q] as products of the pairs of vectors with the cores, strip by strip


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """The products of all entries of two vectors for each token, (T, a b)."""
    return (first[:, :, None] * second[:, None]).flatten(1)


def strips_by_vectors(
    left: Tensor, right: Tensor, cores: Tensor, straight: bool, symmetric: bool, strips: Sequence[slice]
) -> Iterator[Tensor]:
    """With the rows' first axis on the vectors: ((r, c0), (r1, c1)), or crossed ((c0, r1), (r, c1)).

    Of symmetric cores each entry is multiplied once, if the product has them as its rows.
    """
    if straight:
        cores = cores.flatten(1)
        yield from (pairs(left[:, rows], right).T @ cores for rows in strips)
    elif not symmetric:
        cores = cores.permute(2, 1, 0).flatten(0, 1)  # contiguous, as narrow strips are multiplied with it
        yield from (cores @ pairs(left[:, rows], right) for rows in strips)
    else:
        upper_cores, places = packed_upper(cores), upper_numbers(cores.shape[1], cores.device).flatten()
        yield from ((upper_cores @ pairs(left[:, rows], right)).index_select(0, places) for rows in strips)


def strips_by_cores(
    left: Tensor, right: Tensor, cores: Tensor, straight: bool, symmetric: bool, strips: Sequence[slice]
) -> Iterator[Tensor]:
    """With the rows' first axis on the cores: ((r, c0), (r1, c1)), or crossed ((c0, r1), (r, c1))."""
    if not straight:
        vectors = pairs(right, left).T
        yield from (vectors @ cores[:, rows].flatten(1) for rows in strips)
    elif not symmetric:
        vectors, cores = pairs(left, right), cores.permute(1, 2, 0).contiguous()
        yield from (cores[rows].flatten(0, 1) @ vectors for rows in strips)
    else:
        product, places = packed_upper(cores) @ pairs(left, right), upper_numbers(cores.shape[1], cores.device)
        yield from (product.index_select(0, places[rows].flatten()) for rows in strips)


def strips_with_matrix(
    left: Tensor, right: Tensor, cores: Tensor, matrix: Tensor, strips: Sequence[slice]
) -> Iterator[Tensor]:
    """sum_t l_t[a] r_t[b] (S_t W)[p, q] as (r, p, b, q), for symmetric cores S: the sum over the tokens comes first."""
    width, packed = len(matrix), packed_upper(cores)
    places = upper_numbers(width, cores.device).flatten()
    for rows in strips:
        sums = (packed @ pairs(left[:, rows], right)).index_select(0, places)  # ((p, p'), (r, b))
        yield (sums.view(width, width, -1).mT @ matrix).unflatten(1, (-1, right.shape[1])).transpose(0, 1)
