"""Sums over tokens of Kronecker products: what every Hessian block of every Transformer layer is.

A block has rows (r0, r1) and columns (c0, c1), the row-major indices of two weight matrices. A term puts a vector
l_t on one of the row axes, a vector r_t on one of the column axes, and a small matrix C_t, the core, on the two
axes that are left:

    straight, axes (0, 0):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c0] C_t[r1, c1]
    crossed,  axes (0, 1):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c1] C_t[r1, c0]        and (1, 0), (1, 1) alike

A core that is the same for all tokens collapses the sum: `Single` is (sum_t l_t r_t^T) (x) C.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.operators.cores import Core, DenseCore

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
        """sum_tu l_t r_u^T (x) C_tu over the pairs of tokens of a group; C as `blocks` (groups, g, p, g, q)."""
        groups, size, p, _, q = blocks.shape
        first = left.view(groups, size, 1, -1).expand(-1, -1, size, -1).flatten(0, 2)
        second = right.view(groups, 1, size, -1).expand(-1, size, -1, -1).flatten(0, 2)
        return cls(first, second, DenseCore(blocks.transpose(2, 3).reshape(-1, p, q)), axes)

    def chunks(self, budget: int, extra: int = 0, core: int | None = None) -> list[tuple[int, int]]:
        """Ranges of tokens that fit the budget, with `core` numbers per token (those of dense cores) and `extra`."""
        numbers = (self.core.workspace if core is None else core) + extra
        return list(checks.chunks(self.tokens, self.core.period, numbers * self.left.element_size(), budget))

    def factors(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The tensors of some tokens whose product, summed over the tokens, is their part of the term."""
        return self.left[start:stop], self.right[start:stop], self.core.dense(start, stop)

    def letters(self, token: str) -> tuple[str, ...]:
        """Einsum subscripts of the factors: rows are a, p and columns b, q."""
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
        """(b, q, n) -> (a, p, n), with `cores()`."""
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
            if bool(torch.linalg.cholesky_ex(core + shift * unit).info.any()):
                return -math.inf
            lowest = min(lowest, -float(shift))
        return lowest * _spectral(self.left) ** 2

    # ---- entries (a, b, p, q), and the bytes that they take

    @property
    def entry_bytes(self) -> int:
        """What all entries take."""
        return math.prod(self.sizes) * self.left.element_size()

    def workspace(self, room: int) -> int:
        """What `write` takes when `room` is left: moments, and a chunk of tokens."""
        one_token = (self.core.workspace + self._pairs) * self.left.element_size()
        chunk = min(self.tokens * one_token, max(one_token, self._at_once(room)))
        return max(self._beside, self.entry_bytes // (2 if self.symmetric else 1) + chunk)

    def write(self, target: Tensor, add: bool) -> None:
        """Write the entries to `target`, or add them to it."""
        _put(target, self.moments(), add)

    def moments(self) -> Tensor:
        """sum_t l_t[a] r_t[b] C_t[p, q], (a, b, p, q)."""
        if self.symmetric:
            return self.pair_moments()[pair_numbers(self.left.shape[1], self.left.device)]
        result: Tensor | None = None
        for start, stop in self._ranges():
            left, right = self.left[start:stop].T.contiguous(), self.right[start:stop].T.contiguous()
            pairs, cores = (left[:, None] * right).flatten(0, 1), self.core.dense(start, stop).flatten(1)
            result = pairs @ cores if result is None else result.addmm_(pairs, cores)
        assert result is not None  # a term has at least one token
        return result.view(self.sizes)

    def pair_moments(self) -> Tensor:
        """The moments of a symmetric term for pairs a <= b, each a symmetric matrix: (pairs, p, p).

        Each is used twice, so that symmetry is exact.
        """
        width, inner = self.left.shape[1], self.core.shape[0]
        i, j = torch.triu_indices(width, width, device=self.left.device)
        result: Tensor | None = None
        for start, stop in self._ranges():
            left = self.left[start:stop].T.contiguous()
            pairs, cores = left[i] * left[j], self.core.dense(start, stop).flatten(1)
            result = pairs @ cores if result is None else result.addmm_(pairs, cores)
        assert result is not None  # a term has at least one token
        result = result.view(-1, inner, inner)
        return (result + result.mT).mul_(0.5)

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
        """One range."""
        return [(0, 1)]

    def factors(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The two matrices."""
        return self.outer, self.core

    def letters(self, token: str) -> tuple[str, ...]:
        """Einsum subscripts of the factors: rows are a, p and columns b, q."""
        return _letters(self.axes)

    def cores(self) -> Tensor:
        """The core, (p, q)."""
        return self.core

    def with_numbers(self) -> "Single":
        """The same term."""
        return self

    # ---- answers

    def multiply(self, columns: Tensor, cores: Tensor) -> Tensor:
        """(b, q, n) -> (a, p, n)."""
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
        ends = [torch.linalg.eigvalsh(factor)[[0, -1]].tolist() for factor in (self.outer, self.core)]
        return min(first * second for first in ends[0] for second in ends[1])

    # ---- entries (a, b, p, q), and the bytes that they take

    @property
    def entry_bytes(self) -> int:
        """What all entries take."""
        return math.prod(self.sizes) * self.outer.element_size()

    def workspace(self, room: int) -> int:
        """What `write` takes."""
        return 0 if self._core_is_diagonal() else self.entry_bytes

    def write(self, target: Tensor, add: bool) -> None:
        """Write the entries to `target`, or add them; of a diagonal core, such as the identity, only those not zero."""
        if not self._core_is_diagonal():
            _put(target, self.moments(), add)
            return
        if not add:
            target.zero_()
        target.diagonal(dim1=2, dim2=3).add_(self.outer[:, :, None] * self.core.diagonal())

    def moments(self) -> Tensor:
        """All entries."""
        return self.outer[:, :, None, None] * self.core

    def _core_is_diagonal(self) -> bool:
        core = self.core
        return core.shape[0] == core.shape[1] and torch.equal(core, core.diagonal().diag())


def pair_numbers(width: int, device: torch.device) -> Tensor:
    """The number of the pair at every place of a symmetric matrix, (width, width)."""
    numbers = torch.empty(width, width, dtype=torch.int64, device=device)
    first, second = torch.triu_indices(width, width, device=device)
    counted = torch.arange(len(first), device=device)
    numbers[first, second] = counted
    numbers[second, first] = counted
    return numbers


def _put(target: Tensor, values: Tensor, add: bool) -> None:
    """Write values to `target`, or add them to it."""
    if add:
        target += values
    else:
        target.copy_(values)


def _letters(axes: Axes) -> tuple[str, str]:
    """Subscripts on the axes and off them."""
    i, j = axes
    return "ap"[i] + "bq"[j], "ap"[1 - i] + "bq"[1 - j]


def _spectral(matrix: Tensor) -> float:
    """The largest singular value, of one matrix or of several."""
    return float(torch.linalg.matrix_norm(checks.finite("norm_bound", matrix), 2).max())
