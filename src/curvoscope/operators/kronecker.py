"""Sums over tokens of Kronecker products: what every Hessian block of every Transformer layer is.

A block has rows (r0, r1) and columns (c0, c1), the row-major indices of two weight matrices. A term puts a vector
l_t on one of the row axes, a vector r_t on one of the column axes, and a small matrix C_t, the core, on the two
axes that are left:

    straight, axes (0, 0):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c0] C_t[r1, c1]
    crossed,  axes (0, 1):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c1] C_t[r1, c0]        and (1, 0), (1, 1) alike

A core that is the same for all tokens collapses the sum: `Single` is (sum_t l_t r_t^T) (x) C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.operators.base import LinearOperator, Multiplication, Shape, summed
from curvoscope.operators.cores import Core, SumCore, inner_by_tokens, inner_by_tokens_cost

Axes = tuple[int, int]


@dataclass(frozen=True)
class Term:
    """sum_t l_t r_t^T (x) C_t: `left` (T, a), `right` (T, b), cores (T, p, q), `axes` where l and r stand."""

    left: Tensor
    right: Tensor
    core: Core
    axes: Axes = (0, 0)

    @property
    def symmetric(self) -> bool:
        """Whether the term is a symmetric matrix by construction."""
        return self.left is self.right and self.axes[0] == self.axes[1] and self.core.symmetric

    @property
    def T(self) -> "Term":
        """The transposed term."""
        return Term(self.right, self.left, self.core.T, (self.axes[1], self.axes[0]))

    @property
    def tokens(self) -> int:
        """Number of summands."""
        return self.left.shape[0]

    def chunks(self, budget: int, extra: int = 0) -> list[tuple[int, int]]:
        """Ranges of tokens whose cores, and `extra` numbers a token, fit into the budget."""
        numbers = self.core.workspace + extra
        return list(checks.chunks(self.tokens, self.core.period, numbers * self.left.element_size(), budget))


@dataclass(frozen=True)
class Single:
    """One Kronecker product: `outer` (a, b) on `axes`, `core` (p, q) on the others."""

    outer: Tensor
    core: Tensor
    axes: Axes = (0, 0)
    symmetric: bool = False

    @property
    def T(self) -> "Single":
        """The transposed product."""
        return Single(self.outer.T, self.core.T, (self.axes[1], self.axes[0]), self.symmetric)


class KroneckerSum(LinearOperator):
    """A sum of `Term`s and `Single`s: exact trace, diagonal, norms, eigenvalues, products and entries.

    `symmetric` says that the terms add up to a symmetric matrix (by default: that each of them is one). `product` is
    another way to multiply with columns, taken when the cores are too large to be kept.
    """

    def __init__(
        self,
        row_shape: Shape,
        column_shape: Shape,
        terms: Sequence[Term | Single],
        like: Tensor,
        symmetric: bool | None = None,
        product: Multiplication | None = None,
    ) -> None:
        if symmetric is None:
            symmetric = row_shape == column_shape and all(term.symmetric for term in terms)
        super().__init__(row_shape, column_shape, like, symmetric)
        for term in terms:
            self._check(term)
        self._parts: tuple[tuple[Term | Single, ...], ...] = (tuple(terms),)
        self._product = product
        self._kept: dict[int, Tensor] = {}

    @property
    def terms(self) -> tuple[Term | Single, ...]:
        """All summands."""
        return tuple(term for part in self._parts for term in part)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, KroneckerSum) or self.shape != other.shape:
            return super().__add__(other)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        product = summed(self._product, other._product)
        symmetric = self.symmetric and other.symmetric
        result = KroneckerSum(self.row_shape, self.column_shape, self.terms + other.terms, like, symmetric, product)
        result._parts = self._parts + other._parts  # so that the entries are the sum of the entries, to the bit
        return result

    def _transposed(self) -> LinearOperator:
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return KroneckerSum(self.column_shape, self.row_shape, [term.T for term in self.terms], like)

    # ---- entries and products

    def _write(self, out: Tensor) -> None:
        alike = _alike(self._parts)
        if alike and (alike[0].symmetric or not self.symmetric):
            moments = _moments(alike[0])
            for term in alike[1:]:
                moments += _moments(term)
            _put(out, alike[0], moments, add=False)
            return
        _write_part(out, self._parts[0], self.symmetric)
        for part in self._parts[1:]:
            if len(part) == 1 and (part[0].symmetric or not self.symmetric):
                _put_term(out, part[0], add=True)
            elif part:
                values = out.new_empty(out.shape)
                _write_part(values, part, self.symmetric)
                out += values

    def _matmat(self, columns: Tensor) -> Tensor:
        kept = sum(term.tokens * term.core.size for term in self.terms if isinstance(term, Term))
        if self._product is not None and kept * columns.element_size() > checks.memory_budget(None) // 4:
            return self._product(columns)
        n = columns.shape[1]
        result = columns.new_zeros(*self.row_shape, n)
        source = columns.reshape(*self.column_shape, n)
        for number, term in enumerate(self.terms):
            moved = source.movedim(term.axes[1], 0)  # (b, q, n)
            if isinstance(term, Single):
                inner = torch.einsum("ab,bqn,pq->apn", term.outer, moved, term.core)
            else:
                core = self._core(number, term)
                seen = (term.right @ moved.reshape(moved.shape[0], -1)).view(-1, moved.shape[1], n)
                answered = core @ seen  # (T, p, n)
                inner = (term.left.T @ answered.flatten(1)).view(term.left.shape[1], -1, n)
            result += inner.movedim(0, term.axes[0])
        return result.reshape(self.shape[0], n)

    def _core(self, number: int, term: Term) -> Tensor:
        """The cores of a term, (T, p, q), kept for the next product."""
        if number not in self._kept:
            bytes_needed = term.tokens * term.core.size * term.left.element_size()
            checks.fits(bytes_needed, None, "keeping the cores of a block", "use fewer tokens or smaller heads")
            budget = checks.memory_budget(None) // 4
            parts = [term.core.dense(*chunk) for chunk in term.chunks(budget)]
            self._kept[number] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._kept[number]

    # ---- exact contractions

    def _trace(self, memory_limit: int | None) -> float:
        if self.row_shape != self.column_shape:
            return super()._trace(memory_limit)
        total = 0.0
        for term in self.terms:
            if isinstance(term, Single):
                straight = term.axes[0] == term.axes[1]
                value = term.outer.trace() * term.core.trace() if straight else (term.outer * term.core.T).sum()
                total += float(value)
            elif term.axes[0] == term.axes[1]:
                weights = (term.left * term.right).sum(1)
                for start, stop in term.chunks(checks.memory_budget(memory_limit) // 2):
                    total += float(weights[start:stop] @ term.core.trace(start, stop))
            else:
                for start, stop in term.chunks(checks.memory_budget(memory_limit) // 2):
                    core = term.core.dense(start, stop)
                    total += float(torch.einsum("tp,tpa,ta->", term.right[start:stop], core, term.left[start:stop]))
        return total

    def _diagonal(self, memory_limit: int | None) -> Tensor:
        if self.row_shape != self.column_shape:
            return super()._diagonal(memory_limit)
        result = torch.zeros(self.row_shape, dtype=self.dtype, device=self.device)
        for term in self.terms:
            straight = term.axes[0] == term.axes[1]
            target = result.movedim(term.axes[0], 0)  # (a, p), a view
            if isinstance(term, Single):
                if straight:
                    target += torch.outer(term.outer.diagonal(), term.core.diagonal())
                else:
                    target += term.outer * term.core.T
                continue
            for start, stop in term.chunks(checks.memory_budget(memory_limit) // 2):
                left, right = term.left[start:stop], term.right[start:stop]
                if straight:
                    target += (left * right).T @ term.core.diagonal(start, stop)
                else:
                    target += torch.einsum("ta,tp,tpa->ap", left, right, term.core.dense(start, stop))
        return result.reshape(-1)

    def _squared_norm(self, memory_limit: int | None) -> float:
        """|B|_F^2 by the cheapest exact route: from the entries, or from the inner products of the terms."""
        budget = checks.memory_budget(memory_limit)
        terms = _merged(self.terms)
        if not terms:
            return 0.0
        pairs = list(combinations_with_replacement(range(len(terms)), 2))
        pairwise = sum(_inner_cost(terms[i], terms[j]) for i, j in pairs)
        entries = self.shape[0] * self.shape[1]
        by_entries = entries * sum(term.tokens if isinstance(term, Term) else 1 for term in self.terms)
        if by_entries <= pairwise and 2 * entries * self.dtype.itemsize <= budget:
            return float(self.dense(memory_limit=memory_limit).double().square().sum())
        return sum((1 if i == j else 2) * _inner(terms[i], terms[j], budget) for i, j in pairs)

    def _spectrum_is_cheap(self) -> bool:
        return len(self.terms) == 1 and isinstance(self.terms[0], Single)

    def _all_eigenvalues(self, memory_limit: int | None) -> Tensor:
        terms = _merged(self.terms)
        if len(terms) == 1 and isinstance(terms[0], Single):  # eigenvalues of a (x) b: all products
            first, second = torch.linalg.eigvalsh(terms[0].outer), torch.linalg.eigvalsh(terms[0].core)
            return torch.outer(first, second).flatten().sort().values
        compressed = self._compressed()
        if compressed is not None:
            zeros = torch.zeros(self.shape[0] - compressed.shape[0], dtype=self.dtype, device=self.device)
            return torch.cat([compressed._all_eigenvalues(memory_limit), zeros]).sort().values
        return super()._all_eigenvalues(memory_limit)

    def _compressed(self) -> "KroneckerSum | None":
        """The same nonzero spectrum in fewer dimensions, when there are fewer tokens than the vectors have entries.

        With l^T = U R (thin QR), sum_t l_t l_t^T (x) C_t = (U (x) I) (sum_t R_t R_t^T (x) C_t) (U (x) I)^T.
        """
        terms = [term for term in self.terms if isinstance(term, Term)]
        if not terms or len(terms) < len(self.terms):
            return None
        left, axes = terms[0].left, terms[0].axes
        tokens, width = left.shape
        if tokens >= width or any(term.left is not left or term.axes != axes for term in terms):
            return None
        reduced = torch.linalg.qr(left.T).R.T.contiguous()  # (T, T)
        shape = (tokens, self.row_shape[1 - axes[0]])
        return KroneckerSum(shape, shape, [Term(reduced, reduced, term.core) for term in terms], left)

    def norm_bound(self, memory_limit: int | None = None) -> float:
        """|B|_2 <= sum over terms of |l|_2 |r|_2 max_t |C_t|_2; a `Single` enters with its exact norm."""
        total = 0.0
        for term in _merged(self.terms):
            if isinstance(term, Single):
                total += _spectral(term.outer) * _spectral(term.core)
                continue
            largest = max(
                float(torch.linalg.matrix_norm(term.core.dense(start, stop), 2).max())
                for start, stop in term.chunks(checks.memory_budget(memory_limit) // 4)
            )
            total += _spectral(term.left) * _spectral(term.right) * largest
        return total

    def _check(self, term: Term | Single) -> None:
        rows, columns = self.row_shape, self.column_shape
        if isinstance(term, Single):
            sizes = (*term.outer.shape, *term.core.shape)
        else:
            sizes = (term.left.shape[1], term.right.shape[1], *term.core.shape)
        i, j = term.axes
        if sizes != (rows[i], columns[j], rows[1 - i], columns[1 - j]):
            raise ShapeError("terms", f"a term of sizes {sizes} on axes {term.axes} does not fit {rows} x {columns}")


# ---- entries


def _view(out: Tensor, axes: Axes) -> Tensor:
    """`out` (r0, r1, c0, c1) with the axes of the vectors first and those of the core last."""
    return out.permute(axes[0], 2 + axes[1], 1 - axes[0], 3 - axes[1])


def _alike(parts: Sequence[Sequence[Term | Single]]) -> list[Term]:
    """The terms, when each part is one term and all stand on the same axes: their moments can be added."""
    terms = [part[0] for part in parts if len(part) == 1 and isinstance(part[0], Term)]
    kinds = {(term.axes, term.symmetric) for term in terms}
    return terms if len(terms) == len(parts) and len(kinds) == 1 else []


def _put_term(out: Tensor, term: Term | Single, add: bool) -> None:
    if isinstance(term, Single):
        values = term.outer[:, :, None, None] * term.core
        target = _view(out, term.axes)
        target.copy_(target + values if add else values)
    else:
        _put(out, term, _moments(term), add)


def _put(out: Tensor, term: Term, moments: Tensor, add: bool) -> None:
    """Write the moments of a term, or add them."""
    target = _view(out, term.axes)
    if term.symmetric:
        moments = moments[:, _pair_numbers(term.core.shape[0], out.device)]  # (pairs a <= b, p, q)
        moments = moments[_pair_numbers(target.shape[0], out.device)]
    if add:
        target += moments
    else:
        target.copy_(moments)


def _write_part(out: Tensor, terms: Sequence[Term | Single], symmetric: bool) -> None:
    if not terms:
        out.zero_()
    for number, term in enumerate(terms):
        _put_term(out, term, add=number > 0)
    if symmetric and not all(term.symmetric for term in terms):
        out.copy_((out + out.permute(2, 3, 0, 1)) / 2)


def _moments(term: Term) -> Tensor:
    """sum_t l_t[a] r_t[b] C_t[p, q] as one matrix product over the tokens: (a, b, p, q).

    For a symmetric term only its pairs a <= b and p <= q, (pairs, pairs): each entry of the block is computed once,
    so the block is symmetric to the bit.
    """
    a, b, (p, q) = term.left.shape[1], term.right.shape[1], term.core.shape
    if term.symmetric:
        (i, j), (k, m) = (torch.triu_indices(n, n, device=term.left.device) for n in (a, p))
    result: Tensor | None = None
    for start, stop in term.chunks(checks.memory_budget(None) // 4, extra=a * b):
        left, right, cores = term.left[start:stop], term.right[start:stop], term.core.dense(start, stop)
        if term.symmetric:
            vectors, cores = left[:, i] * right[:, j], cores[:, k, m]
        else:
            vectors, cores = (left[:, :, None] * right[:, None, :]).flatten(1), cores.flatten(1)
        result = vectors.T @ cores if result is None else result.addmm_(vectors.T, cores)
    assert result is not None  # a term has at least one token
    return result if term.symmetric else result.view(a, b, p, q)


def _pair_numbers(width: int, device: torch.device) -> Tensor:
    """The number of the pair at every place of a symmetric matrix, (width, width)."""
    numbers = torch.empty(width, width, dtype=torch.int64, device=device)
    first, second = torch.triu_indices(width, width, device=device)
    counted = torch.arange(len(first), device=device)
    numbers[first, second] = counted
    numbers[second, first] = counted
    return numbers


# ---- inner products <B, B'> = sum of the products of the entries


def _merged(terms: Sequence[Term | Single]) -> list[Term | Single]:
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


def _inner_cost(x: Term | Single, y: Term | Single) -> int:
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


def _inner(x: Term | Single, y: Term | Single, budget: int) -> float:
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


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
