"""The block paper's entry maps: the Hessian of a vision Transformer over all its weights, before and after training."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from curvoscope.blocks import Blocks
from curvoscope.curvature import hessian
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.digits import GROUPS, Digits, groups_of
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Image, Panel
from curvoscope.papers.experiments.summaries import claim, geometric_mean, pixels, select

_PIXELS = 120
_FLOOR = 1e-12  # of the largest entry: what is smaller is zero by a symmetry, and rounding
_FLAT = {
    "key bias": "the key's bias",
    "output": "a shift of all columns of the output weights (before LN1)",
    "feed-forward": "a shift of all columns of the second feed-forward weights (before LN2)",
    "head": "a shift of all logits",
}


def measure(configuration: Digits, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Median |entry| of every pair of groups, and the flat directions; of seed 0 also the picture."""
    model = configuration.network(seed)
    values = []
    for step in configuration.training(model, seed):
        groups = groups_of(model)
        H = dense_hessian(configuration, model)
        names = list(groups)
        edges = dict(zip(names, pairwise(borders(groups)), strict=True))
        numbers: dict[tuple[str, str], float] = {}
        for i, row in enumerate(names):
            for column in names[i:]:
                entries = H[slice(*edges[row]), slice(*edges[column])]
                numbers[f"{row}, {column}", "median"] = float(np.median(entries.abs().numpy()))
        norm = float(torch.linalg.matrix_norm(H, 2))
        for name in _FLAT:
            directions = flat_directions(groups[name], name)
            numbers[name, "flat"] = float((H[:, slice(*edges[name])] @ directions).norm(dim=0).max()) / norm
        values += [MeasuredValue(1, name, "total", n, quantity=q, at=float(step)) for (name, q), n in numbers.items()]
        if seed == 0:
            values += curve_values(f"pixel {step}", pixels(H, _PIXELS))
            sizes = {name: float(stop - start) for name, (start, stop) in edges.items()}
            values += [MeasuredValue(1, name, "total", n, quantity="size", at=float(step)) for name, n in sizes.items()]
    return values


def dense_hessian(configuration: Digits, model: torch.nn.Module) -> Tensor:
    """The Hessian of the mean loss on the probe over all weights (P, P), group after group."""
    blocks = Blocks(block for group in groups_of(model).values() for block in group.values())
    return hessian(model, CrossEntropy(), [configuration.probe()], blocks, method="autodiff").total.dense()


def borders(groups: dict[str, Blocks]) -> list[int]:
    """0, and the end of each group."""
    ends: list[int] = np.cumsum([0, *(sum(group.sizes.values()) for group in groups.values())]).tolist()
    return ends


def flat_directions(group: Blocks, name: str) -> Tensor:
    """Unit vectors (size, n) of a group along which the loss is constant from any weights on, so that H v = 0.

    The softmax of attention does not see a number added to all scores of a query (the key's bias), a LayerNorm none
    added to all entries of a row (u 1^T added to W_O or W_down, a number to all of their biases), the softmax of the
    loss none added to all logits.
    """
    columns = []
    start, total = 0, sum(group.sizes.values())
    for block_name, block in group.items():
        entries = torch.arange(start, start + block.size).view(block.shape)
        start += block.size
        if name == "key bias":
            lines = entries.view(-1, 1)
        elif name == "head":  # stored as (classes, d): logits are along the rows
            lines = entries.T if block.shape[0] > 1 else entries
        elif name == "feed-forward" and not block_name.endswith("down"):
            continue
        else:
            lines = entries
        found = torch.zeros(total, len(lines), dtype=torch.float64)
        found[lines.T, torch.arange(len(lines))] = lines.shape[1] ** -0.5
        columns.append(found)
    return torch.cat(columns, 1)


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    rows, found = _without_pixels(rows), []
    for step in _steps(rows):
        when = f"after {step:g} steps" if step else "at initialisation"
        medians = {name: select(rows, block=f"{name}, {name}", quantity="median", at=step) for name in GROUPS}
        sizes = {name: geometric_mean(chosen) for name, chosen in medians.items() if name != "key bias"}
        ratio = sizes["value"] / max(sizes["query"], sizes["key"])
        statement = f"{when}: value has the largest entries of query, key and value (median over the next largest)"
        found.append(claim(medians["value"], statement, ratio, ratio > 1))
        most, least = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        orders = float(np.log10(sizes[most] / sizes[least]))
        statement = f"{when}: groups differ by orders of magnitude ({most} over {least}, log10 of the medians)"
        found.append(claim(medians[most], statement, orders, orders > 1))
        for name, what in _FLAT.items():
            chosen = select(rows, block=name, quantity="flat", at=step)
            worst = max(row.found.value for row in chosen)
            found.append(claim(chosen, f"{when}: flat along {what}: |Hv| / |H|", worst, worst < _FLOOR, 0.0))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    maps, tables = [], []
    pictures, rows = rows, _without_pixels(rows)
    for step in _steps(rows):
        when = "trained" if step else "initial"
        shades = [row.found.value for row in select(pictures, quantity=f"pixel {step:.0f}")]
        sizes = {name: select(rows, block=name, quantity="size", at=step)[0].found.value for name in GROUPS}
        ends = np.cumsum(list(sizes.values())) * _PIXELS / sum(sizes.values())
        names = [name if size > 0.03 * sum(sizes.values()) else "" for name, size in sizes.items()]
        values = _logarithm(np.array(shades).reshape(_PIXELS, _PIXELS))
        maps.append(Panel(f"entries, {when}", image=Image(values, ends.tolist(), names, "log₁₀ mean |entry|")))
        table = np.zeros((len(sizes), len(sizes)))
        for i, row in enumerate(sizes):
            for j, column in list(enumerate(sizes))[i:]:
                chosen = select(rows, block=f"{row}, {column}", quantity="median", at=step)
                table[i, j] = table[j, i] = np.median([one.found.value for one in chosen])
        ends = np.arange(1.0, len(sizes) + 1)
        image = Image(_logarithm(table), ends.tolist(), list(sizes), "log₁₀ median |entry|")
        tables.append(Panel(f"groups, {when}", image=image))
    return maps + tables


def _logarithm(values: np.ndarray) -> np.ndarray:
    """log10, and NaN (blank) for what a symmetry makes zero."""
    return np.log10(values, out=np.full(values.shape, np.nan), where=values > _FLOOR * values.max())


def _without_pixels(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.found.quantity.startswith("pixel")]


def _steps(rows: Sequence[Row]) -> list[float]:
    return sorted({row.found.at for row in select(rows, quantity="median")})


FIGURE = declared(
    "gap-entries", Digits(d=8, hidden=32, rate=0.01, images=48), [{"network": "vit"}], measure, _verdicts, _panels
)
