"""`Sweep`: what the samples of a sweep say about every block."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.approximations.gradients import GradientSource
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, ModelError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.sweep import statistics
from curvoscope.sweep.statistics import Bracket
from curvoscope.text_table import ShownAsTable, TextTable

Grams = Mapping[str, Tensor]  # K (c, c) of each row for one chunk of samples


class PairNorms(NamedTuple):
    """The Frobenius norms of all pairs of blocks.

    Args:
        names: of the blocks, n of them.
        value: |H_bc|_F, (n, n).
        stderr: their standard errors, (n, n).

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.ones(4, 3).double()
        >>> found = cv.sweep(model, torch.nn.MSELoss(), [(X, X[:, :2])], samples=16).norms()
        >>> found.names, tuple(found.value.shape), tuple(found.stderr.shape)
        (['weight', 'bias'], (2, 2), (2, 2))
    """

    names: list[str]
    value: Tensor
    stderr: Tensor


class SweepRow(NamedTuple):
    """One line of a sweep's table."""

    block: str
    shape: tuple[int, int]
    trace: Estimate
    frobenius_norm: Estimate
    effective_rank: Estimate
    largest_eigenvalue: Bracket


class Sweep(ShownAsTable):
    """The Gauss-Newton part of every block, from samples gamma with E[gamma gamma^T] = H.

    Made by `cv.sweep`. Every number is an `Estimate`, computed from sums over Gram matrices alone.

    Args:
        blocks: that were swept.
        chunks: Gram matrices (c, c) of each block, or of each of its heads, for each chunk of samples.
        loss: the mean loss.
        kept: the samples of the blocks that are kept, for each chunk.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
        >>> X, Y = torch.randn(2, 3, 5, 4, dtype=torch.float64)
        >>> sweep = cv.sweep(model, torch.nn.MSELoss(), [(X, Y)], samples=64)
        >>> "h.0.attn.Q" in sweep.names, sweep.heads("h.0.attn.Q")
        (True, ['h.0.attn.Q.0', 'h.0.attn.Q.1'])
        >>> exact = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)]).outer["h.0.attn.V"].trace()
        >>> low, high = sweep.trace("h.0.attn.V").interval(0.999)
        >>> low < exact < high
        True
    """

    def __init__(
        self,
        blocks: Blocks,
        chunks: Sequence[Grams],
        loss: float,
        kept: Sequence[Mapping[str, GradientSource]] = (),
    ) -> None:
        self.blocks, self.chunks, self.loss, self.kept = blocks, list(chunks), loss, list(kept)
        self._sums: dict[tuple[str, int], Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Names of the blocks, in the order of the model; while a sweep runs, of those that are known."""
        return [name for name in self.blocks if self._known(name)]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(next(iter(chunk.values()))) for chunk in self.chunks if chunk)

    def heads(self, name: str) -> list[str]:
        """Names of the heads of a block, such as "h.0.attn.Q.2", for which the sweep answers as for a block.

        Args:
            name: of a block.

        Returns:
            One name per head; an empty list if the block has no heads.
        """
        block = self.blocks[name]
        return [] if block.heads is None else [f"{name}.{i}" for i in range(block.heads)]

    def trace(self, name: str) -> Estimate:
        """tr H of a block or head: the mean of |gamma|^2.

        Args:
            name: of a block, or of a head.

        Returns:
            The trace, with its standard error.
        """
        return statistics.trace(*self.grams(name)).checked("trace")

    def frobenius_norm(self, name: str, other: str | None = None) -> Estimate:
        """|H_bc|_F: the root of the mean of <gamma_b^i, gamma_b^j> <gamma_c^i, gamma_c^j> over i != j.

        Args:
            name: of a block or head b.
            other: of a block or head c; None: the same.

        Returns:
            The norm, with its standard error.
        """
        first, second = self.grams(name, name if other is None else other)
        square = statistics.squared_norms(first, second)
        found = statistics.norm(square, sum(map(len, first))).checked("frobenius_norm")
        if not found.stderr and other in (None, name):  # one sample alone, or none, has no pair: |H|_F <= tr H
            return Estimate(**found.facts() | {"stderr": self.trace(name).value})
        return found

    def norms(self, names: Iterable[str] | None = None) -> PairNorms:
        """|H_bc|_F for all pairs.

        Args:
            names: of blocks and heads; None: all blocks.

        Returns:
            The names, the norms (n, n) and their standard errors (n, n).
        """
        wanted = self.names if names is None else list(names)
        if not wanted:
            raise EmptyError("names", "there are none")
        chunks = [torch.stack(chunk) for chunk in zip(*self.grams(*wanted), strict=True)]
        rows = [
            statistics.squared_norms([chunk[i : i + 1] for chunk in chunks], chunks)[:2] for i in range(len(wanted))
        ]
        square, variance = (torch.stack([row[k] for row in rows]) for k in range(2))
        value = square.clamp_min(0).sqrt()
        stderr = torch.where(value > 0, variance.sqrt() / (2 * value), variance.sqrt().sqrt())
        return PairNorms(wanted, value, stderr)

    def effective_rank(self, name: str) -> Estimate:
        """(tr H)^2 / |H|_F^2: the number of equal eigenvalues that would give both; 0 if H is 0.

        Args:
            name: of a block or head.

        Returns:
            The effective rank, with its standard error; 0 if H is 0.
        """
        return statistics.effective_rank(*self.grams(name)).checked("effective_rank")

    def moment(self, name: str, order: int) -> Estimate:
        """tr H^k, for k = 1 to 4.

        Args:
            name: of a block or head.
            order: k.

        Returns:
            The moment, with its standard error.
        """
        if not isinstance(order, int) or order not in range(1, statistics.LEAST + 1):
            raise RangeError("order", f"got {order}, expected 1 to {statistics.LEAST}")
        return statistics.moment(self.grams(name)[0], order).checked("moment")

    def alignment(self, name: str, other: str) -> float:
        """|H_bc|_F / sqrt(|H_b|_F |H_c|_F): 1 if two blocks have the same directions, 0 without a common one.

        Args:
            name: of a block or head b.
            other: of a block or head c.

        Returns:
            The ratio of three estimates; it may exceed 1 by their errors.
        """
        scale = math.sqrt(self.frobenius_norm(name) * self.frobenius_norm(other))
        return self.frobenius_norm(name, other) / scale if scale else 0.0

    def largest_eigenvalue(self, name: str) -> Bracket:
        """A bracket of the largest eigenvalue: a Ritz value that does not overestimate it, and the largest eigenvalue
        of the sample covariance, which does not underestimate it on average.

        Args:
            name: of a block or head.

        Returns:
            The two bounds, each an Estimate. For a narrower answer: `cv.hessian(...).outer[name].eigenvalues(1)`.
        """
        return statistics.largest_eigenvalue(*self.grams(name))

    def gradient_source(self, name: str) -> GradientSource:
        """The samples of a block or head that the sweep keeps: what `cv.approximations` are made of.

        Args:
            name: of a block whose samples are kept (see `keep` of `cv.sweep`), or of a head of it.

        Returns:
            The samples gamma = X^T delta, with E[gamma gamma^T] = H.
        """
        whole, _, number = name.rpartition(".")
        is_head = name not in self.blocks and number.isdecimal() and whole in self.blocks
        found = [chunk[whole if is_head else name] for chunk in self.kept if (whole if is_head else name) in chunk]
        if not found:
            if not is_head:
                checks.block_named("name", name, self.blocks)
            held = checks.listed(name, sorted({known for chunk in self.kept for known in chunk}))
            raise ModelError(
                "name",
                f"the samples of {name!r} were not kept; available: {held}. Give cv.sweep(..., keep=[...]) a "
                "weight that is one parameter, or a part of one, and neither an embedding nor the output layer",
            )
        joined = replace(found[0], parts=tuple(part for source in found for part in source.parts))
        return joined.head(int(number)) if is_head else joined

    def rows(self) -> list[SweepRow]:
        """The table as data, one row per block, in the order of the model."""
        return [
            SweepRow(
                name,
                self.blocks[name].shape,
                self.trace(name),
                self.frobenius_norm(name),
                self.effective_rank(name),
                self.largest_eigenvalue(name),
            )
            for name in self.names
        ]

    def table(self, largest_first: bool = False) -> "SweepTable":
        """Trace, norm, effective rank and largest eigenvalue of every block.

        Args:
            largest_first: whether the rows are in the order of their norms instead of that of the model.

        Returns:
            A table that shows itself as text, in a terminal with rich, and in a notebook.
        """
        rows = self.rows()
        if largest_first:
            rows.sort(key=lambda row: -row.frobenius_norm)
        return SweepTable(rows, self.samples, self.loss)

    def needed(self, tolerance: float) -> int:
        """How many samples a tolerance takes, from the errors so far: they fall as one over the root of their number.

        Args:
            tolerance: of half of the norms, as a relative standard error; 95 % of them may have twice that.

        Returns:
            The number of samples; at most `samples` if these are enough.
        """
        checks.positive(tolerance=tolerance)
        errors = torch.tensor([found.stderr / found for found in map(self.frobenius_norm, self.names) if found])
        if not errors.numel():
            return 0
        worst = max(float(errors.quantile(0.5)), float(errors.quantile(0.95)) / 2) / tolerance
        return math.ceil(self.samples * worst**2)

    def __repr__(self) -> str:
        return f"Sweep of {len(self.names)} blocks, {self.samples} samples, loss {self.loss:.4g}"

    def _shown(self) -> TextTable:
        return self.table()._shown()

    def _known(self, name: str) -> bool:
        return bool(self.chunks) and all(row in self.chunks[0] for row in self.heads(name) or [name])

    def grams(self, *names: str) -> list[list[Tensor]]:
        """K[i, j] = <gamma_i, gamma_j> of samples, (c, c), of each block or head, for each chunk that knows them all.

        Args:
            *names: of blocks and heads.

        Returns:
            A list of chunks for each name.
        """
        rows = {name: self._rows_of(name) for name in names}
        wanted = {row for some in rows.values() for row in some}
        complete = [k for k, chunk in enumerate(self.chunks) if wanted <= chunk.keys()]
        return [[self._sum(name, rows[name], k) for k in complete] for name in names]

    def _rows_of(self, name: str) -> list[str]:
        """The rows that make up a block or a head."""
        if self.chunks and name in self.chunks[0]:
            return [name]
        checks.block_named("name", name, self.names, "; a head is its block and a number, as in 'h.0.attn.Q.2'")
        return self.heads(name)

    def _sum(self, name: str, rows: Sequence[str], chunk: int) -> Tensor:
        if (name, chunk) not in self._sums:
            self._sums[name, chunk] = torch.stack([self.chunks[chunk][row] for row in rows]).sum(0)
        return self._sums[name, chunk]


class SweepTable(ShownAsTable, Sequence[SweepRow]):
    """The rows of a sweep as a table that shows itself."""

    def __init__(self, rows: list[SweepRow], samples: int, loss: float) -> None:
        self._rows, self._title = rows, f"Gauss-Newton part, {samples} samples, loss {loss:.4g}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    def _shown(self) -> TextTable:
        cells = [
            (
                row.block,
                " x ".join(map(str, row.shape)),
                str(row.trace),
                str(row.frobenius_norm),
                f"{row.effective_rank.value:.3g} ± {row.effective_rank.stderr:.1g}",
                f"{row.largest_eigenvalue.lower.value:.3g} to {row.largest_eigenvalue.upper.value:.3g}",
            )
            for row in self._rows
        ]
        header = ("block", "shape", "trace", "Frobenius norm", "effective rank", "largest eigenvalue")
        return TextTable(header, cells, self._title)

    def __str__(self) -> str:
        return str(self._shown())

    __repr__ = __str__
