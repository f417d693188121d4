"""Histograms of the entries of a model's blocks."""

from collections.abc import Sequence

from curvoscope.analysis.entries import EntryHistogram
from curvoscope.errors import EmptyError
from curvoscope.report import style
from curvoscope.report.style import Figure

_TEXT, _HEADING = 10, 11


def entry_figure(found: Sequence[EntryHistogram], title: str) -> Figure:
    """One panel per block, one line per part: the share of the entries in each bin of log10 |entry|."""
    from matplotlib.lines import Line2D

    if not found:
        raise EmptyError("found", "is empty; give the histograms of at least one block")
    blocks = list(dict.fromkeys(one.block for one in found))
    figure = style.blank(7.2, 1.6 + 2.0 * len(blocks))
    panels = figure.subplots(len(blocks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, block in zip(panels, blocks, strict=True):
        for one in found:
            if one.block == block and any(one.shares):
                axes.stairs(one.shares, one.edges, **style.STYLES[one.part])
        total = next(one for one in found if one.block == block and one.part == "total")
        seen = "all" if total.columns == total.size else f"{total.columns} random"
        heading = f"{block}: median |entry| {total.median:.1e}, {seen} of {total.size:,} columns"
        axes.set_title(style.plain(heading), size=_HEADING, loc="left")
        axes.set_ylabel("share of entries", size=_TEXT)
        axes.tick_params(labelsize=_TEXT)
        style.open_box(axes)
    panels[-1].set_xlabel("$\\log_{10}$ |entry| (first bin: all below)", size=_TEXT)
    figure.suptitle(style.plain(title), size=_HEADING + 1)
    handles = [Line2D([], [], label=part, **look) for part, look in style.STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=_TEXT, frameon=False)
    return figure
