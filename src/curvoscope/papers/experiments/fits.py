"""Growth exponents: the slope of log norm over log σ, and what the theory says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from curvoscope.analysis.fitting import line
from curvoscope.papers.experiments.figure import Row, Verdict

SMALL = 0.3
"""The largest σ of a fit, unless a prediction says otherwise: beyond it the softmax begins to saturate."""
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Growth:
    """norm ~ σ^exponent for one block and part, for σ up to `largest`; `where`: coordinates that the rows must have.

    `exponent` None: nothing is predicted, the slope is reported alone. `zero`: the part vanishes identically. `layers`:
    "all", "top" or "lower" of a network with `depth` (a coordinate) layers.
    """

    block: str
    part: str
    exponent: int | None = None
    zero: bool = False
    layers: str = "all"
    largest: float = SMALL
    tolerance: float = 0.1
    where: Mapping[str, float | int | str] = field(default_factory=dict)


def slope(sigma: Sequence[float], norms: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The least-squares slope of mean log norm over log σ, with the ends of its 95 % interval (Student's).

    `norms` has the norms of all seeds for each σ. The mean of logarithms, not the logarithm of the mean: norms of high
    degree in σ have heavy tails.
    """
    means = [float(np.mean(np.log(group))) for group in norms]
    return line(torch.tensor(sigma, dtype=torch.float64).log(), torch.tensor(means, dtype=torch.float64))


def verdicts(rows: Sequence[Row], predictions: Sequence[Growth]) -> list[Verdict]:
    """One verdict for each prediction, depth and layer that it speaks of and that was measured."""
    found = []
    for prediction in predictions:
        chosen = [row for row in rows if _speaks_of(prediction, row)]
        for depth, layer in sorted({(int(row.point.get("depth", 1)), row.found.layer) for row in chosen}):
            of_layer = [row for row in chosen if (row.point.get("depth", 1), row.found.layer) == (depth, layer)]
            found.append(_verdict(prediction, depth, layer, of_layer))
    return found


def _speaks_of(prediction: Growth, row: Row) -> bool:
    is_top = row.found.layer == row.point.get("depth", 1)
    return (
        (row.found.block, row.found.part) == (prediction.block, prediction.part)
        and (prediction.layers == "all" or (prediction.layers == "top") == is_top)
        and float(row.point["sigma"]) <= prediction.largest
        and all(row.point.get(name) == value for name, value in prediction.where.items())
    )


def _verdict(prediction: Growth, depth: int, layer: int, rows: Sequence[Row]) -> Verdict:
    place = f"depth {depth}, layer {layer}: " if depth > 1 else ""
    name = f"{place}{prediction.part} {prediction.block}"
    key = (prediction.block, prediction.part, layer)
    by_sigma: dict[float, list[float]] = {}
    for row in rows:
        by_sigma.setdefault(float(row.point["sigma"]), []).append(row.found.value)
    if prediction.zero:
        largest = max(row.found.value for row in rows)
        statement = f"{name} is exactly zero"
        return Verdict(statement, *key, None, None, None, None, largest == 0.0, depth)
    predicted = None if prediction.exponent is None else float(prediction.exponent)
    if len(by_sigma) < 3 or min(row.found.value for row in rows) <= 0:
        return Verdict(f"{name}: too few points for a slope", *key, predicted, None, None, None, None, depth)
    fitted, low, high = slope(list(by_sigma), list(by_sigma.values()))
    if prediction.exponent is None:
        return Verdict(f"{name} grows as σ^{fitted:.2f}", *key, None, fitted, low, high, None, depth)
    agrees = abs(fitted - prediction.exponent) <= prediction.tolerance
    power = str(prediction.exponent).translate(_SUPERSCRIPTS)
    statement = f"{name} grows as σ{power} for σ ≤ {prediction.largest:g}"
    return Verdict(statement, *key, predicted, fitted, low, high, agrees, depth)
