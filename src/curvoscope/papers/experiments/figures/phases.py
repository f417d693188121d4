"""Phases of training: block norms, functional share and attention moments through one run, and one-hot attention."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from curvoscope.curvature import ModelHessian, hessian
from curvoscope.families.block_maps import blocks_of
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import slope
from curvoscope.papers.experiments.one_hot import query_bound, row_moments, row_numbers, sharpened, smallest_gap
from curvoscope.papers.experiments.panels import Guide, Panel, Series
from curvoscope.papers.experiments.setting import Additions, checkpoints
from curvoscope.papers.experiments.summaries import by, claim, curve, mean, select
from curvoscope.papers.networks import GPT2

_BLOCKS = ("Q", "K", "V", "O", "up", "down")
_GROUPS = {"Q, K": ("Q", "K"), "V, O": ("V", "O"), "feed-forward": ("up", "down")}
_PARTS = ("outer", "functional")
_MOMENTS = {"M2": "tr M2", "M3": "|M3|"}
_RATES = {("Q", "outer"): -2.0, ("K", "outer"): -2.0, ("Q", "functional"): -1.0, ("K", "functional"): -1.0}
_RATES |= {("V", "outer"): 0.0, ("V", "functional"): 0.0}
_SHARP = 12.0  # βδ from which one row is all that is left
_CLOSE = 0.01
_MARGINALS = 100  # steps in which the loss falls because the frequencies of the digits are learned


class PhasesConfiguration(Additions):
    """Measured on `sequences` additions at the steps `checkpoints`, trained on `batch` fresh ones per step.

    `sharpness` are the values of βδ of the trained network with its scores times β, see `one_hot.smallest_gap`.
    """

    d: int = 16
    sequences: int = 32
    batch: int = 64
    rate: float = 0.003
    checkpoints: tuple[int, ...] = (0, 10, 30, 100, 200, 400, 600, 700, 800, 1000, 1400, 2000)
    sharpness: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 12.0, 14.0, 16.0, 18.0, 20.0)


def measure(configuration: PhasesConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """At each checkpoint (`at`, the step) loss, rows and norms; then the norms with sharpened scores (`at`, βδ)."""
    c = configuration
    model = GPT2(c.d, norm=str(point["norm"]), seed=seed)
    batch = c.probe()
    values = []
    for step in checkpoints(model, c.checkpoints, c.batch, c.rate, seed):
        values += _checkpoint(model, batch, float(step))
    gap = smallest_gap(model, batch[0])
    values.append(MeasuredValue(1, "A", "moment", gap, quantity="smallest_gap"))
    for sharpness in c.sharpness:
        with sharpened(model, sharpness / gap):
            norms = _norms(_hessian(model, batch, "*.attn.[QKV]"))
        for (block, part), norm in norms.items():
            # the queries in the key's block are β times as long
            scale = (sharpness / gap) ** 2 if block == "K" else 1.0
            values.append(MeasuredValue(1, block, part, norm / scale, quantity="sharpened", at=sharpness))
    return values


def _checkpoint(model: GPT2, batch: tuple[Tensor, Tensor], step: float) -> list[MeasuredValue]:
    moments, H = row_moments(model, batch[0]), _hessian(model, batch, "*.attn.[QKVO]", "*.mlp.up", "*.mlp.down")
    with torch.no_grad():
        loss = float(model.loss(*batch))
    norms = _norms(H)
    values = named_values({"loss": loss}, at=step)
    values += named_values(row_numbers(moments), "moment", "A", step)
    values += [MeasuredValue(1, block, part, norm, at=step) for (block, part), norm in norms.items()]
    for group, blocks in {**_GROUPS, "all": _BLOCKS}.items():
        squares = [sum(norms[block, part] ** 2 for block in blocks) for part in _PARTS]
        values.append(MeasuredValue(1, group, "functional", squares[1] / sum(squares), quantity="share", at=step))
    query = float(H.total["h.0.attn.Q"].frobenius_norm())
    tightness = query / query_bound(model, *batch, moments)
    values.append(MeasuredValue(1, "Q", "total", tightness, quantity="share_of_bound", at=step))
    ratio = norms["Q", "outer"] / norms["V", "outer"]
    return [*values, MeasuredValue(1, "Q", "outer", ratio, quantity="over_value_block", at=step)]


def _hessian(model: GPT2, batch: tuple[Tensor, Tensor], *patterns: str) -> ModelHessian:
    return hessian(model, CrossEntropy(), [batch], blocks=blocks_of(model).select(*patterns), method="exact")


def _norms(H: ModelHessian) -> dict[tuple[str, str], float]:
    """Exact Frobenius norms of the diagonal blocks, cut into outer and functional part at the logits."""
    parts = {"outer": H.outer, "functional": H.functional}
    return {
        (name.rsplit(".", 1)[1], part): float(matrix[name].frobenius_norm())
        for name in H.names
        for part, matrix in parts.items()
    }


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for (block, part), rate in _RATES.items():
        chosen = [row for row in select(rows, block=block, part=part, quantity="sharpened") if row.found.at >= _SHARP]
        exponents = [_exponent([row for row in chosen if row.seed == seed]) for seed in {row.seed for row in chosen}]
        name = f"{block}/β²" if block == "K" else block
        if rate:
            what, exponent = f"falls as e^({rate:g} βδ) or faster", max(exponents)
            agrees = exponent <= rate + _CLOSE
        else:
            what, exponent = "stays", max(exponents, key=abs)
            agrees = abs(exponent) <= _CLOSE
        text = f"trained, scores times β → ∞: {part} {name} {what} (exponent for βδ ≥ {_SHARP:g}, worst seed)"
        found.append(claim(chosen, text, exponent, agrees, rate))
    shares = select(rows, quantity="share_of_bound")
    largest = max(row.found.value for row in shares)
    text = "training: |H(Q,Q)| over its bound through M2² and M3, the largest of all checkpoints (at most 1)"
    found.append(claim(shares, text, largest, largest <= 1))
    return found + _observations(rows)


def _exponent(rows: Sequence[Row]) -> float:
    """The slope of the log norm in βδ."""
    groups = by(rows, "at")
    return slope([math.exp(x) for x in groups], list(groups.values()))[0]


def _observations(rows: Sequence[Row]) -> list[Verdict]:
    """What is seen without being predicted: means over the seeds."""
    first, last = (choose(row.found.at for row in select(rows, quantity="loss")) for choose in (min, max))
    found = []

    def add(text: str, value: float, chosen: Sequence[Row]) -> None:
        found.append(claim(chosen, text, value, None))

    for name, unit in (("entropy", " (nats; 0 is one-hot)"), ("M2", ""), ("M3", "")):
        chosen = select(rows, quantity=name)
        for at, when in ((first, "at initialisation"), (last, f"after {last:g} steps")):
            what = "entropy" if unit else f"share of {name}"
            add(f"{what} of the rows {when}{unit}", mean(select(chosen, at=at)), chosen)
    shares = select(rows, quantity="share", block="all")
    for at, when in ((first, "at initialisation"), (last, f"after {last:g} steps")):
        add(f"functional share {when}", mean(select(shares, at=at)), shares)
    ratios = select(rows, quantity="over_value_block")
    means = {at: mean(select(ratios, at=at)) for at in by(ratios, "at")}
    peak = max(means, key=lambda at: means[at])
    add(f"outer |Q|/|V| at its largest, step {peak:g}", means[peak], ratios)
    add(f"outer |Q|/|V| after {last:g} steps", means[last], ratios)
    seeds = sorted({row.seed for row in rows})
    runs = [[row for row in rows if row.seed == seed] for seed in seeds]
    same = sum(_fastest(run, "loss") == _fastest(run, "entropy") for run in runs)
    where = ", ".join(f"{(a + b) / 2:g}" for a, b in (_fastest(run, "loss") for run in runs))
    add(f"seeds of {len(seeds)} whose loss and entropy fall fastest together (about step {where})", float(same), rows)
    return found


def _fastest(run: Sequence[Row], name: str) -> tuple[float, float]:
    """The checkpoints of one seed between which a quantity falls fastest, beyond the first hundred steps."""
    values = by(select(run, quantity=name), "at")
    pairs = [(a, b) for a, b in pairwise(values) if a >= _MARGINALS] or list(pairwise(values))
    return min(pairs, key=lambda pair: (values[pair[1]][0] - values[pair[0]][0]) / (pair[1] - pair[0]))


def _panels(rows: Sequence[Row]) -> list[Panel]:
    step = "step + 1"
    loss = [_shifted(rows, name, i, quantity=name) for i, name in enumerate(("loss", "entropy"))]
    moments = [_shifted(rows, label, i, quantity=name) for i, (name, label) in enumerate(_MOMENTS.items())]
    panels = [
        Panel("loss and entropy of the rows", step, "nats", y_log=False, series=loss),
        Panel("moments of the rows", step, "share", series=moments),
    ]
    share = [_shifted(rows, group, i, quantity="share", block=group) for i, group in enumerate((*_GROUPS, "all"))]
    panels.append(Panel("functional share of |H|²", step, "share", series=share))
    for part in _PARTS:
        series = [
            _shifted(rows, block, i, quantity="frobenius_norm", block=block, part=part)
            for i, block in enumerate(_BLOCKS)
        ]
        panels.append(Panel(f"{part} diagonal blocks", step, series=series))
    series = []
    for i, (block, part) in enumerate(_RATES):
        chosen = select(rows, block=block, part=part, quantity="sharpened")
        name = f"{block}/β²" if block == "K" else block
        series.append(curve(chosen, "at", f"{part} {name}", i))
    guides = []
    for one, exponent in zip((series[0], series[2]), (-2.0, -1.0), strict=True):
        y = [one.y[-1] * math.exp(exponent * (x - one.x[-1])) for x in one.x]
        guides.append(Guide("", list(one.x), y))
    panels.append(
        Panel("trained, scores times β", "βδ; dashed e^(−βδ), e^(−2βδ)", x_log=False, series=series, guides=guides)
    )
    return panels


def _shifted(rows: Sequence[Row], label: str, index: int, **wanted: str) -> Series:
    """A curve whose step 0 has a place on a logarithmic axis."""
    one = curve(select(rows, **wanted), "at", label, index)
    return replace(one, x=[step + 1 for step in one.x])


_POINTS: list[Point] = [{"norm": "pre"}]

FIGURE = declared("phases", PhasesConfiguration(), _POINTS, measure, _verdicts, _panels)
