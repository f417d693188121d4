"""The figure of the attention moments, head by head."""

from collections.abc import Callable, Sequence

from curvoscope.analysis.attention_heads import HeadMoments
from curvoscope.errors import EmptyError
from curvoscope.estimate import Estimate
from curvoscope.report import style
from curvoscope.report.style import Figure

_COLOURS = (style.BLUE, style.ORANGE)  # layers in turn
_MARKERS = ("o", "s")
_TEXT, _HEADING = 9, 11
_HeadNumber = Callable[[HeadMoments], Estimate | None]
_PANELS: tuple[tuple[str, _HeadNumber], ...] = (
    ("entropy of a row, nats", lambda one: one.entropy),
    ("mean, $|M_1|^2/x^2$", lambda one: one.first),
    ("covariance, tr $M_2/x^2$", lambda one: one.second),
    ("third moment, $|M_3|_F/x^3$", lambda one: one.third),
)


def head_figure(heads: Sequence[HeadMoments], title: str) -> Figure:
    """One panel per quantity, one point per head with its 95 % interval; the heads of a layer stand side by side."""
    if not heads:
        raise EmptyError("heads", "is empty; give at least one head")
    panels = [(label, number) for label, number in _PANELS if any(number(one) is not None for one in heads)]
    layers = list(dict.fromkeys(one.layer for one in heads))
    width = min(10.5, max(6.4, 2.0 + 0.09 * len(panels) * len(heads)))
    figure = style.blank(width, 1.0 + 2.2 * -(-len(panels) // 2))
    grid = list(figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat)
    for axes, (label, number) in zip(grid, panels, strict=False):
        for place, one in enumerate(heads):
            estimate = number(one)
            if estimate is None:
                continue
            turn = layers.index(one.layer) % 2
            look = {"color": _COLOURS[turn], "marker": _MARKERS[turn], "markersize": 4, "linewidth": 1.2}
            axes.errorbar([place], *style.with_bars([estimate]), **look)
        axes.set_ylim(0, 1.12 * max(axes.dataLim.y1, 1e-12))
        axes.set_xlim(-0.6, len(heads) - 0.4)
        axes.set_title(label, size=_HEADING, loc="left")
        axes.tick_params(axis="y", labelsize=_TEXT)
        style.open_box(axes, grid=True)
        middles = []
        for layer in layers:
            places = [place for place, one in enumerate(heads) if one.layer == layer]
            middles.append(sum(places) / len(places))
        crowded = sum(map(len, layers)) > 40
        axes.set_xticks(middles, [style.plain(layer) for layer in layers], size=_TEXT, rotation=90 if crowded else 0)
        axes.tick_params(axis="x", length=0)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(style.plain(title), size=_HEADING + 1)
    return figure


def headline_of(heads: Sequence[HeadMoments]) -> str:
    """Which head looks most widely, and which least."""
    if len(heads) == 1:
        return f"{heads[0].layer}: rows of attention with an entropy of {heads[0].entropy.value:.2f} nats"
    ordered = sorted(heads, key=lambda one: one.entropy.value)
    low, high = ordered[0], ordered[-1]
    return (
        f"Entropy from {low.entropy.value:.2f} nats ({low.layer}, head {low.head}) to {high.entropy.value:.2f} "
        f"({high.layer}, head {high.head})"
    )
