"""What a figure is: a configuration, a grid, a measurement, predictions and panels. One file each declares one."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from curvoscope.papers.experiments.panels import Panel
from curvoscope.report.documents import Verdict

Point = Mapping[str, float | int | str]
"""A place on the grid, by the names of its coordinates."""


@dataclass(frozen=True)
class MeasuredValue:
    """One measured number: of which layer (1 is the input's), block, part and quantity; `at`, a place along a curve."""

    layer: int
    block: str
    part: str
    value: float
    stderr: float = 0.0
    quantity: str = "frobenius_norm"
    at: float = 0.0


@dataclass(frozen=True)
class Row:
    """A measured number with the point and the seed that it belongs to."""

    point: Point
    seed: int
    found: MeasuredValue


Measure = Callable[[BaseModel, Point, int, int], list[MeasuredValue]]
"""(configuration, point, seed, draw) -> values; `draw` seeds what is redrawn at each point."""


@dataclass(frozen=True)
class Figure:
    """One of the papers' figures, declared.

    `version` counts changes of `measure` that change numbers: rows of another version are not used. `seconds` is what a
    point takes on one core, to say beforehand how long a run will be. `quick_points` is a part of `points`; all of them
    where it is left out.
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
        """All (point, seed), seed by seed, so that a run cut short has whole curves."""
        points, seeds = (self.quick_points, self.quick_seeds) if quick else (self.points, self.seeds)
        return [(point, seed) for seed in range(seeds) for point in points]

    def draw(self, point: Point, seed: int) -> int:
        """A seed for what is drawn at one point: a function of the configuration, the point and the seed."""
        text = f"{self.name} {self.hash} {self.version} {canonical(point)} {seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def canonical(document: Mapping[str, object]) -> str:
    """One text for equal documents."""
    return json.dumps(dict(document), sort_keys=True, separators=(",", ":"), allow_nan=False)
