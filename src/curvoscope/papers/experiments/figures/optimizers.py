"""Four optimizers on addition: SGD and Adam, each alone and with a step size for each block from its curvature."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.optimizer_runs import NORMS, OPTIMIZERS, OptimizerStudy, search, train
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.summaries import by, curve, select

_CONFIGURATION = OptimizerStudy()
_WANTED = 0.99

# The best of the candidates, in the order of OPTIMIZERS: the verdicts check it against the search.
_TUNED = {"pre": (0.01, 0.1, 0.003, 0.1), "none": (0.03, 0.1, 0.01, 0.1)}
_TITLES = {"pre": "pre-norm", "none": "no norm"}


def measure(configuration: OptimizerStudy, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """A run of the study; or one of the search, in which the seed counts the candidates and the networks are others."""
    optimizer, norm = str(point["optimizer"]), str(point["norm"])
    if point["stage"] == "search":
        return search(configuration, optimizer, norm, configuration.candidates[optimizer][seed])
    return train(configuration, optimizer, norm, float(point["rate"]), seed)


def reached(rows: Sequence[Row], quantity: str = "") -> dict[int, float]:
    """By seed: the first step at which the share of right answers was 99 %, inf if it never was.

    With a `quantity`, what that was at this step.
    """
    found = {}
    for seed in sorted({row.seed for row in rows}):
        own = [row for row in rows if row.seed == seed]
        steps = [row.found.at for row in select(own, quantity="accuracy") if row.found.value >= _WANTED]
        first = min(steps, default=math.inf)
        if quantity and steps:
            first = select(own, quantity=quantity, at=first)[0].found.value
        found[seed] = first
    return found


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Medians over the seeds. Of five values, the smallest and the largest are a 94 % interval of the median."""
    study = select(rows, stage="study")
    verdicts = []
    for norm, runs in _by_norm(study).items():
        for optimizer, own in runs.items():
            steps, last = reached(own), max(row.found.at for row in own)
            count = sum(map(math.isfinite, steps.values()))
            still = sum(row.found.value >= _WANTED for row in select(own, quantity="accuracy", at=last))
            seeds = f"{count} of {len(steps)} seeds, {still} still there at the last step"
            statement = f"{norm}, {optimizer} at {own[0].point['rate']:g}: steps to 99 % ({seeds})"
            verdicts.append(_median(statement, list(steps.values())))
        for base in ("sgd", "adam"):
            if base in runs and f"block-{base}" in runs:
                verdicts += [
                    _median(f"{norm}: block-{base} over {base}, {name} to 99 %", _ratios(runs, base, quantity))
                    for name, quantity in (("steps", ""), ("seconds", "seconds"))
                ]
    return verdicts + _search_verdict(select(rows, stage="search"))


def _by_norm(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Those rows that are there, by norm and then by optimizer."""
    found: dict[str, dict[str, list[Row]]] = {}
    for norm in NORMS:
        runs = {optimizer: select(rows, norm=norm, optimizer=optimizer) for optimizer in OPTIMIZERS}
        runs = {optimizer: some for optimizer, some in runs.items() if some}
        if runs:
            found[_TITLES[norm]] = runs
    return found


def _ratios(runs: dict[str, list[Row]], base: str, quantity: str) -> list[float]:
    """Block curvature over its base, per seed: 0 if only it got there, inf if only the base did."""
    block, alone = reached(runs[f"block-{base}"], quantity), reached(runs[base], quantity)
    pairs = [(block[seed], alone[seed]) for seed in block if seed in alone]
    return [one / other for one, other in pairs if math.isfinite(one) or math.isfinite(other)]


def _median(statement: str, numbers: Sequence[float]) -> Verdict:
    if not any(map(math.isfinite, numbers)):
        return Verdict(f"{statement}: not reached", "all", "total", 1, None, None, None, None, None)
    low, high = (min(numbers), max(numbers)) if len(numbers) > 1 else (None, None)
    return Verdict(statement, "all", "total", 1, None, statistics.median_low(numbers), low, high, None)


def _search_verdict(rows: Sequence[Row]) -> list[Verdict]:
    """Of how many cells the number used in the study is the best of its candidates."""
    cells, best = 0, 0
    for norm in NORMS:
        for optimizer, tuned in zip(OPTIMIZERS, _TUNED[norm], strict=True):
            found = select(rows, norm=norm, optimizer=optimizer, quantity="mean_loss")
            if found:
                cells += 1
                best += min(found, key=lambda row: row.found.value).found.at == tuned
    if not cells:
        return []
    statement = "cells whose tuned number has the least mean loss of the candidates, in the search"
    return [Verdict(statement, "all", "total", 1, float(cells), float(best), None, None, cells == best)]


# ---- panels


def _panels(rows: Sequence[Row]) -> list[Panel]:
    """A row for each norm: loss, λ_max, share of the edge, steps to 99 %, and the search."""
    panels, searched = [], _by_norm(select(rows, stage="search"))
    for title, runs in _by_norm(select(rows, stage="study")).items():
        sharpness = [replace(series, label="") for series in _curves(runs, "sharpness")]
        panels += [
            Panel(title, "step", "loss", x_log=False, series=_curves(runs, "loss")),
            Panel(title, "step", "λ_max", x_log=False, series=[*sharpness, *_edges(runs)]),
            Panel(title, "step", "share of the edge", x_log=False, series=_curves(runs, "edge")),
            _steps_panel(title, runs),
        ]
        if title in searched:
            series = [
                curve(select(own, quantity="mean_loss"), "at", "", OPTIMIZERS.index(optimizer))
                for optimizer, own in searched[title].items()
            ]
            panels.append(Panel(f"search, {title}", "learning rate or safety", "mean loss", y_log=False, series=series))
    return panels


def _steps_panel(title: str, runs: dict[str, list[Row]]) -> Panel:
    """A point for each seed that got there."""
    series = []
    for i, optimizer in enumerate(OPTIMIZERS):
        steps = [step for step in reached(runs.get(optimizer, ())).values() if math.isfinite(step)]
        series += [Series("", [i + 1.0] * len(steps), steps, colour=i, stroke=i)] if steps else []
    note = "" if series else "99 % not reached"
    names = ("SGD", "+ block", "Adam", "+ block")
    return Panel(title, "", "steps to 99 %", x_log=False, y_log=False, series=series, x_names=names, note=note)


def _curves(runs: dict[str, list[Row]], quantity: str) -> list[Series]:
    """Mean and standard error over seeds, at the steps at which the curvature is measured and none has diverged."""
    series = []
    for optimizer, rows in runs.items():
        chosen, places = select(rows, quantity=quantity), by(select(rows, quantity="sharpness"), "at")
        seeds = len({row.seed for row in rows})
        whole = {at for at, group in by(chosen, "at").items() if at in places and len(group) == seeds}
        chosen = [row for row in chosen if row.found.at in whole]
        if chosen:
            series.append(curve(chosen, "at", optimizer, OPTIMIZERS.index(optimizer)))
    return series


def _edges(runs: dict[str, list[Row]]) -> list[Series]:
    """The edge of stability of SGD with its momentum β, 2 (1 + β)/lr, and 2/lr of gradient descent."""
    if "sgd" not in runs:
        return []
    rate, last = float(runs["sgd"][0].point["rate"]), max(row.found.at for row in runs["sgd"])
    edges = (("2/lr of sgd", 2 / rate), ("2 (1 + β)/lr", 2 * (1 + _CONFIGURATION.momentum) / rate))
    return [
        Series(name, [0.0, last], [edge, edge], steps=True, colour=6, stroke=3 + i)
        for i, (name, edge) in enumerate(edges)
    ]


def _study(norm: str) -> list[Point]:
    return [
        {"stage": "study", "norm": norm, "optimizer": optimizer, "rate": rate}
        for optimizer, rate in zip(OPTIMIZERS, _TUNED[norm], strict=True)
    ]


_SEARCH: list[Point] = [{"stage": "search", "norm": norm, "optimizer": name} for norm in NORMS for name in OPTIMIZERS]

FIGURE = declared(
    "optimizers",
    _CONFIGURATION,
    [*_SEARCH, *_study("pre"), *_study("none")],
    measure,
    _verdicts,
    _panels,
    quick_points=_study("pre"),
)
