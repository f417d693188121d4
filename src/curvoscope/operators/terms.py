"""Sums over tokens of Kronecker products: what every Hessian block of every Transformer layer is.

A block has rows (r0, r1) and columns (c0, c1), the row-major indices of two weight matrices. A term puts a vector
l_t on one of the row axes, a vector r_t on one of the column axes, and a small matrix C_t, the core, on the two
axes that are left:

    straight, axes (0, 0):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c0] C_t[r1, c1]
    crossed,  axes (0, 1):   B[r0 r1, c0 c1] = sum_t l_t[r0] r_t[c1] C_t[r1, c0]        and (1, 0), (1, 1) alike

A core that is the same for all tokens collapses the sum: `Single` is (sum_t l_t r_t^T) (x) C.
"""

from dataclasses import dataclass

from torch import Tensor

from curvoscope import checks
from curvoscope.operators.cores import Core, DenseCore

Axes = tuple[int, int]


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

    @classmethod
    def over_pairs(cls, left: Tensor, right: Tensor, blocks: Tensor, axes: Axes = (0, 0)) -> "Term":
        """sum_tu l_t r_u^T (x) C_tu over the pairs of tokens of a group; C as `blocks` (groups, g, p, g, q)."""
        groups, size, p, _, q = blocks.shape
        first = left.view(groups, size, 1, -1).expand(-1, -1, size, -1).flatten(0, 2)
        second = right.view(groups, 1, size, -1).expand(-1, size, -1, -1).flatten(0, 2)
        return cls(first, second, DenseCore(blocks.transpose(2, 3).reshape(-1, p, q)), axes)

    def chunks(self, budget: int, extra: int = 0, core: int | None = None) -> list[tuple[int, int]]:
        """Ranges of tokens that fit into the budget, with `core` numbers a token (those of dense cores) and `extra`."""
        numbers = (self.core.workspace if core is None else core) + extra
        return list(checks.chunks(self.tokens, self.core.period, numbers * self.left.element_size(), budget))


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
