"""Eigenvalues, growth and the scalar model: a blank Plotly figure each, sent once, and what a state writes into it,
sent with every move."""

import math

import numpy as np

from curvoscope.explorer import drawing, pictures
from curvoscope.explorer.compute import CURVES, SIGMAS, SINKS, Curves, ExplorerSpectra, exponents
from curvoscope.explorer.drawing import Blank, Writes
from curvoscope.report import style

_CURVES = (
    ("Q, outer", style.BLUE, "circle"),
    ("Q, functional", style.ORANGE, "square"),
    ("QK, functional", style.PURPLE, "diamond"),
    ("V, outer", style.GREEN, "triangle-up"),
)


def blank() -> dict[str, Blank]:
    """The figures without data, by name."""
    return {"eigenvalues": _eigenvalues(), "growth": _growth(), "scalar": _scalar()}


def fill_curves(found: Curves) -> dict[str, Writes]:
    """What to write into growth and the scalar model, by name."""
    return {"growth": _fill_growth(found), "scalar": _fill_scalar(found)}


def fill_eigenvalues(found: ExplorerSpectra) -> dict[str, Writes]:
    """What to write into the eigenvalues, by name."""
    return {"eigenvalues": _fill_eigenvalues(found)}


def _eigenvalues() -> Blank:
    hover = "eigenvalue %{customdata:.5g}<br>rank %{x}<extra></extra>"
    pair = "T-functional %{customdata:.5g}<extra></extra>"
    sure = "in the bulk: %{customdata:.5g}<extra></extra>"
    common = {"type": "scatter"}
    data = [
        common
        | {"mode": "lines", "name": "Hessian", "line": {"color": style.BLUE, "width": 2}, "hovertemplate": hover},
        common
        | {
            "mode": "markers",
            "name": "T-functional ±",
            "marker": {"color": style.ORANGE, "symbol": "line-ew-open", "size": 11, "line": {"width": 2}},
            "hovertemplate": pair,
        },
        common
        | {
            "mode": "markers",
            "name": "pairs in the bulk",
            "marker": {"color": style.GREEN, "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            "hovertemplate": sure,
        },
    ]
    x = drawing.axis("rank, from the largest")
    y = drawing.axis("eigenvalue (signed log)", range=[-pictures.DECADES - 0.5, pictures.DECADES + 0.5])
    return {"data": data, "layout": drawing.layout(x, y, legend=True)}


def _fill_eigenvalues(found: ExplorerSpectra) -> Writes:
    descending, pairs, n = found.eigenvalues[::-1], found.pairs, len(found.eigenvalues)
    top = pictures.scale(max(float(np.abs(descending).max()), float(pairs.max(initial=0.0))))
    # each pair stands for d_k equal eigenvalues at either end: the marker is in their middle
    middle = (np.arange(len(pairs)) + 0.5) * found.state.d_k + 0.5
    sure = found.bulk if found.multiplicity else np.empty(0)
    places = [float(np.abs(descending - value).argmin()) + 1 for value in sure]
    series = (
        (np.arange(1, n + 1), descending),
        (np.concatenate([middle, n + 1 - middle]), np.concatenate([pairs, -pairs])),
        (np.array(places), sure),
    )
    ticks, words = pictures.ticks(top)
    writes: Writes = {
        "data.2.visible": len(sure) > 0,
        "layout.yaxis.tickvals": ticks,
        "layout.yaxis.ticktext": words,
        "layout.xaxis.range": [1 - 0.02 * n, 1.02 * n],
    }
    for i, (x, values) in enumerate(series):
        writes[f"data.{i}.x"] = x.tolist()
        writes[f"data.{i}.y"] = np.round(pictures.signed_log(values, top), 4).tolist()
        writes[f"data.{i}.customdata"] = values.tolist()
    return writes


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
    ends = [math.log10(SIGMAS[0]) - 0.15, math.log10(SIGMAS[-1]) + 0.15]
    x = drawing.axis("scale σ of X", type="log", dtick=1, range=ends)  # fixed: a moved line does not draw it anew
    y = drawing.axis("Frobenius norm", type="log", exponentformat="power")
    return {"data": [*measured, *guides, here, drawing.upright()], "layout": drawing.layout(x, y, legend=True)}


def _fill_growth(found: Curves) -> Writes:
    writes = drawing.log_range([*found.growth.flat, *found.here])
    powers = exponents(found.state)
    for i, (curve, power) in enumerate(zip(found.growth, powers, strict=True)):
        writes[f"data.{i}.y"] = drawing.positive(curve)
        word = "exactly zero" if not curve.any() else "" if power is None else f"σ{pictures.raised(int(power))}"
        writes[f"data.{i}.name"] = f"{_CURVES[i][0]}: {word}" if word else _CURVES[i][0]
        # the lines start where the attention is the same for all scales; behind a norm, past its ε
        start = SIGMAS.index(1.0) if found.state.norm == "pre" else 0
        line = 0 * curve if power is None else curve[start] * (np.array(SIGMAS) / SIGMAS[start]) ** power
        writes[f"data.{len(CURVES) + i}.y"] = drawing.positive(line)
    writes[f"data.{2 * len(CURVES)}.x"] = [found.state.sigma] * len(CURVES)
    writes[f"data.{2 * len(CURVES)}.y"] = drawing.positive(found.here)
    writes |= drawing.move_upright(2 * len(CURVES) + 1, found.state.sigma, writes)
    return writes


def _scalar() -> Blank:
    names = ("bulk ±", "outlier 1", "outlier 2", "outlier 3")
    styles = ((style.ORANGE, "dash"), (style.BLUE, "solid"), (style.GREEN, "dashdot"), (style.PURPLE, "dot"))
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
    x = drawing.axis("attention sink", range=[SINKS[0] - 0.4, SINKS[-1] + 0.4])  # fixed, as in growth
    y = drawing.axis("|eigenvalue|", type="log", exponentformat="power")
    return {"data": [*data, drawing.upright()], "layout": drawing.layout(x, y, legend=True)}


def _fill_scalar(found: Curves) -> Writes:
    spectra = found.scalar[:-1]
    curves = [[one.bulk for one in spectra]]
    sizes = [sorted(one.outliers.abs().tolist(), reverse=True) for one in spectra]
    curves += [[size[i] for size in sizes] for i in range(3)]
    writes = drawing.log_range([value for curve in curves for value in curve])
    for i, curve in enumerate(curves):
        writes[f"data.{i}.y"] = drawing.positive(curve)
    writes |= drawing.move_upright(len(curves), found.state.sink, writes)
    return writes
