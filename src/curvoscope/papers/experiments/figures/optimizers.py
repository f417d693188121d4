"""Five optimizers on four tasks, each tuned in the same way: steps and seconds to the same loss."""

import math
import statistics
from collections.abc import Sequence

from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.optimizer_runs import OPTIMIZERS, TASKS, OptimizerStudy, search, train
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.summaries import by, curve, select

_CONFIGURATION = OptimizerStudy()
_SHOWN = dict(zip(OPTIMIZERS, ("SGD", "Adam", "Muon", "SOAP", "GaussNewton"), strict=True))
_QUANTITIES = {"steps": "", "processor time": "seconds", "wall-clock time": "wall"}
_SHARES = 5  # seeds that share the rates of a search
_HALF = 0.5  # of Adam's steps: what a second-order method is asked to save

# The best of the rates, in the order of OPTIMIZERS: the verdicts check it against the search.
_TUNED = {
    "addition": (0.02, 0.002, 0.01, 0.01, 0.01),
    "addition without norm": (0.05, 0.01, 0.05, 0.05, 0.02),
    "text": (0.2, 0.01, 0.02, 0.01, 0.02),
    "digits": (0.1, 0.01, 0.02, 0.02, 0.02),
}


def measure(configuration: OptimizerStudy, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """A run of the study; or some of the search, whose networks are others and whose rates the seeds share."""
    task, optimizer = str(point["task"]), str(point["optimizer"])
    if point["stage"] == "search":
        rates = configuration.rates[optimizer][seed::_SHARES]
        return [value for rate in rates for value in search(configuration, task, optimizer, rate)]
    return train(configuration, task, optimizer, float(point["rate"]), seed)


def reached(rows: Sequence[Row], goal: float, quantity: str = "") -> dict[int, float]:
    """By seed: the first step at which the loss was at most the goal, inf if it never was.

    With a `quantity`, what that was at this step.
    """
    found = {}
    for seed in sorted({row.seed for row in rows}):
        own = [row for row in rows if row.seed == seed]
        first = min((row.found.at for row in select(own, quantity="loss") if row.found.value <= goal), default=math.inf)
        if quantity and math.isfinite(first):
            first = select(own, quantity=quantity, at=first)[0].found.value
        found[seed] = first
    return found


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Medians over the seeds. Of five values, the smallest and the largest are a 94 % interval of the median."""
    verdicts, wins, judged = [], 0, 0
    for task, runs in _by_task(select(rows, stage="study")).items():
        goal = _CONFIGURATION.goals[task]
        for optimizer, own in runs.items():
            steps = reached(own, goal)
            seeds = f"{sum(map(math.isfinite, steps.values()))} of {len(steps)} seeds"
            statement = f"{task}, {optimizer} at {own[0].point['rate']:g}: steps to a loss of {goal:g} ({seeds})"
            verdicts.append(_median(statement, list(steps.values())))
        if "adam" not in runs:
            continue
        ratios = {
            (optimizer, name): _ratios(runs[optimizer], runs["adam"], goal, quantity)
            for optimizer in runs
            if optimizer != "adam"
            for name, quantity in _QUANTITIES.items()
        }
        verdicts += [
            _median(f"{task}, {optimizer} over adam: {name}", numbers) for (optimizer, name), numbers in ratios.items()
        ]
        verdicts += [
            _median(f"{task}, {optimizer} over adam: processor time per step", _paces(own, runs["adam"]))
            for optimizer, own in runs.items()
            if optimizer != "adam"
        ]
        if "gauss-newton" in runs and all(ratios["gauss-newton", name] for name in _QUANTITIES):
            judged += 1
            share, _, time = (statistics.median_low(ratios["gauss-newton", name]) for name in _QUANTITIES)
            wins += share <= _HALF and time < 1
    if judged:
        statement = "tasks on which gauss-newton takes at most half of adam's steps and less wall-clock time"
        verdicts.append(Verdict(statement, "all", "total", 1, None, float(wins), None, None, None))
    return verdicts + _search_verdict(select(rows, stage="search"))


def _by_task(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Those rows that are there, by task and then by optimizer."""
    found: dict[str, dict[str, list[Row]]] = {}
    for task in TASKS:
        runs = {optimizer: select(rows, task=task, optimizer=optimizer) for optimizer in OPTIMIZERS}
        runs = {optimizer: some for optimizer, some in runs.items() if some}
        if runs:
            found[task] = runs
    return found


def _ratios(rows: Sequence[Row], adam: Sequence[Row], goal: float, quantity: str) -> list[float]:
    """What an optimizer needs over what Adam needs, per seed: 0 if only it got there, inf if only Adam did."""
    mine, adams = reached(rows, goal, quantity), reached(adam, goal, quantity)
    pairs = [(mine[seed], adams[seed]) for seed in mine if seed in adams]
    return [one / other for one, other in pairs if math.isfinite(one) or math.isfinite(other)]


def _paces(rows: Sequence[Row], adam: Sequence[Row]) -> list[float]:
    """The processor time of a step over that of Adam's, per seed, over the whole run of each."""
    mine, adams = _seconds_per_step(rows), _seconds_per_step(adam)
    return [mine[seed] / adams[seed] for seed in mine if seed in adams]


def _seconds_per_step(rows: Sequence[Row]) -> dict[int, float]:
    """By seed."""
    found = {}
    for seed in {row.seed for row in rows}:
        own = [row.found for row in select(rows, quantity="seconds") if row.seed == seed]
        last = max(own, key=lambda value: value.at)
        if last.at:
            found[seed] = last.value / last.at
    return found


def _median(statement: str, numbers: Sequence[float]) -> Verdict:
    if not any(map(math.isfinite, numbers)):
        return Verdict(f"{statement}: not reached", "all", "total", 1, None, None, None, None, None)
    low, high = (min(numbers), max(numbers)) if len(numbers) > 1 else (None, None)
    return Verdict(statement, "all", "total", 1, None, statistics.median_low(numbers), low, high, None)


def _search_verdict(rows: Sequence[Row]) -> list[Verdict]:
    """Of how many cells the rate used in the study is the best: fewest steps to the goal, then least mean loss."""
    cells, best = 0, 0
    for task in TASKS:
        for optimizer, tuned in zip(OPTIMIZERS, _TUNED[task], strict=True):
            own = select(rows, task=task, optimizer=optimizer)
            means = {row.found.at: row.found.value for row in select(own, quantity="mean_loss")}
            steps = {row.found.at: row.found.value for row in select(own, quantity="steps")}
            if steps:
                cells += 1
                best += min(steps, key=lambda rate: (steps[rate], means[rate])) == tuned
    if not cells:
        return []
    statement = "cells whose rate is the best of the search"
    return [Verdict(statement, "all", "total", 1, float(cells), float(best), None, None, cells == best)]


# ---- panels


def _panels(rows: Sequence[Row]) -> list[Panel]:
    """A row for each task: loss along the steps and along the seconds, steps to the goal, and the search."""
    panels, searched = [], _by_task(select(rows, stage="search"))
    for task, runs in _by_task(select(rows, stage="study")).items():
        curves = {optimizer: _loss_curve(own, optimizer) for optimizer, own in runs.items()}
        panels += [
            Panel(task, "step", "loss", x_log=False, series=list(curves.values())),
            Panel(task, "processor seconds", "loss", x_log=False, series=_over_seconds(runs, curves)),
            _steps_panel(task, runs),
        ]
        if task in searched:
            series = [
                curve(found, "at", "", OPTIMIZERS.index(optimizer))
                for optimizer, own in searched[task].items()
                if (found := select(own, quantity="steps"))
            ]
            panels.append(Panel(f"search, {task}", "learning rate", "steps", y_log=False, series=series))
    return panels


def _loss_curve(rows: Sequence[Row], optimizer: str) -> Series:
    """Mean and standard error over seeds, at the steps before any of them reaches its goal or diverges."""
    chosen, seeds = select(rows, quantity="loss"), len({row.seed for row in rows})
    whole = {at for at, group in by(chosen, "at").items() if len(group) == seeds}
    return curve([row for row in chosen if row.found.at in whole], "at", _SHOWN[optimizer], OPTIMIZERS.index(optimizer))


def _over_seconds(runs: dict[str, list[Row]], curves: dict[str, Series]) -> list[Series]:
    """The same curves over the mean processor time of their steps."""
    found = []
    for optimizer, series in curves.items():
        times = {
            at: statistics.mean(some) for at, some in by(select(runs[optimizer], quantity="seconds"), "at").items()
        }
        index = OPTIMIZERS.index(optimizer)
        found.append(Series("", [times[at] for at in series.x], series.y, series.error, colour=index, stroke=index))
    return found


def _steps_panel(task: str, runs: dict[str, list[Row]]) -> Panel:
    """A point for each seed that got there."""
    series, goal = [], _CONFIGURATION.goals[task]
    for i, optimizer in enumerate(OPTIMIZERS):
        steps = [step for step in reached(runs.get(optimizer, ()), goal).values() if math.isfinite(step)]
        series += [Series("", [i + 1.0] * len(steps), steps, colour=i, stroke=i)] if steps else []
    note, names = "" if series else "not reached", [*list(_SHOWN.values())[:-1], "GN"]
    return Panel(task, "", f"steps to {goal:g}", x_log=False, y_log=False, series=series, x_names=names, note=note)


def _study(task: str) -> list[Point]:
    return [
        {"stage": "study", "task": task, "optimizer": optimizer, "rate": rate}
        for optimizer, rate in zip(OPTIMIZERS, _TUNED[task], strict=True)
    ]


_SEARCH: list[Point] = [{"stage": "search", "task": task, "optimizer": name} for task in TASKS for name in OPTIMIZERS]

FIGURE = declared(
    "optimizers",
    _CONFIGURATION,
    [*_SEARCH, *(point for task in TASKS for point in _study(task))],
    measure,
    _verdicts,
    _panels,
    quick_points=_study("digits"),
)
