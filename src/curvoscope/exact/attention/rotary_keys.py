"""The functional part of a key block behind rotary positions.

The score of query i and key j moves along y_ij = x_j (x) r_ij, with r_ij = s R_j^T R_i q_i, the query turned to the
position of the key. With a the weights of a row of attention and p the derivative of the loss in its scores,

    H = sum_i sum_jl (diag(p_i) - a_i p_i^T - p_i a_i^T)_jl y_ij y_il^T
      = sum_j x_j x_j^T (x) M_j  -  sum_i (v_i w_i^T + w_i v_i^T)

    M_j = sum_i p_ij r_ij r_ij^T        v_i = sum_j a_ij y_ij        w_i = sum_j p_ij y_ij

a Kronecker sum and a matrix of low rank, and not one Kronecker product per query: r_ij depends on the key. Norm and
trace need no vector of the block's size. The two parts may cancel: sums are in float64 unless it is known that they
do not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.attention.rotary import PositionMap
from curvoscope.magnitudes import power_of_two, root
from curvoscope.operators.base import LinearOperator, Shape
from curvoscope.operators.strips import upper

QueryRange = tuple[int, int]  # queries from one to another

_PARTS, _LEAST_PART = 8, 16  # ranges of queries: each has matrix products of its own, with the keys that it sees
_CANCELLED = 0.05  # of the sum, what must be left for single precision to give five digits


@dataclass(frozen=True, eq=False)
class KeySequence:
    """One sequence: inputs X (L, d), and of the queries of all heads that share the key, I of them, the attention A
    (I, L), the derivatives P (I, L) and the turned and scaled queries s R_i q_i (I, k). `positions`: R_j of that key
    head, for a batch in which this is sequence `number`."""

    X: Tensor
    A: Tensor
    P: Tensor
    queries: Tensor
    positions: PositionMap
    number: int


class RotaryKeys(LinearOperator):
    """The functional part of the key weight (d, k) of one head, summed over sequences."""

    def __init__(self, sequences: Sequence[KeySequence], shape: Shape, like: Tensor) -> None:
        super().__init__(shape, shape, like, symmetric=True)
        self._sequences = tuple(sequences)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, RotaryKeys):
            return super().__add__(other)
        return RotaryKeys((*self._sequences, *other._sequences), self.row_shape, self.like)

    def _transposed(self) -> LinearOperator:
        return self

    def _matmat(self, columns: Tensor) -> Tensor:
        Z = columns.reshape(*self.row_shape, -1)
        found = torch.zeros_like(Z)
        for sequence in self._sequences:
            at_keys = torch.tensordot(sequence.X, Z, 1)  # (L, k, n)
            back = torch.zeros_like(at_keys)
            for start, stop in self._parts(sequence, Z.shape[-1]):
                turned = self._turned(sequence, (start, stop), len(at_keys))
                a, p = sequence.A[start:stop].T[:, :, None], sequence.P[start:stop].T[:, :, None]
                moved = turned @ at_keys  # (L, i, n)
                bent = p * moved - a * (p * moved).sum(0) - p * (a * moved).sum(0)
                back += turned.mT @ bent
            found += torch.tensordot(sequence.X.T, back, 1)
        return found.reshape(columns.shape)

    def _trace(self) -> float:
        total = 0.0
        for sequence in self._in(torch.float64):
            gram = sequence.X @ sequence.X.T
            total += float(gram.diagonal() @ self._moments(sequence).diagonal(dim1=1, dim2=2).sum(1))
            for part in self._parts(sequence):
                rows = self._weighted(sequence, part)
                seen = gram[: len(rows), : len(rows)] @ rows[:, :, 1].flatten(1)
                total -= 2 * float((rows[:, :, 0].flatten(1) * seen).sum())
        return total

    def _diagonal(self) -> Tensor:
        found = torch.zeros(self.row_shape, dtype=torch.float64, device=self.device)
        for sequence in self._in(torch.float64):
            found += sequence.X.square().T @ self._moments(sequence).diagonal(dim1=1, dim2=2)
            for part in self._parts(sequence, self.row_shape[0]):
                rows = self._weighted(sequence, part)
                moved = (sequence.X[: len(rows)].T @ rows.flatten(1)).view(-1, *rows.shape[1:])  # (d, k, 2, i)
                found -= 2 * (moved[:, :, 0] * moved[:, :, 1]).sum(-1)
        return found.flatten().to(self.dtype)

    def _norm(self) -> float:
        """In single precision, if the operator has it, unless too many digits cancel."""
        held = {
            name: torch.stack([getattr(sequence, name).abs().max() for sequence in self._sequences])
            for name in ("X", "P", "queries")
        }
        units = {name: power_of_two(largest) for name, largest in held.items()}
        exponent = int(math.log2(units["P"]) + 2 * math.log2(units["X"]) + 2 * math.log2(units["queries"]))
        squares = self._squares(self._in(torch.promote_types(self.dtype, torch.float32), **units))
        if self.dtype != torch.float64 and sum(squares) < _CANCELLED * sum(map(abs, squares)):
            squares = self._squares(self._in(torch.float64, **units))
        return root((sum(squares), 2 * exponent))

    def _squares(self, sequences: Sequence[KeySequence]) -> tuple[float, float, float]:
        """|H|² = sum_jl (x_j . x_l)² <M_j, M_l> - 4 sum_i w_i^T (sum_j x_j x_j^T (x) M_j) v_i
        + 2 sum_ih (<v_i, v_h> <w_i, w_h> + <v_i, w_h> <w_i, v_h>).

        Each pair of queries is taken once, and meets at the keys that the first of them sees.
        """
        moments = [self._moments(sequence) for sequence in sequences]
        packed = [_packed(each) for each in moments]
        weighted = lru_cache(maxsize=self._parts_at_once(sequences))(self._weighted)
        first = second = third = 0.0
        for n, sequence in enumerate(sequences):
            for m, other in enumerate(sequences):
                gram = other.X @ sequence.X.T
                if m <= n:
                    first += (1 if m == n else 2) * _sum(gram.square(), packed[m] @ packed[n].T)
                for part in self._parts(sequence):
                    rows = weighted(sequence, part)
                    seen = gram[:, : len(rows)] @ rows.flatten(1)
                    v, w = seen.view(len(gram), *rows.shape[1:]).unbind(2)  # x_j^T v_i and x_j^T w_i, (L', k, i)
                    second -= 4 * _sum(moments[m] @ v, w)
                    for earlier in self._parts(other) if m <= n else ():
                        if m == n and earlier > part:
                            break
                        third += (2 if (m, earlier) == (n, part) else 4) * _pairs(weighted(other, earlier), seen)
        return first, second, third

    def _moments(self, sequence: KeySequence) -> Tensor:
        """M_j = R_j^T (sum_i p_ij q_i q_i^T) R_j for the turned and scaled queries q, (L, k, k)."""
        length, width = sequence.X.shape[0], self.row_shape[1]
        found = sequence.X.new_zeros(length, width * width)
        for start, stop in self._parts(sequence, width):
            queries = sequence.queries[start:stop]
            found.addmm_(sequence.P[start:stop].T, (queries[:, :, None] * queries[:, None]).flatten(1))
        half = sequence.positions.back(found.view(length, width, width), sequence.number * length, length)
        return sequence.positions.back(half.mT, sequence.number * length, length)

    def _weighted(self, sequence: KeySequence, part: QueryRange) -> Tensor:
        """a_ij r_ij and p_ij r_ij of some queries i at the keys up to the last that one of them sees, (keys, k, 2, i).

        With the keys first, inner products of all vectors at the first keys are one matrix product.
        """
        weights = torch.stack([one[slice(*part)] for one in (sequence.A, sequence.P)])  # (2, i, L)
        keys = weights.shape[2] - int(weights.any(1).any(0).flip(0).byte().argmax())
        turned = self._turned(sequence, part, keys)
        rows = turned.new_empty(keys, turned.shape[2], 2, turned.shape[1])
        return torch.mul(turned.mT[:, :, None], weights[:, :, :keys].permute(2, 0, 1)[:, None], out=rows)

    def _turned(self, sequence: KeySequence, part: QueryRange, keys: int) -> Tensor:
        """r_ij of some queries i and the first keys j, (keys, i, k)."""
        queries = sequence.queries[slice(*part)].expand(keys, -1, -1)
        return sequence.positions.back(queries, sequence.number * len(sequence.X), len(sequence.X))

    def _parts(self, sequence: KeySequence, width: int = 0) -> Iterator[QueryRange]:
        """Ranges of queries, of which turned ones and vectors of so many entries more fit into the memory at hand.

        Under a causal mask, short ranges see fewer keys.
        """
        length, k = len(sequence.X), self.row_shape[1]
        each = torch.float64.itemsize * (8 * length * k + 2 * width * (length + k))
        budget = min(each * max(_LEAST_PART, length // _PARTS), checks.memory_budget() // 8)
        yield from checks.chunks(len(sequence.A), length, each, budget)

    def _parts_at_once(self, sequences: Sequence[KeySequence]) -> int:
        """How many ranges of weighted queries may be kept."""
        sizes = [(stop - start) * len(sequence.X) for sequence in sequences for start, stop in self._parts(sequence)]
        largest = 2 * max(sizes) * self.row_shape[1] * sequences[0].X.element_size()
        most = checks.memory_budget() // 4 // largest
        checks.predict(min(most, len(sizes)) * largest)
        return most

    def _in(self, dtype: torch.dtype, X: float = 1.0, P: float = 1.0, queries: float = 1.0) -> list[KeySequence]:
        """The sequences in this dtype, in units of the numbers given."""
        return [
            replace(
                sequence,
                X=(sequence.X.double() / X).to(dtype),
                A=sequence.A.to(dtype),
                P=(sequence.P.double() / P).to(dtype),
                queries=(sequence.queries.double() / queries).to(dtype),
            )
            for sequence in self._sequences
        ]


def _sum(first: Tensor, second: Tensor) -> float:
    """<first, second>, of many products the sum in float64."""
    return float((first * second).sum(dtype=torch.float64))


def _packed(matrices: Tensor) -> Tensor:
    """Symmetric matrices (L, k, k) as vectors with the same inner products, of which each entry counts once."""
    rows, columns = upper(matrices.shape[1], matrices.device)
    return matrices[:, rows, columns] * torch.where(rows == columns, 1, 2).to(matrices.dtype).sqrt()


def _pairs(rows: Tensor, seen: Tensor) -> float:
    """sum_ih (<v_i, v_h> <w_i, w_h> + <v_i, w_h> <w_i, v_h>), given the weighted queries i (keys, k, 2, i), and of the
    queries h what the keys see of v_h and w_h (L, k 2 h)."""
    keys, k, _, queries = rows.shape
    grams = rows.view(keys * k, -1).T @ seen[:keys].reshape(keys * k, -1)
    vv, vw, wv, ww = grams.view(2, queries, 2, -1).transpose(1, 2).flatten(0, 1)
    return _sum(vv, ww) + _sum(vw, wv)
