"""Figure 7: linear attention without a residual around it, depths 1 to 3, squared error."""

from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
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

FIGURE = declared(
    "fig7",
    Setting(attention="linear", residual=False, loss="mse"),
    _POINTS,
    growth.measure,
    partial(fits.verdicts, predictions=_PREDICTIONS),
    partial(growth.panels_by_depth, predictions=_PREDICTIONS),
    quick_points=_QUICK,
)
