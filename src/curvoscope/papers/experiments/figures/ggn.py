"""How much of the Hessian's largest eigenvalue the Gauss-Newton matrix has: a Transformer and an MLP of its size."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvoscope.curvature import hessian
from curvoscope.losses import CrossEntropy
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Additions, checkpoints
from curvoscope.papers.experiments.summaries import claim, curve, mean, select
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import VOCABULARY

_NETWORKS = ("transformer", "mlp")


class GaussNewtonConfiguration(Additions):
    """`hidden` makes the MLP's parameters as many as the Transformer's, 3900 at d = 16."""

    d: int = 16
    hidden: int = 45
    steps: tuple[int, ...] = (0, 25, 50, 100, 200)
    rate: float = 0.003


class MLP(nn.Module):
    """Each position alone: embeddings, two ReLU layers, logits; weights N(0, 0.64/rows), biases zero."""

    def __init__(self, d: int, hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int, fan_in: int) -> nn.Parameter:
            weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return nn.Parameter(0.8 * weight / fan_in**0.5)

        self.W_E, self.W_pos = draw(VOCABULARY, d, d), draw(18, d, d)
        sizes = ((d, hidden), (hidden, hidden), (hidden, VOCABULARY))
        self.weights = nn.ParameterList(draw(rows, columns, rows) for rows, columns in sizes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(c, dtype=torch.float64)) for _, c in sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L) -> logits (N, L, 12)."""
        x = self.W_E[tokens] + self.W_pos[: tokens.shape[1]]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            x = x.relu() if i < 2 else x
        return x


def measure(configuration: GaussNewtonConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """The largest eigenvalues of the Hessian and of the Gauss-Newton matrix, and their ratio, during training."""
    c = configuration
    model = GPT2(c.d, seed=seed) if point["network"] == "transformer" else MLP(c.d, c.hidden, seed)
    values = []
    for step in checkpoints(model, c.steps, c.sequences, c.rate, seed):
        H = hessian(model, CrossEntropy(), [c.probe()], method="autodiff")
        total, outer = (float(matrix.eigenvalues(1, "LA")[0]) for matrix in (H.total, H.outer))
        values += named_values({"largest_eigenvalue": total}, at=float(step))
        values += named_values({"largest_eigenvalue": outer, "share": outer / total}, "outer", at=float(step))
    return values


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """No prediction: the shares themselves, before and after training."""
    last = max(row.found.at for row in rows)
    found = []
    for at, when in ((0.0, "at initialisation"), (last, f"after {last:g} steps")):
        for network in _NETWORKS:
            chosen = select(rows, network=network, quantity="share", at=at)
            statement = f"{network} {when}: λ_max of the Gauss-Newton matrix over λ_max of the Hessian"
            found.append(claim(chosen, statement, mean(chosen), None))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    shares = [
        curve(select(rows, network=network, quantity="share"), "at", network, i) for i, network in enumerate(_NETWORKS)
    ]
    panels = [Panel("λ_max of GGN over Hessian", "step", "ratio", x_log=False, y_log=False, series=shares)]
    for network in _NETWORKS:
        chosen = select(rows, network=network, quantity="largest_eigenvalue")
        names = (("total", "Hessian"), ("outer", "GGN"))
        series = [curve(select(chosen, part=part), "at", name, i) for i, (part, name) in enumerate(names)]
        panels.append(Panel(network, "step", "largest eigenvalue", x_log=False, series=series))
    return panels


FIGURE = declared(
    "ggn", GaussNewtonConfiguration(), [{"network": network} for network in _NETWORKS], measure, _verdicts, _panels
)
