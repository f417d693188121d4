"""Figure 8: linear MLPs of depth 1 to 5, squared error: every layer grows as σ²."""

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn.functional import one_hot

from curvoscope import exact
from curvoscope.papers import tasks
from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import Figure, MeasuredValue, Point, Row
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import ANSWERS
from curvoscope.papers.tasks import VOCABULARY


class LinearNetworkConfiguration(BaseModel):
    """A token's embedding (width,), depth - 1 layers (width, width), the last one (width, 12); no biases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = 128
    sequences: int = 64
    data_seed: int = 0

    def network(self, seed: int, depth: int, sigma: float) -> tuple[Tensor, exact.LinearMLP]:
        """The embeddings (12, width), N(0, sigma²), and the layers: U(-1/√width, 1/√width), torch's default."""
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(VOCABULARY, self.width, generator=generator, dtype=torch.float64)
        weights = []
        for layer in range(depth):
            columns = self.width if layer < depth - 1 else VOCABULARY
            uniform = torch.rand(self.width, columns, generator=generator, dtype=torch.float64)
            weights.append((2 * uniform - 1) / self.width**0.5)
        return sigma * normal, exact.LinearMLP(weights)


def measure(configuration: BaseModel, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The exact norm of every layer's diagonal block, which is all outer: the network is linear in each weight."""
    assert isinstance(configuration, LinearNetworkConfiguration)
    tokens = tasks.addition(configuration.sequences, seed=configuration.data_seed)[:, ANSWERS]
    embeddings, network = configuration.network(seed, int(point["depth"]), float(point["sigma"]))
    targets = one_hot(tokens, VOCABULARY).double()

    def squares(F: Tensor) -> Tensor:
        return (F - targets).square().sum()

    H = network.hessian(embeddings[tokens], squares)
    return [MeasuredValue(i + 1, "W", "total", float(H.total[name].frobenius_norm())) for i, name in enumerate(H.names)]


_DEPTHS = (1, 2, 3, 4, 5)
_PREDICTIONS = (Growth("W", "total", 2, largest=10.0),)
_POINTS = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS for sigma in growth.log_grid(-2.0, 1.0)]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel
        for depth in _DEPTHS
        for panel in growth.panels(
            rows, _PREDICTIONS, ("W",), ("total",), where={"depth": depth}, heading=f"depth {depth}: "
        )
    ]


FIGURE = Figure(
    name="fig8",
    title="Linear MLPs: growth as σ² at every depth",
    question="How do the blocks of a linear MLP grow with the scale of the input, compared with those of attention?",
    configuration=LinearNetworkConfiguration(),
    points=_POINTS,
    seeds=20,
    quick_seeds=2,
    measure=measure,
    verdicts=partial(fits.verdicts, predictions=_PREDICTIONS),
    panels=_panels,
    seconds=lambda point: 0.1,
)
