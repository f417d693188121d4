"""Figure 8: linear MLPs of depth 1 to 5, squared error: every layer grows as σ²."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from curvoscope import exact
from curvoscope.papers.experiments import fits, growth
from curvoscope.papers.experiments.figure import MeasuredValue, Point
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.fits import Growth
from curvoscope.papers.experiments.setting import ANSWERS, Additions
from curvoscope.papers.tasks import VOCABULARY


class LinearNetworkConfiguration(Additions):
    """A token's embedding (width,), depth - 1 layers (width, width), the last one (width, 12); no biases."""

    width: int = 128

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


def measure(configuration: LinearNetworkConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The exact norm of every layer's diagonal block, which is all outer: the network is linear in each weight."""
    tokens = configuration.additions()[:, ANSWERS]
    embeddings, network = configuration.network(seed, int(point["depth"]), float(point["sigma"]))
    targets = one_hot(tokens, VOCABULARY).double()

    def squares(F: Tensor) -> Tensor:
        return (F - targets).square().sum()

    H = network.hessian(embeddings[tokens], squares)
    return [MeasuredValue(i + 1, "W", "total", float(H.total[name].frobenius_norm())) for i, name in enumerate(H.names)]


_DEPTHS = (1, 2, 3, 4, 5)
_PREDICTIONS = (Growth("W", "total", 2, largest=10.0),)
_POINTS = [{"depth": depth, "sigma": sigma} for depth in _DEPTHS for sigma in growth.log_grid(-2.0, 1.0)]

FIGURE = declared(
    "fig8",
    LinearNetworkConfiguration(),
    _POINTS,
    measure,
    partial(fits.verdicts, predictions=_PREDICTIONS),
    partial(growth.panels_by_depth, predictions=_PREDICTIONS, blocks=("W",), parts=("total",)),
)
