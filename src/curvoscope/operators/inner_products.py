"""Inner products of terms, <B, B'> = sum of the products of their entries, without forming an entry.

Routes: the Gram matrix of the cores, sum_tu (l_t . l'_u) (r_t . r'_u) <C_t, C'_u>; the same in the space of tokens, or
row by row there; and a contraction of all factors when the vectors stand on different axes. Every factor is brought
near one first.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import opt_einsum
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.magnitudes import ScaledNumber, total, unit
from curvoscope.operators.cores import (
    SumCore,
    inner_by_rows,
    inner_by_rows_cost,
    inner_by_tokens,
    inner_by_tokens_cost,
    inner_by_tokens_fits,
)
from curvoscope.operators.terms import Axes, Single, Term

_GRAMS = 3  # matrices of pairs of tokens at once: of the vectors, of the cores, and their product


def merged(terms: Sequence[Term | Single]) -> list[Term | Single]:
    """Terms with the same vectors on the same axes become one, with the sum of their cores."""
    groups: dict[tuple[int, int, Axes], list[Term]] = {}
    singles: list[Term | Single] = []
    for term in terms:
        found = term.summed
        if found is None:
            singles.append(term)
        else:
            groups.setdefault((id(found.left), id(found.right), found.axes), []).append(found)
    merged = [
        group[0]
        if len(group) == 1
        else Term(group[0].left, group[0].right, SumCore([term.core for term in group]), group[0].axes)
        for group in groups.values()
    ]
    return [*merged, *singles]


def inner_cost(x: Term | Single, y: Term | Single) -> int:
    """Multiplications of the cheapest route to <x, y>."""
    first, second = x.summed, y.summed
    if first is None or second is None:
        a, b, p, q = x.sizes if first is None else y.sizes
        return max(x.tokens, y.tokens) * (a * b + p * q)
    gram = _gram_cost(first, second)
    if x.axes != y.axes:
        return gram
    return min(gram, inner_by_tokens_cost(first.core, second.core), inner_by_rows_cost(first.core, second.core))


def _gram_cost(x: Term, y: Term) -> int:
    cost = x.tokens * y.tokens * (x.left.shape[1] + x.right.shape[1] + x.core.size)
    return cost // 2 if x is y else cost


def inner(x: Term | Single, y: Term | Single, budget: int) -> ScaledNumber:
    """<x, y> by the cheapest route."""
    first, second = x.summed, y.summed
    if first is None or second is None or x.axes != y.axes:
        return _crossed_inner(x, y, budget)
    gram, by_rows = _gram_cost(first, second), inner_by_rows_cost(first.core, second.core)
    by_rows = by_rows < min(gram, inner_by_tokens_cost(first.core, second.core))
    by_tokens = not by_rows and inner_by_tokens_cost(first.core, second.core) < gram
    by_tokens = by_tokens and inner_by_tokens_fits(first.core, second.core, first.left.element_size(), budget)
    by_tokens = by_tokens and (x is y or first.core is not second.core)  # there one core stands for one term
    near, left = _with_unit_vectors(first)
    other, right = (near, left) if x is y else _with_unit_vectors(second)
    if by_rows:
        weights = partial(_weights, near, other)
        value, exponent = inner_by_rows(first.core, second.core, weights, budget, same=x is y)
    elif by_tokens:
        value, exponent = inner_by_tokens(first.core, second.core, lambda i, j: _weights(near, other, i, j))
    else:
        value, exponent = _gram_inner(near, other, budget)
    return value, exponent + left + right


def _with_unit_vectors(term: Term) -> tuple[Term, int]:
    """term = result · 2^exponent."""
    left, first = unit(term.left)
    right, second = (left, first) if term.right is term.left else unit(term.right)
    return replace(term, left=left, right=right), first + second


def _contracted(names: Sequence[str], *factors: Tensor) -> ScaledNumber:
    """The sum over all subscripts."""
    units = [unit(factor) for factor in factors]
    equation = ",".join(names) + "->"
    path = _path(equation, *(tuple(factor.shape) for factor in factors))
    found = float(opt_einsum.contract(equation, *(near for near, _ in units), optimize=path))
    return found, sum(exponent for _, exponent in units)


@lru_cache(maxsize=1024)
def _path(equation: str, *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The cheapest order of contraction: to find it costs more than to contract a few tokens."""
    path: list[tuple[int, ...]] = opt_einsum.contract_path(equation, *shapes, shapes=True)[0]
    return path


def _weights(x: Term, y: Term, i: slice, j: slice) -> Tensor:
    """(l_t . l'_u) (r_t . r'_u) for tokens t in i and u in j."""
    weights = x.left[i] @ y.left[j].T
    if x.left is x.right and y.left is y.right:
        return weights.square_()
    return weights.mul_(x.right[i] @ y.right[j].T)


def _gram_inner(x: Term, y: Term, budget: int) -> ScaledNumber:
    """sum_tu (l_t . l'_u) (r_t . r'_u) <C_t, C'_u>, through the Gram matrix of the cores, in chunks of both."""
    parts: list[ScaledNumber] = []
    room = max(budget, checks.LEAST_CHUNK) // 4
    side = int((room / (_GRAMS * x.left.element_size())) ** 0.5)  # of the Gram matrices
    outer, inner = _at_most(x, budget // 2, side), _at_most(y, budget // 4, side)
    checks.predict(_GRAMS * x.left.element_size() * min(side, x.tokens) * min(side, y.tokens))
    for start, stop in outer:
        cores, exponent = unit(x.core.dense(start, stop).flatten(1))
        if x is y and len(outer) == 1:
            found = (_weights(x, x, slice(None), slice(None)) * (cores @ cores.T)).sum(dtype=torch.float64)
            return float(found), 2 * exponent
        for first, last in inner:
            others, other = unit(y.core.dense(first, last).flatten(1))
            weights = _weights(x, y, slice(start, stop), slice(first, last))
            parts.append((float((weights * (cores @ others.T)).sum(dtype=torch.float64)), exponent + other))
    return total(parts)


def _crossed_inner(x: Term | Single, y: Term | Single, budget: int) -> ScaledNumber:
    """<x, y> when the vectors stand on different axes, or one is no sum over tokens: chunk by chunk of both."""
    names = [*x.letters("t"), *y.letters("u")]
    parts: list[ScaledNumber] = []
    itemsize = x.entry_bytes // math.prod(x.sizes)
    pairs = budget // 4 // (itemsize * max(*x.sizes[2:], *y.sizes[2:]))  # of tokens, at once
    side = int(pairs**0.5)
    for i, j in _at_most(x, budget // 4, pairs // max(1, min(side, y.tokens))):
        mine = x.factors(i, j)
        parts += (
            _contracted(names, *mine, *y.factors(k, m))
            for k, m in _at_most(y, budget // 4, pairs // max(1, min(side, x.tokens)))
        )
    return total(parts)


def _at_most(term: Term | Single, budget: int, size: int) -> list[tuple[int, int]]:
    """The term's chunks, of at most so many tokens: whole sequences, or parts of one."""
    period = term.period
    step = size // period * period if size >= period else max(1, size)
    cut = []
    for start, stop in term.chunks(budget):
        while start < stop:
            end = min(start + step, stop) if step >= period else min(start + step, stop, (start // period + 1) * period)
            cut.append((start, end))
            start = end
    return cut
