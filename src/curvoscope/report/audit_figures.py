"""Figures of an audit: error against stored floats, one panel per kind of block; error through the depth."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from curvoscope.analysis.audit_table import AuditTable
from curvoscope.blocks import layer_and_role
from curvoscope.report.style import COLOURS, blank, entitle, open_box, plain

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_TEXT, _HEADING = 8, 11
_COLUMNS = 4
_PANELS = 3
_ERRORS = -0.03, 1.05  # whole marks also at zero
_TICKS = 8
_DECADE = 10.0
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "h", "<", ">", "d")
_SHOWN = ("diagonal", "input", "kfac", "ekfac", "shampoo", "kronecker:1")  # through the depth


def role_of(block: str) -> str:
    """The kind of a block: its role in its layer, or its name."""
    where = layer_and_role(block)
    return block if where is None else where[1]


def error_figure(found: AuditTable, title: str) -> "matplotlib.figure.Figure":
    """The error at the best scale against floats per weight: medians over the layers, bars from least to most."""
    roles: dict[str, list[str]] = {}
    for block in found.blocks:
        roles.setdefault(role_of(block), []).append(block)
    columns = min(_COLUMNS, len(roles))
    rows = -(-len(roles) // columns)
    figure = blank(2.6 * columns + 2.0, 2.3 * rows + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (role, blocks) in zip(grid, roles.items(), strict=False):
        for place, name in enumerate(found.approximations):
            known = [row for block in blocks if (row := found.row(block, name)) is not None]
            if not known:
                continue
            errors = [float(row.best_scale_error) for row in known]
            middle = statistics.median(errors)
            style = {"color": COLOURS[place % len(COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
            bars = [[middle - min(errors)], [max(errors) - middle]]
            floats = statistics.median(row.floats / row.size for row in known)
            axes.errorbar([floats], [middle], bars, label=plain(name), markersize=4.5, linestyle="", **style)
        axes.set_xscale("log")
        axes.set_ylim(*_ERRORS)
        axes.set_title(plain(role), size=_HEADING, loc="left")
        axes.tick_params(labelsize=_TEXT)
        open_box(axes, grid=True)
    _cover(grid[0], [row.floats / row.size for row in found])
    for axes in grid[len(roles) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(roles) - columns) : len(roles)]:
        axes.tick_params(labelbottom=True)  # the lowest panel of each column, also above an empty place
    figure.supxlabel("stored floats per weight", size=_HEADING)
    figure.supylabel("|H - sA| / |H|", size=_HEADING)
    labels = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside right lower", fontsize=_TEXT, frameon=False)
    entitle(figure, title, _HEADING, letters=10)
    return figure


def _cover(axes: "matplotlib.axes.Axes", floats: Sequence[float]) -> None:
    """Show all floats per weight on the logarithmic axis that the panels share: at least a decade, plain numbers.

    Left to itself, an axis with a single value has no width: points lie on its edge, or outside of it.
    """
    from matplotlib import ticker

    low, high = min(floats), max(floats)
    margin = max(1.5, math.sqrt(_DECADE * low / high))
    low, high = low / margin, high * margin
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high / low < _DECADE**2 else (1.0,)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def depth_figure(found: AuditTable) -> "matplotlib.figure.Figure":
    """The error at the best scale through the layers, one panel per approximation, one line per role."""
    layers = layers_of_blocks(found.blocks)
    names = [name for name in _SHOWN if name in found.approximations]
    figure, grid = panels(len(names))
    roles = list(dict.fromkeys(role_of(block) for block in found.blocks if layer_and_role(block) is not None))
    for axes, name in zip(grid, names, strict=False):
        for place, role in enumerate(roles):
            points = sorted(
                (layers.index(where[0]), row.best_scale_error)
                for row in found
                if row.approximation == name and (where := layer_and_role(row.block)) is not None and where[1] == role
            )
            style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
            values, errors = [float(error) for _, error in points], [error.stderr for _, error in points]
            places = [layer for layer, _ in points]
            axes.errorbar(places, values, errors, label=plain(role), markersize=3.5, linewidth=1.0, **style)
        axes.set_ylim(*_ERRORS)
        axes.set_xlabel("layer", size=_TEXT)
        step = -(-len(layers) // _TICKS)
        axes.set_xticks(range(0, len(layers), step), [layer.removeprefix("h.") for layer in layers[::step]])
        axes.set_title(plain(name), size=_HEADING, loc="left")
        axes.tick_params(labelsize=_TEXT)
        open_box(axes, grid=True)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=_TEXT, frameon=False)
    return figure


def panels(count: int) -> "tuple[matplotlib.figure.Figure, Sequence[matplotlib.axes.Axes]]":
    """A figure of `count` panels for errors, at most three per row so that their text is readable on a page."""
    columns = min(_PANELS, count)
    rows = -(-count // columns)
    figure = blank(2.7 * columns + 1.2, 2.4 * rows + 0.2)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes in grid[count:]:
        axes.set_visible(False)
    for axes in grid[:count:columns]:
        axes.set_ylabel("|H - sA| / |H|", size=_TEXT)
    return figure, grid


def layers_of_blocks(blocks: Sequence[str]) -> list[str]:
    """The layers that the blocks are in, the first one first: a sweep begins with the last."""
    found = {where[0] for block in blocks if (where := layer_and_role(block)) is not None}
    return sorted(found, key=lambda layer: (layer.rstrip("0123456789"), int(layer.rpartition(".")[2])))
