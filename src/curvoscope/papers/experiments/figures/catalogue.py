"""Figures from what the catalogue says of them and what their files compute."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from curvoscope.papers.catalogue import CATALOGUE
from curvoscope.papers.experiments.figure import Figure, MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.panels import Panel

Chosen = TypeVar("Chosen", bound=BaseModel)


def declared(
    name: str,
    configuration: Chosen,
    points: Sequence[Point],
    measure: Callable[[Chosen, Point, int, int], list[MeasuredValue]],
    verdicts: Callable[[Sequence[Row]], list[Verdict]],
    panels: Callable[[Sequence[Row]], list[Panel]],
    quick_points: Sequence[Point] = (),
) -> Figure:
    """The figure of this name in the catalogue, with what its file computes."""
    entry = CATALOGUE[name]
    return Figure(
        name=name,
        title=entry["title"],
        question=entry["question"],
        configuration=configuration,
        points=points,
        seeds=entry.get("seeds", 20),
        quick_seeds=entry["quick_seeds"],
        measure=measure,
        verdicts=verdicts,
        panels=panels,
        seconds=_seconds(entry["seconds"]),
        quick_points=quick_points,
        remarks=entry.get("remarks", ""),
        columns=entry.get("columns", 3),
    )


def _seconds(told: float | dict[str, dict[str, float]]) -> Callable[[Point], float]:
    """The time of a point: one number, or one for each value of a coordinate."""
    if isinstance(told, float):
        return lambda point: told
    ((coordinate, times),) = told.items()
    return lambda point: times[str(point[coordinate])]
