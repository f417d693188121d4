"""Figure 1: the Hessian of the whole block and of its attention layer, entry by entry."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Image, Panel
from curvoscope.papers.experiments.setting import PaperLayer, loss_of
from curvoscope.papers.experiments.summaries import claim, geometric_mean, pixels, select
from curvoscope.papers.networks import GPT2

_PIXELS = 120
_ATTENTION = ("W_Q", "W_K", "W_V", "W_O")
_AT_ONCE = 64  # columns of the Hessian


def measure(configuration: PaperLayer, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Median |entry| and norm of every block; of seed 0 also the picture: the mean |entry| of each pixel."""
    model = configuration.network(seed)
    sizes = {name.split(".")[-1]: p.numel() for name, p in model.named_parameters()}
    H = dense_hessian(model, configuration.additions())
    edges = dict(zip(sizes, pairwise(np.cumsum([0, *sizes.values()]).tolist()), strict=True))
    values = []
    for i, row in enumerate(edges):
        for column in list(edges)[i:]:
            entries = H[slice(*edges[row]), slice(*edges[column])]
            name = f"{row} {column}"
            values.append(MeasuredValue(1, name, "total", float(np.median(entries.abs().numpy())), quantity="median"))
            values.append(MeasuredValue(1, name, "total", float(entries.norm())))
    if seed == 0:
        attention = slice(edges[_ATTENTION[0]][0], edges[_ATTENTION[-1]][1])
        for name, matrix in (("block", H), ("attention", H[attention, attention])):
            values += curve_values("pixel", pixels(matrix, _PIXELS), block=name)
    return values


def dense_hessian(model: GPT2, tokens: Tensor) -> Tensor:
    """The Hessian over all parameters, by double backward."""
    parameters = list(model.requires_grad_(True).parameters())
    slopes = torch.autograd.grad(loss_of(model, tokens)(), parameters, create_graph=True)
    slope = torch.cat([one.flatten() for one in slopes])
    columns = []
    for start in range(0, len(slope), _AT_ONCE):
        unit = torch.eye(len(slope), dtype=slope.dtype)[start : start + _AT_ONCE]
        found = torch.autograd.grad(
            slope, parameters, unit, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        pairs = zip(found, parameters, strict=True)
        rows = [(torch.zeros(len(unit), *p.shape) if f is None else f).to(slope.dtype).flatten(1) for f, p in pairs]
        columns.append(torch.cat(rows, 1))
    return torch.cat(columns).detach()


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    query, value = (select(rows, block=f"W_{name} W_{name}", quantity="median") for name in "QV")
    ratio = geometric_mean(query) / geometric_mean(value)
    statement = "query entries are significantly smaller than value entries: ratio of the medians"
    return [claim(query, statement, ratio, ratio < 0.1)]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    sizes = {name.split(".")[-1]: p.numel() for name, p in PaperLayer().network(0).named_parameters()}
    attention = {name: sizes[name] for name in _ATTENTION}
    found = []
    for name, title, shown in (("block", "whole block", sizes), ("attention", "attention", attention)):
        pixels = [row.found.value for row in select(rows, block=name, quantity="pixel")]
        values = np.array(pixels).reshape(_PIXELS, _PIXELS)
        values = np.log10(values, out=np.full(values.shape, np.nan), where=values > 0)
        borders = np.cumsum(list(shown.values())) * _PIXELS / sum(shown.values())
        labels = [label if size > 100 else "" for label, size in shown.items()]
        found.append(Panel(title, image=Image(values, borders.tolist(), labels, "log₁₀ mean |entry|")))
    return found


FIGURE = declared("fig1", PaperLayer(), [{"network": "gpt2"}], measure, _verdicts, _panels)
