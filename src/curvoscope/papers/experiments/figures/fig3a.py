"""Figure 3a: growth of the query and value blocks with the input's scale, without a norm."""

from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.setting import Setting

_PREDICTIONS = (
    Growth("V", "outer", 2),
    Growth("V", "functional", zero=True, largest=10.0),
    Growth("V", "total", 2),
    Growth("Q", "outer", 6),
    Growth("Q", "functional", 5),
    Growth("Q", "total", 5),
)
_POINTS = [{"sigma": sigma} for sigma in growth.log_grid(-2.0, 1.0)]

FIGURE = declared(
    "fig3a",
    Setting(),
    _POINTS,
    growth.measure,
    partial(fits.verdicts, predictions=_PREDICTIONS),
    partial(growth.panels, predictions=_PREDICTIONS),
)
