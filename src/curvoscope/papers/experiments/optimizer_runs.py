"""Trainings of the addition network with four optimizers, for the comparison of them: what is trained and what is kept.

Of a run are kept, along its steps: the loss and the share of right answers on fresh additions, the seconds spent, the
largest eigenvalue of the Hessian, and how far the steps are from the edge of stability.
"""

import math
import time

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from curvoscope.blocks import Block, Blocks
from curvoscope.curvature import blocks_of, hessian, trainable
from curvoscope.errors import NonFiniteError
from curvoscope.estimate import lanczos
from curvoscope.losses import CrossEntropy
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.compositions import DiagonallyScaled
from curvoscope.papers import tasks
from curvoscope.papers.experiments.figure import MeasuredValue, named_values
from curvoscope.papers.networks import GPT2
from curvoscope.papers.tasks import IGNORED
from curvoscope.training import BlockCurvature

OPTIMIZERS = ("sgd", "block-sgd", "adam", "block-adam")
NORMS = ("pre", "none")
_DATA_SEEDS = 1_000_000  # training batches of run s are drawn from (s + 1) times this on
_FRESH, _PROBE, _WATCHED = 900_001, 900_002, 900_003  # seeds of what is never trained on
_TOLERANCE = 0.01  # of the eigenvalues shown
_PARTS: dict[str, tuple[str, ...]] = {
    "attn.QK": ("Q", "K", "b_Q", "b_K"),
    "attn.VO": ("V", "O", "b_V", "b_O"),
    "mlp.up": ("up", "b_up"),
    "mlp.down": ("down", "b_down"),
}


class OptimizerStudy(BaseModel):
    """What is alike in all runs: additions of so many digits, the network, and `steps` on fresh `sequences` each.

    `looks` and `curvatures` are the steps between two looks at the loss and two at the curvature. `caps` are the
    largest step sizes that block curvature may take; `probe`, `every` and `matvecs` are its own. `candidates` are what
    is searched: the learning rate, or the safety of block curvature, five values a factor of about three apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digits: int = 1
    d: int = 16
    depth: int = 1
    sequences: int = 64
    steps: int = 800
    looks: int = 10
    curvatures: int = 50
    answers: int = 1000
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    caps: dict[str, float] = {"sgd": 1.0, "adam": 0.03}
    probe: int = 32
    every: int = 100
    matvecs: int = 3
    candidates: dict[str, tuple[float, ...]] = {
        "sgd": (0.003, 0.01, 0.03, 0.1, 0.3),
        "block-sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
        "adam": (0.0003, 0.001, 0.003, 0.01, 0.03),
        "block-adam": (0.01, 0.03, 0.1, 0.3, 1.0),
    }
    search_seeds: tuple[int, ...] = (100, 101, 102)


def search(c: OptimizerStudy, optimizer: str, norm: str, rate: float) -> list[MeasuredValue]:
    """What a candidate is judged by: the mean of the loss along the runs of the search's seeds, none of the study's.

    Where one of them diverges the candidate is out, and the step at which it did is all that is kept.
    """
    means = []
    for seed in c.search_seeds:
        values = train(c, optimizer, norm, rate, seed, curvature=False)
        if values[-1].quantity == "diverged":
            return named_values({"diverged": values[-1].value}, at=rate)
        losses = [value.value for value in values if value.quantity == "loss"]
        means.append(sum(losses) / len(losses))
    return named_values({"mean_loss": sum(means) / len(means)}, at=rate)


def train(
    c: OptimizerStudy, optimizer: str, norm: str, rate: float, seed: int, curvature: bool = True
) -> list[MeasuredValue]:
    """One run. `rate` is the learning rate of "sgd" and "adam", and the safety of those with block curvature.

    Seconds are of the processor, so that other work on the machine counts little, and those of the steps alone: what
    the optimizer measures for itself is in them, what is measured for the figure is not. A run whose loss is no longer
    finite ends with the step at which that was seen.
    """
    model = GPT2(c.d, c.depth, norm, context=3 * c.digits + 3, seed=seed, dtype=torch.float32)
    stepper = _optimizer(c, model, optimizer, rate)
    fresh = batch(c.answers, c.digits, _FRESH)
    edge = Edge(model, stepper, batch(c.probe, c.digits, _WATCHED))
    values, seconds = list[MeasuredValue](), 0.0
    for step in range(c.steps + 1):
        try:
            if step % c.looks == 0:
                found = {**_look(model, *fresh), "seconds": seconds}
                if curvature and step and step % c.curvatures == 0:
                    found |= edge()
                values += named_values(found, at=float(step))
            if step == c.steps:
                break
            start = time.process_time()
            inputs, targets = batch(c.sequences, c.digits, _DATA_SEEDS * (seed + 1) + step)
            stepper.zero_grad()
            model.loss(inputs, targets).backward()
            stepper.step()
            seconds += time.process_time() - start
        except NonFiniteError:
            return values + named_values({"diverged": step})
    return values


class Edge:
    """λ_max of the Hessian, and λ_max(D H D)/κ, D² the step size over the preconditioner: 1 at the edge of stability.

    For SGD with momentum β that is λ_max over 2 (1 + β)/lr. For Adam it is λ_max of the preconditioned Hessian over
    (2 + 2 β₁)/((1 - β₁) lr). With block curvature D has the step size of each block.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, probe: tuple[Tensor, Tensor]) -> None:
        self._model, self._optimizer, self._probe = model, optimizer, probe
        self._blocks = joined_blocks(model)
        self._starts: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, float]:
        """Both, at the model's present weights and the optimizer's present state."""
        H = hessian(self._model, CrossEntropy(), [self._probe], self._blocks, method="autodiff").total
        D, kappa = self._steps()
        return {
            "sharpness": self._largest("sharpness", H),
            "edge": self._largest("edge", DiagonallyScaled(H, D)) / kappa,
        }

    def _steps(self) -> tuple[Tensor, float]:
        """D (n,) and κ."""
        optimizer, group = self._optimizer, self._optimizer.param_groups[0]
        rates = dict.fromkeys(self._blocks, group["lr"])
        if isinstance(optimizer, BlockCurvature):
            rates = optimizer.learning_rates
        named, parts = dict(self._model.named_parameters()), []
        adaptive = "betas" in group and group.get("base") != "sgd"
        for name, block in self._blocks.items():
            squares = {}
            for piece in block.pieces:
                parameter = named[piece.parameter]
                state = optimizer.state[parameter]
                squares[piece.parameter] = torch.full_like(parameter, rates[name])
                if adaptive:
                    square = state["square" if "square" in state else "exp_avg_sq"]
                    corrected = square / (1 - group["betas"][1] ** float(state["step"]))
                    squares[piece.parameter] /= corrected.sqrt() + group["eps"]
            parts.append(block.gather(squares))
        if not adaptive:
            return torch.cat(parts).sqrt(), 2 * (1 + group["momentum"])
        first = group["betas"][0]
        return torch.cat(parts).sqrt(), 2 * (1 + first) / (1 - first)

    def _largest(self, name: str, matrix: LinearOperator) -> float:
        found = lanczos(matrix, 1, "LA", tolerance=_TOLERANCE, start=self._starts.get(name), vectors=True)
        assert found.vectors is not None
        self._starts[name] = found.vectors[:, 0]
        return found[0].value


def _look(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The loss, and the share of sequences all of whose answer digits are the likeliest."""
    with torch.no_grad():
        logits = model(inputs)
        loss = float(CrossEntropy()(logits, targets))
        if not math.isfinite(loss):
            raise NonFiniteError("loss", f"is {loss}")
        right = (logits.argmax(-1) == targets) | (targets == IGNORED)
        return {"loss": loss, "accuracy": float(right.all(1).double().mean())}


def batch(sequences: int, digits: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (N, 3 digits + 2) each."""
    tokens = tasks.addition(sequences, digits, seed)
    return tokens[:, :-1], tasks.answer_targets(tokens)


def joined_blocks(model: nn.Module) -> Blocks:
    """One block each for embeddings, norms and logits, and in each layer for queries with keys, values with outputs and
    the two feed-forward matrices, biases included: a third of the blocks, so a third of the cost of measuring."""
    groups: dict[str, list[Block]] = {}
    for name, block in trainable(model, blocks_of(model)).items():
        groups.setdefault(_group(name), []).append(block)
    return Blocks(Block(name, tuple(p for block in group for p in block.pieces)) for name, group in groups.items())


def _group(name: str) -> str:
    if "norm" in name:
        return "norms"
    if not name.startswith("h."):
        return "logits" if "unembed" in name else "embeddings"
    layer, _, last = name.rpartition(".")
    layer = layer.rsplit(".", 1)[0]
    return next(f"{layer}.{part}" for part, members in _PARTS.items() if last in members)


def _optimizer(c: OptimizerStudy, model: nn.Module, name: str, rate: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=c.momentum)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, betas=c.betas)
    base = name.removeprefix("block-")
    return BlockCurvature(
        model,
        CrossEntropy(),
        [batch(c.probe, c.digits, _PROBE)],
        c.caps[base],
        joined_blocks(model),
        base=base,
        momentum=c.momentum,
        betas=c.betas,
        safety=rate,
        every=c.every,
        matvecs=c.matvecs,
    )
