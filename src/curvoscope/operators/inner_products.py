"""Inner products of terms, <B, B'> = sum of the products of their entries, without forming an entry.

Routes: the Gram matrix of the cores, sum_tu (l_t . l'_u) (r_t . r'_u) <C_t, C'_u>; the same in the space of tokens; and
a contraction of all factors when the vectors stand on different axes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvoscope.operators.cores import SumCore, inner_by_tokens, inner_by_tokens_cost
from curvoscope.operators.terms import Axes, Single, Term


def merged(terms: Sequence[Term | Single]) -> list[Term | Single]:
    """Terms with the same vectors on the same axes become one, with the sum of their cores."""
    groups: dict[tuple[int, int, Axes], list[Term]] = {}
    singles: list[Term | Single] = []
    for term in terms:
        if isinstance(term, Single):
            singles.append(term)
        else:
            groups.setdefault((id(term.left), id(term.right), term.axes), []).append(term)
    merged = [
        group[0]
        if len(group) == 1
        else Term(group[0].left, group[0].right, SumCore([term.core for term in group]), group[0].axes)
        for group in groups.values()
    ]
    return [*merged, *singles]


def inner_cost(x: Term | Single, y: Term | Single) -> int:
    """Multiplications of the cheapest route to <x, y>."""
    if isinstance(x, Single) and isinstance(y, Single):
        return x.core.numel() + x.outer.numel() if x.axes == y.axes else x.core.numel() * x.outer.numel()
    if isinstance(x, Single) or isinstance(y, Single):
        term = x if isinstance(x, Term) else y
        assert isinstance(term, Term)
        return term.tokens * (term.core.size + term.left.shape[1] * term.right.shape[1])
    gram = x.tokens * y.tokens * (x.left.shape[1] + x.right.shape[1] + x.core.size)
    if x.axes == y.axes:
        return min(gram // (2 if x is y else 1), inner_by_tokens_cost(x.core, y.core))
    return gram


def inner(x: Term | Single, y: Term | Single, budget: int) -> float:
    """<x, y> by the cheapest route."""
    if isinstance(x, Term) and isinstance(y, Term):
        if x.axes != y.axes:
            return _crossed_inner(x, y, budget)
        gram = x.tokens * y.tokens * (x.left.shape[1] + x.right.shape[1] + x.core.size)
        if inner_by_tokens_cost(x.core, y.core) < gram // (2 if x is y else 1):
            return inner_by_tokens(x.core, y.core, lambda i, j: _weights(x, y, i, j))
        return _gram_inner(x, y, budget)
    if isinstance(x, Single) and isinstance(y, Single):
        if x.axes == y.axes:
            return float((x.outer * y.outer).sum() * (x.core * y.core).sum())
        names = [*_letters(x, ""), *_letters(y, "")]
        return float(torch.einsum(",".join(names) + "->", x.outer, x.core, y.outer, y.core))
    term, single = (x, y) if isinstance(x, Term) else (y, x)
    assert isinstance(term, Term) and isinstance(single, Single)
    names = [*_letters(term, "t"), *_letters(single, "")]
    total = 0.0
    for start, stop in term.chunks(budget // 3):
        core = term.core.dense(start, stop)
        total += float(
            torch.einsum(
                ",".join(names) + "->",
                term.left[start:stop],
                term.right[start:stop],
                core,
                single.outer,
                single.core,
            )
        )
    return total


def _weights(x: Term, y: Term, i: slice, j: slice) -> Tensor:
    """(l_t . l'_u) (r_t . r'_u) for tokens t in i and u in j."""
    weights = x.left[i] @ y.left[j].T
    if x.left is x.right and y.left is y.right:
        return weights.square_()
    return weights.mul_(x.right[i] @ y.right[j].T)


def _gram_inner(x: Term, y: Term, budget: int) -> float:
    """sum_tu (l_t . l'_u) (r_t . r'_u) <C_t, C'_u>, through the Gram matrix of the cores, in chunks of both."""
    total = 0.0
    outer, inner = x.chunks(budget // 2), y.chunks(budget // 4)
    for start, stop in outer:
        cores = x.core.dense(start, stop).flatten(1)
        if x is y and len(outer) == 1:
            return float((_weights(x, x, slice(None), slice(None)) * (cores @ cores.T)).sum(dtype=torch.float64))
        for first, last in inner:
            others = y.core.dense(first, last).flatten(1)
            weights = _weights(x, y, slice(start, stop), slice(first, last))
            total += float((weights * (cores @ others.T)).sum(dtype=torch.float64))
    return total


def _crossed_inner(x: Term, y: Term, budget: int) -> float:
    """<x, y> when the vectors of x and y stand on different axes: contracted pair by pair of chunks."""
    names = ",".join([*_letters(x, "t"), *_letters(y, "u")]) + "->"
    total = 0.0
    widest = max(*x.core.shape, *y.core.shape)
    numbers = int((budget // 4 / (x.left.element_size() * widest)) ** 0.5)
    for start, stop in _at_most(x.chunks(budget // 4), max(1, numbers)):
        core = x.core.dense(start, stop)
        for first, last in _at_most(y.chunks(budget // 4), max(1, numbers)):
            total += float(
                torch.einsum(
                    names,
                    x.left[start:stop],
                    x.right[start:stop],
                    core,
                    y.left[first:last],
                    y.right[first:last],
                    y.core.dense(first, last),
                )
            )
    return total


def _at_most(ranges: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, stop)) for begin, stop in ranges for start in range(begin, stop, size)]


def _letters(term: Term | Single, token: str) -> tuple[str, ...]:
    """Einsum subscripts: rows are a, p and columns b, q."""
    i, j = term.axes
    on, off = "ap"[i] + "bq"[j], "ap"[1 - i] + "bq"[1 - j]
    if isinstance(term, Single):
        return on, off
    return token + on[0], token + on[1], token + off
