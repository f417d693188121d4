"""What the softmax does: indefinite diagonal blocks, and blocks of different magnitude."""

from collections.abc import Sequence

import torch

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.setting import PaperLayer
from curvoscope.papers.experiments.summaries import claim, geometric_mean, mean, select

_ATTENTION, _BLOCKS = ("softmax", "linear"), ("Q", "K", "V", "O")


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Norm and extreme eigenvalues of the diagonal blocks; eigenvalues within rounding of zero are zero."""
    H = configuration.hessian(seed, attention=str(point["attention"]))
    values = []
    for name in _BLOCKS:
        dense = H.total[name].dense()
        eigenvalues = torch.linalg.eigvalsh(dense)
        rounding = torch.finfo(dense.dtype).eps * len(dense) * float(eigenvalues.abs().max())
        lowest = float(eigenvalues[0]) if float(eigenvalues[0]) < -rounding else 0.0
        numbers = {
            "frobenius_norm": float(dense.norm()),
            "smallest_eigenvalue": lowest,
            "largest_eigenvalue": float(eigenvalues[-1]),
        }
        values += named_values(numbers, block=name)
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for attention, block, indefinite in (
        ("softmax", "Q", True),
        ("softmax", "K", True),
        ("softmax", "V", False),
        ("linear", "Q", False),
        ("linear", "K", False),
        ("linear", "V", False),
    ):
        chosen = select(rows, attention=attention, block=block, quantity="smallest_eigenvalue")
        share = sum(row.found.value < 0 for row in chosen) / len(chosen)
        word = "has a negative eigenvalue" if indefinite else "is positive semidefinite"
        statement = f"{attention}: {block} {word} (share of seeds with a negative one)"
        found.append(claim(chosen, statement, share, share == float(indefinite), float(indefinite)))
    ratios = {a: _ratio(rows, a) for a in _ATTENTION}
    chosen = select(rows, attention="softmax", block="Q")
    statement = "the norms of Q and V are further apart with softmax than without: ratio of their ratios"
    found.append(claim(chosen, statement, ratios["linear"] / ratios["softmax"], ratios["softmax"] < ratios["linear"]))
    return found


def _ratio(rows: Sequence[Row], attention: str) -> float:
    """|Q| over |V|, the smaller over the larger."""
    query, value = (
        geometric_mean(select(rows, attention=attention, block=block, quantity="frobenius_norm")) for block in "QV"
    )
    return min(query, value) / max(query, value)


def _panels(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for title, quantity, log in (
        ("norm", "frobenius_norm", True),
        ("smallest/largest eigenvalue", "smallest_eigenvalue", False),
    ):
        series = []
        for i, attention in enumerate(_ATTENTION):
            means = []
            for block in _BLOCKS:
                chosen = select(rows, attention=attention, block=block, quantity=quantity)
                top = select(rows, attention=attention, block=block, quantity="largest_eigenvalue")
                means.append(mean(chosen) / (1.0 if log else mean(top)))
            series.append(Series(attention, [1.0, 2.0, 3.0, 4.0], means, colour=i, stroke=i))
        label = "Frobenius norm" if log else "ratio"
        panels.append(Panel(title, "block", label, x_log=False, y_log=log, series=series, x_names=_BLOCKS))
    return panels


FIGURE = declared(
    "softmax", PaperLayer(), [{"attention": attention} for attention in _ATTENTION], measure, _verdicts, _panels
)
