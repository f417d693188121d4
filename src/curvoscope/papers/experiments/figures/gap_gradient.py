"""The block paper's assumption of stationary weights: the norm of the gradient against the number of samples."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvoscope.analysis.plateau import LEVEL, gradient_plateau
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.digits import Digits
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.summaries import claim, curve, mean, select

_WEIGHTS = ("initial", "trained", "descended")
_STATIONARY = {"initial": 0.0, "trained": 1.0, "descended": 1.0}
_PLACES = 24  # numbers of samples at which the running sums are looked at
_PRECISIONS = (torch.float64, torch.bfloat16)


class GapGradientConfiguration(Digits):
    """`descent`: iterations of L-BFGS on the probe, from the trained weights to stationary ones. The running sums go
    `passes` times over the probe, `group` images at a time, as many additions as the paper's 26 passes have."""

    images: int = 512
    descent: int = 150
    group: int = 32
    passes: int = 625


def measure(configuration: GapGradientConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The plateau and its test at three weights; at trained ones also the norm of running sums in two precisions."""
    c = configuration
    model = c.network(seed)
    patches, labels = c.probe()
    values = []
    for step in c.training(model, seed):
        values += _plateau(model, patches, labels, "trained" if step else "initial")
    gradients = _gradients(model, patches, labels, c.group)
    for precision in _PRECISIONS:
        name = str(precision).removeprefix("torch.")
        counts, norms = zip(*running_norms(gradients, c.passes, precision), strict=True)
        values += curve_values(name, norms, (count * c.group for count in counts), "trained")
    descend(model, patches, labels, c.descent)
    return values + _plateau(model, patches, labels, "descended")


def _plateau(model: nn.Module, patches: Tensor, labels: Tensor, weights: str) -> list[MeasuredValue]:
    plateau = gradient_plateau(model, CrossEntropy(), [(patches, labels)])
    scalars = {
        "full_norm": plateau.full_norm,
        "noise_norm": plateau.noise_norm,
        "p_value": plateau.p_value,
        "sample_norm": math.sqrt(plateau.full_norm**2 + plateau.trace),
        "law_ratio": float((plateau.norms / plateau.law).mean()),
    }
    values = named_values(scalars, weights)
    shown = (
        torch.logspace(0, math.log10(len(plateau.counts)), _PLACES // 2, dtype=torch.float64).round().long().unique()
    )
    for name, numbers in {"norm": plateau.norms, "law": plateau.law}.items():
        values += curve_values(name, numbers[shown - 1].tolist(), plateau.counts[shown - 1].tolist(), weights)
    return values


def descend(model: nn.Module, patches: Tensor, labels: Tensor, iterations: int) -> None:
    """Full-batch L-BFGS: to weights whose gradient on these images is far below its noise."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=iterations, history_size=50, tolerance_grad=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(patches), labels)
        loss.backward()
        return loss

    optimizer.step(closure)


def running_norms(gradients: Tensor, passes: int, precision: torch.dtype) -> list[tuple[int, float]]:
    """|mean of the first n gradients|, the sum over `passes` of the rows (m, P) being kept in `precision`."""
    total = len(gradients) * passes
    counts = set(torch.logspace(0, math.log10(total), _PLACES, dtype=torch.float64).round().long().tolist())
    rows = gradients.to(precision)
    running = torch.zeros_like(rows[0])
    found = []
    for n in range(1, total + 1):
        running += rows[(n - 1) % len(rows)]
        if n in counts:
            found.append((n, float(running.double().norm()) / n))
    return found


def _gradients(model: nn.Module, patches: Tensor, labels: Tensor, group: int) -> Tensor:
    """Mean gradients (m, P) of whole groups of images."""
    found = []
    for start in range(0, len(labels) - group + 1, group):
        chosen = slice(start, start + group)
        slopes = torch.autograd.grad(cross_entropy(model(patches[chosen]), labels[chosen]), list(model.parameters()))
        found.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(found)


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for weights in _WEIGHTS:
        chosen = select(rows, part=weights)
        values = [row.found.value for row in select(chosen, quantity="p_value")]
        share = sum(value >= LEVEL for value in values) / len(values)
        predicted = _STATIONARY[weights]
        statement = f"{weights} weights: share of seeds where the test calls them stationary"
        found.append(claim(chosen, statement, share, share == predicted, predicted))
        ratio = mean(select(chosen, quantity="full_norm")) / mean(select(chosen, quantity="noise_norm"))
        statement = f"{weights} weights: gradient over all samples, in units of its noise"
        found.append(claim(chosen, statement, ratio, None))
        ratio = mean(select(chosen, quantity="law_ratio"))
        statement = f"{weights} weights: norm over its law sqrt(|ḡ|² + tr Σ (1/k - 1/N))"
        found.append(claim(chosen, statement, ratio, abs(ratio - 1) < 0.05, 1.0))
    trained = select(rows, part="trained")
    size = mean(select(trained, quantity="sample_norm"))
    statement = "trained weights: Assumption 1 at every k makes each sample's gradient zero (root mean square norm)"
    found.append(claim(trained, statement, size, size < 1e-3, 0.0))
    plateau = mean(select(trained, quantity="full_norm"))
    double, half = (_last(trained, name) / plateau for name in ("float64", "bfloat16"))
    statement = "trained weights: the norm after all passes over |ḡ|, the sum kept in"
    found.append(claim(trained, f"{statement} float64", double, abs(double - 1) < 1e-6, 1.0))
    found.append(claim(trained, f"{statement} bfloat16", half, abs(half - 1) < 0.05, 1.0))
    return found


def _last(rows: Sequence[Row], quantity: str) -> float:
    """The mean over seeds at the largest number of samples."""
    chosen = select(rows, quantity=quantity)
    last = max(row.found.at for row in chosen)
    return mean(select(chosen, at=last))


def _panels(rows: Sequence[Row]) -> list[Panel]:
    label = "norm of the gradient"
    found = []
    for weights in _WEIGHTS:
        chosen = select(rows, part=weights)
        names = (("norm", "measured"), ("law", "law"))
        series = [curve(select(chosen, quantity=name), "at", title, i) for i, (name, title) in enumerate(names)]
        noise = [mean(select(chosen, quantity="noise_norm"))] * 2
        series.append(Series("plateau if stationary", [series[0].x[0], series[0].x[-1]], noise, colour=2, stroke=3))
        found.append(Panel(f"{weights} weights", "samples k", label, series=series))
    trained = select(rows, part="trained")
    names = (("float64", "sum in float64"), ("bfloat16", "sum in bfloat16"))
    series = [curve(select(trained, quantity=name), "at", title, i) for i, (name, title) in enumerate(names)]
    found.append(Panel("trained weights, many passes", "samples k", label, series=series))
    return found


FIGURE = declared("gap-gradient", GapGradientConfiguration(), [{"network": "vit"}], measure, _verdicts, _panels)
