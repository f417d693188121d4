"""A figure: a configuration, a grid, a measurement, predictions and panels. Each figure is declared in one file."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from curvoscope.papers.experiments.panels import Panel
from curvoscope.report.documents import Verdict

Point = Mapping[str, float | int | str]
"""A place on the grid, by the names of its coordinates."""


@dataclass(frozen=True)
class MeasuredValue:
    """One measured number.

    Args:
        layer: 1 is the layer nearest the input.
        block: for example "Q".
        part: "outer", "functional" or "total".
        value: the number.
        stderr: its standard error, 0 if exact.
        quantity: what was measured.
        at: a place along a curve.

    Example:
        >>> from curvoscope.papers.experiments import MeasuredValue
        >>> MeasuredValue(1, "Q", "outer", 0.5)
        MeasuredValue(layer=1, block='Q', part='outer', value=0.5, stderr=0.0, quantity='frobenius_norm', at=0.0)
    """

    layer: int
    block: str
    part: str
    value: float
    stderr: float = 0.0
    quantity: str = "frobenius_norm"
    at: float = 0.0


def named_values(
    numbers: Mapping[str, float], part: str = "total", block: str = "all", at: float = 0.0
) -> list[MeasuredValue]:
    """One value of the first layer for each number, by the names of the quantities."""
    return [MeasuredValue(1, block, part, float(n), quantity=name, at=at) for name, n in numbers.items()]


def curve_values(
    quantity: str,
    numbers: Iterable[float],
    places: Iterable[float] | None = None,
    part: str = "total",
    block: str = "all",
) -> list[MeasuredValue]:
    """One value of the first layer for each place along a curve; without places, they are counted from 0."""
    pairs = enumerate(numbers) if places is None else zip(places, numbers, strict=True)
    return [MeasuredValue(1, block, part, float(n), quantity=quantity, at=float(at)) for at, n in pairs]


@dataclass(frozen=True)
class Row:
    """A measured number with the point and the seed that it belongs to.

    Args:
        point: the coordinates on the figure's grid, by name.
        seed: the seed of the measurement.
        found: the number.

    Example:
        >>> from curvoscope.papers.experiments import MeasuredValue, Row
        >>> row = Row({"sigma": 0.1}, seed=0, found=MeasuredValue(1, "Q", "outer", 0.5))
        >>> row.point["sigma"], row.found.value
        (0.1, 0.5)
    """

    point: Point
    seed: int
    found: MeasuredValue


class Configuration(BaseModel):
    """What a measurement depends on. Its values cannot be changed, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Measure = Callable[[Any, Point, int, int], list[MeasuredValue]]
"""(configuration, point, seed, draw) -> values; `draw` seeds what is redrawn at each point."""


@dataclass(frozen=True)
class Figure:
    """Declaration of one of the papers' figures.

    Args:
        name: as in `NAMES`.
        title: the title.
        question: what the figure answers.
        configuration: everything that the measurement depends on.
        points: the grid.
        seeds: the number of seeds.
        quick_seeds: the number of seeds of a quick run.
        measure: measure(configuration, point, seed, draw) -> values.
        verdicts: verdicts(rows) -> predictions compared with what was found.
        panels: panels(rows) -> what is drawn.
        seconds: seconds(point), the time of a point on one core, to predict the time of a run.
        quick_points: the part of `points` that a quick run measures; if left out, all.
        version: counts changes of `measure` that change numbers; rows of another version are not used.
        remarks: what to know about the result.
        columns: of panels.

    Example:
        >>> from curvoscope.papers.experiments import find
        >>> figure, = find(["fig3a"])
        >>> figure.seeds, len(figure.points), figure.grid(quick=True)[0]
        (20, 20, ({'sigma': 0.01}, 0))
    """

    name: str
    title: str
    question: str
    configuration: BaseModel
    points: Sequence[Point]
    seeds: int
    quick_seeds: int
    measure: Measure
    verdicts: Callable[[Sequence[Row]], list[Verdict]]
    panels: Callable[[Sequence[Row]], list[Panel]]
    seconds: Callable[[Point], float]
    quick_points: Sequence[Point] = ()
    version: int = 1
    remarks: str = ""
    columns: int = 3
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        document = canonical(self.configuration.model_dump(mode="json"))
        object.__setattr__(self, "hash", hashlib.sha256(document.encode()).hexdigest())
        object.__setattr__(self, "quick_points", self.quick_points or self.points)

    def grid(self, quick: bool) -> list[tuple[Point, int]]:
        """All (point, seed), seed by seed, so that an interrupted run has whole curves."""
        points, seeds = (self.quick_points, self.quick_seeds) if quick else (self.points, self.seeds)
        return [(point, seed) for seed in range(seeds) for point in points]

    def draw(self, point: Point, seed: int) -> int:
        """A seed for the random numbers at one point: a function of the configuration, the point and the seed."""
        text = f"{self.name} {self.hash} {self.version} {canonical(point)} {seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def canonical(document: Mapping[str, object]) -> str:
    """The same text for equal documents."""
    return json.dumps(dict(document), sort_keys=True, separators=(",", ":"), allow_nan=False)
