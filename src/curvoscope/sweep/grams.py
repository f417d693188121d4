"""Gram matrices K[i, j] = <gamma^i, gamma^j> of sampled weight gradients, without the gradients themselves.

gamma = X^T delta for a product y = X w, so that over tokens t of sample i and u of sample j

    K[i, j] = sum_tu (x_t . x_u) (delta_t . delta_u) = <(X X'^T) delta', delta>

which takes X and delta only. With many tokens it is cheaper to form gamma, a few rows of w at a time. A parameter that
is also read row by row (an embedding that is tied to the unembedding) has gradients of both kinds, and their inner
products besides.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, combinations_with_replacement

import torch
from torch import Tensor

from curvoscope.approximations.factors import moment
from curvoscope.autodiff.uses import Factors
from curvoscope.blocks import Piece

_ROWS = 2**26  # entries of gradients that are formed at a time


def add_gram(gram: Tensor, found: Sequence[Factors]) -> None:
    """Add K of a rectangle of a parameter, from all its products, to `gram` (m, m)."""
    alike: dict[tuple[bool, tuple[int, ...]], list[Factors]] = {}
    for one in found:
        corners = tuple(end for side in one.region for end in (side.start, side.stop))
        alike.setdefault((one.transposed, corners), []).append(one)
    for group in alike.values():
        _add_alike(gram, group)
    for first, second in combinations(alike.values(), 2):
        for one in first:
            for other in second:
                _add_apart(gram, one, other)


def _add_apart(gram: Tensor, one: Factors, other: Factors) -> None:
    """Two products that read different rectangles of the parameter, or in different orientation."""
    common, rest = one.within(other.region), other.within(one.region)
    if common is None or rest is None:
        return
    if common.transposed == rest.transposed:
        _add(gram, common.samples, rest.samples, _by_tokens(common, rest), twice=True)
    elif common.transposed:
        add_crossed(gram, rest, common)
    else:
        add_crossed(gram, common, rest)


def _add_alike(gram: Tensor, found: Sequence[Factors]) -> None:
    """Products that have the same rows: X^T delta with the same axes."""
    if not found:
        return
    samples = sum(len(one.samples) for one in found)
    tokens = sum(len(one.factor) for one in found)
    width, rows = found[0].deltas.shape[-1], found[0].rows.stop - found[0].rows.start
    seen = sum(len(one.samples) * len(one.factor) for one in found)
    by_tokens = tokens**2 * (min(rows, 64) if found[0].factor.ndim == 1 else rows) + samples * tokens**2 * width
    by_tokens += samples**2 * tokens * width
    by_rows = seen * rows * width + samples**2 * rows * width
    look_up = any(one.factor.ndim == 1 for one in found)
    if look_up or by_tokens <= by_rows:
        for one, other in combinations_with_replacement(found, 2):
            _add(gram, one.samples, other.samples, _by_tokens(one, other), twice=one is not other)
    else:
        _add_by_rows(gram, found, rows, width)


def _by_tokens(one: Factors, other: Factors) -> Tensor:
    """<(X' X^T) delta, delta'> for all pairs of samples: (n, n')."""
    left, right = (_token_products(one, other).mT @ one.deltas).flatten(1), other.deltas.flatten(1)
    return moment(left.mT, right.mT) if one is other else left @ right.mT


def _token_products(one: Factors, other: Factors) -> Tensor:
    """X X'^T, (T, T')."""
    if one.factor.ndim == 1 and other.factor.ndim == 1:
        same = (one.factor[:, None] == other.factor[None]) & (one.factor >= 0)[:, None]
        return same.to(one.deltas.dtype)
    if one.factor.ndim == 1:
        return _chosen(other.factor, one.factor - one.rows.start, one.factor < 0)
    if other.factor.ndim == 1:
        return _chosen(one.factor, other.factor - other.rows.start, other.factor < 0).mT
    return one.factor @ other.factor.mT


def _chosen(factor: Tensor, rows: Tensor, none: Tensor) -> Tensor:
    """X[u, row of t], (T, U), zero where there is no row."""
    return factor.mT[rows.clamp_min(0)].masked_fill(none[:, None], 0)


def _add_by_rows(gram: Tensor, found: Sequence[Factors], rows: int, width: int) -> None:
    """Form the gradients, some rows of w at a time, and take their inner products."""
    samples = torch.cat([one.samples for one in found]).unique()
    place = {int(sample): i for i, sample in enumerate(samples)}
    step = max(1, min(rows, _ROWS // max(1, width * len(samples))))
    total = gram.new_zeros(len(samples), len(samples))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        formed = found[0].deltas.new_zeros(len(samples), part.stop - part.start, width)
        for one in found:
            gradients = one.factor[:, part].mT @ one.deltas
            formed.index_add_(0, torch.tensor([place[int(s)] for s in one.samples]), gradients)
        flat = formed.flatten(1)
        total += moment(flat.mT).to(total.dtype)
    gram[samples[:, None], samples] += total


def add_crossed(gram: Tensor, one: Factors, other: Factors) -> None:
    """<X^T delta, (X'^T delta')^T> = sum_tu (x_t . delta'_u) (delta_t . x'_u): one product reads the parameter as it is
    stored, the other transposed."""
    first = _against(one, other)  # x_t . delta'_u: (n', T, T')
    second = _against(other, one).mT  # delta_t . x'_u: (n, T, T')
    _add(gram, one.samples, other.samples, second.flatten(1) @ first.flatten(1).mT, twice=True)


def _against(one: Factors, other: Factors) -> Tensor:
    """x_t . delta'_u, (n', T, U)."""
    deltas = other.deltas
    if one.factor.ndim > 1:
        return one.factor @ deltas.mT
    chosen = deltas[..., (one.factor - one.rows.start).clamp_min(0)]  # (n', U, T)
    return chosen.masked_fill(one.factor < 0, 0).mT


def _add(gram: Tensor, rows: Tensor, columns: Tensor, block: Tensor, twice: bool) -> None:
    """Add a block and, if it lies off the diagonal, its transpose; samples may occur in both."""
    block = block.to(gram.dtype)
    gram[rows[:, None], columns] += block
    if twice:
        gram[columns[:, None], rows] += block.mT


def tiling(piece: Piece, others: Iterable[Piece]) -> list[Piece]:
    """Those of the others that make up a part of their parameter, such as heads; [] if they do not."""
    inside = [one for one in others if _is_within(one, piece)]
    apart = not any(one.overlaps(other) for one, other in combinations(inside, 2))
    return inside if apart and sum(one.size for one in inside) == piece.size else []


def _is_within(one: Piece, other: Piece) -> bool:
    sides = zip(one.index, other.index, strict=True)
    return all(outer.start <= inner.start and inner.stop <= outer.stop for inner, outer in sides)
