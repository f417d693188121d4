"""Figures of a monitored training run: its course, its steps, what is measured more seldom (trace, λ min, norms)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from curvoscope.errors import EmptyError
from curvoscope.estimate import Estimate
from curvoscope.report import style
from curvoscope.report.style import Axes, Figure
from curvoscope.training.records import Details, Record
from curvoscope.training.updates import Update

_TEXT, _HEADING, _LARGE = 9, 10, 11
_ABOVE = 3  # labels in one row above a panel
ROUNDING = 1e-7  # of the largest norm: models are trained in float32
_COLORS = (*style.COLOURS, style.GREY)

RecordNumber = Callable[[Record], float | None]


def training_figure(records: Sequence[Record]) -> Figure:
    """Loss; sharpness, critical sharpness and the edge 2/lr; share of functional and of negative curvature; entropy
    and spread of attention; all against the step."""
    if not records:
        raise EmptyError("records", "there are none: nothing was measured")
    figure = style.blank(9.6, 6.4)
    loss, sharpness, shares, attention = figure.subplots(2, 2, sharex=True).flat
    _line(loss, records, lambda one: one.probe_loss, "loss on the probe", style.BLACK)
    _line(loss, records, lambda one: one.gradient_norm, "gradient norm", style.GREY, style.DASHED)
    style.logarithmic(loss)
    _line(sharpness, records, lambda one: one.largest_eigenvalue.value, "$\\lambda_{max}$", style.BLUE)
    _line(sharpness, records, lambda one: _value(one.critical_sharpness), "critical sharpness of the step", style.GREEN)
    _line(sharpness, records, lambda one: one.edge, "edge 2/lr", style.ORANGE, style.DASHED)
    style.logarithmic(sharpness)
    _line(shares, records, _functional, "functional, of $|H_{bb}|_F^2$", style.BLUE)
    _line(shares, records, _negative, "negative, of $\\Sigma|\\lambda|$", style.ORANGE, style.DASHED)
    shares.set_ylim(0, 1)
    for layer, color in zip(records[0].attention, _COLORS * len(records[0].attention), strict=False):
        for quantity, word, stroke in (("entropy", "entropy", "-"), ("variance", "spread", style.DASHED)):
            number = partial(_of_rows, layer=layer, quantity=quantity)
            _line(attention, records, number, f"{word}, {style.plain(layer)}", color, stroke)
    titles = ("loss and gradient", "sharpness", "shares of the curvature", "rows of attention")
    for axes, title in zip((loss, sharpness, shares, attention), titles, strict=True):
        _entitle(axes, title)
        axes.tick_params(labelsize=_TEXT)
        if not axes.lines:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "not measured", size=_TEXT, ha="center", transform=axes.transAxes)
        style.open_box(axes)
    for axes in (shares, attention):
        _along_steps(axes, _HEADING)
    first, last = records[0].largest_eigenvalue.value, records[-1]
    where = "no learning rate given"
    if last.edge_ratio is not None:
        where = f"{last.edge_ratio:.2g} times the edge 2/lr at the end"
    figure.suptitle(f"$\\lambda_{{max}}$ went from {first:.3g} to {last.largest_eigenvalue.value:.3g}: {where}")
    return figure


def _line(
    axes: Axes,
    records: Sequence[Record],
    number: RecordNumber,
    label: str,
    color: str,
    stroke: object = "-",
) -> None:
    """A point for each record that has the number."""
    points = [(one.step, value) for one in records if (value := number(one)) is not None]
    if points:
        steps, values = np.array(points, dtype=float).T
        axes.plot(steps, values, "o", color=color, markersize=2.5)
        axes.plot(steps, values, color=color, linestyle=stroke, linewidth=1.3, label=label)


def _entitle(axes: Axes, title: str) -> None:
    """The title and the legend above the curves; a long legend, as of the attention of many layers, among them."""
    known = len(axes.get_legend_handles_labels()[1])
    above = 0 < known <= _ABOVE
    axes.set_title(title, size=_HEADING, pad=22 if above else 6)
    if above:
        place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.0}
        axes.legend(fontsize=_TEXT, frameon=False, ncols=known, columnspacing=1.2, **place)
    elif known:
        axes.legend(fontsize=_TEXT, framealpha=0.8, edgecolor="none")


def _along_steps(axes: Axes, size: int) -> None:
    """The horizontal axis counts steps: whole numbers."""
    from matplotlib import ticker

    axes.set_xlabel("step", size=size)
    axes.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def _value(estimate: object) -> float | None:
    return None if estimate is None else float(estimate)  # type: ignore[arg-type]


def _negative(record: Record) -> float | None:
    return None if record.details is None else _value(record.details.negative_curvature_share)


def _functional(record: Record) -> float | None:
    return None if record.details is None else record.details.functional_share


def _of_rows(record: Record, layer: str, quantity: str) -> float | None:
    found: float | None = getattr(record.attention[layer], quantity)
    return found


def _of_step(quantity: str) -> RecordNumber:
    return lambda record: None if record.update is None else getattr(record.update, quantity)


def detailed(records: Sequence[Record]) -> list[tuple[int, Details]]:
    """The steps whose details were measured."""
    return [(one.step, one.details) for one in records if one.details is not None]


def stepped(records: Sequence[Record]) -> list[tuple[int, Update]]:
    """The measurements at which a step of the optimizer was recorded."""
    return [(one.step, one.update) for one in records if one.update is not None]


def trace_figure(records: Sequence[Record]) -> Figure:
    """Trace and smallest eigenvalue with 95 % intervals."""
    known = _known(records)
    figure = style.blank(9.6, 3.4)
    for axes, (label, name) in zip(
        figure.subplots(1, 2), (("trace", "trace"), ("$\\lambda_{min}$", "smallest_eigenvalue")), strict=True
    ):
        found: list[Estimate] = [getattr(details, name) for _, details in known]
        look = {"color": style.BLUE, "marker": "o", "markersize": 3, "linewidth": 1.2}
        axes.errorbar([step for step, _ in known], *style.with_bars(found), **look)
        axes.axhline(0, color="#666666", linewidth=0.8, linestyle=":")
        axes.set_title(label, size=_LARGE, loc="left")
        _along_steps(axes, _TEXT + 1)
        axes.tick_params(labelsize=_TEXT)
        style.open_box(axes)
    first, last = known[0][1].trace.value, known[-1][1].trace.value
    figure.suptitle(f"The trace went from {first:.3g} to {last:.3g}", size=_LARGE + 1)
    return figure


def block_map(records: Sequence[Record]) -> Figure:
    """|H_bb|_F of both parts: one row per block, one column per measurement, one logarithmic colour scale."""
    from matplotlib import colormaps

    known = _known(records)
    names = list(known[-1][1].blocks)
    if not names:
        raise EmptyError("records", "have no blocks")
    tables = {
        part: np.array([[getattr(details.blocks[name], part).value for _, details in known] for name in names])
        for part in ("outer", "functional")
    }
    everything = np.concatenate(list(tables.values()))
    seen = everything[everything > ROUNDING * everything.max()]
    scale = style.log_scale(seen)
    figure = style.blank(9.6, 1.8 + 0.24 * len(names))
    grid = figure.subplots(1, 2, sharey=True)
    for axes, (part, table) in zip(grid, tables.items(), strict=True):
        colors = colormaps["viridis"].with_extremes(under=style.ZERO)
        image = axes.imshow(np.maximum(table, 1e-300), cmap=colors, norm=scale, aspect="auto", interpolation="nearest")
        axes.set_title(f"{part} part", size=_LARGE, loc="left")
        _steps_below(axes, [step for step, _ in known])
        axes.set_yticks(range(len(names)), [style.plain(name) for name in names], size=_TEXT)
    style.colour_bar(image, grid, "$\\|H_{bb}\\|_F$", _LARGE, _TEXT, aspect=25)
    figure.suptitle("Norms of the diagonal blocks (grey: zero to rounding)", size=_LARGE + 1)
    return figure


def updates_figure(records: Sequence[Record]) -> Figure:
    """The optimizer's steps: predicted and measured change of the loss, the curvature met, each block's part of it."""
    known = stepped(records)
    if not known:
        raise EmptyError("records", "no step of an optimizer was recorded; call watch(optimizer)")
    names = list(known[-1][1].blocks)
    figure = style.blank(9.6, 3.6 + 0.24 * len(names))
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 0.6 + 0.24 * len(names)))
    change, sharpness, parts = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    _line(change, records, _of_step("change"), "measured", style.BLACK)
    _line(change, records, _of_step("predicted"), "second order", style.BLUE, style.DASHED)
    change.axhline(0, color="#666666", linewidth=0.8, linestyle=":")
    _line(sharpness, records, lambda one: one.largest_eigenvalue.value, "$\\lambda_{max}$", style.GREY)
    _line(sharpness, records, _of_step("sharpness"), "met by the step", style.BLUE)
    _line(sharpness, records, lambda one: one.edge, "edge 2/lr", style.ORANGE, style.DASHED)
    sharpness.set_yscale("symlog", linthresh=max(1e-3, min(abs(update.sharpness) for _, update in known)))
    for axes, title in ((change, "change of the loss by the step"), (sharpness, "curvature along the step")):
        _entitle(axes, title)
        axes.tick_params(labelsize=_TEXT)
        _along_steps(axes, _TEXT + 1)
        style.open_box(axes)
    _shares_map(parts, known, names)
    last = known[-1][1]
    figure.suptitle(
        f"The last step changed the loss by {last.change:.3g} (second order: {last.predicted:.3g})", size=_LARGE + 1
    )
    return figure


def _shares_map(axes: Axes, known: Sequence[tuple[int, Update]], names: Sequence[str]) -> None:
    from matplotlib import colors

    table = np.array([[update.blocks[name].curvature / update.length**2 for _, update in known] for name in names])
    largest = float(np.abs(table).max()) or 1.0
    scale = colors.SymLogNorm(largest / 100, vmin=-largest, vmax=largest)
    image = axes.imshow(table, cmap="RdBu_r", norm=scale, aspect="auto", interpolation="nearest")
    axes.set_title("contribution of each block to the curvature along the step (blue: negative)", size=_HEADING)
    _steps_below(axes, [step for step, _ in known])
    axes.set_yticks(range(len(names)), [style.plain(name) for name in names], size=_TEXT)
    style.colour_bar(image, axes, "$\\delta_b (H\\delta)_b/|\\delta|^2$", _HEADING, _TEXT, aspect=25)


def _steps_below(axes: Axes, steps: Sequence[int]) -> None:
    """At most six steps below the columns of a heat map."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).round().astype(int))
    axes.set_xticks(places, [str(steps[place]) for place in places], size=_TEXT)
    axes.tick_params(length=0)
    axes.set_xlabel("step", size=_TEXT + 1)


def _known(records: Sequence[Record]) -> list[tuple[int, Details]]:
    known = detailed(records)
    if not known:
        raise EmptyError("records", "no details were measured; give a larger budget or more steps")
    return known
