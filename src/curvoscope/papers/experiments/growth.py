"""The sweeps over σ: what they measure, and their panels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.lower_layers import lower_layer_norms
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.papers.experiments.setting import Setting
from curvoscope.papers.experiments.top_layer import top_layer_norms

PARTS = ("outer", "functional", "total")
_LONG = {"Q": "query", "V": "value", "W": "weight"}


def measure(configuration: BaseModel, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Norms of the query and value blocks, all parts and layers, of one network; the top layer's are exact."""
    assert isinstance(configuration, Setting)
    depth = int(point.get("depth", 1))
    model = configuration.swept(seed, depth, float(point["sigma"]))
    tokens = configuration.additions()
    values = [
        MeasuredValue(depth, block, part, norm)
        for (block, part), norm in top_layer_norms(model, tokens, configuration.loss).items()
    ]
    for (layer, block, part), estimate in lower_layer_norms(model, tokens, configuration.loss, draw).items():
        values.append(MeasuredValue(layer + 1, block, part, estimate.value, estimate.stderr))
    return values


def log_grid(low: float, high: float, count: int = 20) -> list[float]:
    """10^linspace(low, high, count)."""
    return [float(sigma) for sigma in 10 ** np.linspace(low, high, count)]


def linear_grid(low: float, high: float, count: int = 20) -> list[float]:
    """linspace(low, high, count)."""
    return [float(sigma) for sigma in np.linspace(low, high, count)]


def panels(
    rows: Sequence[Row],
    predictions: Sequence[Growth],
    blocks: Sequence[str] = ("V", "Q"),
    parts: Sequence[str] = PARTS,
    where: Mapping[str, float | int | str] | None = None,
    log: bool = True,
    heading: str = "",
) -> list[Panel]:
    """A panel for each block and part: mean and standard error over the seeds, one curve per layer."""
    where = where or {}
    found = []
    for block in blocks:
        for part in parts:
            chosen = [
                row
                for row in rows
                if (row.found.block, row.found.part) == (block, part)
                and all(row.point.get(name) == value for name, value in where.items())
            ]
            layers = sorted({row.found.layer for row in chosen})
            series = [curve(chosen, layer, label=f"layer {layer}" if len(layers) > 1 else "") for layer in layers]
            series = [one for one in series if any(one.y)]
            title = f"{heading}{_LONG[block]}, {part}"
            if not series:
                found.append(Panel(title, x_log=log, y_log=log, note="exactly zero"))
                continue
            guides = [guide(series, p) for p in predictions if (p.block, p.part) == (block, part) and p.exponent]
            found.append(Panel(title, x_log=log, y_log=log, series=series, guides=guides[:1], marks=(1.0,)))
    return found


def panels_by_depth(rows: Sequence[Row], predictions: Sequence[Growth], **options: Any) -> list[Panel]:
    """The panels of each depth, with the predictions that speak of it."""
    return [
        panel
        for depth in sorted({int(row.point["depth"]) for row in rows})
        for panel in panels(
            rows,
            [one for one in predictions if one.where.get("depth", depth) == depth],
            where={"depth": depth},
            heading=f"depth {depth}: ",
            **options,
        )
    ]


def curve(rows: Sequence[Row], layer: int, label: str) -> Series:
    """Mean over the seeds with its standard error, and with that of the estimates: whichever is larger."""
    by_sigma: dict[float, list[Row]] = {}
    for row in rows:
        if row.found.layer == layer:
            by_sigma.setdefault(float(row.point["sigma"]), []).append(row)
    sigma = sorted(by_sigma)
    means, errors = [], []
    for group in (by_sigma[one] for one in sigma):
        values = np.array([row.found.value for row in group])
        over_seeds = float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
        estimated = float(np.sqrt(sum(row.found.stderr**2 for row in group))) / len(group)
        means.append(float(values.mean()))
        errors.append(max(over_seeds, estimated))
    return Series(label, sigma, means, errors, colour=layer - 1, stroke=layer - 1)


def guide(series: Sequence[Series], prediction: Growth) -> Guide:
    """The predicted slope, through the point of the first curve nearest to σ = 0.1 (in the middle, on a short grid)."""
    assert prediction.exponent is not None
    x = np.asarray(series[0].x)
    i = int(np.argmin(np.abs(np.log(x) - np.log(min(max(0.1, x[0] ** 0.5 * x[-1] ** 0.5), 0.3)))))
    y = series[0].y[i] * (x / x[i]) ** prediction.exponent
    return Guide(f"σ^{prediction.exponent}", x.tolist(), y.tolist())
