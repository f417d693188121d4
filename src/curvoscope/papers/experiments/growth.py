"""The sweeps over σ: what they measure, and their panels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from curvoscope.operators.block_matrix import PARTS
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.lower_layers import lower_layer_norms
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.papers.experiments.setting import Setting
from curvoscope.papers.experiments.summaries import curve, select
from curvoscope.papers.experiments.top_layer import top_layer_norms

_LONG = {"Q": "query", "V": "value", "W": "weight"}


def measure(configuration: Setting, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Norms of the query and value blocks, all parts and layers, of one network; the top layer's are exact."""
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
            chosen = select(rows, block=block, part=part, **where)
            layers = sorted({row.found.layer for row in chosen})
            labels = {layer: f"layer {layer}" if len(layers) > 1 else "" for layer in layers}
            curves = [curve(select(chosen, layer=layer), "sigma", labels[layer], layer - 1) for layer in layers]
            series = [one for one in curves if any(one.y)]
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


def guide(series: Sequence[Series], prediction: Growth) -> Guide:
    """The predicted slope, through the point of the first curve nearest to σ = 0.1 (in the middle, on a short grid)."""
    assert prediction.exponent is not None
    x = np.asarray(series[0].x)
    i = int(np.argmin(np.abs(np.log(x) - np.log(min(max(0.1, x[0] ** 0.5 * x[-1] ** 0.5), 0.3)))))
    y = series[0].y[i] * (x / x[i]) ** prediction.exponent
    return Guide(f"σ^{prediction.exponent}", x.tolist(), y.tolist())
