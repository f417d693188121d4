"""Figure 6: the growth of every layer in networks of depth 1 to 5, without a norm."""

from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
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

FIGURE = declared(
    "fig6",
    Setting(),
    _POINTS,
    growth.measure,
    partial(fits.verdicts, predictions=_PREDICTIONS),
    partial(growth.panels_by_depth, predictions=_PREDICTIONS),
    quick_points=_QUICK,
)
