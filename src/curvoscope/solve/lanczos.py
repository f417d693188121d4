"""The Lanczos process of a damped operator, for several right-hand sides side by side, preconditioned or not."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from curvoscope.errors import RangeError
from curvoscope.estimate.products import Products

_KEPT = 1024  # vectors to which new ones are made orthogonal
_ENTRIES = 2**21  # of these vectors: more of them would cost a noticeable part of a product
_SHARE = 4  # of the memory at hand that they may take: one fourth
_ROUNDING = 16  # units of rounding below which a vector is not a new direction

RowMap = Callable[[Tensor], Tensor]  # rows (c, n) -> rows (c, n)


class Recurrence(Protocol):
    """What builds iterates x (c, n) from the vectors of the process: conjugate gradients, or MINRES."""

    x: Tensor
    alive: Tensor  # (c,), whether another step can make the residual smaller

    @property
    def residual(self) -> Tensor | None:
        """That of x (c, n), if the recurrence knows it."""
        ...

    def advance(self, v: Tensor, alpha: Tensor, below: Tensor) -> Tensor:
        """Take the next vector v (c, n) with its column (alpha, below) of T; return the residual norms (c,)."""
        ...


class LanczosProcess:
    """A V_k = Q_k T_k + β_{k+1} q_{k+1} e_k^T with V = M^-1 Q and V^T Q = I, for A = B / unit + shift.

    M is the preconditioner; without one V = Q is orthonormal. Every new q is made orthogonal to all the first ones that
    fit in memory, twice: orthogonality is lost along the eigenvectors that converge first, which lie in their span.

    Args:
        products: with B / unit; the unit is known after the first.
        damping: shift · unit.
        start: the right-hand sides, rows (c, n).
        inverse: M^-1, of rows; None: M = 1.
    """

    def __init__(self, products: Products, damping: float, start: Tensor, inverse: RowMap | None) -> None:
        self._products, self._damping, self._inverse = products, damping, inverse
        self._space = products.space
        self.scale = 0.0  # |A|, as far as seen
        self.epsilon = products.epsilon  # of the products, which may be less exact than the vectors here
        self._size = torch.zeros(len(start), dtype=torch.float64, device=start.device)  # |T|
        room = products.budget() // (_SHARE * max(1, start.nbytes) * (1 if inverse is None else 2))
        self._most = max(0, min(_KEPT, room, _ENTRIES // max(1, start.numel())))
        self._q_before = torch.zeros_like(start)
        self._kept: tuple[Tensor, Tensor] | None = None
        self._count = 0
        self.lengths = torch.ones_like(self._size)  # |q|, of the last that is not 0
        self.beta = self._normalise(start.clone())

    def _normalise(self, q: Tensor) -> Tensor:
        """Make q the next vector: its length (c,) in the norm of M^-1, 0 if it is not a new direction."""
        v = q if self._inverse is None else self._inverse(q)
        square = self.dot(v, q)
        first = self._inverse is not None and not self._count
        if bool((square < 0).any()) or (first and bool(((square == 0) & (self.row_lengths(q) > 0)).any())):
            raise RangeError("preconditioner", f"is not positive definite: <b, A^-1 b> = {float(square.min()):.3g}")
        floor = (_ROUNDING * self.epsilon * self._size).square() if self._count else 0 * square
        beta = torch.where(square > floor, square, 0.0).sqrt()
        factor = torch.where(beta > 0, 1 / beta, 0.0).to(q.dtype)[:, None]
        self.q = q * factor
        self._v = self.q if self._inverse is None else v * factor
        if self._inverse is not None:  # |q|
            self.lengths = torch.where(beta > 0, self.row_lengths(self.q), self.lengths)
        return beta

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """<x_i, y_i> of rows, (c,) in float64."""
        return self._space.total(torch.linalg.vecdot(x.double(), y.double()))

    def row_lengths(self, rows: Tensor) -> Tensor:
        """|x_i| of rows, (c,) in float64."""
        return self._space.norm(rows, 1).double()

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """The present v (c, n), and its column of T: alpha (c,) and the next beta (c,)."""
        v, q, beta = self._v, self.q, self.beta
        w = self._products(v.T).T
        w = torch.add(w, v, alpha=self._damping / self._products.unit)
        alpha = self.dot(v, w)
        if self._inverse is not None:
            lengths = self.row_lengths(v)
            self.scale = max(self.scale, float((self.row_lengths(w) / torch.where(lengths > 0, lengths, 1.0)).max()))
        self._size = torch.maximum(self._size, alpha.abs() + beta * bool(self._count))  # the first is not an entry of T
        for length, before in ((beta, self._q_before), (alpha, q)):
            w.addcmul_(length.to(w.dtype)[:, None], before, value=-1)
        w = self._orthogonal(w)
        self._q_before = q
        self._count += 1
        self.beta = self._normalise(w)
        if self._inverse is None:  # A v is the column of T, in orthonormal vectors
            column = alpha.square() + self.beta.square() + (beta * bool(self._count > 1)).square()
            self.scale = max(self.scale, float(column.max()) ** 0.5)
        return v, alpha, self.beta

    def _orthogonal(self, w: Tensor) -> Tensor:
        """Keep the present vectors, if there is room, and take what is along the kept ones out of w."""
        if self._count < self._most:
            self._keep()
        if self._kept is None:
            return w
        held = min(self._count + 1, self._most)
        Q, V = (part[:, :held] for part in self._kept)
        for _ in range(2):
            inside = self._space.total(torch.einsum("ckn,cn->ck", V, w))
            w = w - torch.einsum("ck,ckn->cn", inside, Q)
        return w

    def _keep(self) -> None:
        if self._kept is None or self._count == self._kept[0].shape[1]:
            rows = min(self._most, max(16, 2 * self._count))
            grown = [self.q.new_empty(len(self.q), rows, self.q.shape[1]) for _ in range(1 + bool(self._inverse))]
            for i, part in enumerate(grown):
                if self._kept is not None:
                    part[:, : self._count] = self._kept[i]
            self._kept = grown[0], grown[-1]
        self._kept[0][:, self._count] = self.q
        self._kept[1][:, self._count] = self._v
