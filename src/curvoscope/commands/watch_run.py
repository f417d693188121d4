"""The training that `curvoscope watch` watches: what is trained, its batches, its checkpoint."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvoscope import checks, commands
from curvoscope.curvature import CrossEntropy
from curvoscope.errors import ModelError, RangeError
from curvoscope.families import text
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from curvoscope.training import CurvatureMonitor, GaussNewton, Logger, Record, StoredRun

TokenBatch = tuple[Tensor, Tensor]

_TASKS = ("addition", "text")
_OPTIMIZERS = ("sgd", "adam", "gauss-newton")
_SEQUENCES = {"addition": 64, "text": 16}  # a batch, and the probe
MOMENTUM = 0.9  # of "sgd"
_MEASUREMENTS = 20  # make a curve
_DATA_SEEDS = 1_000_000  # apart: those of the training batches begin here, the probe's is the run's own


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """What is trained and how it is watched. The names are those of the options; all but `steps` belong to a run."""

    steps: int = 2000
    seed: int = 0
    task: str = "addition"
    d: int = 16
    norm: str = "pre"
    optimizer: str = "adam"
    lr: float = 3e-3
    sequences: int | None = None  # None: what suits the task
    every: int | None = None  # None: at most _MEASUREMENTS in the run
    budget: float = 1.0

    def __post_init__(self) -> None:
        checks.choice("task", self.task, _TASKS)
        checks.choice("optimizer", self.optimizer, _OPTIMIZERS)
        checks.at_least(1, steps=self.steps, d=self.d, every=self.every, sequences=self.sequences)
        checks.positive(lr=self.lr)
        if not 0 <= self.seed < 1000:
            raise RangeError("seed", f"got {self.seed}, expected 0 to 999")
        if not 0 < self.budget <= 1:
            raise RangeError("budget", f"got {self.budget}, expected a share of the time above 0 and at most 1")

    @property
    def batch(self) -> int:
        """Sequences per batch."""
        return self.sequences if self.sequences is not None else _SEQUENCES[self.task]

    @property
    def spacing(self) -> int:
        """Steps between two measurements, at least."""
        return self.every if self.every is not None else -(-self.steps // _MEASUREMENTS)


class _Additions:
    """Five-digit additions; the loss is that of the answers."""

    vocabulary, context, depth = tasks.VOCABULARY, 18, 1

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self.about = f"Cross-entropy of the answers to five-digit additions, {sequences} per batch and in the probe."

    def probe(self, seed: int) -> TokenBatch:
        """What is measured on."""
        return self.batch(seed)

    def batch(self, seed: int) -> TokenBatch:
        """Inputs and targets (N, 17)."""
        tokens = tasks.addition(self._sequences, seed=seed)
        return tokens[:, :-1], tasks.answer_targets(tokens)


class _Text:
    """The corpus that ships with the package, one token per byte; the loss is that of each next byte."""

    vocabulary, context, depth = text.BYTES, 32, 2

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        encoded = text.encode(text.corpus(), text.BYTES)
        self._tokens = encoded.tokens
        self.about = (
            f"Cross-entropy of the next token in the package's corpus, {sequences} sequences of {self.context} tokens "
            f"per batch, the probe from its beginning; tokens: {encoded.about}."
        )

    def probe(self, seed: int) -> TokenBatch:
        """The first sequences of the text."""
        tokens = text.cut(self._tokens, self._sequences, self.context + 1)
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, seed: int) -> TokenBatch:
        """Inputs and targets (N, 32) from random places."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(self._tokens) - self.context, (self._sequences, 1), generator=generator)
        tokens = self._tokens[starts + torch.arange(self.context + 1)]
        return tokens[:, :-1], tokens[:, 1:]


class TrainingRun:
    """Model, optimizer and monitor; batch t is a function of the seed and of t, so a resumed run is the same run."""

    def __init__(self, options: WatchOptions, store: StoredRun | None = None, logger: Logger | None = None) -> None:
        self.options, seed = options, options.seed
        task = self._data = _Additions(options.batch) if options.task == "addition" else _Text(options.batch)
        self.model = GPT2(
            *(options.d, task.depth, options.norm),
            vocabulary=task.vocabulary,
            context=task.context,
            seed=seed,
            dtype=torch.float32,
        )
        self.loss = CrossEntropy()
        probe = [task.probe(seed)]
        kind, lr, weights = options.optimizer, options.lr, self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if kind == "sgd":
            self.optimizer = torch.optim.SGD(weights, lr=lr, momentum=MOMENTUM)
        elif kind == "adam":
            self.optimizer = torch.optim.Adam(weights, lr=lr)
        else:
            self.optimizer = GaussNewton(self.model, self.loss, lr=lr, seed=seed)
        self.monitor = CurvatureMonitor(
            *(self.model, self.loss, probe),
            every=options.spacing,
            budget=options.budget,
            seed=seed,
            store=store,
            logger=logger,
        )
        self.monitor.watch(self.optimizer)

    @property
    def about(self) -> list[str]:
        """The model and its data, one sentence per line."""
        size = sum(weight.numel() for weight in self.model.parameters())
        return [f"GPT2, {size:,} parameters in float32, seed {self.options.seed}.", self._data.about]

    def step(self) -> Record | None:
        """One training step, watched."""
        inputs, targets = self._data.batch(_DATA_SEEDS * (self.options.seed + 1) + self.monitor.steps)
        if isinstance(self.optimizer, GaussNewton):
            return self.monitor.step(self.optimizer.step((inputs, targets)))
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return self.monitor.step(loss)

    def state(self) -> dict[str, Any]:
        """All that is needed to resume."""
        return {
            "options": dataclasses.asdict(self.options),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "monitor": self.monitor.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a state, after checking that it belongs to such a run."""
        mine = dataclasses.asdict(self.options)
        for name, value in state["options"].items():
            if name != "steps" and mine[name] != value:
                was, cure = ("not given", "leave it out") if value is None else (value, f"give --{name} {value}")
                raise ModelError(name, f"is {mine[name]}, and was {was} in the run to resume; {cure}")
        self.monitor.load_state_dict(state["monitor"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


# ---- the checkpoint


def save(path: Path, state: dict[str, Any]) -> None:
    """Write next to the old checkpoint and rename, so that a run that dies here can still be resumed."""
    beside = path.with_name(f".{path.name}")
    try:
        torch.save(state, beside)
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # half a checkpoint is of no use
            beside.unlink()
        raise commands.OutputError("out", f"cannot write {path}: {error}") from error


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote."""
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise ModelError("resume", f"there is no {path}; start a run without --resume") from None
    except Exception as error:  # whatever torch does not like
        reason = str(error).split("\n")[0]
        raise ModelError("resume", f"{path} cannot be read: {reason}; start a run without --resume") from error
    needed = {"run", "options", "model", "optimizer", "monitor"}
    if not isinstance(state, dict) or not needed <= state.keys():
        raise ModelError("resume", f"{path} is not a checkpoint of a watched run; start one without --resume")
    return state
