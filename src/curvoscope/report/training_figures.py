"""The figure of a monitored training run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvoscope.errors import EmptyError
from curvoscope.report import style
from curvoscope.training.records import Record

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_TEXT, _HEADING = 9, 10
_COLORS = (*style.COLOURS, style.GREY)

Number = Callable[[Record], float | None]


def training_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Loss; sharpness, critical sharpness and the edge 2/lr; share of functional and of negative curvature; entropy
    and spread of attention; all against the step."""
    if not records:
        raise EmptyError("records", "there are none: nothing was measured")
    figure = style.blank(9.6, 6.4)
    loss, sharpness, shares, attention = figure.subplots(2, 2, sharex=True).flat
    _line(loss, records, lambda one: one.probe_loss, "loss on the probe", style.BLACK)
    _line(loss, records, lambda one: one.gradient_norm, "gradient norm", style.GREY, style.DASHED)
    loss.set_yscale("log")
    _line(sharpness, records, lambda one: one.largest_eigenvalue.value, "$\\lambda_{max}$", style.BLUE)
    _line(sharpness, records, lambda one: _value(one.critical_sharpness), "critical sharpness of the step", style.GREEN)
    _line(sharpness, records, lambda one: one.edge, "edge 2/lr", style.ORANGE, style.DASHED)
    sharpness.set_yscale("log")
    _line(shares, records, _functional, "functional, of $|H_{bb}|_F^2$", style.BLUE)
    _line(shares, records, _negative, "negative, of $\\Sigma|\\lambda|$", style.ORANGE, style.DASHED)
    shares.set_ylim(0, 1)
    for layer, color in zip(records[0].attention, _COLORS * len(records[0].attention), strict=False):
        for quantity, word, stroke in (("entropy", "entropy", "-"), ("variance", "spread", style.DASHED)):
            number = partial(_of_rows, layer=layer, quantity=quantity)
            _line(attention, records, number, f"{word}, {style.plain(layer)}", color, stroke)
    titles = ("loss and gradient", "sharpness", "shares of the curvature", "rows of attention")
    for axes, title in zip((loss, sharpness, shares, attention), titles, strict=True):
        axes.set_title(title, size=_HEADING)
        axes.tick_params(labelsize=_TEXT)
        if axes.lines:
            axes.legend(fontsize=_TEXT, frameon=False)
        style.open_box(axes)
    for axes in (shares, attention):
        axes.set_xlabel("step", size=_HEADING)
    last = records[-1]
    where = "no learning rate given"
    if last.edge_ratio is not None:
        where = f"{last.edge_ratio:.2g} of the edge 2/lr at the end"
    figure.suptitle(
        f"$\\lambda_{{max}}$ went from {_first(records):.3g} to {last.largest_eigenvalue.value:.3g}: {where}"
    )
    return figure


def _line(
    axes: "matplotlib.axes.Axes",
    records: Sequence[Record],
    number: Number,
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


def _value(estimate: object) -> float | None:
    return None if estimate is None else float(estimate)  # type: ignore[arg-type]


def _negative(record: Record) -> float | None:
    return None if record.details is None else _value(record.details.negative_curvature_share)


def _functional(record: Record) -> float | None:
    return None if record.details is None else record.details.functional_share


def _of_rows(record: Record, layer: str, quantity: str) -> float | None:
    found: float | None = getattr(record.attention[layer], quantity)
    return found


def _first(records: Sequence[Record]) -> float:
    return records[0].largest_eigenvalue.value
