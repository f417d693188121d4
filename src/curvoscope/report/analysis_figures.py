"""Figures of the analyses along lines and over data: one function per figure, each returns a Matplotlib `Figure`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from curvoscope.analysis.convergence import Convergence, ConvergenceCurve
from curvoscope.analysis.landscape import Slice
from curvoscope.analysis.plateau import GradientPlateau
from curvoscope.analysis.power_law import PowerLaw
from curvoscope.analysis.scaling import Scaling
from curvoscope.analysis.taylor import Divergence, Taylor
from curvoscope.report import style
from curvoscope.report.style import Axes, Figure

_TEXT, _HEADING = 9, 10
_DIRECTIONS = {
    "gradient": "downhill along the gradient",
    "random": "along a random direction",
    "given": "along the given direction",
}
_QUANTITIES = {
    "largest_eigenvalue": "largest eigenvalue",
    "trace": "trace",
    "condition": "condition on the range",
    "effective_rank": "effective rank $|H|_F^2/|H|_2^2$",
    "functional_share": "functional share of $|H|_F^2$",
}


def taylor_figure(found: Taylor) -> Figure:
    """Actual and predicted change of the loss in size against the distance, and the error with its order below."""
    figure = style.blank(6.4, 6.4)
    top, bottom = figure.subplots(2, 1, sharex=True)
    radii = found.radii.numpy()
    for change, look in (
        (found.actual_change.numpy(), {"color": style.BLUE, "linewidth": 1.2}),
        (found.predicted_change.numpy(), {"color": style.ORANGE, "linestyle": style.DASHED, "linewidth": 1.6}),
    ):
        top.loglog(radii, np.where(change != 0, np.abs(change), np.nan), **look)
    actual = found.actual_change.numpy()
    for chosen, face, words in (
        (actual > 0, style.BLUE, "actual, loss rises"),
        (actual < 0, "white", "actual, loss falls"),
    ):
        if chosen.any():
            look = {"color": style.BLUE, "markerfacecolor": face, "markersize": 5, "label": words}
            top.plot(radii[chosen], np.abs(actual[chosen]), "o", **look)
    top.plot([], [], color=style.ORANGE, linestyle=style.DASHED, label="second order")
    top.set_ylabel("|change of the loss|", size=_HEADING)
    error = found.error.numpy()
    bottom.loglog(radii, np.where(error > 0, error, np.nan), "o-", color=style.BLUE, markersize=4, linewidth=1.2)
    bottom.plot(radii, found.rounding.numpy(), color=style.GREY, linestyle=style.DOTTED, label="rounding")
    if found.order is not None:
        ends = np.array([found.order.start, found.order.stop])
        inside = (radii >= ends[0] * 0.999) & (radii <= ends[1] * 1.001)
        middle = np.exp(np.log(error[inside] / radii[inside] ** 3).mean())
        label = f"slope 3; fitted: {found.order.value:.2f}"
        bottom.plot(ends, middle * ends**3, color=style.BLACK, linestyle=style.DASHED, label=label)
    bottom.set_ylabel("|actual - second order|", size=_HEADING)
    bottom.set_xlabel("distance from the weights", size=_HEADING)
    if found.radius is not None:
        top.axvline(found.radius, color=style.GREEN, linewidth=1.2, label=f"holds to {found.tolerance:.0%}")
        bottom.axvline(found.radius, color=style.GREEN, linewidth=1.2)
    where = _DIRECTIONS.get(found.direction.name, f"along the {found.direction.name} eigenvector")
    figure.suptitle(f"{_reach(found)}\n{where}", size=_HEADING + 1)
    _finish([top, bottom])
    return figure


def _reach(found: Taylor) -> str:
    if found.radius is None:
        return f"The second-order prediction is off by more than {found.tolerance:.0%} at every distance"
    beyond = "at least " if found.reaches_further else ""
    return f"The second-order prediction holds to {found.tolerance:.0%} up to {beyond}{found.radius:.2g}"


def landscape_figure(found: Slice) -> Figure:
    """The loss on a line next to its quadratic, or on a plane as a map with the quadratic's contours."""
    axes_names = [_axis(one.name, one.eigenvalue) for one in found.directions]
    figure = style.blank(6.4, 4.4 if len(axes_names) == 1 else 5.6)
    axes = figure.subplots()
    places = found.coordinates.numpy()
    if len(axes_names) == 1:
        axes.plot(places, found.losses.numpy(), "o-", color=style.BLUE, markersize=3, linewidth=1.6, label="loss")
        axes.plot(places, found.quadratic.numpy(), color=style.ORANGE, linestyle=style.DASHED, label="second order")
        axes.plot([0], [found.loss], "x", color=style.BLACK, markersize=8, label="the weights")
        axes.set_ylabel("loss", size=_HEADING)
        _finish([axes])
    else:
        low, high = float(found.losses.min()), float(found.losses.max())
        levels = np.linspace(low, high if high > low else low + 1, 12)
        image = axes.contourf(places, places, found.losses.numpy().T, levels, cmap="viridis")
        if levels[1] < float(found.quadratic.max()) and float(found.quadratic.min()) < levels[-1]:
            look: dict[str, Any] = {"colors": "white", "linestyles": "dashed", "linewidths": 0.9}
            axes.contour(places, places, found.quadratic.numpy().T, levels[1:], **look)
        axes.plot([0], [0], "x", color="white", markersize=8, markeredgewidth=2)
        style.colour_bar(image, axes, "loss (dashed: second order, the same levels)", _HEADING, _TEXT)
        axes.set_ylabel(axes_names[1], size=_HEADING)
        axes.set_aspect("equal")
        axes.tick_params(labelsize=_TEXT)
    axes.set_xlabel(axes_names[0], size=_HEADING)
    off = float((found.losses - found.quadratic).abs().max())
    span = float(found.losses.max() - found.losses.min())
    share = f"off by up to {off / span:.1%} of the range of the loss" if span else "exact"
    figure.suptitle(f"The loss around the weights\nThe quadratic is {share}", size=_HEADING + 1)
    return figure


def _axis(name: str, eigenvalue: object) -> str:
    if eigenvalue is not None:
        return f"{name} eigenvector, λ = {float(eigenvalue):.3g}"  # type: ignore[arg-type]
    return f"distance {_DIRECTIONS.get(name, name)}"


def convergence_figure(found: Convergence) -> Figure:
    """|L_{k+b} - L_k| against k with its laws, bound and random numbers, one panel per distance; then the gradient."""
    count = len(found.curves) + 1
    figure = style.blank(0.8 + 3.4 * count, 4.8)
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes, curve in zip(panels, found.curves, strict=False):
        _changes(axes, curve, found.batch)
        axes.sharey(panels[0])
    _gradient(panels[-1], found.plateau)
    for axes in panels[1:-1]:
        axes.set_ylabel("")
    figure.suptitle("The rate 1/k is arithmetic: random numbers of the same spread also have it", size=_HEADING + 1)
    _finish(panels[-1:])
    handles, labels = panels[0].get_legend_handles_labels()
    _clean(panels[:-1])
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize=_TEXT, frameon=False)
    return figure


def _changes(axes: Axes, curve: ConvergenceCurve, batch: int) -> None:
    k = curve.counts.numpy()
    axes.loglog(k, curve.mean.numpy(), "o", color=style.BLUE, markersize=4, label="measured, mean")
    axes.plot(k, curve.law.numpy(), color=style.BLUE, linewidth=1.2, label="law of the spread")
    axes.plot(k, curve.null.numpy(), "x", color=style.GREY, markersize=5, label="random numbers")
    axes.plot(k, curve.rms.numpy(), "s", color=style.ORANGE, markersize=3.5, label="measured, rms")
    axes.plot(
        k, curve.second_order_rms.numpy(), color=style.ORANGE, linestyle=style.DASHED, label="second-order law, rms"
    )
    if curve.bound is not None:
        axes.plot(k, curve.bound.numpy(), color=style.BLACK, linestyle=style.DOTTED, label="bound")
    place = "at the weights" if curve.distance == 0 else f"at τ = {curve.distance:g} from them"
    slopes = f"slope {curve.slope.value:.2f}, random numbers {curve.null_slope.value:.2f}"
    axes.set_title(f"{place}\n{slopes}", size=_HEADING)
    axes.set_xlabel("samples k", size=_HEADING)
    axes.set_ylabel(f"$|L_{{k+{batch}}} - L_k|$", size=_HEADING)


def _gradient(axes: Axes, plateau: GradientPlateau) -> None:
    k = plateau.counts.numpy()
    seen = np.where(plateau.norms.numpy() > 1e-12 * plateau.trace**0.5, plateau.norms.numpy(), np.nan)
    axes.loglog(k, seen, "o", color=style.GREEN, markersize=4, label="measured")
    axes.plot(k, np.where(np.isnan(seen), np.nan, plateau.law.numpy()), color=style.GREEN, linewidth=1.2, label="law")
    axes.plot(k, (plateau.trace / k) ** 0.5, color=style.GREY, linestyle=style.DASHED, label="noise alone")
    words = "stationary" if plateau.is_stationary else "not stationary"
    axes.set_title(f"gradient: {words}\np = {plateau.p_value:.2g}", size=_HEADING)
    axes.set_xlabel("samples k", size=_HEADING)
    axes.set_ylabel("$|\\nabla L_k|$", size=_HEADING)


def scaling_figure(found: Scaling, size: str = "size") -> Figure:
    """Each quantity against the size, its power law and the law's band; one panel per measured quantity."""
    quantities = [name for name in _QUANTITIES if found.values(name)]
    columns = min(3, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    figure = style.blank(0.4 + 3.1 * columns, 0.9 + 2.6 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, quantity in zip(panels, quantities, strict=False):
        points = [(n, value) for n, values in found.values(quantity).items() for value in values]
        axes.plot(*np.array(points).T, "o", color=style.BLUE, markersize=4)
        axes.set_xscale("log")
        axes.set_xticks(list(found.measurements), [f"{n:g}" for n in found.measurements])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(size, size=_HEADING)
        law = found.laws.get(quantity)
        if law is None:
            axes.set_title(f"{_QUANTITIES[quantity]}\nno power law", size=_HEADING)
            continue
        axes.set_yscale("log")
        _law(axes, law)
        low, high = law.interval
        axes.set_title(f"{_QUANTITIES[quantity]}\nexponent {law.exponent:.2f} ({low:.2f} to {high:.2f})", size=_HEADING)
    for axes in panels[len(quantities) :]:
        axes.set_visible(False)
    level = next((f"{law.level:.0%}" for law in found.laws.values()), "no")
    figure.suptitle(f"Curvature against {size}: power laws with {level} bands", size=_HEADING + 1)
    _clean(panels)
    return figure


def _law(axes: Axes, law: PowerLaw) -> None:
    x = np.geomspace(min(law.sizes), max(law.sizes), 60)
    band = [law(float(n)) for n in x]
    axes.fill_between(
        x, [one.low for one in band], [one.high for one in band], color=style.ORANGE, alpha=0.25, linewidth=0
    )
    axes.plot(x, [one.value for one in band], color=style.ORANGE, linestyle=style.DASHED, linewidth=1.4)


def divergence_figure(found: Divergence) -> Figure:
    """Losses of gradient descent by step at each learning rate, and loss at the end over that at the start."""
    from matplotlib import colormaps

    figure = style.blank(8.4, 4.2)
    left, right = figure.subplots(1, 2)
    factors = (found.learning_rates / found.critical_learning_rate).numpy()
    above = found.losses.numpy() - found.loss
    above = np.where(np.isfinite(above) & (above > 0), above, np.nan)
    for i, (factor, row) in enumerate(zip(factors, above, strict=True)):
        color, stroke = ("Oranges", "-") if factor > 1 else ("Blues", style.DASHED)
        shade = colormaps[color](0.45 + 0.5 * i / max(1, len(factors) - 1))
        left.plot(row, color=shade, linestyle=stroke, linewidth=1.4, label=f"{factor:.3g}")
    left.set_yscale("log")
    left.set_xlabel("step", size=_HEADING)
    left.set_ylabel("loss above that of the weights", size=_HEADING)
    left.xaxis.get_major_locator().set_params(integer=True)
    growth, rises = found.growth.numpy(), found.rises.numpy()
    x = np.linspace(min(0.5, factors.min()), max(1.5, factors.max()), 100)
    right.plot(x, (1 - 2 * x) ** 2, color=style.BLACK, linewidth=1, label="$(1 - \\eta\\lambda_{max})^2$")
    for chosen, color, mark, label in ((~rises, style.BLUE, "o", "falls"), (rises, style.ORANGE, "^", "rises")):
        seen = chosen & np.isfinite(growth)
        right.plot(factors[seen], growth[seen], mark, color=color, markersize=6, label=f"loss {label}")
    right.axvline(1, color=style.GREY, linewidth=1, linestyle=style.DASHED)
    right.axhline(1, color=style.GREY, linewidth=1, linestyle=style.DASHED)
    right.set_xlabel("learning rate × $\\lambda_{max}$ / 2", size=_HEADING)
    right.set_ylabel("loss above that of the weights:\nafter one step / at the start", size=_HEADING)
    exactly = "exactly" if found.agrees else "not exactly"
    critical = found.critical_learning_rate
    figure.suptitle(f"The loss rises {exactly} above the critical learning rate, {critical:.3g}", size=_HEADING + 1)
    _finish([right])
    _clean([left])
    figure.legend(
        *left.get_legend_handles_labels(),
        title="left: learning rate × $\\lambda_{max}$ / 2",
        title_fontsize=_TEXT,
        fontsize=_TEXT,
        frameon=False,
        loc="outside lower center",
        ncols=min(8, len(factors)),
    )
    return figure


def _finish(panels: Sequence[Axes]) -> None:
    """A legend in each panel, and what `_clean` does."""
    for axes in panels:
        axes.legend(fontsize=_TEXT, frameon=False)
    _clean(panels)


def _clean(panels: Sequence[Axes]) -> None:
    """Small ticks, and no box around the panel."""
    for axes in panels:
        axes.tick_params(labelsize=_TEXT)
        style.open_box(axes)
