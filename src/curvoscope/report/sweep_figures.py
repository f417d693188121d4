"""Figures of a sweep: all pairs of blocks, profiles through the depth, heads."""

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from curvoscope.blocks import layer_and_role
from curvoscope.report.block_figures import short
from curvoscope.report.style import plain
from curvoscope.sweep import Sweep

if TYPE_CHECKING:
    import matplotlib.figure

_TEXT, _HEADING = 8, 11
_MOST_LABELS = 80
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#999999", "#882255", "#44AA99"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "h")


def norm_map(sweep: Sweep, title: str) -> "matplotlib.figure.Figure":
    """log10 |H(a, b)|_F of the Gauss-Newton part for all pairs of blocks; grey if not distinguishable from zero."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    norms = sweep.norms()
    count = len(norms.names)
    value, stderr = norms.value.numpy(), norms.stderr.numpy()
    known = np.where(value > 2 * stderr, value, np.nan)
    side = min(12.0, max(5.0, 2.0 + 0.16 * count))
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    positive = known[np.isfinite(known) & (known > 0)]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.1, 1.0)
    colors = colormaps["viridis"].with_extremes(bad="#d8d8d8")
    image = axes.imshow(known, cmap=colors, norm=LogNorm(low, high if high > low else 10 * low))
    step = -(-count // _MOST_LABELS)
    places = range(0, count, step)
    labels = [plain(short(norms.names[i])) for i in places]
    size = max(4, min(_TEXT, int(300 / max(1, len(labels)) + 3)))
    axes.set_xticks(places, labels, size=size, rotation=90)
    axes.set_yticks(places, labels, size=size)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, aspect=30, shrink=0.8)
    bar.set_label("$\\|H_{bc}\\|_F$", size=_HEADING)
    figure.suptitle(textwrap.fill(plain(title), int(9 * side)), size=_HEADING)
    return figure


def depth_profile(sweep: Sweep) -> "matplotlib.figure.Figure":
    """Frobenius norm and effective rank of each role through the layers, with 95 % intervals."""
    from matplotlib.figure import Figure

    roles: dict[str, list[tuple[int, str]]] = {}
    layers = list(dict.fromkeys(where[0] for name in sweep.names if (where := layer_and_role(name)) is not None))
    for name in sweep.names:
        where = layer_and_role(name)
        if where is not None and ".b_" not in where[1]:
            roles.setdefault(where[1], []).append((layers.index(where[0]), name))
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    for axes, label, ask in zip(
        figure.subplots(1, 2),
        ("$\\|H\\|_F$", "effective rank"),
        (sweep.frobenius_norm, sweep.effective_rank),
        strict=True,
    ):
        for place, (role, found) in enumerate(roles.items()):
            estimates = [ask(name) for _, name in found]
            values = np.array([float(one) for one in estimates])
            ends = np.array([one.interval() for one in estimates]).T
            bars = np.clip(np.stack([values - ends[0], ends[1] - values]), 0, None)
            style = {
                "color": _COLOURS[place % 10],
                "marker": _MARKERS[(place + place // 10) % 10],
                "markersize": 3.5,
                "linewidth": 1.0,
            }
            axes.errorbar([layer for layer, _ in found], values, bars, label=plain(role), **style)
        axes.set_yscale("log")
        axes.set_xlabel("layer", size=_HEADING)
        axes.locator_params(axis="x", integer=True)
        axes.set_title(label, size=_HEADING, loc="left")
        axes.grid(color="#e0e0e0", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=_TEXT, frameon=False)
    return figure


def head_map(sweep: Sweep) -> "matplotlib.figure.Figure":
    """Frobenius norm of the Gauss-Newton part of each head, one panel per role, one row per layer."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[float]]] = {}
    for name in sweep.names:
        where, heads = layer_and_role(name), sweep.heads(name)
        if heads and where is not None and ".b_" not in where[1]:
            norms = [float(sweep.frobenius_norm(head)) for head in heads]
            panels.setdefault(where[1], {})[where[0]] = norms
    values = [value for rows in panels.values() for norms in rows.values() for value in norms if value > 0]
    low, high = (min(values), max(values)) if values else (0.1, 1.0)
    scale = LogNorm(low, high if high > low else 10 * low)
    layers = list(dict.fromkeys(layer for rows in panels.values() for layer in rows))
    figure = Figure(figsize=(1.8 + 2.1 * len(panels), max(2.6, 1.2 + 0.16 * len(layers))), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (role, rows) in zip(grid, panels.items(), strict=True):
        table = np.full((len(layers), max(map(len, rows.values()))), np.nan)
        for layer, norms in rows.items():
            table[layers.index(layer), : len(norms)] = norms
        image = axes.imshow(np.where(table > 0, table, np.nan), norm=scale, aspect="auto")
        axes.set_title(plain(role), size=_HEADING, loc="left")
        axes.set_xlabel("head", size=_TEXT)
        axes.set_xticks([])
        step = -(-len(layers) // 16)
        axes.set_yticks(range(0, len(layers), step), [plain(layer) for layer in layers[::step]], size=_TEXT)
    bar = figure.colorbar(image, ax=grid, aspect=25)
    bar.set_label("$\\|H\\|_F$", size=_HEADING)
    return figure
