"""Curvature through depth: without a norm it grows with every block, with LayerNorm it stays bounded."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from curvoscope import exact, losses
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel, Series
from curvoscope.papers.experiments.setting import Additions
from curvoscope.papers.experiments.summaries import by, claim, curve, geometric_mean, select
from curvoscope.papers.networks import GPT2

_PLACEMENTS = {"none": "no norm", "pre": "pre-norm", "post": "post-norm"}
_DEPTHS = tuple(range(1, 9))
_POINTS: list[Point] = [{"placement": placement, "depth": depth} for placement in _PLACEMENTS for depth in _DEPTHS]
_QUICK = [point for point in _POINTS if point["depth"] in (1, 2, 4, 8)]
_BOUNDED = 10.0  # from one block to eight


class DepthNetwork(Additions):
    """The paper's network at initialisation, embeddings N(0, σ²); for "post" its norms stand behind the branches."""

    d: int = 16
    sequences: int = 4
    sigma: float = 1.0

    def parts(self, placement: str, depth: int, seed: int) -> tuple[exact.Stack, Tensor, losses.CrossEntropy]:
        """The network in closed form, its input X (N, L, d) and its loss."""
        inputs, targets = self.probe()
        model = GPT2(self.d, depth, norm="pre" if placement == "pre" else "none", seed=seed).requires_grad_(False)
        with torch.no_grad():
            for embedding in (model.W_E, model.W_pos):
                embedding.mul_(self.sigma * self.d**0.5 / 0.8)  # drawn from N(0, 0.64/d)
        stack = model.stack()
        if placement == "post":
            stack = exact.Stack(
                [self._post(block) for block in stack.layers if isinstance(block, exact.TransformerBlock)]
            )
        return stack, model.residual_stream(inputs, 0), model.exact_loss(targets)

    def _post(self, block: exact.TransformerBlock) -> exact.TransformerBlock:
        ones, zeros = torch.ones(self.d, dtype=torch.float64), torch.zeros(self.d, dtype=torch.float64)
        norm = exact.LayerNorm(ones, zeros, 1e-5)
        return exact.TransformerBlock(block.attention, block.feedforward, norm, norm, placement="post")


def measure(configuration: DepthNetwork, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """|S|_2 and |S_functional|_2 at the input and behind each block, and |H|_F of the first block's Q and V."""
    depth = int(point["depth"])
    stack, X, loss = configuration.parts(str(point["placement"]), depth, seed)
    records = {record.name: record for record in exact.backpropagate(stack, X, loss)}
    values = []
    for layer, name in enumerate(["input", *(f"h.{i}.mlp" for i in range(depth))]):
        for part, S in (("total", records[name].S), ("functional", records[name].S_functional)):
            values.append(MeasuredValue(layer, "S", part, float(S.spectral_norm()), quantity="spectral_norm"))
    H = stack.hessian(X, loss)
    values += [
        MeasuredValue(1, role, "total", float(H.total[f"h.0.attn.{role}"].frobenius_norm())) for role in ("Q", "V")
    ]
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    at_input = select(rows, block="S", part="total", layer=0)
    for placement, name in _PLACEMENTS.items():
        chosen = select(at_input, placement=placement)
        first, last = (geometric_mean(select(chosen, depth=depth)) for depth in (_DEPTHS[0], _DEPTHS[-1]))
        grows = placement == "none"
        statement = f"{name}: |S|₂ at the input, eight blocks over one, is " + (
            f"above {_BOUNDED:.0f}" if grows else f"below {_BOUNDED:.0f}"
        )
        found.append(claim(chosen, statement, last / first, (last / first > _BOUNDED) == grows))
    for role in ("Q", "V"):
        without, with_norm = (
            geometric_mean(select(rows, block=role, placement=placement, depth=_DEPTHS[-1]))
            for placement in ("none", "pre")
        )
        statement = (
            f"eight blocks: |H|_F of the first {role} without a norm over that with pre-norm is above {_BOUNDED:.0f}"
        )
        found.append(claim(select(rows, block=role), statement, without / with_norm, without / with_norm > _BOUNDED))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    spectral = select(rows, block="S", part="total")
    panels = [
        Panel("loss Hessian at the input", "blocks", "|S|₂", x_log=False, series=_curves(select(spectral, layer=0))),
        Panel("value block of the first layer", "blocks", x_log=False, series=_curves(select(rows, block="V"))),
    ]
    deepest = [
        _profile(select(spectral, placement=placement, depth=_DEPTHS[-1]), name, i)
        for i, (placement, name) in enumerate(_PLACEMENTS.items())
    ]
    title = f"through a network of {_DEPTHS[-1]} blocks"
    return [*panels, Panel(title, "behind block (0: input)", "|S|₂", x_log=False, series=deepest)]


def _curves(rows: Sequence[Row]) -> list[Series]:
    return [curve(select(rows, placement=p), "depth", name, i) for i, (p, name) in enumerate(_PLACEMENTS.items())]


def _profile(rows: Sequence[Row], label: str, index: int) -> Series:
    groups = by(rows, "layer")
    means = [float(np.exp(np.mean(np.log(group)))) for group in groups.values()]
    return Series(label, list(groups), means, colour=index, stroke=index)


FIGURE = declared("depth", DepthNetwork(), _POINTS, measure, _verdicts, _panels, quick_points=_QUICK)
