"""Trainings of four small networks with five optimizers, for the comparison of them: what is trained and what is kept.

Of a run are kept, along its steps: the loss on a fixed sample of what is trained on, and the seconds spent.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from curvoscope.errors import NonFiniteError
from curvoscope.families import text
from curvoscope.losses import CrossEntropy
from curvoscope.papers import tasks
from curvoscope.papers.experiments import digits
from curvoscope.papers.experiments.extras import check_installed
from curvoscope.papers.experiments.figure import MeasuredValue, named_values
from curvoscope.papers.networks import GPT2
from curvoscope.training import GaussNewton

OPTIMIZERS = ("sgd", "adam", "muon", "soap", "gauss-newton")
TASKS = ("addition", "addition without norm", "text", "digits")
_DATA_SEEDS = 1_000_000  # training batches of run s are drawn from (s + 1) times this on
_SAMPLE = 900_001  # seed of the sample that the loss is measured on
_OUTER = ("W_E", "W_pos", "W_U", "embed", "head")  # parameters that are not hidden matrices, which Muon is made for

InputsAndTargets = tuple[Tensor, Tensor]


class OptimizerStudy(BaseModel):
    """What is alike in all runs.

    `steps` are the most of a run and `goals` the losses at which it ends, by task; `looks` the steps between two looks
    at the loss; `rates` the learning rates that are searched, with networks and data of `search_seeds`, none of the
    study's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digits: int = 1
    d: int = 32
    sequences: int = 128
    characters: int = 40
    context: int = 32
    texts: int = 32
    images: int = 64
    sample: int = 128
    steps: dict[str, int] = {"addition": 400, "addition without norm": 400, "text": 300, "digits": 300}
    goals: dict[str, float] = {"addition": 0.1, "addition without norm": 0.1, "text": 2.0, "digits": 0.5}
    looks: int = 5
    rates: dict[str, tuple[float, ...]] = {
        "sgd": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
        "adam": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
        "muon": (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
        "soap": (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
        "gauss-newton": (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    }
    search_seeds: tuple[int, ...] = (100, 101, 102)


def search(c: OptimizerStudy, task: str, optimizer: str, rate: float) -> list[MeasuredValue]:
    """Means over the search's seeds: of the steps to the goal, twice those of a run if it is not reached, and of the
    loss up to there; only the step at which a run diverged, if one did."""
    steps, means = [], []
    for seed in c.search_seeds:
        values = train(c, task, optimizer, rate, seed)
        if values[-1].quantity == "diverged":
            return named_values({"diverged": values[-1].value}, at=rate)
        losses = [(value.at, value.value) for value in values if value.quantity == "loss"]
        steps.append(min((at for at, loss in losses if loss <= c.goals[task]), default=2.0 * c.steps[task]))
        means.append(sum(loss for _, loss in losses) / len(losses))
    return named_values({"steps": sum(steps) / len(steps), "mean_loss": sum(means) / len(means)}, at=rate)


def train(c: OptimizerStudy, task: str, optimizer: str, rate: float, seed: int) -> list[MeasuredValue]:
    """One run, up to its goal.

    `seconds` are of the processor, so that other work on the machine counts little, `wall` those of the clock; both are
    those of the steps alone. A run whose loss is no longer finite ends with the step at which that was seen.
    """
    subject = subject_of(c, task)
    model = subject.network(seed)
    step_on = stepper(model, optimizer, rate)
    sample = subject.batch(_SAMPLE, c.sample)
    values, seconds, wall = list[MeasuredValue](), 0.0, 0.0
    for step in range(c.steps[task] + 1):
        try:
            if step % c.looks == 0:
                found = {"loss": _loss(model, *sample), "seconds": seconds, "wall": wall}
                values += named_values(found, at=float(step))
            if step == c.steps[task] or values[-3].value <= c.goals[task]:
                break
            batch = subject.batch(_DATA_SEEDS * (seed + 1) + step, subject.rows)
            start, clock = time.process_time(), time.perf_counter()
            step_on(*batch)
            seconds, wall = seconds + time.process_time() - start, wall + time.perf_counter() - clock
        except NonFiniteError:
            return values + named_values({"diverged": step})
    return values


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        loss = float(CrossEntropy()(model(inputs), targets))
    if not math.isfinite(loss):
        raise NonFiniteError("loss", f"is {loss}")
    return loss


# ---- what is trained


@dataclass(frozen=True)
class StudyTask:
    """A network as a function of its seed, data as a function of a seed and a number of rows, and rows per batch."""

    network: Callable[[int], nn.Module]
    batch: Callable[[int, int], InputsAndTargets]
    rows: int


def subject_of(c: OptimizerStudy, task: str) -> StudyTask:
    """What a task trains, in float32."""
    if task == "text":
        tokens = text.encode(text.corpus(), c.characters).tokens

        def excerpts(seed: int, rows: int) -> InputsAndTargets:
            starts = _numbers(len(tokens) - c.context, rows, seed)
            found = tokens[starts[:, None] + torch.arange(c.context + 1)]
            return found[:, :-1], found[:, 1:]

        return StudyTask(lambda seed: _gpt2(c.d, "pre", c.characters, c.context, seed), excerpts, c.texts)
    if task == "digits":

        def pictures(seed: int, rows: int) -> InputsAndTargets:
            patches, labels = digits.training_images()
            chosen = _numbers(len(labels), rows, seed)
            return patches[chosen].float(), labels[chosen]

        def vision(seed: int) -> nn.Module:
            return digits.VisionTransformer(c.d, 4 * c.d, seed).float()

        return StudyTask(vision, pictures, c.images)
    norm = "pre" if task == "addition" else "none"

    def additions(seed: int, rows: int) -> InputsAndTargets:
        found = tasks.addition(rows, c.digits, seed)
        return found[:, :-1], tasks.answer_targets(found)

    return StudyTask(lambda seed: _gpt2(c.d, norm, tasks.VOCABULARY, 3 * c.digits + 3, seed), additions, c.sequences)


def _gpt2(d: int, norm: str, vocabulary: int, context: int, seed: int) -> GPT2:
    return GPT2(d, 1, norm, vocabulary=vocabulary, context=context, seed=seed, dtype=torch.float32)


def _numbers(below: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, below, (count,), generator=torch.Generator().manual_seed(seed))


# ---- optimizers


def stepper(model: nn.Module, name: str, rate: float) -> Callable[[Tensor, Tensor], object]:
    """One step of an optimizer on a batch: all settings but the learning rate are the packages' own, without decay.

    Muon takes the hidden matrices and Adam the others, at the same rate: Muon's is scaled to steps of Adam's size.
    """
    if name == "gauss-newton":
        optimizer = GaussNewton(model, CrossEntropy(), lr=rate)
        return lambda inputs, targets: optimizer.step((inputs, targets))
    weights = list(model.parameters())
    if name == "sgd":
        return _plain_step(model, [torch.optim.SGD(weights, lr=rate, momentum=0.9)])
    if name == "adam":
        return _plain_step(model, [torch.optim.Adam(weights, lr=rate)])
    if name == "soap":
        check_installed("optimizers")
        from pytorch_optimizer import SOAP

        return _plain_step(model, [SOAP(weights, lr=rate, weight_decay=0.0)])
    hidden = {id(p) for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith(_OUTER)}
    inner, outer = [p for p in weights if id(p) in hidden], [p for p in weights if id(p) not in hidden]
    muon = torch.optim.Muon(inner, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return _plain_step(model, [muon, torch.optim.Adam(outer, lr=rate)])


def _plain_step(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[Tensor, Tensor], None]:
    def step(inputs: Tensor, targets: Tensor) -> None:
        model.zero_grad()
        logits = model(inputs)
        nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step
