"""The block paper's norms while training: every parameter group's diagonal block of the Hessian, each weight once."""

from collections.abc import Sequence

from curvoscope.blocks import Blocks
from curvoscope.curvature import hessian
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.digits import GROUPS, Digits, accuracy, groups_of
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.summaries import claim, curve, geometric_mean, mean, select

_TOLERANCE = 1e-3  # of the norms
_ZERO = 1e-12  # of the whole norm
_WHOLE = "whole"
_ATTENTION = ("query", "key", "value", "output")
_OTHERS = ("patches", "norm 1", "feed-forward", "norm 2", "head")
_PAPER = ("query", "key", "value", "norm 1", "feed-forward")


def measure(configuration: Digits, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Spectral norm of each group's diagonal block, of the whole Hessian, and the norms of the weights."""
    model = configuration.network(seed)
    values = []
    for step in configuration.training(model, seed):
        groups = groups_of(model)
        blocks = Blocks(block for group in groups.values() for block in group.values())
        H = hessian(model, CrossEntropy(), [configuration.probe()], blocks, method="autodiff")
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        at = float(step)
        for name, names in {**{name: group.names for name, group in groups.items()}, _WHOLE: blocks.names}.items():
            norm = H.total.select(names).spectral_norm(tolerance=_TOLERANCE)
            values.append(MeasuredValue(1, name, "total", float(norm), norm.stderr, "spectral_norm", at))
            length = float(blocks.select(*names).gather(weights).norm())
            values.append(MeasuredValue(1, name, "total", length, quantity="weight_norm", at=at))
        values.append(MeasuredValue(1, _WHOLE, "total", accuracy(model), quantity="accuracy", at=at))
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    norms = {name: select(rows, block=name, quantity="spectral_norm") for name in (*GROUPS, _WHOLE)}
    last = max(row.found.at for row in rows)
    first = {name: geometric_mean(select(norms[name], at=0.0)) for name in (*_ATTENTION, *_OTHERS)}
    trained = {name: geometric_mean(select(norms[name], at=last)) for name in (*_ATTENTION, *_OTHERS)}
    after = f"after {last:g} steps"
    others = max(trained[name] for name in _PAPER if name not in ("key", "value"))
    ratio = min(trained["key"], trained["value"]) / others
    statement = f"{after} key and value are above query, norm 1 and feed-forward (the lower over the highest of these)"
    found = [claim(norms["key"], statement, ratio, ratio > 1)]
    ratio = max(first["query"], first["key"]) / first["value"]
    statement = "at initialisation query and key are far below value (the larger over value)"
    found.append(claim(norms["query"], statement, ratio, ratio < 0.1))
    top = max(trained, key=trained.__getitem__)
    statement = f"{after}: the largest of all groups is {top}, its norm"
    found.append(claim(norms[top], statement, trained[top], None))
    ratio = trained["feed-forward"] / trained["norm 2"]
    statement = f"{after}: feed-forward over norm 2, which the paper's code measured in its place"
    found.append(claim(norms["feed-forward"], statement, ratio, None))
    whole = {_key(row): row.found.value for row in norms[_WHOLE]}
    worst = max(row.found.value / whole[_key(row)] for row in norms["key bias"])
    found.append(claim(norms["key bias"], "the key's bias: norm over that of the whole", worst, worst < _ZERO, 0.0))
    worst = max(row.found.value / whole[_key(row)] for name in GROUPS for row in norms[name])
    statement = "no group's norm is above that of the whole Hessian (the largest ratio)"
    found.append(claim(norms[_WHOLE], statement, worst, worst <= 1 + 2 * _TOLERANCE))
    right = select(rows, quantity="accuracy", at=last)
    found.append(claim(right, f"{after}: accuracy on images not trained on", mean(right), None))
    return found


def _key(row: Row) -> tuple[int, float]:
    return row.seed, row.found.at


def _panels(rows: Sequence[Row]) -> list[Panel]:
    def panel(title: str, names: Sequence[str], quantity: str, label: str) -> Panel:
        chosen = [select(rows, block=name, quantity=quantity) for name in names]
        series = [curve(found, "at", name, i) for i, (name, found) in enumerate(zip(names, chosen, strict=True))]
        return Panel(title, "step", label, x_log=False, series=series)

    norm = "spectral norm of the block"
    return [
        panel("attention", _ATTENTION, "spectral_norm", norm),
        panel("feed-forward and norms", ("feed-forward", "norm 1", "norm 2"), "spectral_norm", norm),
        panel("the rest, and the whole", ("patches", "head", _WHOLE), "spectral_norm", norm),
        panel("weights", ("query", "key", "value", "feed-forward"), "weight_norm", "norm of the weights"),
    ]


FIGURE = declared(
    "gap-norms", Digits(checkpoints=(0, 200, 400, 600, 800, 1000)), [{"network": "vit"}], measure, _verdicts, _panels
)
