"""The picture of a Hessian, entry by entry."""

import numpy as np

from curvoscope.operators import BlockHessian
from curvoscope.report import style
from curvoscope.report.style import Figure

_LONG_NAMES = {"Q": "query", "K": "key", "V": "value", "O": "output"}
_LABELLED, _ANNOTATED = 0.03, 0.15  # shares of the Hessian's size from which a block has a label, and its median
_SIZE = (6.4, 6.2)  # inches; the text is large enough for print at half of it
_TEXT, _HEADING = 12, 13


def hessian_figure(H: BlockHessian, title: str) -> Figure:
    """log10 |H| entry by entry with the borders of the blocks, and the median |entry| written into each.

    The scale runs from the first percentile of the non-zero entries to the largest one; what is below has the
    darkest colour. Entries that are exactly zero have no logarithm: they are grey, and counted.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    logarithm, medians = _log_magnitude(H)
    zeros = np.isnan(logarithm)
    low, high = (-1.0, 0.0) if zeros.all() else np.percentile(logarithm[~zeros], [1, 100])
    figure = style.blank(*_SIZE)
    axes = figure.subplots()
    image = axes.imshow(logarithm, cmap=colormaps["viridis"].with_extremes(bad=style.ZERO), vmin=low, vmax=high)
    style.colour_bar(image, axes, "$\\log_{10}$ |entry|", _HEADING, _TEXT, extend="min", shrink=0.85, aspect=25)
    ranges = H.total.ranges
    for block in list(ranges.values())[1:]:
        axes.axhline(block.start - 0.5, color="white", linewidth=1.5)
        axes.axvline(block.start - 0.5, color="white", linewidth=1.5)
    shares = {name: (block.stop - block.start) / len(logarithm) for name, block in ranges.items()}
    labelled = [name for name in H.names if shares[name] >= _LABELLED]
    middles = [(ranges[name].start + ranges[name].stop - 1) / 2 for name in labelled]
    labels = [_long_name(name) for name in labelled]
    crowded = min(shares[name] for name in labelled) < _ANNOTATED
    axes.set_xticks(middles, labels, size=_HEADING, rotation=90 if crowded else 0)
    axes.set_yticks(middles, labels, size=_HEADING, rotation=0 if crowded else 90, va="center")
    axes.tick_params(length=0)
    box = {"boxstyle": "square,pad=0.2", "facecolor": "#202020", "edgecolor": "none", "alpha": 0.65}
    inset = 0.012 * len(logarithm)
    for (row, column), median in medians.items():
        if min(shares[row], shares[column]) < _ANNOTATED:
            continue
        x, y = ranges[column].start + inset, ranges[row].stop - inset  # the corner that no diagonal crosses
        text = _power_of_ten(median)
        axes.text(x, y, text, size=_TEXT, color="white", ha="left", va="bottom", bbox=box)
    figure.suptitle(title, size=_HEADING)
    grey = Patch(facecolor=style.ZERO, edgecolor="black", linewidth=0.5)
    figure.legend(
        [grey],
        [f"exactly zero: {_count(zeros)}. In the boxes: the median |entry|"],
        loc="outside lower center",
        fontsize=_TEXT,
        frameon=False,
    )
    return figure


def _log_magnitude(H: BlockHessian) -> tuple[np.ndarray, dict[tuple[str, str], float]]:
    """log10 |H| in float32, NaN where H is zero, and the median |entry| of each block; one block at a time."""
    logarithm = np.empty(H.shape, dtype=np.float32)
    medians = {}
    for i, row in enumerate(H.names):
        for column in H.names[i:]:
            magnitude: np.ndarray = H.total[row, column].dense().abs().cpu().numpy()
            medians[row, column] = medians[column, row] = float(np.median(magnitude))
            block = np.full(magnitude.shape, np.nan)
            np.log10(magnitude, out=block, where=magnitude > 0)
            logarithm[H.total.ranges[row], H.total.ranges[column]] = block
            logarithm[H.total.ranges[column], H.total.ranges[row]] = block.T
    return logarithm, medians


def _long_name(name: str) -> str:
    """ "query" for "Q" and "attn.Q", "up" for "mlp.up"."""
    role = name.rpartition(".")[2]
    return _LONG_NAMES.get(role, role)


def _count(zeros: np.ndarray) -> str:
    if zeros.all():
        return f"all {zeros.size:,}"
    return f"{int(zeros.sum()):,} of {zeros.size:,}" if zeros.any() else "none"


def _power_of_ten(value: float) -> str:
    """A non-negative number as mathtext with two digits."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"${mantissa}\\cdot 10^{{{int(exponent)}}}$"
