"""What the Matplotlib figures share: colours and strokes, blank figures, panels without a box, colour bars, titles."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvoscope.analysis import Part
from curvoscope.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
else:  # in annotations alone: Matplotlib is loaded when a figure is drawn
    Axes = Figure = LogNorm = Any

# Okabe and Ito's colours, which the colour-blind also tell apart
BLUE, ORANGE, GREEN, PURPLE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#999999"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", BLACK)
ZERO = "#c8c8c8"  # a grey: viridis has none
DASHED, DOTTED = (0, (5, 1.5)), (0, (1, 1.2))
STYLES: dict[Part, dict[str, Any]] = {  # each part has a stroke of its own
    "outer": {"color": BLUE, "linestyle": "-", "linewidth": 2.0},
    "functional": {"color": ORANGE, "linestyle": DASHED, "linewidth": 2.0},
    "total": {"color": BLACK, "linestyle": (0, (1, 1)), "linewidth": 2.0},
}


def blank(width: float, height: float) -> Figure:
    """A figure of the given size in inches. It does not belong to pyplot, so no global state is left behind."""
    from matplotlib import figure

    return figure.Figure(figsize=(width, height), layout="constrained")


def open_box(axes: Axes, grid: bool = False) -> None:
    """Remove the lines at the top and on the right; with `grid`, draw lines behind the values."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
        axes.set_axisbelow(True)


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis; within one decade its ticks are round numbers, and no powers of ten."""
    from matplotlib import ticker

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.yaxis.set_minor_locator(ticker.NullLocator())


def colour_bar(image: Any, axes: Any, label: str, heading: int, text: int, **options: Any) -> None:
    """A colour bar for an image, next to one or several axes."""
    figure = image.axes.figure
    bar = figure.colorbar(image, ax=axes, **options)
    bar.set_label(label, size=heading)
    bar.ax.tick_params(labelsize=text)


def entitle(figure: Figure, title: str, size: int, letters: int = 12) -> None:
    """A title above all panels, on as many lines as it needs with so many letters per inch."""
    figure.suptitle(textwrap.fill(plain(title), int(letters * figure.get_figwidth())), size=size)


def with_bars(estimates: Sequence[Estimate], floor: float = -math.inf) -> tuple[np.ndarray, np.ndarray]:
    """The values (n,), and what their 95 % intervals reach below and above them (2, n), down to `floor`."""
    values = np.array([one.value for one in estimates])
    low, high = np.array([one.interval() for one in estimates]).reshape(-1, 2).T
    return values, np.clip([values - np.maximum(low, floor), high - values], 0, None)


def log_scale(values: Sequence[float] | np.ndarray) -> LogNorm:
    """Colours from the smallest to the largest of some positive numbers, also if there are none."""
    from matplotlib import colors

    low, high = (float(min(values)), float(max(values))) if len(values) else (0.1, 1.0)
    return colors.LogNorm(low, high if high > low else 10 * low)


def plain(text: str) -> str:
    """A name for Matplotlib: no mathematics, even with a dollar in it."""
    return text.replace("$", "\\$")
