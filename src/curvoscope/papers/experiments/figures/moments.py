"""Attention from uniform to one-hot: what depends on its central moments vanishes at the end."""

from collections.abc import Sequence

import torch

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.growth import log_grid
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import PaperLayer
from curvoscope.papers.experiments.summaries import by, claim, curve, select

_POINTS = [{"scale": scale} for scale in log_grid(-1.0, 8.0, 28)]
_MOMENTS, _BLOCKS = ("M1", "M2", "M3"), ("Q", "K", "V")


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Norms of the attention moments over all tokens, and of the diagonal blocks; the rows' mean entropy."""
    layer, X, loss = configuration.parts(seed, logit_scale=float(point["scale"]))
    moments, H = layer.moments(X), layer.hessian(X, loss)
    values = [
        MeasuredValue(1, name, "moment", float(torch.linalg.vector_norm(getattr(moments, name)))) for name in _MOMENTS
    ]
    values += [MeasuredValue(1, name, "total", float(H.total[name].frobenius_norm())) for name in _BLOCKS]
    values.append(MeasuredValue(1, "A", "moment", float(moments.entropy.mean()), quantity="entropy"))
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for name, vanishes in (("M2", True), ("M3", True), ("Q", True), ("K", True), ("V", False)):
        chosen = select(rows, block=name)
        means = [sum(group) / len(group) for group in by(chosen, "scale").values()]
        left = means[-1] / max(means)
        what = f"{name} vanishes" if vanishes else f"{name} stays"
        statement = f"{what} as the rows become one-hot: the last value over the largest"
        found.append(claim(chosen, statement, left, (left < 1e-3) == vanishes, 0.0 if vanishes else None))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    groups = (("attention moments", "norm", _MOMENTS), ("diagonal blocks", "Frobenius norm", _BLOCKS))
    panels = []
    for title, label, names in groups:
        curves = [curve(select(rows, block=name), "scale", name, i) for i, name in enumerate(names)]
        panels.append(Panel(title, "factor of the logits", label, series=curves, y_floor=1e-20))
    entropy = curve(select(rows, quantity="entropy"), "scale", "", 6)
    return [*panels, Panel("entropy", "factor of the logits", "mean entropy (nats)", y_log=False, series=[entropy])]


FIGURE = declared("moments", PaperLayer(), _POINTS, measure, _verdicts, _panels)
