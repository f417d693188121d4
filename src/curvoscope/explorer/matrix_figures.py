"""The attention map and the pictures of the Hessian: a blank Plotly figure each, sent once, and what a state writes
into it, sent with every move."""

from itertools import pairwise

import numpy as np

from curvoscope.explorer import drawing, pictures
from curvoscope.explorer.compute import Matrices
from curvoscope.explorer.drawing import Blank, Writes
from curvoscope.report import style

_LONG = {"Q": "query", "K": "key", "V": "value"}


def blank() -> dict[str, Blank]:
    """The figures without data, by name."""
    return {"attention": _attention(), "hessian": _matrix(scale=True), "outer": _matrix(), "functional": _matrix()}


def fill(found: Matrices) -> dict[str, Writes]:
    """What to write into them, by name."""
    cells = {part: pictures.pooled(values) for part, values in found.dense.items()}
    top = pictures.scale(max(float(np.abs(values).max()) for values in cells.values()))
    parts = {"hessian": "total", "outer": "outer", "functional": "functional"}
    matrices = {name: _fill_matrix(found, part, cells[part], top) for name, part in parts.items()}
    return {"attention": _fill_attention(found), **matrices}


def _attention() -> Blank:
    heat = {
        "type": "heatmap",
        "hovertemplate": "query %{y}, %{x}<br>weight %{z:.4f}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0},
    }
    x, y = drawing.axis("key", type="category"), drawing.axis("query", range=[1.5, 0.5])
    return {"data": [heat], "layout": drawing.layout(x, y, right=52)}


def _fill_attention(found: Matrices) -> Writes:
    heads, L, _ = found.attention.shape
    gap = np.full((L, 1), np.nan)
    tiles = [tile for head in found.attention for tile in (gap, head)][1:]
    names = [f"key {j + 1}" if heads == 1 else f"head {h + 1}, key {j + 1}" for h in range(heads) for j in range(L)]
    columns: list[str] = []
    for h in range(heads):
        columns += ([" " * h] if h else []) + names[h * L : (h + 1) * L]
    most = float(np.abs(found.attention).max()) or 1.0
    linear = found.state.attention == "linear"
    signed, one = [[0, style.ORANGE], [0.5, "#ffffff"], [1, style.BLUE]], [[0, "#ffffff"], [1, "#003a5c"]]
    shown = names[:: max(1, L // 4)] if heads == 1 else names[L // 2 :: L]
    words = [str(1 + i * max(1, L // 4)) for i in range(len(shown))]
    return {
        "data.0.z": drawing.rows(np.concatenate(tiles, 1)),
        "data.0.x": columns,
        "data.0.y": list(range(1, L + 1)),
        "data.0.zmin": -most if linear else 0.0,
        "data.0.zmax": most if linear else 1.0,
        "data.0.colorscale": signed if linear else one,
        "layout.yaxis.range": [L + 0.5, 0.5],
        "layout.xaxis.range": [-0.5, len(columns) - 0.5],
        "layout.xaxis.tickvals": shown,
        "layout.xaxis.ticktext": words if heads == 1 else [f"head {h + 1}" for h in range(heads)],
    }


def _matrix(scale: bool = False) -> Blank:
    # an image of the layout, as a new one is drawn without the axes; the traces have nothing to show but the colours
    picture = {"xref": "x", "yref": "y", "x": -0.5, "y": -0.5, "sizing": "stretch", "layer": "below"}
    marker = {
        "size": 0.01,
        "color": [0.0],
        "cmin": -pictures.DECADES,
        "cmax": pictures.DECADES,
        "colorscale": pictures.colour_scale(),
        "showscale": True,
        "colorbar": {"orientation": "h", "y": -0.08, "yanchor": "top", "thickness": 10, "outlinewidth": 0},
    }
    colours = {"type": "scatter", "x": [0], "y": [0], "mode": "markers", "marker": marker, "hoverinfo": "skip"}
    unseen = {"type": "scatter", "x": [0], "y": [0], "mode": "markers", "marker": {"size": 0.01}, "hoverinfo": "skip"}
    x = drawing.axis("", range=[0, 1], showgrid=False, zeroline=False, constrain="domain")
    y = drawing.axis(
        "", range=[1, 0], showgrid=False, zeroline=False, scaleanchor="x", constrain="domain", tickangle=-90
    )
    return {"data": [colours if scale else unseen], "layout": drawing.layout(x, y) | {"images": [picture]}}


def _fill_matrix(found: Matrices, part: str, cells: np.ndarray, top: float) -> Writes:
    n, step = found.borders[-1], pictures.pooling(found.borders[-1])
    side = step * -(-n // step)  # the last cells may reach beyond the matrix
    middles = [(start + stop - 1) / 2 for start, stop in pairwise(found.borders)]
    names = [_LONG[name] for name in found.names]
    writes: Writes = {
        "layout.images.0.source": pictures.address(cells, top),
        "layout.images.0.sizex": side,
        "layout.images.0.sizey": side,
    }
    if part == "total":
        places, words = pictures.ticks(top)
        writes |= {"data.0.marker.colorbar.tickvals": places, "data.0.marker.colorbar.ticktext": words}
    for axis, ends in (("xaxis", [-0.5, n - 0.5]), ("yaxis", [n - 0.5, -0.5])):
        writes[f"layout.{axis}.range"] = ends
        writes |= {f"layout.{axis}.tickvals": middles, f"layout.{axis}.ticktext": names}
    writes["layout.shapes"] = [
        {"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": {"color": drawing.GREY, "width": 1.5}}
        for border in found.borders
        for x0, x1, y0, y1 in (
            (border - 0.5, border - 0.5, -0.5, n - 0.5),
            (-0.5, n - 0.5, border - 0.5, border - 0.5),
        )
    ]
    return writes
