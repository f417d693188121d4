"""Eigenvalues, growth and the scalar model: a blank Plotly figure each, sent once, and what a state writes into it,
sent with every move."""

import numpy as np
from dash import Patch

from curvoscope.explorer import drawing, pictures
from curvoscope.explorer.compute import CURVES, SIGMAS, SINKS, Spectra, exponents
from curvoscope.explorer.drawing import Blank

_CURVES = (
    ("Q, outer", drawing.BLUE, "circle"),
    ("Q, functional", drawing.ORANGE, "square"),
    ("QK, functional", drawing.PINK, "diamond"),
    ("V, outer", drawing.GREEN, "triangle-up"),
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def blank() -> dict[str, Blank]:
    """The figures without data, by name."""
    return {"eigenvalues": _eigenvalues(), "growth": _growth(), "scalar": _scalar()}


def fill(found: Spectra) -> list[Patch]:
    """What to write into them, in their order."""
    return [_fill_eigenvalues(found), _fill_growth(found), _fill_scalar(found)]


def _eigenvalues() -> Blank:
    hover = "eigenvalue %{customdata:.5g}<br>rank %{x}<extra></extra>"
    pair = "T-functional %{customdata:.5g}<extra></extra>"
    sure = "in the bulk: %{customdata:.5g}<extra></extra>"
    common = {"type": "scatter"}
    data = [
        common
        | {"mode": "lines", "name": "Hessian", "line": {"color": drawing.BLUE, "width": 2}, "hovertemplate": hover},
        common
        | {
            "mode": "markers",
            "name": "T-functional ±",
            "marker": {"color": drawing.ORANGE, "symbol": "line-ew-open", "size": 11, "line": {"width": 2}},
            "hovertemplate": pair,
        },
        common
        | {
            "mode": "markers",
            "name": "pairs in the bulk",
            "marker": {"color": drawing.GREEN, "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            "hovertemplate": sure,
        },
    ]
    x = drawing.axis("rank, from the largest")
    y = drawing.axis("eigenvalue (signed log)", range=[-pictures.DECADES - 0.5, pictures.DECADES + 0.5])
    return {"data": data, "layout": drawing.layout(x, y, legend=True)}


def _fill_eigenvalues(found: Spectra) -> Patch:
    descending, pairs, n = found.eigenvalues[::-1], found.pairs, len(found.eigenvalues)
    top = max(float(np.abs(descending).max()), float(pairs.max(initial=0.0))) or 1.0
    # each pair stands for d_k equal eigenvalues at either end: the marker is in their middle
    middle = (np.arange(len(pairs)) + 0.5) * found.state.d_k + 0.5
    sure = found.bulk if found.multiplicity else np.empty(0)
    places = [float(np.abs(descending - value).argmin()) + 1 for value in sure]
    series = (
        (np.arange(1, n + 1), descending),
        (np.concatenate([middle, n + 1 - middle]), np.concatenate([pairs, -pairs])),
        (np.array(places), sure),
    )
    patch = Patch()
    for i, (x, values) in enumerate(series):
        patch["data"][i]["x"] = x.tolist()
        patch["data"][i]["y"] = np.round(pictures.signed_log(values, top), 4).tolist()
        patch["data"][i]["customdata"] = values.tolist()
    patch["data"][2]["visible"] = len(sure) > 0
    axis = patch["layout"]["yaxis"]
    axis["tickvals"], axis["ticktext"] = pictures.ticks(top)
    patch["layout"]["xaxis"]["range"] = [1 - 0.02 * n, 1.02 * n]
    return patch


def _growth() -> Blank:
    measured = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(SIGMAS),
            "line": {"color": colour, "width": 2},
            "marker": {"symbol": symbol, "size": 6},
            "hovertemplate": f"σ = %{{x:.3g}}<br>{name}: %{{y:.4g}}<extra></extra>",
        }
        for name, colour, symbol in _CURVES
    ]
    guides = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": list(SIGMAS),
            "line": {"color": colour, "width": 1.5, "dash": "dash"},
            "showlegend": False,
            "hovertemplate": f"theory of {name}<extra></extra>",
        }
        for name, colour, _ in _CURVES
    ]
    here = {
        "type": "scatter",
        "mode": "markers",
        "showlegend": False,
        "marker": {"size": 13, "symbol": "circle-open", "line": {"width": 2}, "color": [c for _, c, _ in _CURVES]},
        "hovertemplate": "here: %{y:.4g}<extra></extra>",
    }
    x = drawing.axis("scale σ of X", type="log", dtick=1)
    y = drawing.axis("Frobenius norm", type="log", exponentformat="power")
    return {"data": [*measured, *guides, here], "layout": drawing.layout(x, y, legend=True)}


def _fill_growth(found: Spectra) -> Patch:
    patch = Patch()
    powers = exponents(found.state)
    for i, (curve, power) in enumerate(zip(found.growth, powers, strict=True)):
        patch["data"][i]["y"] = drawing.positive(curve)
        word = "exactly zero" if not curve.any() else "" if power is None else f"σ{str(int(power)).translate(_RAISED)}"
        patch["data"][i]["name"] = f"{_CURVES[i][0]}: {word}" if word else _CURVES[i][0]
        # the lines start where the attention is the same for all scales; behind a norm, past its ε
        start = 6 if found.state.norm == "pre" else 0
        line = 0 * curve if power is None else curve[start] * (np.array(SIGMAS) / SIGMAS[start]) ** power
        patch["data"][len(CURVES) + i]["y"] = drawing.positive(line)
    patch["data"][2 * len(CURVES)]["x"] = [found.state.sigma] * len(CURVES)
    patch["data"][2 * len(CURVES)]["y"] = drawing.positive(found.here)
    drawing.set_log_range(patch, [*found.growth.flat, *found.here])
    patch["layout"]["shapes"] = [drawing.upright(found.state.sigma)]
    return patch


def _scalar() -> Blank:
    names = ("bulk ±", "outlier 1", "outlier 2", "outlier 3")
    styles = ((drawing.ORANGE, "dash"), (drawing.BLUE, "solid"), (drawing.GREEN, "dashdot"), (drawing.PINK, "dot"))
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": list(SINKS),
            "line": {"color": colour, "dash": dash, "width": 2},
            "marker": {"size": 5},
            "hovertemplate": f"sink %{{x:g}}<br>{name}: %{{y:.4g}}<extra></extra>",
        }
        for name, (colour, dash) in zip(names, styles, strict=True)
    ]
    x = drawing.axis("attention sink")
    y = drawing.axis("|eigenvalue|", type="log", exponentformat="power")
    return {"data": data, "layout": drawing.layout(x, y, legend=True)}


def _fill_scalar(found: Spectra) -> Patch:
    patch = Patch()
    spectra = found.scalar[:-1]
    curves = [[one.bulk for one in spectra]]
    sizes = [sorted(one.outliers.abs().tolist(), reverse=True) for one in spectra]
    curves += [[size[i] for size in sizes] for i in range(3)]
    for i, curve in enumerate(curves):
        patch["data"][i]["y"] = drawing.positive(curve)
    drawing.set_log_range(patch, [value for curve in curves for value in curve])
    patch["layout"]["shapes"] = [drawing.upright(found.state.sink)]
    return patch
