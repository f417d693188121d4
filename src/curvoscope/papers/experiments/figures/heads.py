"""More heads at the same width: the share of the functional part falls."""

from collections.abc import Sequence
from itertools import pairwise

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import PaperLayer
from curvoscope.papers.experiments.summaries import by, claim, curve, select

_HEADS = (1, 2, 4, 8, 16)
_POINTS = [{"heads": heads} for heads in _HEADS]


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Of the whole Hessian: the share of functional entries that are not zero, and the functional part's norm."""
    H = configuration.hessian(seed, heads=int(point["heads"]))
    functional, outer = H.functional.dense(), H.outer.dense()
    return [
        MeasuredValue(1, "all", "functional", float((functional != 0).double().mean()), quantity="nonzero_share"),
        MeasuredValue(1, "all", "functional", float(functional.norm())),
        MeasuredValue(1, "all", "outer", float(outer.norm())),
    ]


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    chosen = select(rows, quantity="nonzero_share")
    shares = [sum(group) / len(group) for group in by(chosen, "heads").values()]
    falls = all(later < earlier for earlier, later in pairwise(shares))
    statement = "the share of functional entries that are not zero falls with the heads: 16 heads over 1"
    return [claim(chosen, statement, shares[-1] / shares[0], falls)]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    share = curve(select(rows, quantity="nonzero_share"), "heads", "", 1)
    norms = [
        curve(select(rows, part=part, quantity="frobenius_norm"), "heads", part, i)
        for i, part in enumerate(("outer", "functional"))
    ]
    return [
        Panel("functional entries that are not zero", "heads", "share", y_log=False, series=[share]),
        Panel("norms of the whole Hessian", "heads", series=norms),
    ]


FIGURE = declared("heads", PaperLayer(), _POINTS, measure, _verdicts, _panels)
