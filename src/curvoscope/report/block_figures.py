"""Figures of a model's blocks, one panel per layer."""

from collections.abc import Sequence

from curvoscope.analysis.measurements import Measurement
from curvoscope.blocks import layer_and_role
from curvoscope.operators.block_matrix import Part
from curvoscope.report import style
from curvoscope.report.style import Axes, Figure

OUTSIDE = "outside of the layers"
_MARKERS: dict[Part, str] = {"outer": "o", "functional": "D", "total": "_"}
_SHIFTS: dict[Part, float] = {"outer": -0.22, "functional": 0.22, "total": 0.0}
_MOST_COLUMNS = 4
_TEXT, _HEADING = 9, 11


def split_name(name: str) -> tuple[str, str]:
    """The layer that a block belongs to and its name there: ("h.0", "Q") for "h.0.attn.Q"."""
    found = layer_and_role(name)
    if found is None:
        return OUTSIDE, name
    return found[0], name.removeprefix(f"{found[0]}.").removeprefix("attn.").removeprefix("mlp.")


def norm_figure(rows: Sequence[Measurement], title: str, rounding: float = 0.0) -> Figure:
    """Frobenius norms of the outer and the functional part of every block, and of their sum, with 95 % intervals.

    One logarithmic axis for all panels. A part that is zero, or not larger than `rounding`, is an open marker on the
    lower edge.
    """
    from matplotlib.lines import Line2D

    panels: dict[str, dict[str, list[Measurement]]] = {}
    for row in rows:
        layer, name = split_name(row.block)
        panels.setdefault(layer, {}).setdefault(name, []).append(row)
    panels = dict(sorted(panels.items(), key=lambda item: item[0] == OUTSIDE))  # layers first
    columns = min(_MOST_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    widest = max(len(names) for names in panels.values())
    figure = style.blank(max(6.4, 1.2 + columns * (0.5 + 0.32 * widest)), 1.2 + 2.6 * lines)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    values = [row.frobenius_norm.value for row in rows if row.frobenius_norm.value > rounding]
    low, high = (min(values) / 3, max(values) * 3) if values else (0.1, 1.0)
    for axes, (layer, names) in zip(grid.flat, panels.items(), strict=False):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        for place, parts in enumerate(names.values()):
            for row in parts:
                _point(axes, place, row, low, rounding)
        axes.set_xticks(range(len(names)), [style.plain(short(name)) for name in names], size=_TEXT, rotation=90)
        axes.set_xlim(-0.6, widest - 0.4)  # the same step in all panels
        axes.set_title(
            style.plain(layer.replace("h.", "layer ") if layer != OUTSIDE else layer), size=_HEADING, loc="left"
        )
        axes.tick_params(axis="y", labelsize=_TEXT)
        style.open_box(axes, grid=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for line in grid:
        line[0].set_ylabel("$\\|H\\|_F$ (95 % interval)", size=_HEADING)
    style.entitle(figure, title, _HEADING + 1)
    handles = [
        Line2D([], [], color=style.STYLES[part]["color"], marker=marker, linestyle="", label=part)
        for part, marker in _MARKERS.items()
    ]
    if any(row.frobenius_norm.value <= rounding for row in rows):
        handles.append(
            Line2D([], [], color="#666666", marker="v", markerfacecolor="none", linestyle="", label="zero to rounding")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=_TEXT + 1, frameon=False)
    return figure


def _point(axes: Axes, place: int, row: Measurement, low: float, rounding: float) -> None:
    """One part with its interval."""
    estimate, color = row.frobenius_norm, style.STYLES[row.part]["color"]
    x = place + _SHIFTS[row.part]
    if estimate.value <= rounding:
        axes.plot([x], [low], marker="v", color=color, markerfacecolor="none", markersize=6, clip_on=False)
        return
    if row.part == "total":
        axes.plot([x - 0.35, x + 0.35], [estimate.value] * 2, color=color, linewidth=1.4)
        return
    look = {"color": color, "marker": _MARKERS[row.part], "markersize": 3.5, "linewidth": 1.3}
    axes.errorbar([x], *style.with_bars([estimate], low), **look)


def short(name: str) -> str:
    """A long parameter name by its end."""
    return name if len(name) <= 18 else "…" + name[-17:]
