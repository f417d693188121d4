"""`KroneckerSum`: the operator that every Hessian block of every Transformer layer is. See `terms` for its form.

Norms are sums of inner products of terms, <B, B'>, without forming an entry. Routes: the Gram matrix of the cores,
sum_tu (l_t . l'_u) (r_t . r'_u) <C_t, C'_u>; the same in the space of tokens, or row by row there; and a contraction of
all factors when the vectors stand on different axes. Every factor is brought near one first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations_with_replacement

import opt_einsum
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.magnitudes import ScaledNumber, in_single, norm, root, total, unit
from curvoscope.operators.base import LinearOperator, ProductPair, Shape, summed
from curvoscope.operators.cores import (
    SumCore,
    inner_by_rows,
    inner_by_rows_cost,
    inner_by_tokens,
    inner_by_tokens_cost,
    inner_by_tokens_fits,
)
from curvoscope.operators.eigenvalues import symmetric_eigenvalues
from curvoscope.operators.entries import workspace, write_entries
from curvoscope.operators.solving import DENSE
from curvoscope.operators.terms import Axes, Single, Term
from curvoscope.settings import settings
from curvoscope.solve import Eigenbasis

_GRAMS = 3  # matrices of pairs of tokens at once: of the vectors, of the cores, and their product
_MOST_KEPT = 2**28  # bytes of cores that are kept for the next product, if there is another way to multiply


class KroneckerSum(LinearOperator):
    """A sum of `Term`s and `Single`s: exact trace, diagonal, norms, eigenvalues, products and entries.

    Args:
        row_shape: (r0, r1), the shape of the weight of the rows.
        column_shape: (c0, c1), that of the columns.
        terms: the summands.
        like: a tensor of the dtype of the terms, on their device.
        symmetric: whether the terms add up to a symmetric matrix; by default whether each of them is one.
        products: products with the block and with its transpose, used when the cores are too large to be kept.

    Example:
        >>> import torch, curvoscope as cv
        >>> from curvoscope.operators import Single
        >>> a, b = torch.eye(2).double(), torch.full((3, 3), 2.0).double()
        >>> block = cv.KroneckerSum((2, 3), (2, 3), [Single(a, b)], a)
        >>> bool((block.dense() == torch.kron(a, b)).all()), block.trace().value
        (True, 12.0)
    """

    def __init__(
        self,
        row_shape: Shape,
        column_shape: Shape,
        terms: Sequence[Term | Single],
        like: Tensor,
        symmetric: bool | None = None,
        products: ProductPair | None = None,
    ) -> None:
        if symmetric is None:
            symmetric = row_shape == column_shape and all(term.symmetric for term in terms)
        super().__init__(row_shape, column_shape, like, symmetric)
        for term in terms:
            self._check(term)
        self.terms = tuple(terms)
        self._products = products
        self._kept: dict[int, Tensor] = {}

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, KroneckerSum) or self.shape != other.shape:
            return super().__add__(other)
        products = summed(self._products, other._products)
        symmetric = self.symmetric and other.symmetric
        terms = self.terms + other.terms
        return KroneckerSum(self.row_shape, self.column_shape, terms, self.like, symmetric, products)

    def _transposed(self) -> LinearOperator:
        products = self._products and (self._products[1], self._products[0])
        terms = [term.T for term in self.terms]
        return KroneckerSum(self.column_shape, self.row_shape, terms, self.like, self.symmetric, products)

    # ---- entries and products

    def _write(self, out: Tensor) -> None:
        write_entries(out, merged(self.terms), self.symmetric)

    def _write_both(self, out: Tensor, mirror: Tensor) -> None:
        write_entries(out, merged(self.terms), self.symmetric, mirror)

    def _workspace(self, room: int) -> int:
        return workspace(merged(self.terms), self.symmetric, room)

    def _matmat(self, columns: Tensor) -> Tensor:
        kept = sum(term.kept for term in self.terms) * columns.element_size()
        if self._products is not None and kept > min(_MOST_KEPT, checks.memory_budget() // 4):
            return self._products[0](columns)
        n = columns.shape[1]
        result = columns.new_zeros(*self.row_shape, n)
        source = columns.reshape(*self.column_shape, n)
        for number, term in enumerate(self.terms):
            if number not in self._kept:  # for the next product too
                self._kept[number] = term.cores()
            moved = source.movedim(term.axes[1], 0)  # (b, q, n)
            result += term.multiply(moved, self._kept[number]).movedim(0, term.axes[0])
        return result.reshape(self.shape[0], n)

    # ---- exact contractions

    def _trace(self) -> float:
        if self.row_shape != self.column_shape:
            return super()._trace()
        return sum(term.trace() for term in self.terms)

    def _diagonal(self) -> Tensor:
        if self.row_shape != self.column_shape:
            return super()._diagonal()
        result = torch.zeros(self.row_shape, dtype=self.dtype, device=self.device)
        for term in self.terms:
            term.add_diagonal(result.movedim(term.axes[0], 0))  # (a, p), a view
        return result.reshape(-1)

    def _norm(self) -> float:
        """|B|_F by the cheapest exact route: the entries, or inner products of terms that do not cancel."""
        budget = max(checks.memory_budget(), checks.LEAST_CHUNK)
        terms = merged(self.terms)
        if not terms:
            return 0.0
        pairs = list(combinations_with_replacement(range(len(terms)), 2))
        pairwise = sum(inner_cost(terms[i], terms[j]) for i, j in pairs)
        entries = self.shape[0] * self.shape[1]
        by_entries = entries * sum(term.tokens for term in self.terms)
        if by_entries <= pairwise and self._bytes(2, budget) <= budget:
            with settings(memory_limit=budget):
                return norm(self.dense())
        known = ((inner(terms[i], terms[j], budget), 1 if i == j else 2) for i, j in pairs)
        parts = [(count * value, exponent) for (value, exponent), count in known]
        square, size = total(parts), total((abs(value), exponent) for value, exponent in parts)
        is_lost = size[0] and not square[0] > torch.finfo(self.dtype).eps ** 0.5 * size[0]  # cancelled, or overflowed
        return super()._norm() if is_lost else root(square)

    def _is_product(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].summed is None and self.terms[0].symmetric

    def _spectrum_is_cheap(self) -> bool:
        if self._is_product():
            return True
        compressed = self._compressed()
        return compressed is not None and compressed._takes_all_eigenvalues(1)

    def _all_eigenvalues(self) -> Tensor:
        if self._is_product():  # a (x) b, both symmetric: all products of their eigenvalues
            first, second = (symmetric_eigenvalues(factor) for factor in self.terms[0].factors(0, 1))
            return torch.outer(first, second).flatten().sort().values
        compressed = self._compressed()
        if compressed is not None:
            zeros = torch.zeros(self.shape[0] - compressed.shape[0], dtype=self.dtype, device=self.device)
            return torch.cat([compressed._all_eigenvalues(), zeros]).sort().values
        return super()._all_eigenvalues()

    def _compressed(self) -> "KroneckerSum | None":
        """The same nonzero spectrum in fewer dimensions, when there are fewer tokens than the vectors have entries."""
        found = self._in_token_space()
        return None if found is None else found[0]

    def _in_token_space(self) -> "tuple[KroneckerSum, Tensor, int] | None":
        """The sum in the space of tokens, the way U (width, T) from there, and the axis of the weight that it is for.

        With l^T = U R (thin QR), sum_t l_t l_t^T (x) C_t = (U (x) I) (sum_t R_t R_t^T (x) C_t) (U (x) I)^T.
        """
        terms = [term for each in self.terms if (term := each.summed) is not None]
        if not terms or len(terms) < len(self.terms):
            return None
        left, axes = terms[0].left, terms[0].axes
        tokens, width = left.shape
        alike = all(term.left is left and term.right is left and term.axes == axes for term in terms)
        if tokens >= width or axes[0] != axes[1] or not alike:
            return None
        U, R = (factor.to(left.dtype) for factor in torch.linalg.qr(in_single(left.T)))
        reduced = R.T.contiguous()  # (T, T)
        shape = (tokens, self.row_shape[1 - axes[0]])
        return KroneckerSum(shape, shape, [Term(reduced, reduced, term.core) for term in terms], left), U, axes[0]

    def _eigenbasis(self) -> Eigenbasis | None:
        """Of both factors of a single product, in the space of tokens if that is smaller, or of the entries."""
        if self._is_product() and self.row_shape == self.column_shape:
            outer, core = self.terms[0].factors(0, 1)
            return Eigenbasis.kronecker(outer, core, self.terms[0].axes[0])
        found = self._in_token_space()
        if found is not None and found[0].shape[0] <= DENSE:
            compressed, U, axis = found
            return Eigenbasis.tokens(compressed.dense(), U, self.row_shape, axis)
        return super()._eigenbasis()

    def lower_bound(self) -> float:
        """0 to rounding if every term is positive semidefinite: l = r on the same axes, and so are all cores."""
        if not self.symmetric or not all(term.symmetric for term in self.terms):
            return super().lower_bound()
        return sum(term.lower_bound() for term in self.terms)

    def norm_bound(self) -> float:
        """|B|_2 <= sum over terms of |l|_2 |r|_2 max_t |C_t|_2; a `Single` enters with its exact norm."""
        return sum(term.norm_bound() for term in merged(self.terms))

    def _check(self, term: Term | Single) -> None:
        rows, columns = self.row_shape, self.column_shape
        sizes = term.sizes
        i, j = term.axes
        if sizes != (rows[i], columns[j], rows[1 - i], columns[1 - j]):
            raise ShapeError("terms", f"a term of sizes {sizes} on axes {term.axes} does not fit {rows} x {columns}")


# ---- inner products


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
    contract = _expression(",".join(names) + "->", *(tuple(factor.shape) for factor in factors))
    return float(contract(*(near for near, _ in units))), sum(exponent for _, exponent in units)


@lru_cache(maxsize=1024)
def _expression(equation: str, *shapes: tuple[int, ...]) -> Callable[..., Tensor]:
    """The contraction in its cheapest order: to find it costs more than to contract a few tokens."""
    expression: Callable[..., Tensor] = opt_einsum.contract_expression(equation, *shapes)
    return expression


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
    """<x, y> when the vectors stand on different axes, or one is not a sum over tokens: chunk by chunk of both."""
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
