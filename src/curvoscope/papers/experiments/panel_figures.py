"""The papers' figures drawn from their panels by Matplotlib, for PNG, PDF and SVG."""

import io
import math
from collections.abc import Sequence
from typing import Any

from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.report import style
from curvoscope.report.style import COLOURS, Axes, Figure

_STROKES = ("-", (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1.5, 1)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
GREY = "#666666"
_WIDTH, _HEIGHT = 3.3, 2.9  # inches per panel; the text is large enough for print at half of it
_TEXT, _HEADING = 12, 13
_LONG_LEGEND = 4  # names, above which a legend has two columns


def draw(title: str, panels: Sequence[Panel], columns: int) -> Figure:
    """A Matplotlib figure of the panels, row by row."""
    rows = math.ceil(len(panels) / columns)
    figure = style.blank(_WIDTH * columns, _HEIGHT * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=_HEADING)
    return figure


def encode(figure: Figure, kind: str) -> bytes:
    """The bytes of a "png" or "pdf" file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT - 2)
    if panel.image is not None:
        _draw_image(axes, panel)
        return
    for mark in panel.marks:
        axes.axvline(mark, color=GREY, linestyle=":", linewidth=1.2)
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
        axes.set_xlim(0.5, len(panel.x_names) + 0.5)  # a name without a point has its place too
    if panel.note:
        axes.text(0.5, 0.5, panel.note, transform=axes.transAxes, ha="center", va="center", fontsize=_TEXT)
    if labelled := sum(bool(series.label) for series in panel.series):
        columns = 2 if labelled > _LONG_LEGEND else 1
        pad: dict[str, Any] = {
            "facecolor": "white",
            "edgecolor": "none",
            "framealpha": 0.8,
        }  # if no place is free of curves
        axes.legend(fontsize=_TEXT - 3, handlelength=2.2, ncols=columns, columnspacing=1.0, **pad)


def _few_ticks(axis: Any) -> None:
    """Less than two decades: 1, 2, 5, 10, ... in place of every number, which would not fit side by side."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if 0 < low < high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_series(axes: Axes, series: Series) -> None:
    style: dict[str, Any] = {
        "color": COLOURS[series.colour % len(COLOURS)],
        "linestyle": _STROKES[series.stroke % len(_STROKES)],
        "label": series.label or None,
    }
    if series.steps:
        axes.step(series.x, series.y, where="post", linewidth=1.8, **style)
        return
    marker = _MARKERS[series.stroke % len(_MARKERS)]
    axes.errorbar(series.x, series.y, series.error, marker=marker, markersize=4, linewidth=1.6, capsize=2, **style)


def _draw_guide(axes: Axes, guide: Guide, panel: Panel) -> None:
    in_legend = any(series.label for series in panel.series)  # which keeps clear of the curves
    label = _powers(guide.label) if in_legend and guide.label else None
    axes.plot(guide.x, guide.y, color=GREY, linestyle="--", linewidth=1.4, zorder=1, label=label)
    if in_legend:
        return
    place: dict[str, Any] = {"x": 0.97, "y": 0.06, "ha": "right"}
    if guide.y[-1] < guide.y[0]:
        place |= {"x": 0.03, "ha": "left"}
    elif not panel.y_log:
        place = {"x": 0.05, "y": 0.88, "ha": "left"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
    axes.text(s=_powers(guide.label), transform=axes.transAxes, color=GREY, fontsize=_TEXT, bbox=box, **place)


def _draw_image(axes: Axes, panel: Panel) -> None:
    image = panel.image
    assert image is not None
    low, high = image.shades
    shown = axes.imshow(image.values, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    axes.figure.colorbar(shown, ax=axes, label=image.scale, shrink=0.8)
    for border in image.borders[:-1]:
        axes.axhline(border - 0.5, color="white", linewidth=0.5)
        axes.axvline(border - 0.5, color="white", linewidth=0.5)
    axes.set_xticks(image.middles, image.names, fontsize=_TEXT - 4, rotation=90)
    axes.set_yticks(image.middles, image.names, fontsize=_TEXT - 4)


def _powers(label: str) -> str:
    """σ^6 as mathematics."""
    return f"${label.replace('σ^', chr(92) + 'sigma^{')}}}$" if "σ^" in label else label
