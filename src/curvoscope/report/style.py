"""What the Matplotlib figures share: colours and strokes, blank figures, panels without a box, colour bars, titles."""

import textwrap
from typing import TYPE_CHECKING, Any

from curvoscope.analysis import Part

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

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


def blank(width: float, height: float) -> "matplotlib.figure.Figure":
    """A figure of so many inches. It does not belong to pyplot, so no global state is left behind."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def open_box(axes: "matplotlib.axes.Axes", grid: bool = False) -> None:
    """Remove the lines at the top and on the right; with `grid`, draw lines behind the values."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
        axes.set_axisbelow(True)


def colour_bar(image: Any, axes: Any, label: str, heading: int, text: int, **options: Any) -> None:
    """The colours of an image beside one or several axes."""
    figure = image.axes.figure
    bar = figure.colorbar(image, ax=axes, **options)
    bar.set_label(label, size=heading)
    bar.ax.tick_params(labelsize=text)


def entitle(figure: "matplotlib.figure.Figure", title: str, size: int, letters: int = 12) -> None:
    """A title above all panels, on as many lines as it needs with so many letters per inch."""
    figure.suptitle(textwrap.fill(plain(title), int(letters * figure.get_figwidth())), size=size)


def plain(text: str) -> str:
    """A name for Matplotlib: no mathematics, even with a dollar in it."""
    return text.replace("$", "\\$")
