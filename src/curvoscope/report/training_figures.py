"""The figure of a monitored training run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvoscope.errors import EmptyError
from curvoscope.report.figures import plain
from curvoscope.training.records import Record

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_BLUE, _ORANGE, _GREEN, _BLACK, _GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#999999"
_DASHED = (0, (5, 1.5))
_TEXT, _HEADING = 9, 10
_COLORS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", _BLACK, _GREY)

Number = Callable[[Record], float | None]


def training_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Loss; sharpness, critical sharpness and the edge 2/lr; share of functional and of negative curvature; entropy
    and spread of attention; all against the step."""
    from matplotlib.figure import Figure

    if not records:
        raise EmptyError("records", "there are none: nothing was measured")
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    loss, sharpness, shares, attention = figure.subplots(2, 2, sharex=True).flat
    _line(loss, records, lambda one: one.probe_loss, "loss on the probe", _BLACK)
    _line(loss, records, lambda one: one.gradient_norm, "gradient norm", _GREY, _DASHED)
    loss.set_yscale("log")
    _line(sharpness, records, lambda one: one.largest_eigenvalue.value, "$\\lambda_{max}$", _BLUE)
    _line(sharpness, records, lambda one: _value(one.critical_sharpness), "critical sharpness of the step", _GREEN)
    _line(sharpness, records, lambda one: one.edge, "edge 2/lr", _ORANGE, _DASHED)
    sharpness.set_yscale("log")
    _line(
        shares,
        records,
        _functional,
        "functional, of $|H_{bb}|_F^2$",
        _BLUE,
    )
    _line(shares, records, _negative, "negative, of $\\Sigma|\\lambda|$", _ORANGE, _DASHED)
    shares.set_ylim(0, 1)
    for layer, color in zip(records[0].attention, _COLORS * len(records[0].attention), strict=False):
        name = plain(layer)
        _line(attention, records, lambda one, at=layer: one.attention[at].entropy, f"entropy, {name}", color)  # type: ignore[misc]
        _line(attention, records, lambda one, at=layer: one.attention[at].variance, f"spread, {name}", color, _DASHED)  # type: ignore[misc]
    titles = ("loss and gradient", "sharpness", "shares of the curvature", "rows of attention")
    for axes, title in zip((loss, sharpness, shares, attention), titles, strict=True):
        axes.set_title(title, size=_HEADING)
        axes.tick_params(labelsize=_TEXT)
        if axes.lines:
            axes.legend(fontsize=_TEXT, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
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


def _first(records: Sequence[Record]) -> float:
    return records[0].largest_eigenvalue.value
