"""Figure 3b: the same as 3a with LayerNorm before attention, before the MLP and before the unembedding."""

from collections.abc import Sequence
from functools import partial

from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.setting import Setting

_PREDICTIONS = [Growth(block, part, largest=10.0) for block in ("V", "Q") for part in growth.PARTS]
_POINTS = [{"sigma": sigma} for sigma in growth.log_grid(-2.0, 1.0)]
_GAP_WITHOUT_NORM = 4.0


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The slopes over the whole grid, as in the paper, and how far those of the two outer blocks are apart."""
    found = fits.verdicts(rows, _PREDICTIONS)
    slopes = {(v.block, v.part): v.fitted for v in found}
    query, value = slopes["Q", "outer"], slopes["V", "outer"]
    assert query is not None and value is not None
    gap = abs(query - value)
    statement = "the exponents of outer Q and outer V are far nearer than the 4 without a norm"
    return [*found, Verdict(statement, "Q", "outer", 1, None, gap, None, None, gap < _GAP_WITHOUT_NORM / 4)]


FIGURE = declared(
    "fig3b", Setting(norm="pre"), _POINTS, growth.measure, _verdicts, partial(growth.panels, predictions=_PREDICTIONS)
)
