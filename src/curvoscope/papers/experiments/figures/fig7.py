"""Figure 7: linear attention without a residual around it, depths 1 to 3, squared error."""

from collections.abc import Sequence
from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Figure, Point, Row
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Setting

_DEPTHS = (1, 2, 3)
_PREDICTIONS = (
    *(
        Growth(block, "outer", 2 * 3**depth, where={"depth": depth}, largest=1.0)
        for depth in _DEPTHS
        for block in ("V", "Q")
    ),
    *(Growth(block, "functional", zero=True, layers="top", largest=1.0) for block in ("V", "Q")),
    *(
        Growth(block, "functional", 3**depth, layers="lower", where={"depth": depth}, tolerance=0.5)
        for depth in _DEPTHS[1:]
        for block in ("V", "Q")
    ),
)
_SIGMAS = growth.log_grid(-1.0, 0.0)
_POINTS = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS for sigma in _SIGMAS]
_QUICK = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS for sigma in _SIGMAS[:: 4 if depth > 1 else 1]]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel
        for depth in sorted({int(row.point["depth"]) for row in rows})
        for panel in growth.panels(
            rows,
            [p for p in _PREDICTIONS if p.where.get("depth") == depth],
            where={"depth": depth},
            heading=f"depth {depth}: ",
        )
    ]


def _seconds(point: Point) -> float:
    return {1: 0.3, 2: 8.0, 3: 17.0}[int(point["depth"])]


FIGURE = Figure(
    name="fig7",
    title="Linear attention, depths 1 to 3: growth as σ^(2·3^depth)",
    question="Do the blocks of chained linear attention layers grow super-exponentially with depth?",
    configuration=Setting(attention="linear", residual=False, loss="mse"),
    points=_POINTS,
    seeds=20,
    quick_points=_QUICK,
    quick_seeds=1,
    measure=growth.measure,
    verdicts=partial(fits.verdicts, predictions=_PREDICTIONS),
    panels=_panels,
    seconds=_seconds,
    remarks="The outer exponents are exact. At small σ the functional part of the lower layers grows as σ^(3^depth).",
)
