"""A block in closed form whose tokens are spread over ranks: the sum of each rank's own closed form.

What is linear in the block is summed: products, entries, diagonal, trace. The Frobenius norm is not: it is that of the
summed entries if these are few; otherwise each rank gathers the terms (l_t, r_t, C_t) of all tokens.
"""

from functools import reduce
from operator import add

import torch
from torch import Tensor

from curvoscope import estimate
from curvoscope.distributed.ranks import Group
from curvoscope.errors import MemoryLimitError
from curvoscope.estimate import Estimate
from curvoscope.magnitudes import norm
from curvoscope.operators.base import LinearOperator, Shape
from curvoscope.operators.block_matrix import Tiles
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.settings import settings

_FEW = 2048  # rows and columns up to which summing the entries is cheap


class RankSum(LinearOperator):
    """The sum over ranks of `own`, None on a rank without batches. All ranks ask the same of it at once."""

    def __init__(
        self,
        own: LinearOperator | None,
        row_shape: Shape,
        column_shape: Shape,
        like: Tensor,
        symmetric: bool,
        ranks: Group,
    ) -> None:
        super().__init__(row_shape, column_shape, like, symmetric)
        self._own, self._ranks = own, ranks

    def _matmat(self, columns: Tensor) -> Tensor:
        def product() -> Tensor:
            if self._own is None:
                return columns.new_zeros(columns.shape[1], self.shape[0])
            return self._own._matmat(columns).T

        question = "closed form", self.row_shape, self.column_shape
        return self._ranks.sum(question, columns.T, self.shape[0], product).T

    def _transposed(self) -> LinearOperator:
        own = None if self._own is None else self._own.T
        return RankSum(own, self.column_shape, self.row_shape, self.like, self.symmetric, self._ranks)

    def _write(self, out: Tensor) -> None:
        mine = out.new_zeros(out.shape)
        with self._ranks.together():
            if self._own is not None:
                self._own._write(mine)
        out.copy_(self._ranks.add(mine))

    def _workspace(self, room: int) -> int:
        entries = self.shape[0] * self.shape[1] * self.dtype.itemsize
        return 2 * entries + (0 if self._own is None else self._own._workspace(max(0, room - entries)))

    def _budget(self) -> int:
        """The budget of the rank with the least memory: all ranks continue, or none does."""
        return self._ranks.least(super()._budget())

    def _bytes(self, copies: int, budget: int) -> int:
        return int(max(self._ranks.exchange(super()._bytes(copies, budget))))

    def _trace(self) -> float:
        with self._ranks.together():
            mine = 0.0 if self._own is None else self._own._trace()
        return float(sum(self._ranks.exchange(mine)))

    def _diagonal(self) -> Tensor:
        with self._ranks.together():
            mine = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            if self._own is not None:
                mine += self._own._diagonal()
        return self._ranks.add(mine)

    def _norm(self) -> float:
        budget = self._budget()
        if max(self.shape) > _FEW:
            needed = self._ranks.exchange(0 if self._own is None else _core_bytes(self._own))
            if None not in needed and 2 * sum(needed) <= budget:
                with self._ranks.together():
                    mine = None if self._own is None else _factors(self._own)
                found = (other for other in self._ranks.exchange(mine) if other is not None)
                total: LinearOperator = reduce(add, found)
                with settings(memory_limit=budget):
                    return total._norm()
        return norm(self.dense())

    def frobenius_norm(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> Estimate:
        """Exact; an Estimate if one is asked for, or if neither the terms of all ranks nor the entries
        fit into memory."""
        asked = matvecs is not None or tolerance is not None
        try:
            return super().frobenius_norm(matvecs=matvecs, tolerance=tolerance, seed=seed)
        except MemoryLimitError:
            if asked:
                raise
            return estimate.frobenius_norm(self, seed=seed)


def _core_bytes(operator: LinearOperator) -> int | None:
    """The size of the cores of all terms; None if the block has no terms."""
    if isinstance(operator, KroneckerSum):
        return sum(term.kept for term in operator.terms) * operator.dtype.itemsize
    if isinstance(operator, Tiles):
        several = [_core_bytes(entry) for entry in operator.entries.values()]
        return None if None in several else sum(one for one in several if one is not None)
    return None


def _factors(operator: LinearOperator) -> LinearOperator:
    """The same block as terms whose cores are tensors, which can be sent."""
    shapes = operator.row_shape, operator.column_shape
    if isinstance(operator, Tiles):
        entries = {key: _factors(entry) for key, entry in operator.entries.items()}
        return Tiles(*shapes, operator.rows, operator.columns, entries, operator.like, operator.symmetric)
    assert isinstance(operator, KroneckerSum)
    terms = [term.with_numbers() for term in operator.terms]
    return KroneckerSum(*shapes, terms, operator.like, operator.symmetric)
