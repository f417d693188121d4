"""Figures of a ledger: interactions of all pairs, predicted against measured changes, the ranking of the blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvoscope.analysis.ledger import Ledger, LedgerRow
from curvoscope.report import style
from curvoscope.report.block_figures import short

if TYPE_CHECKING:
    import matplotlib.figure

_TEXT, _HEADING = 9, 11
_MOST_LABELS = 60
_MOST_BARS = 40
_DECADES = 3  # of the symmetric logarithmic scales


def interaction_map(ledger: Ledger, title: str) -> "matplotlib.figure.Figure":
    """½ d_b·H_bc d_c for all pairs of blocks that change: red raises the loss, blue lowers it."""
    from matplotlib.colors import SymLogNorm

    places = [i for i, norm in enumerate(ledger.norms) if norm]
    values = ledger.pairs.matrix.numpy()[np.ix_(places, places)]
    most = float(np.abs(values).max()) or 1.0
    side = min(11.0, max(4.5, 2.0 + 0.18 * len(places)))
    figure = style.blank(side + 1.2, side)
    axes = figure.subplots()
    scale = SymLogNorm(most / 10**_DECADES, vmin=-most, vmax=most)
    image = axes.imshow(values, cmap="RdBu_r", norm=scale)
    step = -(-len(places) // _MOST_LABELS)
    shown = range(0, len(places), step)
    labels = [style.plain(short(ledger.names[places[i]])) for i in shown]
    size = _TEXT if len(labels) <= 30 else _TEXT - 3
    axes.set_xticks(shown, labels, size=size, rotation=90)
    axes.set_yticks(shown, labels, size=size)
    axes.tick_params(length=0)
    powers = 10.0 ** np.arange(np.ceil(np.log10(3 * scale.linthresh)), np.log10(most))  # closer ones would overlap
    ticks = [*-powers[::-1], 0.0, *powers]
    style.colour_bar(image, axes, "$d_b \\cdot H_{bc} d_c / 2$", _HEADING, _TEXT, shrink=0.8, ticks=ticks)
    style.entitle(figure, title, _HEADING, letters=10)
    return figure


def prediction_figure(rows: Sequence[LedgerRow], rounding: float, title: str) -> "matplotlib.figure.Figure":
    """Predicted against measured change of each block alone, with 95 % intervals of their difference, and the diagonal.

    Both numbers vary over sequences together: the interval of each alone would say nothing about how well they agree.
    """
    figure = style.blank(5.6, 5.4)
    axes = figure.subplots()
    points: list[tuple[float, float]] = []
    for row in rows:
        if row.alone is not None and row.measured is not None and row.remainder is not None:
            low, high = row.remainder.interval()
            points.append((row.measured.value, row.alone.value))
            bar = [[row.remainder.value - low], [high - row.remainder.value]]
            look: dict[str, Any] = {"color": style.BLUE, "markersize": 4, "linewidth": 0.8, "alpha": 0.8}
            axes.errorbar([row.measured.value], [row.alone.value], yerr=bar, fmt="o", **look)
    values = [value for point in points for value in point]
    most = max(map(abs, values), default=0.0) or 1.0
    linear = max(most / 10**_DECADES, rounding)
    axes.set_xscale("symlog", linthresh=linear)
    axes.set_yscale("symlog", linthresh=linear)
    ends = [-most, most] if min(values, default=0.0) < 0 else [0.0, most]
    axes.plot(ends, ends, color=style.GREY, linestyle=style.DASHED, label="predicted = measured")
    axes.set_xlabel("measured change of the loss", size=_HEADING)
    axes.set_ylabel("predicted to second order", size=_HEADING)
    axes.tick_params(axis="x", rotation=90)
    axes.legend(fontsize=_TEXT, frameon=False)
    style.open_box(axes)
    style.entitle(figure, title, _HEADING, letters=11)
    return figure


def ranking_figure(rows: Sequence[LedgerRow], title: str) -> "matplotlib.figure.Figure":
    """What each block contributes to the predicted change: first order, outer and functional part; largest first."""
    ranked = sorted(rows, key=lambda row: -abs(row.first + row.second))[:_MOST_BARS]
    figure = style.blank(6.8, 1.4 + 0.24 * len(ranked))
    axes = figure.subplots()
    places = np.arange(len(ranked))
    parts = (
        ("first order", [row.first.value for row in ranked], style.GREY),
        ("second, outer", [row.outer.value for row in ranked], style.BLUE),
        ("second, functional", [row.functional.value for row in ranked], style.ORANGE),
    )
    for shift, (label, values, colour) in zip((-0.26, 0.0, 0.26), parts, strict=True):
        axes.barh(places + shift, values, height=0.26, color=colour, label=label)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, [style.plain(short(row.block)) for row in ranked], size=_TEXT)
    axes.invert_yaxis()
    axes.set_xlabel("contribution to the change of the loss", size=_HEADING)
    axes.legend(fontsize=_TEXT, frameon=False)
    style.open_box(axes)
    style.entitle(figure, title, _HEADING, letters=11)
    return figure
