"""Figure 4: histograms of the absolute entries of the query and value blocks, with softmax and without."""

from collections.abc import Sequence

import numpy as np

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import PaperLayer
from curvoscope.papers.experiments.summaries import claim, curve, geometric_mean, select

_EDGES = np.linspace(-10, 0, 51)  # of log10 |entry|
_ATTENTION = ("softmax", "linear")


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Shares of the entries in each bin, the first with all below it and the last with all above; and the medians."""
    H = configuration.hessian(seed, attention=str(point["attention"]))
    values = []
    for block in ("Q", "V"):
        entries = H.total[block].dense().abs().numpy()
        logarithms = np.log10(entries, out=np.full(entries.shape, -np.inf), where=entries > 0)
        shares = np.histogram(logarithms.clip(_EDGES[0], _EDGES[-1]), _EDGES)[0] / entries.size
        values += curve_values("share", shares, _EDGES[:-1], block=block)
        values += named_values({"median": float(np.median(entries))}, block=block)
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    medians = {
        (attention, block): select(rows, attention=attention, block=block, quantity="median")
        for attention in _ATTENTION
        for block in ("Q", "V")
    }
    value = {key: geometric_mean(chosen) for key, chosen in medians.items()}
    ratio = {attention: value[attention, "Q"] / value[attention, "V"] for attention in _ATTENTION}
    rows = medians["softmax", "Q"]
    return [
        claim(
            rows,
            "softmax: the median query entry is two orders of magnitude below the median value entry",
            ratio["softmax"],
            10**-2.5 <= ratio["softmax"] <= 10**-1.5,
            0.01,
        ),
        claim(
            medians["linear", "Q"],
            "linear: the median query and value entries are of one order of magnitude",
            ratio["linear"],
            10**-0.5 <= ratio["linear"] <= 10**0.5,
            1.0,
        ),
        claim(
            rows,
            "softmax changes the median query entry more than the median value entry (ratio of the two changes)",
            (log_change := abs(np.log(value["linear", "Q"] / value["softmax", "Q"])))
            / abs(np.log(value["linear", "V"] / value["softmax", "V"])),
            bool(log_change > abs(np.log(value["linear", "V"] / value["softmax", "V"]))),
        ),
    ]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    found = []
    for block, name in (("V", "value"), ("Q", "query")):
        series = [
            curve(select(rows, block=block, attention=attention, quantity="share"), "at", attention, i, steps=True)
            for i, attention in enumerate(_ATTENTION)
        ]
        found.append(Panel(name, "log₁₀ |entry|", "share of entries", x_log=False, y_log=False, series=series))
    return found


FIGURE = declared(
    "fig4", PaperLayer(), [{"attention": attention} for attention in _ATTENTION], measure, _verdicts, _panels
)
