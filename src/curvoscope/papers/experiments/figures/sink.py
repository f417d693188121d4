"""Attention sinks: a bias of all queries towards the first token, in the scalar model and in a trained network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvoscope.exact import ScalarAttention
from curvoscope.papers.experiments.figure import MeasuredValue, Point, Row, Verdict, named_values
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.panels import Panel
from curvoscope.papers.experiments.setting import Additions, checkpoints
from curvoscope.papers.experiments.summaries import by, claim, curve, select
from curvoscope.papers.networks import GPT2

_MODELS = ("scalar", "gpt2")


class SinkConfiguration(Additions):
    """`biases` are added to the scores of the first key; the network is trained for `steps` without one."""

    biases: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    tokens: int = 12
    k: int = 16
    d: int = 16
    steps: int = 200
    rate: float = 0.003


def measure(configuration: SinkConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Scalar model: bulk and largest outlier. Network: the extreme eigenvalues of its attention layer's Hessian."""
    found = _scalar(configuration, seed) if point["model"] == "scalar" else _network(configuration, seed)
    values = []
    for bias, numbers in zip(configuration.biases, found, strict=True):
        values += named_values(numbers, at=bias)
    return values


def _scalar(configuration: SinkConfiguration, seed: int) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, configuration.tokens, generator=generator, dtype=torch.float64)
    w_Q, w_K = torch.randn(2, configuration.k, generator=generator, dtype=torch.float64)
    model = ScalarAttention(w_Q, w_K, 1.0)
    found = []
    for bias in configuration.biases:
        spectrum = model.spectrum(x, y, mask=_towards_first(configuration.tokens, bias))
        found.append({"bulk": spectrum.bulk, "outlier": float(spectrum.outliers.abs().max())})
    return found


def _network(configuration: SinkConfiguration, seed: int) -> list[dict[str, float]]:
    c = configuration
    model = GPT2(c.d, seed=seed)
    for _ in checkpoints(model, (c.steps,), c.sequences, c.rate, seed):
        model.requires_grad_(False)
    inputs, targets = c.probe()
    layer, X, loss = model.attention(), model.attention_input(inputs), model.tail(inputs, targets)
    found = []
    for bias in c.biases:
        H = layer.hessian(X, loss, _towards_first(X.shape[1], bias), biases=False)
        eigenvalues = torch.linalg.eigvalsh(H.dense())
        found.append({"largest": float(eigenvalues[-1]), "smallest": float(eigenvalues[0])})
    return found


def _towards_first(length: int, bias: float) -> Tensor:
    mask = torch.zeros(length, length, dtype=torch.float64)
    mask[:, 0] = bias
    return mask


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for model, quantity, grows in (("scalar", "bulk", False), ("scalar", "outlier", True), ("gpt2", "largest", True)):
        chosen = select(rows, model=model, quantity=quantity)
        means = [sum(group) / len(group) for group in by(chosen, "at").values()]
        ratio = means[-1] / means[0]
        what = {"bulk": "shrinks the bulk", "outlier": "stretches the outliers", "largest": "stretches the spectrum"}
        statement = f"{model}: a sink {what[quantity]} (mean with the largest bias over that without one)"
        found.append(claim(chosen, statement, ratio, (ratio > 1) == grows))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    label = "bias of the first key's scores"
    scalar = [curve(select(rows, quantity=name), "at", name, i) for i, name in enumerate(("bulk", "outlier"))]
    network = [curve(select(rows, quantity=name), "at", name, i) for i, name in enumerate(("largest", "smallest"))]
    return [
        Panel("scalar model", label, "|eigenvalue|", x_log=False, series=scalar),
        Panel("trained GPT-2, attention layer", label, "eigenvalue", x_log=False, y_log=False, series=network),
    ]


FIGURE = declared("sink", SinkConfiguration(), [{"model": model} for model in _MODELS], measure, _verdicts, _panels)
