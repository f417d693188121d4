"""Figures 3a, 3b, 5, 6 and 7: how the query and value blocks grow with the scale σ of the input; they differ in data.

3a: one block without a norm. 3b: with LayerNorm before attention, before the MLP and before the unembedding. 5: as 3a,
on linear axes. 6: every layer of networks of depth 1 to 5. 7: linear attention without a residual around it, with the
squared error.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from curvoscope.operators.block_matrix import PARTS
from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Figure, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Setting

_SIGMAS = growth.log_grid(-2.0, 1.0)
_LINEAR_SIGMAS = growth.log_grid(-1.0, 0.0)
_POINTS: list[Point] = [{"sigma": sigma} for sigma in _SIGMAS]
_GRIDS = {"up to 1": growth.linear_grid(0.1, 1.0), "up to 10": growth.linear_grid(0.1, 10.0)}
_GAP_WITHOUT_NORM = 4.0
_ONE_BLOCK = (
    Growth("V", "outer", 2),
    Growth("V", "functional", zero=True, largest=10.0),
    Growth("V", "total", 2),
    Growth("Q", "outer", 6),
    Growth("Q", "functional", 5),
    Growth("Q", "total", 5),
)
_PRE_NORM = [Growth(block, part, largest=10.0) for block in ("V", "Q") for part in PARTS]
_LINEAR_AXES = tuple(replace(one, largest=fits.SMALL, where={"grid": "up to 1"}, tolerance=0.3) for one in _ONE_BLOCK)
_DEEP = (
    Growth("V", "outer", 2),
    Growth("V", "functional", zero=True, layers="top", largest=10.0),
    Growth("V", "functional", 3, layers="lower", tolerance=0.3),
    Growth("Q", "outer", 6),
    Growth("Q", "functional", 5),
)
_LINEAR_ATTENTION = (
    *(
        Growth(block, "outer", 2 * 3**depth, where={"depth": depth}, largest=1.0)
        for depth in (1, 2, 3)
        for block in ("V", "Q")
    ),
    *(Growth(block, "functional", zero=True, layers="top", largest=1.0) for block in ("V", "Q")),
    *(
        Growth(block, "functional", 3**depth, layers="lower", where={"depth": depth}, tolerance=0.5)
        for depth in (2, 3)
        for block in ("V", "Q")
    ),
)


def _pre_norm_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The slopes over the whole grid, as in the paper, and how far those of the two outer blocks are apart."""
    found = fits.verdicts(rows, _PRE_NORM)
    slopes = {(v.block, v.part): v.fitted for v in found}
    query, value = slopes["Q", "outer"], slopes["V", "outer"]
    assert query is not None and value is not None
    gap = abs(query - value)
    statement = "the exponents of outer Q and outer V are far nearer than the 4 without a norm"
    return [*found, Verdict(statement, "Q", "outer", 1, None, gap, None, None, gap < _GAP_WITHOUT_NORM / 4)]


def _linear_panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel
        for name in _GRIDS
        for panel in growth.panels(rows, _LINEAR_AXES, where={"grid": name}, log=False, heading=f"σ {name}: ")
    ]


def _by_depth(depths: Sequence[int], sigmas: Sequence[float]) -> list[Point]:
    return [{"depth": depth, "sigma": sigma} for depth in depths for sigma in sigmas]


def _sweep(
    name: str,
    points: Sequence[Point],
    predictions: Sequence[Growth],
    setting: Setting | None = None,
    verdicts: Callable[[Sequence[Row]], list[Verdict]] | None = None,
    panels: Callable[[Sequence[Row]], list[Panel]] | None = None,
    quick_points: Sequence[Point] = (),
) -> Figure:
    return declared(
        name,
        setting or Setting(),
        points,
        growth.measure,
        verdicts or partial(fits.verdicts, predictions=predictions),
        panels or partial(growth.panels_by_depth if "depth" in points[0] else growth.panels, predictions=predictions),
        quick_points=quick_points,
    )


_SWEEPS = (
    _sweep("fig3a", _POINTS, _ONE_BLOCK),
    _sweep("fig3b", _POINTS, _PRE_NORM, Setting(norm="pre"), verdicts=_pre_norm_verdicts),
    _sweep(
        "fig5",
        [{"grid": name, "sigma": sigma} for name, grid in _GRIDS.items() for sigma in grid],
        _LINEAR_AXES,
        panels=_linear_panels,
    ),
    _sweep("fig6", _by_depth(range(1, 6), _SIGMAS), _DEEP, quick_points=_by_depth(range(1, 4), _SIGMAS[1:15:3])),
    _sweep(
        "fig7",
        _by_depth((1, 2, 3), _LINEAR_SIGMAS),
        _LINEAR_ATTENTION,
        Setting(attention="linear", residual=False, loss="mse"),
        quick_points=[*_by_depth((1,), _LINEAR_SIGMAS), *_by_depth((2, 3), _LINEAR_SIGMAS[::4])],
    ),
)
FIGURES = {figure.name: figure for figure in _SWEEPS}
