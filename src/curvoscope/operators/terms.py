"""Sums over tokens of Kronecker products: what every Hessian block of every Transformer layer is.

A block has rows (r0, r1) and columns (c0, c1), the row-major indices of two weight matrices. A term puts a vector
l_t on one of the row axes, a vector r_t on one of the column axes, and a small matrix C_t, the core, on the two
axes that are left:

    straight, axes (0, 0):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c0] C_t[r1, c1]
    crossed,  axes (0, 1):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c1] C_t[r1, c0]        and (1, 0), (1, 1) alike

A core that is the same for all tokens collapses the sum: `Single` is (sum_t l_t r_t^T) (x) C.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.magnitudes import in_single
from curvoscope.operators.cores import Core, DenseCore
from curvoscope.operators.strips import (
    packed_upper,
    put,
    row_strips,
    strips_by_cores,
    strips_by_vectors,
    strips_with_matrix,
    upper,
    write_upper,
)

Axes = tuple[int, int]

_CHUNK = 2**28  # bytes for the tokens taken at once: more gain nothing
_ROUNDING = 16  # units of rounding by which the eigenvalues of a core may lie below 0


@dataclass(frozen=True)
class Term:
    """sum_t l_t r_t^T (x) C_t.

    Args:
        left: l (T, a).
        right: r (T, b).
        core: C (T, p, q).
        axes: where l stands in the rows and r in the columns.

    Example:
        >>> import torch
        >>> from curvoscope.operators import Term
        >>> from curvoscope.operators.cores import DenseCore
        >>> x = torch.ones(5, 2)
        >>> term = Term(x, x, DenseCore(torch.eye(3).expand(5, 3, 3), symmetric=True))
        >>> term.tokens, term.symmetric
        (5, True)
    """

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

    @property
    def period(self) -> int:
        """Tokens in a sequence."""
        return self.core.period

    @property
    def summed(self) -> "Term | None":
        """The term itself, as it is a sum over tokens."""
        return self

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(a, b, p, q)."""
        return self.left.shape[1], self.right.shape[1], *self.core.shape

    @property
    def kept(self) -> int:
        """Numbers that `cores` has."""
        return self.tokens * self.core.kept

    @classmethod
    def over_pairs(cls, left: Tensor, right: Tensor, blocks: Tensor, axes: Axes = (0, 0)) -> "Term":
        """sum_tu l_t r_u^T (x) C_tu over the pairs of tokens of a group, for C as `blocks` (groups, g, p, g, q)."""
        groups, size, p, _, q = blocks.shape
        first = left.view(groups, size, 1, -1).expand(-1, -1, size, -1).flatten(0, 2)
        second = right.view(groups, 1, size, -1).expand(-1, size, -1, -1).flatten(0, 2)
        return cls(first, second, DenseCore(blocks.transpose(2, 3).reshape(-1, p, q)), axes)

    def chunks(self, budget: int, extra: int = 0, core: int | None = None) -> list[tuple[int, int]]:
        """Ranges of tokens that fit `budget` bytes at `core` + `extra` numbers each (`core` None: of dense cores)."""
        numbers = (self.core.workspace if core is None else core) + extra
        return list(checks.chunks(self.tokens, self.core.period, numbers * self.left.element_size(), budget))

    def factors(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The factors l, r and C of some tokens; their product, summed over the tokens, is a part of the term."""
        return self.left[start:stop], self.right[start:stop], self.core.dense(start, stop)

    def letters(self, token: str) -> tuple[str, ...]:
        """Einsum subscripts of the factors, each begun by the letter `token`: rows are a, p and columns b, q."""
        on, off = _letters(self.axes)
        return token + on[0], token + on[1], token + off

    def cores(self) -> Tensor:
        """The cores of all tokens, as `multiply` takes them."""
        needed = self.kept * self.left.element_size()
        checks.fits(needed, None, "keeping the cores of a block", "use fewer tokens or smaller heads")
        parts = [
            self.core.numbers(*chunk)
            for chunk in self.chunks(checks.memory_budget() // 4, core=self.core.numbers_workspace)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def with_numbers(self) -> "Term":
        """The same term with its cores as numbers, which can be sent to another process."""
        return replace(self, core=self.core.with_numbers(self.tokens))

    # ---- answers

    def multiply(self, columns: Tensor, cores: Tensor) -> Tensor:
        """The term times columns (b, q, n): (a, p, n). `cores` is what `cores()` returned."""
        seen = (self.right @ columns.reshape(columns.shape[0], -1)).view(-1, *columns.shape[1:])
        answered = self.core.times(cores, seen)  # (T, p, n)
        return (self.left.T @ answered.flatten(1)).view(self.left.shape[1], *answered.shape[1:])

    def trace(self) -> float:
        """The trace, when rows and columns have one shape."""
        found, budget = 0.0, checks.memory_budget() // 2
        if self.axes[0] == self.axes[1]:
            weights = (self.left * self.right).sum(1)
            for start, stop in self.chunks(budget, core=self.core.trace_workspace):
                found += float(weights[start:stop] @ self.core.trace(start, stop))
        else:
            for start, stop in self.chunks(budget):
                left, right, core = self.factors(start, stop)
                found += float(torch.einsum("tp,tpa,ta->", right, core, left))
        return found

    def add_diagonal(self, target: Tensor) -> None:
        """Add the diagonal, when rows and columns have one shape, to `target` (a, p)."""
        straight = self.axes[0] == self.axes[1]
        core = self.core.diagonal_workspace if straight else self.core.workspace
        for start, stop in self.chunks(checks.memory_budget() // 2, core=core):
            if straight:
                pairs = self.left[start:stop] * self.right[start:stop]
                target += pairs.T @ self.core.diagonal(start, stop)
            else:
                target += torch.einsum("ta,tp,tpa->ap", *self.factors(start, stop))

    def norm_bound(self) -> float:
        """|l|_2 |r|_2 max_t |C_t|_2, which bounds the spectral norm."""
        chunks = self.chunks(checks.memory_budget() // 4)
        largest = max(_spectral(self.core.dense(start, stop)) for start, stop in chunks)
        return _spectral(self.left) * _spectral(self.right) * largest

    def lower_bound(self) -> float:
        """Of the eigenvalues of a symmetric term: 0 to rounding if all cores are positive semidefinite, or -inf.

        sum_t l_t l_t^T (x) C_t is at least -τ |l|² if every C_t + τ is positive definite.
        """
        lowest = 0.0
        for start, stop in self.chunks(checks.memory_budget() // 4, extra=2 * self.core.size):
            core = self.core.dense(start, stop)
            shift = _ROUNDING * torch.finfo(core.dtype).eps * core.abs().amax() * core.shape[1]
            unit = torch.eye(core.shape[1], dtype=core.dtype, device=core.device)
            if bool(torch.linalg.cholesky_ex(in_single(core + shift * unit)).info.any()):
                return -math.inf
            lowest = min(lowest, -float(shift))
        return lowest * _spectral(self.left) ** 2

    # ---- entries (r0, r1, c0, c1), and the bytes that they take

    @property
    def entry_bytes(self) -> int:
        """What all entries take."""
        return math.prod(self.sizes) * self.left.element_size()

    def workspace(self, room: int) -> int:
        """Bytes that `write` needs if `room` bytes are left: for moments, and for a chunk of tokens."""
        one_token = (self.core.workspace + self._pairs) * self.left.element_size()
        chunk = min(self.tokens * one_token, max(one_token, self._at_once(room)))
        return max(self._beside, self.entry_bytes // (2 if self.symmetric else 1) + chunk)

    def write(self, out: Tensor, add: bool) -> None:
        """Write the entries to `out` (r0, r1, c0, c1), or add them to it."""
        if self.symmetric:
            self.write_upper(out, self.upper_moments(), add)
            return
        for number, tokens in enumerate(self._ranges()):
            for rows, values in zip(row_strips(tuple(out.shape)), self._strips(*tokens), strict=True):
                put(out[rows], values, add or number > 0)

    def strips(self) -> Iterator[Tensor] | None:
        """The entries (r, r1, c0, c1) of each of the `row_strips`; None if memory does not hold all tokens at once."""
        return self._strips(0, self.tokens) if len(self._ranges()) == 1 else None

    def _strips(self, start: int, stop: int) -> Iterator[Tensor]:
        """The part of some tokens: sum_t l_t[a] r_t[b] C_t[p, q] is a product of the pairs of vectors with the cores.

        The factor with the columns' last axis is the right one, so that this axis is innermost, and the rows' last
        axis is next to it: a strip and its transpose are then both copied fast.
        """
        left, right, shape = self.left[start:stop], self.right[start:stop], _block_shape(self.sizes, self.axes)
        split = self.core.split() if self.axes == (0, 0) else None
        if split is not None and (stop - start) * (2 * shape[3] - len(split[1])) > 2 * shape[3] * len(split[1]):
            yield from strips_with_matrix(left, right, split[0].dense(start, stop), split[1], row_strips(shape))
            return
        straight, (_, r1, c0, c1) = self.axes[0] == self.axes[1], shape
        make = strips_by_vectors if self.axes[0] == 0 else strips_by_cores
        cores = self.core.dense(start, stop)
        for found in make(left, right, cores, straight, self.core.symmetric, row_strips(shape)):
            yield (
                found.view(-1, c0, r1, c1).transpose(1, 2)
                if straight
                else found.view(c0, r1, -1, c1).permute(2, 1, 0, 3)
            )

    def upper_moments(self) -> Tensor:
        """sum_t l_t[a] l_t[b] C_t[p, q] of a symmetric term for a <= b and p <= q, (pairs, entries).

        Each is used up to four times, so that symmetry is exact.
        """
        i, j = upper(self.left.shape[1], self.left.device)
        result: Tensor | None = None
        for start, stop in self._ranges():
            left = self.left[start:stop].T.contiguous()
            pairs = left.index_select(0, i).mul_(left.index_select(0, j))
            cores = packed_upper(self.core.dense(start, stop)).T
            result = pairs @ cores if result is None else result.addmm_(pairs, cores)
        assert result is not None  # a term has at least one token
        return result

    def write_upper(self, out: Tensor, moments: Tensor, add: bool) -> None:
        """Write the entries of a symmetric term, or add them, from its `upper_moments`."""
        write_upper(out.transpose(1, 2), moments if self.axes[0] == 0 else moments.T, add)

    def _ranges(self) -> list[tuple[int, int]]:
        return self.chunks(self._at_once(checks.memory_budget()), extra=self._pairs)

    @property
    def _pairs(self) -> int:
        """Numbers a token for the pairs of its vectors: of a symmetric term half of them, and their factors."""
        return self.left.shape[1] * self.right.shape[1] * (3 if self.symmetric else 2) // 2

    @property
    def _beside(self) -> int:
        """The moments and, for a symmetric term, also the half that determines them."""
        return self.entry_bytes * (3 if self.symmetric else 2) // 2

    def _at_once(self, room: int) -> int:
        """For a chunk of tokens."""
        return max(0, min(_CHUNK, room // 4, room - self._beside))


@dataclass(frozen=True)
class Single:
    """One Kronecker product.

    Args:
        outer: (a, b) on `axes`.
        core: (p, q) on the other axes.
        axes: where `outer` stands in the rows and in the columns.
        symmetric: whether both are symmetric matrices, and the axes are straight.

    Example:
        >>> import torch
        >>> from curvoscope.operators import Single
        >>> Single(torch.ones(2, 3), torch.ones(4, 5)).T.outer.shape
        torch.Size([3, 2])
    """

    outer: Tensor
    core: Tensor
    axes: Axes = (0, 0)
    symmetric: bool = False

    @property
    def T(self) -> "Single":
        """The transposed product."""
        return Single(self.outer.T, self.core.T, (self.axes[1], self.axes[0]), self.symmetric)

    tokens = period = 1  # as the number of summands, and of those in a sequence
    kept = 0  # no core is kept in addition to the term itself

    @property
    def summed(self) -> Term | None:
        """None: the sum over tokens has been carried out."""
        return None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(a, b, p, q)."""
        return (*self.outer.shape, *self.core.shape)

    def chunks(self, budget: int) -> list[tuple[int, int]]:
        """The single range (0, 1), whatever the budget."""
        return [(0, 1)]

    def factors(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The matrices `outer` and `core`, for any range."""
        return self.outer, self.core

    def letters(self, token: str) -> tuple[str, ...]:
        """Einsum subscripts of the factors, without `token`: rows are a, p and columns b, q."""
        return _letters(self.axes)

    def cores(self) -> Tensor:
        """The core, (p, q)."""
        return self.core

    def with_numbers(self) -> "Single":
        """The same term."""
        return self

    # ---- answers

    def multiply(self, columns: Tensor, cores: Tensor) -> Tensor:
        """The product times columns (b, q, n): (a, p, n). `cores` is not read."""
        return torch.einsum("ab,bqn,pq->apn", self.outer, columns, cores)

    def trace(self) -> float:
        """The trace, when rows and columns have one shape."""
        straight = self.axes[0] == self.axes[1]
        return float(self.outer.trace() * self.core.trace() if straight else (self.outer * self.core.T).sum())

    def add_diagonal(self, target: Tensor) -> None:
        """Add the diagonal, when rows and columns have one shape, to `target` (a, p)."""
        straight = self.axes[0] == self.axes[1]
        target += torch.outer(self.outer.diagonal(), self.core.diagonal()) if straight else self.outer * self.core.T

    def norm_bound(self) -> float:
        """The spectral norm."""
        return _spectral(self.outer) * _spectral(self.core)

    def lower_bound(self) -> float:
        """The smallest eigenvalue of a symmetric product: the least of the products of the factors' ends."""
        ends = [torch.linalg.eigvalsh(in_single(factor))[[0, -1]].tolist() for factor in (self.outer, self.core)]
        return min(first * second for first in ends[0] for second in ends[1])

    # ---- entries (r0, r1, c0, c1), and the bytes that they take

    @property
    def entry_bytes(self) -> int:
        """What all entries take."""
        return math.prod(self.sizes) * self.outer.element_size()

    def workspace(self, room: int) -> int:
        """Bytes that `write` needs, whatever the `room`: none for a diagonal core."""
        return 0 if self._core_is_diagonal() else self.entry_bytes

    def write(self, out: Tensor, add: bool) -> None:
        """Write the entries to `out` (r0, r1, c0, c1), or add them; for a diagonal core, only those on its diagonal."""
        i, j = self.axes
        target = out.permute(i, 2 + j, 1 - i, 3 - j)  # (a, b, p, q)
        if not self._core_is_diagonal():
            put(target, self.outer[:, :, None, None] * self.core, add)
            return
        if not add:
            target.zero_()
        target.diagonal(dim1=2, dim2=3).add_(self.outer[:, :, None] * self.core.diagonal())

    def _core_is_diagonal(self) -> bool:
        core = self.core
        return core.shape[0] == core.shape[1] and torch.equal(core, core.diagonal().diag())


def _block_shape(sizes: tuple[int, int, int, int], axes: Axes) -> tuple[int, int, int, int]:
    """(r0, r1, c0, c1) of a term with sizes (a, b, p, q)."""
    a, b, p, q = sizes
    rows, columns = (a, p) if axes[0] == 0 else (p, a), (b, q) if axes[1] == 0 else (q, b)
    return (*rows, *columns)


def _letters(axes: Axes) -> tuple[str, str]:
    """Subscripts on the axes and off them."""
    i, j = axes
    return "ap"[i] + "bq"[j], "ap"[1 - i] + "bq"[1 - j]


def _spectral(matrix: Tensor) -> float:
    """The largest singular value, of one matrix or of several."""
    return float(torch.linalg.matrix_norm(in_single(checks.finite("norm_bound", matrix)), 2).max())
