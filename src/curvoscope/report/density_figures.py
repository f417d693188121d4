"""Spectral densities of a model's blocks in small panels with common axes, and the distances between them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from curvoscope.analysis.spectra import BlockSpectrum, Distances
from curvoscope.report import style
from curvoscope.report.block_figures import OUTSIDE, short, split_name

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_POSITIVE, _NEGATIVE, _NEAR_ZERO = style.BLUE, style.ORANGE, "#dddddd"
_WIDTH = 0.12  # decades: the deviation of the kernel
_DECADES, _MOST_DECADES = 3, 7  # below the largest eigenvalue of a block, and of all
_MOST_COLUMNS = 7
_TEXT, _HEADING = 8, 10


def density_figure(spectra: Sequence[BlockSpectrum], title: str) -> "matplotlib.figure.Figure":
    """The share of eigenvalues per decade of |λ|, negative ones on the left, with 95 % bands: one row per layer.

    The axis is logarithmic on both sides, and linear between its innermost ticks. The grey part of a panel holds the
    eigenvalues that are smaller than these, or too small for their sign and decade to be known from so many products,
    and says how many they are.
    """
    from matplotlib.patches import Patch

    rows = _arrange(spectra)
    columns = max(len(row) for _, row in rows)
    figure = style.blank(0.8 + 1.75 * max(columns, 4), 1.5 + 1.35 * len(rows))
    grid = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False)
    floor, most = _range(spectra)
    for i, (label, row) in enumerate(rows):
        for axes, (name, spectrum) in zip(grid[i], row, strict=False):
            if spectrum is None:
                axes.set_visible(False)
                continue
            _panel(axes, spectrum, floor)
            if i == 0 or label == OUTSIDE or rows[i - 1][0] == OUTSIDE:
                axes.set_title(style.plain(short(name)), size=_HEADING)
        grid[i][0].set_ylabel("" if label == OUTSIDE else style.plain(label.replace("h.", "layer ")), size=_HEADING)
        for axes in grid[i][len(row) :]:
            axes.set_visible(False)
    _scale(figure, floor, most, max(spectrum.size for spectrum in spectra))
    for j in range(columns):
        layers = [i for i, (label, _) in enumerate(rows) if label != OUTSIDE and grid[i][j].get_visible()]
        others = [i for i, (label, _) in enumerate(rows) if label == OUTSIDE and grid[i][j].get_visible()]
        for i in (*layers[-1:], *others[-1:]):  # the last panel of a column has the ticks of those above
            grid[i][j].tick_params(labelbottom=True)
            grid[i][j].set_xlabel("λ", size=_TEXT)
    style.entitle(figure, title, _HEADING + 1)
    figure.supylabel("share of eigenvalues per decade", size=_HEADING)
    handles = [
        Patch(color=_NEGATIVE, label="negative"),
        Patch(color=_POSITIVE, label="positive"),
        Patch(color=_NEAR_ZERO, label="near zero (with their share)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=_TEXT + 1, frameon=False)
    return figure


def distance_figure(distances: Distances) -> "matplotlib.figure.Figure":
    """The Jensen-Shannon distances between the spectra of all pairs of blocks."""
    count = len(distances.names)
    side = max(4.2, 1.8 + 0.19 * count)
    figure = style.blank(side + 0.9, side + 0.5)
    axes = figure.subplots()
    image = axes.imshow(distances.values.numpy(), cmap="viridis", vmin=0, vmax=1)
    labels = [style.plain(short(name)) for name in distances.names]
    axes.set_xticks(range(count), labels, size=_TEXT, rotation=90)
    axes.set_yticks(range(count), labels, size=_TEXT)
    axes.tick_params(length=0)
    style.colour_bar(image, axes, "Jensen-Shannon distance", _HEADING, _TEXT, shrink=0.7, aspect=22)
    figure.suptitle("Lower bounds on the distances between the blocks' spectra,\nby half-decades of λ", size=_HEADING)
    return figure


def headline_of(spectra: Sequence[BlockSpectrum]) -> str:
    """What the spectra show, as a title: how far the largest eigenvalues are apart."""
    positive = sorted((one for one in spectra if one.largest.value > 0), key=lambda one: one.largest.value)
    if len(positive) < 2:
        return "Spectra of the Hessian's blocks"
    low, high = positive[0], positive[-1]
    return (
        f"Largest eigenvalues from {low.largest.value:.2g} ({low.block}) to {high.largest.value:.2g} ({high.block}): "
        f"{high.largest.value / low.largest.value:,.0f} times apart"
    )


DensityPanel = tuple[str, BlockSpectrum | None]


def _arrange(spectra: Sequence[BlockSpectrum]) -> list[tuple[str, list[DensityPanel]]]:
    """Rows of panels with their labels: one row per layer, the same blocks below each other, then all others."""
    layers: dict[str, dict[str, BlockSpectrum]] = {}
    others: list[DensityPanel] = []
    for one in spectra:
        layer, name = split_name(one.block)
        if layer == OUTSIDE:
            others.append((name, one))
        else:
            layers.setdefault(layer, {})[name] = one
    kinds = list(dict.fromkeys(name for names in layers.values() for name in names))
    rows: list[tuple[str, list[DensityPanel]]] = [
        (layer, [(kind, names.get(kind)) for kind in kinds]) for layer, names in layers.items()
    ]
    step = max(len(kinds), min(len(others), _MOST_COLUMNS), 1)
    return rows + [(OUTSIDE, others[start : start + step]) for start in range(0, len(others), step)]


def _range(spectra: Sequence[BlockSpectrum]) -> tuple[float, float]:
    """The common axis: powers of ten below and above what is resolved of all spectra."""
    most = max(max(abs(end) for end in one.density.support) for one in spectra) or 1.0
    seen = [_resolution(one) for one in spectra]
    least = max(min((size for size in seen if size > 0), default=most), most * 10.0**-_MOST_DECADES)
    return min(10.0 ** math.floor(math.log10(least)), most / 10), most


def _resolution(spectrum: BlockSpectrum) -> float:
    """The size of the smallest eigenvalue to show: where the resolution ends, or three decades if it does not end."""
    most = max(abs(end) for end in spectrum.density.support)
    return max(spectrum.log.reach, most * 10.0**-_DECADES)


def _panel(axes: "matplotlib.axes.Axes", spectrum: BlockSpectrum, floor: float) -> None:
    edge = max(spectrum.log.reach, floor)
    density = spectrum.density
    near = float((density.weights * (density.nodes.abs() <= edge)).sum() / density.weights.sum())
    if near > 0:
        axes.axvspan(-edge, edge, color=_NEAR_ZERO, linewidth=0)
        axes.text(
            0.5, 0.95, _percent(near), size=_TEXT, ha="center", va="top", transform=axes.transAxes, color="#444444"
        )
    for side, sign, color in ((spectrum.log.positive, 1, _POSITIVE), (spectrum.log.negative, -1, _NEGATIVE)):
        held = side.nodes[side.weights > 0]
        if not held.numel() or float(held.max()) < math.log10(edge):
            continue
        u = torch.linspace(math.log10(edge), float(held.max()) + 4 * _WIDTH, 200, dtype=torch.float64)
        band = side.smooth(u, _WIDTH)
        seen = band.value >= 0.5 / spectrum.size  # below half an eigenvalue there is only the tail of the kernel
        x = sign * 10.0 ** u[seen].numpy()
        low, high, value = (part[seen].numpy() for part in (band.low, band.high, band.value))
        axes.fill_between(x, low, high, color=color, alpha=0.3, linewidth=0)
        axes.plot(x, value, color=color, linewidth=1.2)


def _scale(figure: "matplotlib.figure.Figure", floor: float, most: float, size: int) -> None:
    """Scales and ticks of all panels, which share them."""
    axes = figure.axes[0]
    axes.set_xscale("symlog", linthresh=floor, linscale=0.5)
    axes.set_xlim(-most * 3, most * 3)
    decades = range(math.ceil(math.log10(floor)), math.floor(math.log10(most)) + 1)
    named = [decades[-1]] if len(decades) < 4 else [decades[len(decades) // 2 - 1], decades[-1]]
    ticks = sorted([(0.0, "0"), *((sign * 10.0**k, _power(sign, k)) for k in named for sign in (-1, 1))])
    axes.set_xticks([x for x, _ in ticks], [word for _, word in ticks])
    axes.set_xticks([sign * 10.0**k for k in decades for sign in (-1, 1)], minor=True)
    axes.set_yscale("log")
    axes.set_ylim(0.3 / size, 5)
    for one in figure.axes:
        one.tick_params(labelsize=_TEXT - 0.5)
        one.tick_params(axis="y", which="minor", length=0)
        style.open_box(one)


def _power(sign: int, exponent: int) -> str:
    minus = "-" if sign < 0 else ""
    return f"${minus}1$" if exponent == 0 else f"${minus}10^{{{exponent}}}$"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"
