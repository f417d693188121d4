"""Figure 5: the growth of Figure 3a on linear axes, for σ up to 1 and up to 10."""

from collections.abc import Sequence
from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Point, Row
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Setting

_PREDICTIONS = tuple(
    Growth(block, part, exponent, zero=not exponent, where={"grid": "up to 1"}, tolerance=0.3)
    for block, part, exponent in (
        ("V", "outer", 2),
        ("V", "functional", 0),
        ("V", "total", 2),
        ("Q", "outer", 6),
        ("Q", "functional", 5),
        ("Q", "total", 5),
    )
)
_GRIDS = {"up to 1": growth.linear_grid(0.1, 1.0), "up to 10": growth.linear_grid(0.1, 10.0)}
_POINTS: list[Point] = [{"grid": name, "sigma": sigma} for name, grid in _GRIDS.items() for sigma in grid]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel
        for name in _GRIDS
        for panel in growth.panels(rows, _PREDICTIONS, where={"grid": name}, log=False, heading=f"σ {name}: ")
    ]


FIGURE = declared("fig5", Setting(), _POINTS, growth.measure, partial(fits.verdicts, predictions=_PREDICTIONS), _panels)
