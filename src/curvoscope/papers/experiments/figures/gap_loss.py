"""The block paper's loss differences |L_{k+b} - L_k| against the number of samples k, with the laws they obey."""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from curvoscope.analysis.convergence import ConvergenceCurve, convergence
from curvoscope.analysis.data_sufficiency import data_sufficiency
from curvoscope.estimate.result import student
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.digits import Digits, VisionTransformer
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, curve_values, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.summaries import claim, curve, mean, select

_WEIGHTS = ("initial", "trained")
_NEAR = 0.003  # distances up to which the losses should be quadratic
_CEILINGS = 100  # displacements over which the ceiling is averaged


class GapLossConfiguration(Digits):
    """`added` samples at a time, b; `distances` τ of w + τξ; `tolerance` ε of k*(ε)."""

    images: int = 192
    added: int = 8
    distances: tuple[float, ...] = (0.0, 0.001, 0.003, 0.01, 0.03)
    orders: int = 256
    draws: int = 12
    probes: int = 4
    tolerance: float = 0.01


def measure(configuration: GapLossConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The study of `analysis.convergence` at every distance, and k*(ε)."""
    c = configuration
    model = c.model(seed, str(point["weights"]))
    batches = [c.probe()]
    study = convergence(
        model,
        CrossEntropy(),
        batches,
        c.added,
        c.distances,
        orders=c.orders,
        draws=c.draws,
        probes=c.probes,
        seed=draw,
    )
    values = []
    for one in study.curves:
        values += _values(one, c.added, expected_ceiling(model, one.distance, draw), study.variance(one.distance))
    enough = data_sufficiency(model, CrossEntropy(), batches, c.tolerance, c.added, seed=draw)
    ends = {"k_star": enough.samples, "k_star_low": enough.interval[0], "k_star_high": enough.interval[1]}
    return values + named_values(ends, _part(0.0))


def _values(one: ConvergenceCurve, added: int, ceiling: float, second_order: float) -> list[MeasuredValue]:
    counts = one.counts.double()
    curves = {"mean": one.mean, "law": one.law, "null": one.null, "ceiling": ceiling * added / (counts + added)}
    if one.bound is not None:
        curves["bound"] = one.bound
    scalars = {
        "slope": one.slope.value,
        "null_slope": one.null_slope.value,
        "identity_error": one.identity_error,
        "ratio": one.ratio,
        "rms_ratio": float((one.rms / one.law_rms).mean()),
        "variance": one.variance,
        "second_order": second_order,
        "over_ceiling": float((one.mean / curves["ceiling"]).max()),
    }
    found = named_values(scalars, _part(one.distance))
    for name, numbers in curves.items():
        found += curve_values(name, numbers.tolist(), one.counts.tolist(), _part(one.distance))
    return found


def expected_ceiling(model: VisionTransformer, tau: float, seed: int) -> float:
    """The mean over displacements τξ of a number that no loss is above there: E|L_{k+b} - L_k| ≤ b/(k+b) times it."""
    if tau == 0:
        return model.ceiling()
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model).requires_grad_(False)
    tail = [(moved.get_parameter(name), model.get_parameter(name)) for name in VisionTransformer.TAIL]
    total = 0.0
    for _ in range(_CEILINGS):
        for there, here in tail:
            there.copy_(here + tau * torch.randn(here.shape, generator=generator, dtype=here.dtype))
        total += moved.ceiling()
    return total / _CEILINGS


def _part(distance: float) -> str:
    return f"τ = {distance:g}"


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    worst = max(row.found.value for row in select(rows, quantity="identity_error"))
    exact = "the averaging identity L(k+b) - L(k) = b/(k+b) (new mean - L(k)), largest error over the largest loss"
    found = [claim(rows, exact, worst, worst < 1e-12, 0.0)]
    for weights in _WEIGHTS:
        chosen = select(rows, weights=weights)
        here = select(chosen, part=_part(0.0))
        slope, null = (mean(select(here, quantity=name)) for name in ("slope", "null_slope"))
        statement = f"{weights} weights, τ = 0: the slope is that of random numbers"
        found.append(claim(here, statement, slope, abs(slope - null) < 0.05, null))
        ratio = _farthest(chosen, "rms_ratio")
        statement = f"{weights} weights: root mean square over its law sqrt(s² b/(k(k+b))), the worst τ"
        found.append(claim(chosen, statement, ratio, abs(ratio - 1) < 0.03, 1.0))
        ratio = _farthest(chosen, "ratio")
        statement = (
            f"{weights} weights: mean over its law sqrt(2/π) s sqrt(b/(k(k+b))), normal for large b, the worst τ"
        )
        found.append(claim(chosen, statement, ratio, abs(ratio - 1) < 0.1, 1.0))
        ratio = max(row.found.value for row in select(chosen, quantity="over_ceiling"))
        statement = f"{weights} weights: largest ratio to the bound b/(k+b) B at any τ"
        found.append(claim(chosen, statement, ratio, ratio <= 1))
        for distance in _distances(chosen)[1:]:
            found.append(second_order(chosen, weights, distance))
        found.append(_sufficient(chosen, weights))
    return found


def _farthest(rows: Sequence[Row], quantity: str) -> float:
    """Of the means over seeds at each distance, the one farthest from 1."""
    means = [mean(select(rows, part=_part(distance), quantity=quantity)) for distance in _distances(rows)]
    return max(means, key=lambda one: abs(one - 1))


def second_order(rows: Sequence[Row], weights: str, distance: float) -> Verdict:
    """What the distance adds to the variance of the losses, measured over predicted: 1 near, anything far away.

    The variance at the weights is taken off both: near them it is most of the whole, and would make any law agree. The
    interval is Student's over the seeds, whose displacements and probes are independent.
    """
    measured, predicted = (_added(rows, name, distance) for name in ("variance", "second_order"))
    scale = float(np.mean(predicted))
    ratio, count = float(np.mean(measured)) / scale, len(measured)
    low = high = agrees = None
    if count > 1:
        error = float(np.std(measured - predicted, ddof=1)) / count**0.5 / abs(scale)
        reach = student(0.95, float(count - 1)) * error
        low, high = ratio - reach, ratio + reach
        agrees = low <= 1 <= high if distance <= _NEAR else None
    statement = f"{weights} weights, {_part(distance)}: what τ adds to the variance of the losses, over V(τ) - V(0)"
    wanted = 1.0 if distance <= _NEAR else None
    return Verdict(statement, "all", _part(distance), 1, wanted, ratio, low, high, agrees)


def _added(rows: Sequence[Row], quantity: str, distance: float) -> np.ndarray:
    """The quantity at a distance less that at the weights, for each seed."""
    there, here = (
        {row.seed: row.found.value for row in select(rows, part=_part(tau), quantity=quantity)}
        for tau in (distance, 0.0)
    )
    return np.array([there[seed] - here[seed] for seed in sorted(there)])


def _sufficient(rows: Sequence[Row], weights: str) -> Verdict:
    middle, low, high = (mean(select(rows, quantity=name)) for name in ("k_star", "k_star_low", "k_star_high"))
    statement = f"{weights} weights: k*(0.01), from which b more samples move the loss by less than 0.01"
    return Verdict(statement, "all", _part(0.0), 1, None, middle, low, high, None)


def _distances(rows: Sequence[Row]) -> list[float]:
    return sorted({_distance(row) for row in rows})


def _distance(row: Row) -> float:
    return float(row.found.part.removeprefix("τ = "))


def _panels(rows: Sequence[Row]) -> list[Panel]:
    far = _distances(rows)[-1]
    names = {"mean": "losses", "null": "random", "law": "law"}
    found = []
    for weights, distance in (("initial", 0.0), ("trained", 0.0), ("trained", far)):
        chosen = select(rows, weights=weights, part=_part(distance))
        shown = names | {"ceiling" if distance else "bound": "bound"}
        pairs = enumerate(shown.items())
        series = [curve(select(chosen, quantity=quantity), "at", name, i) for i, (quantity, name) in pairs]
        title = f"{weights}, {_part(distance)}"
        found.append(Panel(title, "samples k", "|L(k+b) − L(k)|", series=series))
    spreads = [_spread(rows, weights, i) for i, weights in enumerate(_WEIGHTS)]
    series = [one for pair in spreads for one in pair]
    found.append(Panel("variance of the losses", "distance τ", "variance", series=series))
    return found


def _spread(rows: Sequence[Row], weights: str, index: int) -> list[Series]:
    """Measured and second-order variance against the distance."""
    found = []
    for stroke, (quantity, name) in enumerate((("variance", "measured"), ("second_order", "V(τ)"))):
        chosen = [row for row in select(rows, weights=weights, quantity=quantity) if _distance(row) > 0]
        taus = sorted({_distance(row) for row in chosen})
        means = [mean(select(chosen, part=_part(tau))) for tau in taus]
        found.append(Series(f"{weights}, {name}", taus, means, colour=index, stroke=stroke))
    return found


FIGURE = declared(
    "gap-loss", GapLossConfiguration(), [{"weights": weights} for weights in _WEIGHTS], measure, _verdicts, _panels
)
