"""Figure 6: the growth of every layer in networks of depth 1 to 5, without a norm."""

from collections.abc import Sequence
from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Figure, Point, Row
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Setting

_PREDICTIONS = (
    Growth("V", "outer", 2),
    Growth("V", "functional", zero=True, layers="top", largest=10.0),
    Growth("V", "functional", 3, layers="lower", tolerance=0.3),
    Growth("Q", "outer", 6),
    Growth("Q", "functional", 5),
)
_DEPTHS = (1, 2, 3, 4, 5)
_SIGMAS = growth.log_grid(-2.0, 1.0)
_POINTS = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS for sigma in _SIGMAS]
_QUICK = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS[:3] for sigma in _SIGMAS[1:15:3]]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel
        for depth in sorted({int(row.point["depth"]) for row in rows})
        for panel in growth.panels(rows, _PREDICTIONS, where={"depth": depth}, heading=f"depth {depth}: ")
    ]


def _seconds(point: Point) -> float:
    return {1: 0.3, 2: 8.0, 3: 17.0, 4: 30.0, 5: 45.0}[int(point["depth"])]


FIGURE = Figure(
    name="fig6",
    title="Growth with the scale of the input, every layer of deeper networks",
    question="Do the growth rates of one layer carry over to a layer inside a deep network?",
    configuration=Setting(),
    points=_POINTS,
    seeds=20,
    quick_points=_QUICK,
    quick_seeds=1,
    measure=growth.measure,
    verdicts=partial(fits.verdicts, predictions=_PREDICTIONS),
    panels=_panels,
    seconds=_seconds,
    remarks=(
        "Outer parts and top layers are exact; the functional part and the total of lower layers are estimates with a "
        "standard error of 5 %."
    ),
)
