"""The functional part of a key block behind rotary positions.

The score of query i and key j moves along y_ij = x_j (x) r_ij, with r_ij = s R_j^T R_i q_i, the query turned to the
position of the key. With a the weights of a row of attention and p the derivative of the loss in its scores,

    H = sum_i sum_jl (diag(p_i) - a_i p_i^T - p_i a_i^T)_jl y_ij y_il^T
      = sum_j x_j x_j^T (x) M_j  -  sum_i (v_i w_i^T + w_i v_i^T)

    M_j = sum_i p_ij r_ij r_ij^T        v_i = sum_j a_ij y_ij        w_i = sum_j p_ij y_ij

a Kronecker sum and a matrix of low rank, and not one Kronecker product per query: r_ij depends on the key. Norm and
trace need no vector of the block's size. Everything is summed in float64: the two parts may cancel.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.attention.rotary import PositionMap
from curvoscope.magnitudes import power_of_two
from curvoscope.operators.base import LinearOperator, Shape

_CHUNK = 2**26  # bytes of turned queries at a time


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
            for part in self._queries(sequence, Z.shape[-1]):
                turned, a, p = self._turned(sequence, part), sequence.A[part, :, None], sequence.P[part, :, None]
                moved = torch.einsum("ijk,jkn->ijn", turned, at_keys)
                bent = p * moved - a * (p * moved).sum(1, keepdim=True) - p * (a * moved).sum(1, keepdim=True)
                back += torch.einsum("ijk,ijn->jkn", turned, bent)
            found += torch.tensordot(sequence.X.T, back, 1)
        return found.reshape(columns.shape)

    def _trace(self) -> float:
        total = 0.0
        for sequence in self._doubled():
            gram = sequence.X @ sequence.X.T
            for part in self._queries(sequence):
                turned = self._turned(sequence, part)
                total += float((sequence.P[part] * turned.square().sum(-1) * gram.diagonal()).sum())
                v, w = self._weighted(sequence, part, turned)
                total -= 2 * float((v * (gram @ w)).sum())
        return total

    def _diagonal(self) -> Tensor:
        found = torch.zeros(self.row_shape, dtype=torch.float64, device=self.device)
        for sequence in self._doubled():
            for part in self._queries(sequence, self.row_shape[0]):
                turned = self._turned(sequence, part)
                weights = torch.einsum("ij,ijk->jk", sequence.P[part], turned.square())
                v, w = (sequence.X.T @ one for one in self._weighted(sequence, part, turned))  # (i, d, k)
                found += sequence.X.square().T @ weights - 2 * (v * w).sum(0)
        return found.flatten().to(self.dtype)

    def _norm(self) -> float:
        """|H|² = sum_jl (x_j . x_l)² <M_j, M_l> - 4 sum_i w_i^T (sum_j x_j x_j^T (x) M_j) v_i
        + 2 sum_ih (<v_i, v_h> <w_i, w_h> + <v_i, w_h> <w_i, v_h>)."""
        unit = power_of_two(torch.stack([sequence.P.abs().max() for sequence in self._sequences]))
        sequences = list(self._doubled(unit))
        moments = [self._moments(sequence) for sequence in sequences]
        total = 0.0
        for n, sequence in enumerate(sequences):
            for m, other in enumerate(sequences):
                gram = other.X @ sequence.X.T
                total += float((gram.square() * (moments[m].flatten(1) @ moments[n].flatten(1).T)).sum())
                for part in self._queries(sequence):
                    seen = gram @ self._weighted(sequence, part, self._turned(sequence, part))  # (2, i, L', k)
                    total -= 4 * float(torch.einsum("ijk,jkl,ijl->", seen[1], moments[m], seen[0]))
                    if m <= n:
                        total += (2 if m == n else 4) * self._pairs(other, seen)
        return unit * math.sqrt(max(0.0, total))

    def _pairs(self, sequence: KeySequence, seen: Tensor) -> float:
        """sum_ih (<v_i, v_h> <w_i, w_h> + <v_i, w_h> <w_i, v_h>), given x_j^T v_h and x_j^T w_h (2, h, L, k)."""
        total, columns = 0.0, seen.flatten(0, 1).flatten(1)
        for part in self._queries(sequence):
            rows = self._weighted(sequence, part, self._turned(sequence, part))
            grams = (rows.flatten(0, 1).flatten(1) @ columns.T).view(2, rows.shape[1], 2, -1)
            total += float((grams[0, :, 0] * grams[1, :, 1] + grams[0, :, 1] * grams[1, :, 0]).sum())
        return total

    def _moments(self, sequence: KeySequence) -> Tensor:
        """M_j, (L, k, k)."""
        length, width = sequence.X.shape[0], self.row_shape[1]
        found = sequence.X.new_zeros(length, width, width)
        for part in self._queries(sequence):
            turned = self._turned(sequence, part).transpose(0, 1)  # (L, i, k)
            found += turned.mT @ (sequence.P[part].T[:, :, None] * turned)
        return found

    def _weighted(self, sequence: KeySequence, part: slice, turned: Tensor) -> Tensor:
        """a_ij r_ij and p_ij r_ij, (2, i, L, k)."""
        return torch.stack([sequence.A[part, :, None] * turned, sequence.P[part, :, None] * turned])

    def _turned(self, sequence: KeySequence, part: slice) -> Tensor:
        """r_ij of some queries, (i, L, k)."""
        length = len(sequence.X)
        queries = sequence.queries[part].expand(length, -1, -1)
        return sequence.positions.back(queries, sequence.number * length, length).transpose(0, 1)

    def _queries(self, sequence: KeySequence, width: int = 0) -> Iterator[slice]:
        """Ranges of queries, of which turned ones and vectors of so many entries more fit into the memory at hand."""
        length, k = len(sequence.X), self.row_shape[1]
        each = torch.float64.itemsize * (5 * length * k + 2 * width * (length + k))
        for start, stop in checks.chunks(len(sequence.A), 1, each, min(_CHUNK, checks.memory_budget() // 8)):
            yield slice(start, stop)

    def _doubled(self, unit: float = 1.0) -> Iterator[KeySequence]:
        for sequence in self._sequences:
            P = sequence.P.double() / unit
            X, A, queries = sequence.X.double(), sequence.A.double(), sequence.queries.double()
            yield replace(sequence, X=X, A=A, P=P, queries=queries)
