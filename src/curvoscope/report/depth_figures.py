"""Figures of curvature through depth: by layer for several networks, and over depth and training steps."""

import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from curvoscope.analysis.propagation import LayerCurvature, Propagation
from curvoscope.errors import EmptyError, ShapeError
from curvoscope.estimate import Estimate
from curvoscope.report import style
from curvoscope.report.style import Axes, Figure

_COLOURS = style.COLOURS[:6]  # each network has a marker of its own too
_MARKERS = ("o", "s", "^", "D", "v", "P")
_TEXT, _HEADING = 9, 11
_MOST_LABELS = 24

_DepthNumber = Callable[[LayerCurvature], Estimate | None]
_PANELS: tuple[tuple[str, _DepthNumber], ...] = (
    ("$\\|S\\|_2$, the loss Hessian at the layer's output", lambda layer: layer.spectral),
    ("$\\|S_{functional}\\|_2$, its functional part", lambda layer: layer.functional_spectral),
    ("$\\|\\partial F/\\partial X\\|_2$, the layer's Jacobian", lambda layer: layer.jacobian),
    ("$\\|H\\|_F$, the largest block of its weights", lambda layer: max(layer.blocks.values(), default=None)),
)


def propagation_figure(networks: Mapping[str, Propagation], title: str) -> Figure:
    """Four logarithmic panels over the layers from input to output, one line per network, with 95 % intervals."""
    if not networks:
        raise EmptyError("networks", "is empty; give at least one")
    figure = style.blank(10.5, 7.2)
    panels = figure.subplots(2, 2, sharex=True).flat
    longest = max(networks.values(), key=lambda network: len(network.layers))
    for axes, (label, number) in zip(panels, _PANELS, strict=True):
        for place, (name, network) in enumerate(networks.items()):
            _line(axes, name, network, number, place)
        if axes.containers:
            style.logarithmic(axes)
        else:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "zero, or not measured", size=_TEXT, ha="center", transform=axes.transAxes)
        axes.set_title(label, size=_HEADING, loc="left")
        axes.tick_params(labelsize=_TEXT)
        style.open_box(axes, grid=True)
        _ticks(axes, longest)
    figure.supxlabel("layer, from input to output", size=_HEADING)
    figure.suptitle(textwrap.fill(style.plain(title), 110), size=_HEADING + 1)
    if len(networks) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        # above: below it would stand on the label of the axis
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=_TEXT + 1, frameon=False)
    return figure


def propagation_map(steps: Sequence[int], networks: Sequence[Propagation], title: str) -> Figure:
    """log10 |S|_2 as a heat map: training steps from left to right, layers from input (top) to output (bottom)."""
    if len(steps) != len(networks) or not steps:
        raise ShapeError(
            "steps", f"got {len(steps)} steps for {len(networks)} measurements, expected the same number, at least 1"
        )
    names = [layer.name for layer in networks[0].layers]
    if any([layer.name for layer in network.layers] != names for network in networks):
        raise ShapeError("networks", "do not all have the same layers")
    values = np.array([[layer.spectral.value for layer in network.layers] for network in networks]).T
    tiny = np.finfo(float).tiny
    logs = np.where(values > 0, np.log10(np.maximum(values, tiny)), np.nan)
    figure = style.blank(1.8 + 0.5 * max(8, len(steps)), 1.6 + 0.28 * max(6, len(names)))
    axes = figure.subplots()
    image = axes.imshow(logs, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_xticks(range(len(steps)), [str(step) for step in steps], size=_TEXT, rotation=90 if len(steps) > 12 else 0)
    axes.set_yticks(range(len(names)), [style.plain(name) for name in names], size=_TEXT)
    axes.set_xlabel("training step", size=_HEADING)
    figure.colorbar(image, ax=axes, label="$\\log_{10} \\|S\\|_2$")
    style.entitle(figure, title, _HEADING + 1, letters=11)
    return figure


def _line(axes: Axes, name: str, network: Propagation, number: _DepthNumber, place: int) -> None:
    found = [(i, number(layer)) for i, layer in enumerate(network.layers)]
    known = {i: estimate for i, estimate in found if estimate is not None and estimate.value > 0}
    if not known:
        return
    axes.errorbar(
        list(known),
        *style.with_bars(list(known.values()), floor=0.0),
        color=_COLOURS[place % len(_COLOURS)],
        marker=_MARKERS[place % len(_MARKERS)],
        markersize=4,
        linewidth=1.2,
        label=style.plain(name),
    )


def _ticks(axes: Axes, network: Propagation) -> None:
    names = [style.plain(layer.name) for layer in network.layers]
    step = -(-len(names) // _MOST_LABELS)
    places = range(0, len(names), step)
    axes.set_xticks(list(places), [names[i] for i in places], size=_TEXT - 1, rotation=90)
