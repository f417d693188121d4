"""Figures of what a monitor measures more seldom: trace, smallest eigenvalue and the blocks' norms against the step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvoscope.errors import EmptyError
from curvoscope.estimate import Estimate
from curvoscope.report import style
from curvoscope.training.records import Details, Record

if TYPE_CHECKING:
    import matplotlib.figure

_TEXT, _HEADING = 9, 11
ROUNDING = 1e-7  # of the largest norm: models are trained in float32


def detailed(records: Sequence[Record]) -> list[tuple[int, Details]]:
    """The steps whose details were measured."""
    return [(one.step, one.details) for one in records if one.details is not None]


def trace_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Trace and smallest eigenvalue with 95 % intervals."""
    known = _known(records)
    figure = style.blank(9.6, 3.4)
    for axes, (label, name) in zip(
        figure.subplots(1, 2), (("trace", "trace"), ("$\\lambda_{min}$", "smallest_eigenvalue")), strict=True
    ):
        found: list[Estimate] = [getattr(details, name) for _, details in known]
        values = np.array([one.value for one in found])
        low, high = np.array([one.interval() for one in found]).T
        bars = np.clip([values - low, high - values], 0, None)
        axes.errorbar(
            [step for step, _ in known], values, bars, color=style.BLUE, marker="o", markersize=3, linewidth=1.2
        )
        axes.axhline(0, color="#666666", linewidth=0.8, linestyle=":")
        axes.set_title(label, size=_HEADING, loc="left")
        axes.set_xlabel("step", size=_TEXT + 1)
        axes.tick_params(labelsize=_TEXT)
        style.open_box(axes)
    first, last = known[0][1].trace.value, known[-1][1].trace.value
    figure.suptitle(f"The trace went from {first:.3g} to {last:.3g}", size=_HEADING + 1)
    return figure


def block_map(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """|H_bb|_F of both parts: one row per block, one column per measurement, one logarithmic colour scale."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    known = _known(records)
    names = list(known[-1][1].blocks)
    if not names:
        raise EmptyError("records", "have no blocks")
    tables = {
        part: np.array([[getattr(details.blocks[name], part).value for _, details in known] for name in names])
        for part in ("outer", "functional")
    }
    everything = np.concatenate(list(tables.values()))
    seen = everything[everything > ROUNDING * everything.max()]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.1, 1.0)
    scale = LogNorm(low, high if high > low else 10 * low)
    figure = style.blank(9.6, 1.8 + 0.24 * len(names))
    grid = figure.subplots(1, 2, sharey=True)
    for axes, (part, table) in zip(grid, tables.items(), strict=True):
        colors = colormaps["viridis"].with_extremes(under=style.ZERO)
        image = axes.imshow(np.maximum(table, 1e-300), cmap=colors, norm=scale, aspect="auto", interpolation="nearest")
        axes.set_title(f"{part} part", size=_HEADING, loc="left")
        places = np.unique(np.linspace(0, len(known) - 1, min(6, len(known))).round().astype(int))
        axes.set_xticks(places, [str(known[place][0]) for place in places], size=_TEXT)
        axes.set_yticks(range(len(names)), [style.plain(name) for name in names], size=_TEXT)
        axes.tick_params(length=0)
        axes.set_xlabel("step", size=_TEXT + 1)
    style.colour_bar(image, grid, "$\\|H_{bb}\\|_F$", _HEADING, _TEXT, aspect=25)
    figure.suptitle("Norms of the diagonal blocks (grey: zero to rounding)", size=_HEADING + 1)
    return figure


def _known(records: Sequence[Record]) -> list[tuple[int, Details]]:
    known = detailed(records)
    if not known:
        raise EmptyError("records", "no details were measured; give a larger budget or more steps")
    return known
