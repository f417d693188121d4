"""Divergence predicted: full-batch gradient descent at a minimum, with learning rates on both sides of 2/λ_max."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from curvoscope.analysis.surface import Surface
from curvoscope.analysis.taylor import divergence, taylor
from curvoscope.estimate import lanczos
from curvoscope.papers.experiments.anchored import Anchored, loss, minimum
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.papers.experiments.setting import Additions
from curvoscope.papers.experiments.summaries import by, claim, curve, select

_NORMS = ("none", "pre")
_STARTS = ("eigenvector", "random")
_NEAR = (0.95, 0.99, 1.01, 1.05)  # learning rates whose whole runs are drawn
_LEAST = 0.9  # below this factor, what five steps leave of the kick is rounding
_EXACT = 0.02
_ZERO = 1e-12  # the gradient at a minimum, to rounding


class DivergenceConfiguration(Additions):
    """`factors` are learning rates in units of 2/λ_max, `kick` is in units of the radius of the quadratic region."""

    d: int = 16
    sequences: int = 32
    train: int = 300
    rate: float = 0.003
    pull: float = 0.05
    factors: tuple[float, ...] = (0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 1.3, 1.5)
    kick: float = 0.01
    short: int = 5
    long: int = 400
    every: int = 20
    most: float = 1e3


def measure(configuration: DivergenceConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The loss above that of the minimum, over what it was at the start, after the runs from two kinds of start.

    "eigenvector": `short` steps from w* + κ v, v that of λ_max. "random": `long` steps from w* + κ ξ, ξ ~ N(0, I), each
    run until its loss is `most` times that of its start, and then counted as that: further out L is not quadratic.
    """
    c = configuration
    batch = c.probe()
    model = minimum(c.d, str(point["norm"]), batch, c.train, c.rate, c.pull, seed)
    surface = Surface(model, loss, [batch])
    top = lanczos(surface.hessian.total, 1, "LA")[0].value
    radius = _radius(model, batch, float(surface.weights.norm()))
    kick = c.kick * radius
    rates = torch.tensor(c.factors, dtype=torch.float64) * 2 / top
    numbers = {
        "largest_eigenvalue": top,
        "smallest_eigenvalue": lanczos(surface.hessian.total, 1, "SA", tolerance=1e-5)[0].value,
        "gradient_norm": float(surface.gradient().norm()),
        "loss": surface.loss,
        "radius": radius / float(surface.weights.norm()),
    }
    values = named_values(numbers)

    found = divergence(model, loss, [batch], rates, steps=c.short, kick=kick)
    above = found.losses - found.loss
    runs = {"eigenvector": above / above[:, :1], "random": _descents(model, batch, rates, kick, c.long, c.most, draw)}
    for start, ratios in runs.items():
        for factor, run in zip(c.factors, ratios, strict=True):
            run = run[run.isfinite()].clamp_max(c.most) if start == "random" else run
            values += named_values({"growth": run[-1]}, start, at=factor)
            if start == "random" and factor in _NEAR:
                values += curve_values(_run(factor), run[:: c.every], range(0, len(run), c.every), start)
    return values


def _radius(model: Anchored, batch: tuple[Tensor, Tensor], scale: float) -> float:
    """The distance along v up to which the second-order loss is right to 1 %."""
    radii = torch.logspace(-8, -1, 22, dtype=torch.float64) * scale
    found = taylor(model, loss, [batch], "top", radii).radius
    return float(radii[0]) if found is None else found


def _descents(
    model: Anchored, batch: tuple[Tensor, Tensor], rates: Tensor, kick: float, steps: int, most: float, seed: int
) -> Tensor:
    """(L - L*)/(L₀ - L*), (n, steps + 1), of plain gradient descent at n rates; NaN once it was above `most`."""
    inputs, targets = batch

    def value(weights: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(model, weights, (inputs,)), targets)

    generator = torch.Generator().manual_seed(seed)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    least = float(value(weights))
    many = {}
    for name, weight in weights.items():
        start = weight + kick * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        many[name] = start.expand(len(rates), *weight.shape).clone()
    ratios = torch.full((len(rates), steps + 1), torch.nan, dtype=torch.float64)
    running = torch.arange(len(rates))
    gradients = vmap(grad_and_value(value))
    for i in range(steps + 1):
        slopes, losses = gradients(many)
        ratios[running, i] = losses.detach() - least
        kept = ratios[running, i] <= most * ratios[running, 0]
        running = running[kept]
        many = {
            name: weight[kept] - rates[running].view(-1, *[1] * (weight.ndim - 1)) * slopes[name][kept]
            for name, weight in many.items()
        }
        if not len(running):
            break
    return ratios / ratios[:, :1]


def _run(factor: float) -> str:
    return f"run at {factor:g}"


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for norm, named in _networks(rows):
        chosen = select(rows, norm=norm)
        for start in _STARTS:
            grown = select(chosen, part=start, quantity="growth")
            wrong = sum((row.found.value > 1) != (row.found.at > 1) for row in grown)
            text = f"{named}, {start} start: runs of {len(grown)} that rise below 2/λ_max or fall above it"
            found.append(claim(grown, text, float(wrong), wrong == 0, 0.0))
        falls = max((row.found.at for row in grown if row.found.value <= 1), default=0.0)
        rises = min((row.found.at for row in grown if row.found.value > 1), default=float("inf"))
        text = f"{named}, random start: the largest learning rate that falls, over 2/λ_max"
        found.append(claim(grown, text, falls, falls < 1))
        text = f"{named}, random start: the smallest learning rate that rises, over 2/λ_max"
        found.append(claim(grown, text, rises, rises > 1))
        grown = [row for row in select(chosen, part="eigenvector", quantity="growth") if row.found.at >= _LEAST]
        error = max(abs(row.found.value / _predicted(row.found.at) - 1) for row in grown)
        text = f"{named}: growth in {_SHORT} steps along the eigenvector against (1 - ηλ)^{2 * _SHORT}, largest error"
        found.append(claim(grown, text, error, error < _EXACT, 0.0))
        lowest = select(chosen, quantity="smallest_eigenvalue")
        least = min(row.found.value for row in lowest)
        found.append(claim(lowest, f"{named}: a strict minimum, smallest eigenvalue of all seeds", least, least > 0))
        norms = select(chosen, quantity="gradient_norm")
        largest = max(row.found.value for row in norms)
        found.append(claim(norms, f"{named}: a stationary point, largest |∇L|", largest, largest < _ZERO, 0.0))
    return found


_SHORT = DivergenceConfiguration().short


def _predicted(factor: float) -> float:
    """(1 - ηλ)^2K for η = factor · 2/λ."""
    return float((1 - 2 * factor) ** (2 * _SHORT))


def _networks(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for norm in _NORMS:
        if select(rows, norm=norm):
            yield norm, "no norm" if norm == "none" else "Pre-LN"


def _panels(rows: Sequence[Row]) -> list[Panel]:
    label, above = "learning rate / (2/λ_max)", "L − L* over that of the start"
    panels = []
    fine = [0.6 + 0.005 * i for i in range(181)]
    for norm, named in _networks(rows):
        chosen = select(rows, norm=norm)
        series = []
        for i, start in enumerate(_STARTS):
            shown = fine[0] if start == "eigenvector" else 0.0  # what is left at 0.5 is zero, no place on these axes
            groups = by([row for row in select(chosen, part=start, quantity="growth") if row.found.at > shown], "at")
            middle = [sorted(group)[len(group) // 2] for group in groups.values()]
            series.append(Series(f"{start} start", list(groups), middle, colour=i, stroke=i))
        guides = [
            Guide("", fine, [_predicted(factor) for factor in fine]),
            Guide("", [0.5, 1.5], [1.0, 1.0]),
        ]
        title = f"{named}; dashed (1 − ηλ)^{2 * _SHORT}"
        panels.append(Panel(title, label, above, x_log=False, series=series, guides=guides, marks=[1.0]))
        first = [row for row in chosen if row.seed == 0]
        runs = [
            replace(curve(select(first, quantity=_run(factor)), "at", f"{factor:g} · 2/λ_max", i), error=None)
            for i, factor in enumerate(_NEAR)
        ]
        panels.append(Panel(f"{named}: runs of seed 0", "step", above, x_log=False, series=runs))
    return panels


FIGURE = declared(
    "divergence", DivergenceConfiguration(), [{"norm": norm} for norm in _NORMS], measure, _verdicts, _panels
)
