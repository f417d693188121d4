"""The papers' figures drawn from their panels: Matplotlib for PNG and PDF, Plotly for HTML, from the same data."""

import html
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from curvoscope.experiments.panels import Guide, Image, Panel, Series

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.axis
    import matplotlib.figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_STROKES = ("-", (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1.5, 1)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_PLOTLY_STROKES = ("solid", "longdash", "dashdot", "dot", "longdashdot")
_PLOTLY_MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down")
_GREY = "#666666"
_WIDTH, _HEIGHT = 3.3, 2.9  # inches a panel; the text is large enough for print at half of it
_TEXT, _HEADING = 12, 13
_NARROWEST = 420  # pixels a panel of a Plotly page: narrower windows scroll
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
<p>{note}</p>
</body>
</html>
"""


def draw(title: str, panels: Sequence[Panel], columns: int) -> "matplotlib.figure.Figure":
    """A Matplotlib figure of the panels, row by row."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=_HEADING)
    return figure


def encode(figure: "matplotlib.figure.Figure", kind: str) -> bytes:
    """The bytes of a "png" or "pdf" file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def page(title: str, panels: Sequence[Panel], columns: int, note: str = "") -> str:
    """One HTML page with the panels as an interactive Plotly figure, and a note; it loads nothing from the network."""
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    rows = math.ceil(len(panels) / columns)
    figure: Figure = make_subplots(rows, columns, subplot_titles=[panel.title for panel in panels])
    for i, panel in enumerate(panels):
        _add_panel(figure, panel, i // columns + 1, i % columns + 1)
    figure.update_layout(template="plotly_white", height=380 * rows, showlegend=True, margin={"t": 40})
    drawn = figure.to_html(include_plotlyjs=True, full_html=False, div_id="figure", config={"responsive": True})
    escaped = html.escape(title)
    return _PAGE.format(title=escaped, width=_NARROWEST * columns, figure=drawn, note=html.escape(note))


# ---- Matplotlib


def _draw_panel(axes: "matplotlib.axes.Axes", panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT - 2)
    if panel.image is not None:
        _draw_image(axes, panel)
        return
    for mark in panel.marks:
        axes.axvline(mark, color=_GREY, linestyle=":", linewidth=1.2)
    for guide in panel.guides:
        _draw_guide(axes, guide, panel)
    for series in panel.series:
        _draw_series(axes, series)
    axes.set_xlabel(panel.x_label, fontsize=_TEXT)
    axes.set_ylabel(panel.y_label, fontsize=_TEXT)
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    shown = panel.y_range()
    if shown is None:
        axes.set_axis_off()
    else:
        axes.set_ylim(shown)
    for axis, is_log in ((axes.xaxis, panel.x_log), (axes.yaxis, panel.y_log)):
        if is_log:
            _few_ticks(axis)
    if panel.x_names:
        axes.set_xticks(range(1, len(panel.x_names) + 1), panel.x_names)
    if panel.note:
        axes.text(0.5, 0.5, panel.note, transform=axes.transAxes, ha="center", va="center", fontsize=_TEXT)
    if any(series.label for series in panel.series):
        axes.legend(fontsize=_TEXT - 3, frameon=False, handlelength=2.2)


def _few_ticks(axis: "matplotlib.axis.Axis") -> None:
    """Less than two decades: 1, 2, 5, 10, ... in place of every number, which would not fit side by side."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if 0 < low < high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_series(axes: "matplotlib.axes.Axes", series: Series) -> None:
    style: dict[str, Any] = {
        "color": _COLOURS[series.colour % len(_COLOURS)],
        "linestyle": _STROKES[series.stroke % len(_STROKES)],
        "label": series.label or None,
    }
    if series.steps:
        axes.step(series.x, series.y, where="post", linewidth=1.8, **style)
        return
    marker = _MARKERS[series.stroke % len(_MARKERS)]
    axes.errorbar(series.x, series.y, series.error, marker=marker, markersize=4, linewidth=1.6, capsize=2, **style)


def _draw_guide(axes: "matplotlib.axes.Axes", guide: Guide, panel: Panel) -> None:
    in_legend = any(series.label for series in panel.series)  # which keeps clear of the curves
    label = _powers(guide.label) if in_legend and guide.label else None
    axes.plot(guide.x, guide.y, color=_GREY, linestyle="--", linewidth=1.4, zorder=1, label=label)
    if in_legend:
        return
    place: dict[str, Any] = {"x": 0.97, "y": 0.06, "ha": "right"}
    if guide.y[-1] < guide.y[0]:
        place |= {"x": 0.03, "ha": "left"}
    elif not panel.y_log:
        place = {"x": 0.05, "y": 0.88, "ha": "left"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    axes.text(s=_powers(guide.label), transform=axes.transAxes, color=_GREY, fontsize=_TEXT, bbox=box, **place)


def _draw_image(axes: "matplotlib.axes.Axes", panel: Panel) -> None:
    image = panel.image
    assert image is not None
    low, high = np.nanpercentile(image.values, [1, 100])
    shown = axes.imshow(image.values, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    axes.figure.colorbar(shown, ax=axes, label=image.scale, shrink=0.8)
    for border in image.borders[:-1]:
        axes.axhline(border - 0.5, color="white", linewidth=0.5)
        axes.axvline(border - 0.5, color="white", linewidth=0.5)
    middles = _middles(image)
    axes.set_xticks(middles, image.names, fontsize=_TEXT - 4, rotation=90)
    axes.set_yticks(middles, image.names, fontsize=_TEXT - 4)


def _middles(image: Image) -> list[float]:
    """Of the blocks, on axes where entry i reaches from i - 1/2 to i + 1/2."""
    return [(first + last - 1) / 2 for first, last in pairwise([0.0, *image.borders])]


def _powers(label: str) -> str:
    """σ^6 as mathematics."""
    return f"${label.replace('σ^', chr(92) + 'sigma^{')}}}$" if "σ^" in label else label


# ---- Plotly


def _add_panel(figure: Any, panel: Panel, row: int, column: int) -> None:
    from plotly.graph_objects import Heatmap, Scatter

    place = {"row": row, "col": column}
    if panel.image is not None:
        axes = figure.get_subplot(row, column)
        bar = {
            "title": {"text": panel.image.scale, "side": "right"},
            "x": axes.xaxis.domain[1],
            "xpad": 4,
            "y": sum(axes.yaxis.domain) / 2,
            "len": axes.yaxis.domain[1] - axes.yaxis.domain[0],
            "thickness": 12,
        }
        figure.add_trace(Heatmap(z=panel.image.values, colorscale="Viridis", colorbar=bar), **place)
        for border in panel.image.borders[:-1]:
            figure.add_hline(y=border - 0.5, line={"color": "white", "width": 0.5}, **place)
            figure.add_vline(x=border - 0.5, line={"color": "white", "width": 0.5}, **place)
        ticks = {"tickvals": _middles(panel.image), "ticktext": list(panel.image.names)}
        figure.update_xaxes(**ticks, **place)
        figure.update_yaxes(autorange="reversed", **ticks, **place)
        return
    legend = _legend(figure, panel, row, column)
    for guide in panel.guides:
        line = {"dash": "dash", "color": _GREY}
        curve = Scatter(x=list(guide.x), y=list(guide.y), mode="lines", line=line, name=guide.label, legend=legend)
        figure.add_trace(curve.update(showlegend=bool(guide.label)), **place)
    for series in panel.series:
        line = {
            "color": _COLOURS[series.colour % len(_COLOURS)],
            "dash": _PLOTLY_STROKES[series.stroke % len(_PLOTLY_STROKES)],
            "shape": "hv" if series.steps else "linear",
        }
        errors = None if series.error is None else {"type": "data", "array": list(series.error)}
        symbol = {"symbol": _PLOTLY_MARKERS[series.stroke % len(_PLOTLY_MARKERS)]}
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
        figure.add_vline(x=mark, line={"dash": "dot", "color": _GREY}, **place)
    if panel.note:
        figure.add_annotation(text=panel.note, x=0.5, y=0.5, showarrow=False, xref="x domain", yref="y domain", **place)
    for update, label, is_log in (
        (figure.update_xaxes, panel.x_label, panel.x_log),
        (figure.update_yaxes, panel.y_label, panel.y_log),
    ):
        update(title=label, type="log" if is_log else "linear", exponentformat="power", **place)
    if panel.x_names:
        figure.update_xaxes(tickvals=list(range(1, len(panel.x_names) + 1)), ticktext=list(panel.x_names), **place)
    shown = panel.y_range()
    if shown is not None:
        figure.update_yaxes(range=[math.log10(y) for y in shown] if panel.y_log else list(shown), **place)


def _legend(figure: Any, panel: Panel, row: int, column: int) -> str:
    """A legend of the panel's own, in the corner with the fewest points; its name in the figure."""
    axes = figure.get_subplot(row, column)
    number = axes.xaxis.plotly_name.removeprefix("xaxis")
    right, top = min(((True, True), (False, True), (False, False), (True, False)), key=lambda one: _crowd(panel, *one))
    place = {
        "x": axes.xaxis.domain[int(right)],
        "y": axes.yaxis.domain[int(top)],
        "xanchor": "right" if right else "left",
        "yanchor": "top" if top else "bottom",
        "bgcolor": "rgba(255, 255, 255, 0.6)",
        "font": {"size": 11},
    }
    figure.update_layout({f"legend{number}": place})
    return f"legend{number}"


def _crowd(panel: Panel, right: bool, top: bool) -> int:
    """How many points of the curves lie in a quarter of the panel, in the coordinates that are drawn."""
    x, y = (np.array([value for one in panel.series for value in getattr(one, name)], float) for name in "xy")
    with np.errstate(divide="ignore", invalid="ignore"):
        x, y = np.log(x) if panel.x_log else x, np.log(y) if panel.y_log else y
    seen = np.isfinite(x) & np.isfinite(y)
    if not seen.any():
        return 0
    middle = [(values[seen].min() + values[seen].max()) / 2 for values in (x, y)]
    return int(np.sum(((x > middle[0]) == right)[seen] & ((y > middle[1]) == top)[seen]))
