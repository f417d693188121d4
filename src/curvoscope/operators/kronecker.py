"""`KroneckerSum`: the operator that every Hessian block of every Transformer layer is. See `terms` for its form.

Entries are one matrix product over the tokens for each term, never a loop over them: sum_t l_t[a] r_t[b] C_t[p, q] is
the product of the pairs (a b, T) of the vectors with the cores (T, p q). The sum comes in parts (the outer and the
functional one, say), and what is written is the sum of what each part alone would be, to the bit.
"""

from collections.abc import Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.magnitudes import norm, root, total
from curvoscope.operators.base import LinearOperator, ProductPair, Shape, summed, symmetric_eigenvalues
from curvoscope.operators.inner_products import inner, inner_cost, merged
from curvoscope.operators.solving import DENSE
from curvoscope.operators.terms import Axes, Single, Term, pair_numbers
from curvoscope.settings import settings
from curvoscope.solve import Eigenbasis

TermGroup = Sequence[Term | Single]

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
        self._parts: tuple[tuple[Term | Single, ...], ...] = (tuple(terms),)
        self._products = products
        self._kept: dict[int, Tensor] = {}

    @property
    def terms(self) -> tuple[Term | Single, ...]:
        """All summands."""
        return tuple(term for part in self._parts for term in part)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, KroneckerSum) or self.shape != other.shape:
            return super().__add__(other)
        products = summed(self._products, other._products)
        symmetric = self.symmetric and other.symmetric
        result = KroneckerSum(
            self.row_shape, self.column_shape, self.terms + other.terms, self.like, symmetric, products
        )
        result._parts = self._parts + other._parts  # so that the entries are the sum of the entries, to the bit
        return result

    def _transposed(self) -> LinearOperator:
        products = self._products and (self._products[1], self._products[0])
        terms = [term.T for term in self.terms]
        return KroneckerSum(self.column_shape, self.row_shape, terms, self.like, self.symmetric, products)

    # ---- entries and products

    def _write(self, out: Tensor) -> None:
        write_entries(out, self._parts, self.symmetric)

    def _workspace(self, room: int) -> int:
        return workspace(self._parts, self.symmetric, room)

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
        """|B|_F by the cheapest exact route: from the entries, or from the inner products of the terms."""
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
        parts = ((inner(terms[i], terms[j], budget), 1 if i == j else 2) for i, j in pairs)
        return root(total((count * value, exponent) for (value, exponent), count in parts))

    def _spectrum_is_cheap(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].summed is None and self.terms[0].symmetric

    def _all_eigenvalues(self) -> Tensor:
        if self._spectrum_is_cheap():  # a (x) b, both symmetric: all products of their eigenvalues
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
        U, R = torch.linalg.qr(left.T)
        reduced = R.T.contiguous()  # (T, T)
        shape = (tokens, self.row_shape[1 - axes[0]])
        return KroneckerSum(shape, shape, [Term(reduced, reduced, term.core) for term in terms], left), U, axes[0]

    def _eigenbasis(self) -> Eigenbasis | None:
        """Of both factors of a single product, in the space of tokens if that is smaller, or of the entries."""
        if self._spectrum_is_cheap() and self.row_shape == self.column_shape:
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


# ---- entries


def write_entries(out: Tensor, parts: Sequence[TermGroup], symmetric: bool) -> None:
    """Write the sum of the parts to `out`, a view (r0, r1, c0, c1) into some larger matrix."""
    parts = [part for part in parts if part]
    if not parts:
        out.zero_()
    elif symmetric and (alike := _alike(parts)):
        _write_symmetric(out, alike)
    else:
        for number, part in enumerate(parts):
            symmetrise = symmetric and not all(term.symmetric for term in part)
            at_once = number == 0 or (len(part) == 1 and not symmetrise)
            if at_once:
                _write_part(out, part, add=number > 0)
                target = out
            else:
                target = _new_part(part)
            if symmetrise:
                target.copy_((target + target.permute(2, 3, 0, 1)).mul_(0.5))
            if not at_once:
                out += target


def _view(out: Tensor, axes: Axes) -> Tensor:
    """`out` (r0, r1, c0, c1) with the axes of the vectors first and those of the core last."""
    return out.permute(axes[0], 2 + axes[1], 1 - axes[0], 3 - axes[1])


# ---- what it takes, in bytes


def workspace(parts: Sequence[TermGroup], symmetric: bool, room: int) -> int:
    """What `write_entries` needs in addition to the entries, when `room` is left: moments, and chunks of tokens."""
    parts, needed = [part for part in parts if part], [0]
    alike = symmetric and bool(_alike(parts))
    for number, part in enumerate(parts):
        first, *others = (term.workspace(room) for term in part)
        entries, symmetrised = part[0].entry_bytes, symmetric and not all(term.symmetric for term in part)
        apart = number > 0 and not alike and (len(part) > 1 or symmetrised)  # its sum is made beside the entries
        beside = entries if apart else 0
        needed += [first, *(beside + other for other in others), *([beside + entries] if symmetrised else [])]
    return max(needed)


def _alike(parts: Sequence[TermGroup]) -> list[Term]:
    """The terms, if each part is one symmetric term and all stand on the same axes: their moments can be added."""
    terms = [term for part in parts if len(part) == 1 and (term := part[0].summed) is not None and term.symmetric]
    return terms if len(terms) == len(parts) and len({term.axes for term in terms}) == 1 else []


def _write_symmetric(out: Tensor, terms: Sequence[Term]) -> None:
    moments = terms[0].pair_moments()
    for term in terms[1:]:
        moments += term.pair_moments()
    _view(out, terms[0].axes).copy_(moments[pair_numbers(terms[0].left.shape[1], out.device)])


def _write_part(out: Tensor, terms: TermGroup, add: bool) -> None:
    for term in terms:
        term.write(_view(out, term.axes), add)
        add = True


def _new_part(terms: TermGroup) -> Tensor:
    """The sum of the terms, (r0, r1, c0, c1), in the memory of the first one's moments."""
    first, *rest = terms
    order = _view(torch.empty(0, 1, 2, 3), first.axes).shape  # which axis of the block stands where
    values = first.moments().permute([order.index(axis) for axis in range(4)])
    _write_part(values, rest, add=True)
    return values
