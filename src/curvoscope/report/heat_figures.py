"""Heat maps of the norms of a Hessian's blocks and of pairs of blocks, one panel per part."""

from collections.abc import Mapping, Sequence

import numpy as np

from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.operators.block_matrix import PARTS, Part
from curvoscope.report import style
from curvoscope.report.block_figures import OUTSIDE, short, split_name
from curvoscope.report.style import Figure

_CELL, _SMALL_CELL = 0.3, 0.15  # inches; small if there are many
_MANY = 16
_TEXT, _HEADING = 9, 11

NormsByPlace = dict[tuple[int, int], float]


def pair_map(rows: Sequence[Measurement], pairs: Sequence[PairNorm], title: str, rounding: float = 0.0) -> Figure:
    """log10 |H(a, b)|_F for all pairs of a model's blocks, the diagonal from `rows`."""
    names = list(dict.fromkeys(row.block for row in rows))
    panels: dict[Part, NormsByPlace] = {part: {} for part in PARTS}
    for row in rows:
        panels[row.part][names.index(row.block), names.index(row.block)] = row.frobenius_norm.value
    for pair in pairs:
        i, j = names.index(pair.row), names.index(pair.column)
        panels[pair.part][i, j] = panels[pair.part][j, i] = pair.frobenius_norm.value
    labels = [short(name) for name in names]
    return _draw(panels, labels, labels, title, rounding)


def layer_map(rows: Sequence[Measurement], title: str, rounding: float = 0.0) -> Figure:
    """log10 |H(a, a)|_F of the diagonal blocks, one row per layer. Norms up to `rounding` count as zero."""
    places = [split_name(row.block) for row in rows]
    layers = sorted(dict.fromkeys(layer for layer, _ in places), key=lambda layer: layer == OUTSIDE)
    kinds = list(dict.fromkeys(name for layer in layers for home, name in places if home == layer))
    panels: dict[Part, NormsByPlace] = {part: {} for part in PARTS}
    for row, (layer, name) in zip(rows, places, strict=True):
        panels[row.part][layers.index(layer), kinds.index(name)] = row.frobenius_norm.value
    lines = ["outside" if layer == OUTSIDE else layer.replace("h.", "layer ") for layer in layers]
    return _draw(panels, lines, [short(kind) for kind in kinds], title, rounding)


def _draw(
    panels: Mapping[Part, NormsByPlace], lines: Sequence[str], columns: Sequence[str], title: str, rounding: float
) -> Figure:
    """One colour scale for all panels; zero is grey, what was not measured is left blank."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    seen = [value for norms in panels.values() for value in norms.values() if value > rounding]
    scale, least = style.log_scale(seen), min(seen, default=0.1)
    beside = len(columns) <= min(2 * len(lines), _MANY)
    cell = _CELL if len(lines) <= _MANY else _SMALL_CELL
    width, height = max(2.0, cell * len(columns)), max(0.6, cell * len(lines))
    text = _TEXT if cell == _CELL else _TEXT - 1
    size = (2.6 + 3 * (width + 0.2), 2.4 + height) if beside else (2.8 + width, 2.6 + 3 * (height + 0.35))
    figure = style.blank(max(size[0], 6.4), size[1])
    grid = figure.subplots(*((1, 3) if beside else (3, 1)), sharex=True, sharey=True)
    for axes, (part, norms) in zip(grid, panels.items(), strict=True):
        table = np.full((len(lines), len(columns)), np.nan)
        for place, value in norms.items():
            table[place] = value if value > rounding else least / 10
        colors = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0), under=style.ZERO)
        image = axes.imshow(table, cmap=colors, norm=scale, aspect="auto")
        axes.set_title(part, size=_HEADING, loc="left")
        axes.set_xticks(range(len(columns)), [style.plain(label) for label in columns], size=text, rotation=90)
        axes.set_yticks(range(len(lines)), [style.plain(label) for label in lines], size=text)
        axes.tick_params(length=0)
    style.colour_bar(image, grid, "$\\|H\\|_F$", _HEADING, _TEXT, aspect=25 if beside else 40)
    style.entitle(figure, title, _HEADING + 1, letters=11)
    if any(value <= rounding for norms in panels.values() for value in norms.values()):
        grey = Patch(facecolor=style.ZERO, edgecolor="black", linewidth=0.5)
        label = "zero to rounding" if rounding else "exactly zero"
        figure.legend([grey], [label], loc="outside lower center", fontsize=_TEXT + 1, frameon=False)
    return figure
