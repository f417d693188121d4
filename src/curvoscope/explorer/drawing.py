"""What the figures share: layout and axes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Blank = dict[str, Any]
Writes = dict[str, Any]
"""Values by their places in a figure, as "data.0.y" or "layout.xaxis.range"."""

GREY = "#767676"


def layout(x: Blank, y: Blank, legend: bool = False, right: int = 10) -> Blank:
    """White, with fixed margins: to fit them to the text would draw everything twice."""
    return {
        "margin": {"l": 58, "r": right, "t": 8, "b": 92 if legend else 58, "autoexpand": False},
        "font": {"family": "system-ui, sans-serif", "size": 11, "color": "#1b1b1b"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "y": -0.23,
            "yanchor": "top",
            "x": -0.08,
            "entrywidthmode": "fraction",
            "entrywidth": 0.5,
        },
        "hovermode": "closest",
        "uirevision": "kept",
        "xaxis": x,
        "yaxis": y,
    }


def axis(title: str, **options: Any) -> Blank:
    """An axis with its title."""
    line = {"gridcolor": "#e4e4e4", "zerolinecolor": "#b0b0b0", "linecolor": "#b0b0b0", "automargin": False}
    return {"title": {"text": title, "standoff": 6}, **line, **options}


def rows(values: np.ndarray) -> list[list[float | None]]:
    """As JSON, which has no NaN."""
    return [[None if math.isnan(value) else value for value in row] for row in values.tolist()]


def positive(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """For a logarithmic axis."""
    return [float(value) if value > 0 else None for value in values]


def log_range(values: Sequence[float]) -> Writes:
    """The y axis over even powers of ten, so that it seldom changes, with at most some seven powers named."""
    seen = [math.log10(value) for value in values if value > 0] or [-1.0, 0.0]
    low, high = 2 * math.floor((min(seen) - 0.1) / 2), 2 * math.ceil((max(seen) + 0.1) / 2)
    return {"layout.yaxis.range": [low, high], "layout.yaxis.dtick": math.ceil((high - low) / 7)}


def upright() -> Blank:
    """A dotted line from the bottom to the top, at a place that each state writes. It is a trace and no shape: a
    moved shape would draw everything."""
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    return {"type": "scatter", "mode": "lines", "line": line, "showlegend": False, "hoverinfo": "skip"}


def move_upright(trace: int, x: float, log_axis: Writes) -> Writes:
    """That line, the figure's trace of this number, at x over the whole of the axis of `log_range`."""
    low, high = log_axis["layout.yaxis.range"]
    return {f"data.{trace}.x": [x, x], f"data.{trace}.y": [10.0**low, 10.0**high]}
