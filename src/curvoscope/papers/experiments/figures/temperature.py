"""The temperature of the softmax: T-outer falls as 1/t², T-functional as 1/t."""

from collections.abc import Sequence

from torch import Tensor

from curvoscope.exact import SelfAttention
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.growth import log_grid
from curvoscope.papers.experiments.panels import Guide, Panel
from curvoscope.papers.experiments.setting import PaperLayer
from curvoscope.papers.experiments.summaries import by, claim, curve, power, select

_PARTS = ("T-outer", "T-functional")
_EXPONENTS = {"T-outer": -2.0, "T-functional": -1.0}
_ATTENTION = ("frozen", "moving")
_SCALE = 100.0  # of the logits: at initialisation they are so small that no temperature would move the attention
_POINTS: list[Point] = [{"attention": attention, "t": t} for attention in _ATTENTION for t in log_grid(-1.0, 5.0, 25)]
_WARM = 100.0


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Norms of the two parts of the query-key Hessian.

    Frozen attention: what the temperature takes from the scores, a mask puts back, so that A is that of t = 1.
    """
    t = float(point["t"])
    layer, X, loss = configuration.parts(seed, logit_scale=_SCALE, temperature=t)
    mask = (1 - 1 / t) * _scores(layer, X) if point["attention"] == "frozen" else None
    H = layer.hessian(X, loss, mask)
    parts = zip(_PARTS, (H.t_outer, H.t_functional), strict=True)
    return [MeasuredValue(1, "QK", part, float(matrix.dense().norm())) for part, matrix in parts]


def _scores(layer: SelfAttention, X: Tensor) -> Tensor:
    """The scores at temperature 1, (N, L, L)."""
    return (X @ layer.W_Q) @ (X @ layer.W_K).mT / layer.W_K.shape[1] ** 0.5


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for part, exponent in _EXPONENTS.items():
        frozen = select(rows, attention="frozen", part=part)
        found.append(power(frozen, "t", f"frozen attention: {part} goes as t^{exponent:g}", exponent, 1e-6))
    for part, exponent in _EXPONENTS.items():
        warm = [row for row in select(rows, attention="moving", part=part) if float(row.point["t"]) >= _WARM]
        found.append(power(warm, "t", f"moving attention, t ≥ {_WARM:g}: {part} goes as t^{exponent:g}", exponent))
    shares = {}
    for part in _PARTS:
        groups = by(select(rows, attention="moving", part=part), "t")
        shares[part] = [sum(group) / len(group) for group in groups.values()]
    ratios = [o / f for o, f in zip(shares["T-outer"], shares["T-functional"], strict=True)]
    statement = "T-functional dominates as t grows: T-outer over T-functional at the largest t"
    found.append(claim(select(rows, part="T-outer"), statement, ratios[-1], ratios[-1] < min(0.1, *ratios[:-1])))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for attention in _ATTENTION:
        series = [curve(select(rows, attention=attention, part=part), "t", part, i) for i, part in enumerate(_PARTS)]
        guides = []
        for one, exponent in zip(series, _EXPONENTS.values(), strict=True):
            y = [one.y[-1] * (t / one.x[-1]) ** exponent for t in one.x]
            guides.append(Guide("t⁻² and t⁻¹" if exponent == -1 else "", list(one.x), y))
        panels.append(Panel(f"{attention} attention", "temperature t", series=series, guides=guides))
    return panels


FIGURE = declared("temperature", PaperLayer(), _POINTS, measure, _verdicts, _panels)
