"""Figures from the stored numbers of a model: quotients and parts by layer."""

import numpy as np
from matplotlib.figure import Figure

from curvoscope.blocks import layer_and_role
from curvoscope.report import style
from gallery.claims import WORDS, Ratio, norms_of, trio_of, value_over_query
from gallery.measure import Facts

_MARKERS = "os^D"


def figures_of_facts(stages: dict[str, Facts]) -> dict[str, Figure]:
    """By name; the second is of the trained weights, the last of the stages."""
    trained = list(stages.values())[-1]
    query, _, value = (WORDS[role] for role in trio_of(trained))
    quotients = {label: value_over_query(facts) for label, facts in stages.items()}
    return {"ratios": ratio_figure(quotients, value, query), "parts": parts_figure(trained)}


def ratio_figure(lines: dict[str, list[Ratio]], above: str, below: str) -> Figure:
    """Quotients over the layers with their intervals, one line per set of weights, and the line at 1."""
    figure = style.blank(9.5, 3.8)
    axes = figure.subplots()
    for (label, ratios), colour, marker in zip(lines.items(), style.COLOURS, _MARKERS, strict=False):
        values = [ratio.value for ratio in ratios]
        below_them = [ratio.value - ratio.low for ratio in ratios]
        above_them = [min(ratio.high, 100 * ratio.value) - ratio.value for ratio in ratios]
        axes.errorbar(
            range(len(ratios)),
            values,
            [below_them, above_them],
            label=label,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.2,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    _layers(axes, max(map(len, lines.values()), default=1))
    axes.set_ylabel(f"norm of the {above} block over\nthat of the {below} block")
    style.open_box(axes, grid=True)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def parts_figure(facts: Facts) -> Figure:
    """Norms of the Gauss-Newton and of the functional part by layer, one panel each for query and key."""
    figure = style.blank(9.5, 3.8)
    grid = figure.subplots(1, 2, sharey=True)
    layers = [one.layer for one in value_over_query(facts)]
    kinds = {"Gauss-Newton": norms_of(facts), "functional": facts["functional"], "outer, at the layer": facts["outer"]}
    for axes, role in zip(grid, trio_of(facts), strict=False):
        for (label, norms), colour, marker in zip(kinds.items(), style.COLOURS, _MARKERS, strict=False):
            known = {
                layers.index(at[0]): norm
                for name, norm in norms.items()
                if (at := layer_and_role(name)) is not None and at[1] == role
            }
            if known:
                values = np.array([norm["value"] for norm in known.values()])
                ends = np.array([[max(norm["low"], 0.01 * norm["value"]), norm["high"]] for norm in known.values()]).T
                bars = np.clip([values - ends[0], ends[1] - values], 0, None)
                look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2}
                axes.errorbar(list(known), values, bars, label=label, **look)
        axes.set_yscale("log")
        _layers(axes, len(layers))
        axes.set_title(f"{WORDS[role]} block", size=11, loc="left")
        style.open_box(axes, grid=True)
    grid[0].set_ylabel("Frobenius norm")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def _layers(axes: style.Axes, count: int) -> None:
    axes.set_xlabel("layer")
    axes.set_xticks(range(0, count, -(-count // 15)))
