"""The ledger of a change of weights: what each block costs to second order, each pair of blocks, and what was measured.

Every number is a mean over independent units of the data (sequences). All of them are kept unit by unit, so that sums
and differences of correlated numbers have the right standard errors.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import scipy
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import EmptyError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.text_table import ShownAsTable, TextTable


@dataclass(frozen=True)
class LedgerRow:
    """The contribution of one block to the predicted change of the loss, and the effect of changing it alone.

    Args:
        block: its name.
        size: number of entries.
        norm: |d_b|.
        relative: |d_b| / |w_b|; infinite if the weights are zero.
        first: g_b·d_b.
        outer: ½ d_b·(H_outer d)_b, interactions with other blocks included.
        functional: ½ d_b·(H_functional d)_b.
        second: outer + functional.
        share: (first + second) / predicted change of all blocks.
        alone: g_b·d_b + ½ d_b·H_bb d_b, the predicted change if this block changes alone; None without pairs.
        measured: L(w + d_b) - L(w), the measured one; None without pairs.
        remainder: measured - alone, of third and higher order; its standard error is that of the difference.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.eye(2).double(), model(torch.eye(2).double()).detach())]
        >>> moved = {"weight": model.weight.detach() + 1.0}
        >>> (row,) = cv.analysis.sensitivity(model, torch.nn.MSELoss(), data, moved).rows
        >>> row.block, round(row.second, 12), round(row.measured, 12)  # the loss is quadratic, at its minimum
        ('weight', 1.0, 1.0)
    """

    block: str
    size: int
    norm: float
    relative: float
    first: Estimate
    outer: Estimate
    functional: Estimate
    second: Estimate
    share: float
    alone: Estimate | None
    measured: Estimate | None
    remainder: Estimate | None


@dataclass(frozen=True)
class ScaledChange:
    """The change of the loss for ε δ: predicted ε g·δ + ε²/2 δ·Hδ, measured, and their difference.

    Args:
        scale: ε.
        predicted, measured, remainder: of the loss; remainder = measured - predicted, of third order in ε.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.eye(2).double(), model(torch.eye(2).double()).detach())]
        >>> moved = {"weight": model.weight.detach() + 1.0}
        >>> ledger = cv.analysis.sensitivity(model, torch.nn.MSELoss(), data, moved, scales=(0.5,))
        >>> round(ledger.scaled[0].predicted, 12), abs(ledger.scaled[0].remainder) < 1e-12
        (0.25, True)
    """

    scale: float
    predicted: Estimate
    measured: Estimate
    remainder: Estimate


@dataclass(frozen=True, eq=False)
class Units:
    """The numbers of N units of the data with weights w_i in the loss, (N,); in float64, for n blocks and k scales.

    `losses` and `change` are those of L(w) and L(w + δ) - L(w), (N,); `first`, `outer` and `functional` (N, n), `pairs`
    (N, n, n) and `alone` (N, n) or None, `scaled` (N, k).
    """

    name: str
    weights: Tensor
    losses: Tensor
    change: Tensor
    first: Tensor
    outer: Tensor
    functional: Tensor
    pairs: Tensor | None
    alone: Tensor | None
    scaled: Tensor

    def mean(self, values: Tensor) -> Estimate:
        """Σ w_i x_i for x (N,), with its standard error."""
        return mean_over_units(self.name, self.weights, values)


def mean_over_units(name: str, weights: Tensor, values: Tensor) -> Estimate:
    """Σ w_i x_i for weights and values (N,), with the standard error over units: that of a ratio, as weights are
    counts of terms. One unit alone shows no spread: its standard error is 0."""
    total, count = float(weights @ values), len(weights)
    deviations = weights * values - weights / weights.sum() * total
    stderr = math.sqrt(count / (count - 1) * float(deviations @ deviations)) if count > 1 else 0.0
    plural = name if count == 1 else {"sequence": "sequences", "batch": "batches"}[name]
    return Estimate(total, stderr, 0, f"mean of {count} {plural}", count - 1.0 if count > 1 else math.inf)


class Interactions(Mapping[tuple[str, str], Estimate]):
    """½ d_b·H_bc d_c for all pairs of blocks, by their names; symmetric. A row adds up to the row's `second`.

    Args:
        names: of the n blocks.
        units: with pairs.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1).double()
        >>> data = [(torch.eye(2).double(), torch.zeros(2, 1).double())]
        >>> moved = {name: p.detach() + 1.0 for name, p in model.named_parameters()}
        >>> ledger = cv.analysis.sensitivity(model, torch.nn.MSELoss(), data, moved)
        >>> [round(ledger.pairs["bias", name], 12) for name in ledger.names], round(ledger.rows[1].second, 12)
        ([1.0, 1.0], 2.0)
    """

    def __init__(self, names: tuple[str, ...], units: Units) -> None:
        self._places = {name: i for i, name in enumerate(names)}
        self._units = units

    def __getitem__(self, pair: tuple[str, str]) -> Estimate:
        for name in pair:
            checks.block_named("pairs", name, self._places)
        assert self._units.pairs is not None
        row, column = (self._places[name] for name in pair)
        return self._units.mean(self._units.pairs[:, row, column])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((row, column) for row in self._places for column in self._places)

    def __len__(self) -> int:
        return len(self._places) ** 2

    @property
    def matrix(self) -> Tensor:
        """The values, (n, n) in float64."""
        assert self._units.pairs is not None
        return torch.einsum("i,ibc->bc", self._units.weights, self._units.pairs)


@dataclass(frozen=True, eq=False)
class Ledger(ShownAsTable):
    """What a change δ of the weights costs: L(w + δ) - L(w) = g·δ + ½ δ·Hδ + remainder, by block and by pair of blocks.

    Made by `cv.analysis.sensitivity`. Standard errors are over the sequences of the probe, 0 for a single one.

    Args:
        names: of all n blocks.
        sizes: entries of each block.
        norms: |d_b| of each block.
        relatives: |d_b| / |w_b|.
        scales: the ε of `scaled`.
        units: all numbers, sequence by sequence.
        rounding: the error that rounding may cause in a measured change.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(3, 2).double()  # of which the square loss is quadratic: nothing remains
        >>> data = [(torch.randn(5, 3).double(), torch.zeros(5, 2).double())]
        >>> ledger = cv.analysis.sensitivity(model, torch.nn.MSELoss(), data, cv.analysis.recipes.int4)
        >>> abs(ledger.predicted - sum(row.first + row.second for row in ledger.rows)) < 1e-12
        True
        >>> abs(ledger.remainder) < 1e-12
        True
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    norms: tuple[float, ...]
    relatives: tuple[float, ...]
    scales: tuple[float, ...]
    units: Units
    rounding: float

    @property
    def loss(self) -> Estimate:
        """L(w)."""
        return self.units.mean(self.units.losses)

    @property
    def predicted(self) -> Estimate:
        """g·δ + ½ δ·Hδ, the sum of first and second order over all rows."""
        return self.units.mean(self._first + self._second)

    @property
    def measured(self) -> Estimate:
        """L(w + δ) - L(w)."""
        return self.units.mean(self.units.change)

    @property
    def remainder(self) -> Estimate:
        """measured - predicted: third and higher orders."""
        return self.units.mean(self.units.change - self._first - self._second)

    @cached_property
    def rows(self) -> list[LedgerRow]:
        """One row per block, in the order of the model."""
        return [self._row(i) for i in range(len(self.names))]

    @property
    def changed(self) -> list[LedgerRow]:
        """The rows of the blocks that change."""
        return [row for row in self.rows if row.norm]

    @property
    def pairs(self) -> Interactions:
        """½ d_b·H_bc d_c by (b, c)."""
        if self.units.pairs is None:
            raise RangeError("pairs", "the ledger was made with pairs=False; make it with pairs=True")
        return Interactions(self.names, self.units)

    @property
    def scaled(self) -> list[ScaledChange]:
        """The change for each ε of `scales`."""
        found = []
        for i, scale in enumerate(self.scales):
            predicted, measured = scale * self._first + scale**2 * self._second, self.units.scaled[:, i]
            three = (predicted, measured, measured - predicted)
            found.append(ScaledChange(scale, *map(self.units.mean, three)))
        return found

    @property
    def rank_correlation(self) -> Estimate:
        """Spearman's correlation of `alone` with `measured` over the blocks that change, needs three of them.

        The standard error is the jackknife's over sequences.
        """
        if self.units.pairs is None or self.units.alone is None:
            raise RangeError("pairs", "the ledger was made with pairs=False; make it with pairs=True")
        moving = [i for i, norm in enumerate(self.norms) if norm]
        if len(moving) < 3:
            raise EmptyError("changed", f"{len(moving)} blocks change; a rank correlation needs 3")
        predicted = (self.units.first + self.units.pairs.diagonal(dim1=1, dim2=2))[:, moving]
        measured = self.units.alone[:, moving]
        weights, count = self.units.weights, len(self.units.weights)
        value = spearman(weights @ predicted, weights @ measured)
        if count < 3:
            return Estimate(value, 0.0, 0, "rank correlation")
        kept = [(weights * (torch.arange(count) != i)) for i in range(count)]
        others = torch.tensor([spearman(one @ predicted, one @ measured) for one in kept], dtype=torch.float64)
        stderr = math.sqrt((count - 1) / count * float((others - others.mean()).square().sum()))
        return Estimate(value, stderr, 0, "rank correlation, jackknife", count - 1.0)

    @property
    def _first(self) -> Tensor:
        return self.units.first.sum(1)

    @property
    def _second(self) -> Tensor:
        return (self.units.outer + self.units.functional).sum(1)

    def _row(self, i: int) -> LedgerRow:
        units = self.units
        mean = units.mean
        second = mean(units.outer[:, i] + units.functional[:, i])
        first, predicted = mean(units.first[:, i]), float(self.predicted)
        alone = None if units.pairs is None else units.first[:, i] + units.pairs[:, i, i]
        measured = None if units.alone is None else units.alone[:, i]
        return LedgerRow(
            self.names[i],
            self.sizes[i],
            self.norms[i],
            self.relatives[i],
            first,
            mean(units.outer[:, i]),
            mean(units.functional[:, i]),
            second,
            (first + second) / predicted if predicted else math.nan,
            None if alone is None else mean(alone),
            None if measured is None else mean(measured),
            None if alone is None or measured is None else mean(measured - alone),
        )

    def _shown(self) -> TextTable:
        """The blocks that change, the largest predicted change first."""
        most = sorted(self.changed, key=lambda row: -abs(row.first + row.second))
        header = ["block", "first", "outer", "functional", "share"]
        cells = [[row.block, str(row.first), str(row.outer), str(row.functional), f"{row.share:.1%}"] for row in most]
        if self.units.alone is not None:
            header += ["alone", "measured"]
            cells = [[*line, str(row.alone), str(row.measured)] for line, row in zip(cells, most, strict=True)]
        change = f"predicted change {self.predicted}, measured {self.measured}, remainder {self.remainder}"
        return TextTable(header, cells, f"loss {self.loss}: {change}")

    def __str__(self) -> str:
        return str(self._shown())


def spearman(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation of two vectors (n,); 0 if one of them is constant."""
    found = [torch.as_tensor(scipy.stats.rankdata(values.numpy()), dtype=torch.float64) for values in (one, other)]
    x, y = (ranks - ranks.mean() for ranks in found)
    length = float(x.norm() * y.norm())
    return float(x @ y) / length if length else 0.0
