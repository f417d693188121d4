"""The papers' figures drawn from their panels by Plotly: one HTML page each, from the data of the printed figure."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from curvoscope.papers.experiments.panel_figures import GREY
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.report.style import COLOURS

_STROKES = ("solid", "longdash", "dashdot", "dot", "longdashdot")
_MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down")
_NARROWEST, _NARROWEST_IMAGE = 420, 500  # pixels per panel: narrower windows scroll
_ROW = 380  # pixels
_MARGINS = {"t": 40, "b": 80, "l": 80, "r": 80}
_LEGEND_LINE, _LEGEND_SYMBOL, _LEGEND_LETTER = 19, 50, 5.5  # pixels
_CORNERS = ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0))
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1b1b1b; background: #ffffff; }}
h1 {{ font-size: 1.3rem; }}
p {{ max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
#figure {{ min-width: {width}px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="scroll" role="region" tabindex="0" aria-label="{title}">{figure}</div>
{notes}
</body>
</html>
"""


def page(title: str, panels: Sequence[Panel], columns: int, *notes: str) -> str:
    """One HTML page with the panels as an interactive figure, and one paragraph per note; it loads nothing from the
    network."""
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    rows = math.ceil(len(panels) / columns)
    images = any(panel.image is not None for panel in panels)
    width, height = columns * (_NARROWEST_IMAGE if images else _NARROWEST), rows * _ROW
    figure: Figure = make_subplots(
        rows,
        columns,
        subplot_titles=[panel.title for panel in panels],
        horizontal_spacing=(0.32 if images else 0.2) / columns,  # a colour bar stands between two images
    )
    inside = width - _MARGINS["l"] - _MARGINS["r"], height - _MARGINS["t"] - _MARGINS["b"]
    for i, panel in enumerate(panels):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        if panel.image is None:
            _add_curves(figure, panel, place, _legend(figure, panel, place, inside))
        else:
            _add_image(figure, panel, place)
    figure.update_layout(template="plotly_white", height=height, showlegend=True, margin=_MARGINS)
    drawn = figure.to_html(include_plotlyjs=True, full_html=False, div_id="figure", config={"responsive": True})
    paragraphs = "\n".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return _PAGE.format(title=html.escape(title), width=width, figure=drawn, notes=paragraphs)


def _add_image(figure: Any, panel: Panel, place: dict[str, int]) -> None:
    from plotly.graph_objects import Heatmap

    image, axes = panel.image, figure.get_subplot(*place.values())
    assert image is not None
    bar = {
        "title": {"text": image.scale, "side": "right"},
        "x": axes.xaxis.domain[1],
        "xpad": 4,
        "y": sum(axes.yaxis.domain) / 2,
        "len": axes.yaxis.domain[1] - axes.yaxis.domain[0],
        "thickness": 12,
    }
    low, high = image.shades
    figure.add_trace(Heatmap(z=image.values, zmin=low, zmax=high, colorscale="Viridis", colorbar=bar), **place)
    for border in image.borders[:-1]:
        figure.add_hline(y=border - 0.5, line={"color": "white", "width": 0.5}, **place)
        figure.add_vline(x=border - 0.5, line={"color": "white", "width": 0.5}, **place)
    # without a grid: what is blank stays so
    ticks = {"tickvals": image.middles, "ticktext": list(image.names), "showgrid": False, "zeroline": False}
    figure.update_xaxes(tickangle=-90, **ticks, **place)
    figure.update_yaxes(autorange="reversed", **ticks, **place)


def _add_curves(figure: Any, panel: Panel, place: dict[str, int], legend: str) -> None:
    from plotly.graph_objects import Scatter

    for guide in panel.guides:
        line = {"dash": "dash", "color": GREY}
        curve = Scatter(x=list(guide.x), y=list(guide.y), mode="lines", line=line, name=guide.label, legend=legend)
        figure.add_trace(curve.update(showlegend=bool(guide.label)), **place)
    for series in panel.series:
        line = {
            "color": COLOURS[series.colour % len(COLOURS)],
            "dash": _STROKES[series.stroke % len(_STROKES)],
            "shape": "hv" if series.steps else "linear",
        }
        errors = None if series.error is None else {"type": "data", "array": list(series.error)}
        symbol = {"symbol": _MARKERS[series.stroke % len(_MARKERS)]}
        mode = "lines" if series.steps else "lines+markers"
        figure.add_trace(
            Scatter(
                x=list(series.x),
                y=list(series.y),
                error_y=errors,
                mode=mode,
                line=line,
                marker=symbol,
                name=series.label or panel.title,
                legend=legend,
                showlegend=bool(series.label),
            ),
            **place,
        )
    for mark in panel.marks:
        figure.add_vline(x=mark, line={"dash": "dot", "color": GREY}, **place)
    if panel.note:  # in the coordinates of the page: a panel without curves has none of its own
        axes = figure.get_subplot(*place.values())
        x, y = (sum(axis.domain) / 2 for axis in (axes.xaxis, axes.yaxis))
        figure.add_annotation(text=panel.note, x=x, y=y, showarrow=False, xref="paper", yref="paper")
    for update, label, is_log, ticks in (
        (figure.update_xaxes, panel.x_label, panel.x_log, 4),
        (figure.update_yaxes, panel.y_label, panel.y_log, 5),
    ):
        # few ticks: those between two powers of ten would stand on top of each other
        scale = {"type": "log", "nticks": ticks} if is_log else {"type": "linear"}
        update(title=label, exponentformat="power", **scale, **place)
    if panel.x_names:
        ends = [0.5, len(panel.x_names) + 0.5]
        names = {"tickvals": list(range(1, len(panel.x_names) + 1)), "ticktext": list(panel.x_names)}
        figure.update_xaxes(range=ends, **names, **place)
    shown = panel.y_range()
    if shown is not None:
        figure.update_yaxes(range=[math.log10(y) for y in shown] if panel.y_log else list(shown), **place)


# ---- the place of the legend


def _legend(figure: Any, panel: Panel, place: dict[str, int], inside: tuple[int, int]) -> str:
    """A legend of the panel's own, where it hides least of the curves, corners first; its name in the figure.

    `inside` are the width and height of all panels together, in pixels.
    """
    axes = figure.get_subplot(*place.values())
    number = axes.xaxis.plotly_name.removeprefix("xaxis")
    (left, right), (bottom, top) = axes.xaxis.domain, axes.yaxis.domain
    labels = [one.label for one in _all(panel) if one.label]
    width = (_LEGEND_SYMBOL + _LEGEND_LETTER * max(map(len, labels), default=0)) / (right - left) / inside[0]
    height = _LEGEND_LINE * (len(labels) + 0.5) / (top - bottom) / inside[1]
    x, y = _drawn(panel)

    def hidden(at: tuple[float, float]) -> int:
        start, floor = at[0] * (1 - width), at[1] * (1 - height)
        return int(np.sum((x >= start) & (x <= start + width) & (y >= floor) & (y <= floor + height)))

    others = [at for at in product((1.0, 0.0, 0.5), (0.5, 1.0, 0.0)) if at not in _CORNERS]
    across, up = min((*_CORNERS, *others), key=hidden)
    box = {
        "x": left + across * (right - left),
        "y": bottom + up * (top - bottom),
        "xanchor": {0.0: "left", 0.5: "center", 1.0: "right"}[across],
        "yanchor": {0.0: "bottom", 0.5: "middle", 1.0: "top"}[up],
        "bgcolor": "rgba(255, 255, 255, 0.6)",
        "font": {"size": 11},
    }
    figure.update_layout({f"legend{number}": box})
    return f"legend{number}"


def _all(panel: Panel) -> list[Guide | Series]:
    return [*panel.guides, *panel.series]


def _drawn(panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """Points along the curves of a panel and on their error bars, from 0 to 1 across and up what is shown."""
    shown = panel.y_range()
    if shown is None:
        return np.empty(0), np.empty(0)
    lines = [_points(one.x, one.y, panel) for one in _all(panel)]
    bars = [_points(one.x, end, panel, joined=False) for one in panel.series for end in _ends(one)]
    x, y = np.concatenate([*lines, *bars], 1)
    ends = [value for one in panel.series for value in one.x]
    low, high = _scaled([min(ends), max(ends)], panel.x_log)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)  # as Plotly leaves room at either side
    floor, top = _scaled(shown, panel.y_log)
    return (x - low) / (high - low or 1.0), (y - floor) / (top - floor)


def _points(x: Sequence[float], y: Sequence[float], panel: Panel, joined: bool = True) -> np.ndarray:
    """(2, n) in the coordinates that are drawn; joined: also places between them, on the line from one to the next."""
    places = np.array([_scaled(x, panel.x_log), _scaled(y, panel.y_log)])
    places = places[:, np.isfinite(places).all(0)]
    if not joined:
        return places
    between = [np.linspace(start, stop, 20, axis=1) for start, stop in pairwise(places.T)]
    return np.concatenate([places, *between], 1)


def _ends(series: Series) -> list[list[float]]:
    """Of the error bars: the upper ones, then the lower ones."""
    if series.error is None:
        return []
    pairs = list(zip(series.y, series.error, strict=True))
    return [[y + error for y, error in pairs], [y - error for y, error in pairs]]


def _scaled(values: Sequence[float], is_log: bool) -> np.ndarray:
    """As an axis places them: NaN or infinite for what a logarithmic one cannot show."""
    found = np.array(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(found) if is_log else found
