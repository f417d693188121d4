"""Choosing rows and summing them up over seeds, for figures that are not sweeps over σ; matrices as pictures."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from curvoscope.papers.experiments.figure import Row, Verdict
from curvoscope.papers.experiments.fits import slope
from curvoscope.papers.experiments.panels import Series


def select(rows: Sequence[Row], **wanted: float | int | str) -> list[Row]:
    """The rows whose point or value has all these coordinates: `select(rows, block="Q", attention="linear")`."""
    return [row for row in rows if all(_coordinate(row, name) == value for name, value in wanted.items())]


def by(rows: Sequence[Row], name: str, what: str = "value") -> dict[float, list[float]]:
    """The values of all seeds, or what else was found, for each value of a coordinate, in its order."""
    groups: dict[float, list[float]] = {}
    for row in sorted(rows, key=lambda row: float(_coordinate(row, name))):
        groups.setdefault(float(_coordinate(row, name)), []).append(getattr(row.found, what))
    return groups


def curve(rows: Sequence[Row], name: str, label: str, index: int, steps: bool = False) -> Series:
    """Mean along a coordinate with its standard error over the seeds, or with that of the estimates if it is larger."""
    groups, bars = by(rows, name), by(rows, name, "stderr")
    means, errors = [], []
    for values, stderr in zip(groups.values(), bars.values(), strict=True):
        over_seeds = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
        means.append(float(np.mean(values)))
        errors.append(max(over_seeds, float(np.linalg.norm(stderr)) / len(stderr)))
    return Series(label, list(groups), means, None if steps else errors, colour=index, stroke=index, steps=steps)


def mean(rows: Sequence[Row]) -> float:
    """Over the seeds."""
    return sum(row.found.value for row in rows) / len(rows)


def geometric_mean(rows: Sequence[Row]) -> float:
    """Over the seeds, of positive values."""
    return float(np.exp(np.mean([np.log(row.found.value) for row in rows])))


def power(rows: Sequence[Row], name: str, statement: str, predicted: float, tolerance: float = 0.05) -> Verdict:
    """Whether the values go as a power of a coordinate."""
    groups = by(rows, name)
    fitted, low, high = slope(list(groups), list(groups.values()))
    found, agrees = rows[0].found, abs(fitted - predicted) <= tolerance
    return Verdict(statement, found.block, found.part, found.layer, predicted, fitted, low, high, agrees)


def claim(
    rows: Sequence[Row], statement: str, found: float, agrees: bool | None, predicted: float | None = None
) -> Verdict:
    """A statement with one number found for it; block, part and layer are those of the rows.

    `agrees` None: the number is noted, and nothing predicts it.
    """
    first = rows[0].found
    return Verdict(statement, first.block, first.part, first.layer, predicted, found, None, None, agrees)


def pixels(matrix: Tensor, count: int) -> list[float]:
    """Mean |entry| of a square matrix over a grid of count x count pixels, row by row."""
    pixel = (torch.arange(len(matrix)) * count // len(matrix)).clamp(max=count - 1)
    sums = matrix.new_zeros(count, len(matrix)).index_add_(0, pixel, matrix.abs())
    sums = matrix.new_zeros(count, count).index_add_(1, pixel, sums)
    number = torch.bincount(pixel, minlength=count).clamp(min=1).to(matrix.dtype)
    means: list[float] = (sums / number[:, None] / number).flatten().tolist()
    return means


def _coordinate(row: Row, name: str) -> float | int | str:
    value = row.point[name] if name in row.point else getattr(row.found, name)
    assert isinstance(value, float | int | str)
    return value
