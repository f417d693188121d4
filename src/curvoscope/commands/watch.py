"""`curvoscope watch`: train the addition model with the monitor on; stop at any time, go on with --resume."""

import dataclasses
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from curvoscope import checks, commands, data
from curvoscope.curvature import CrossEntropy
from curvoscope.errors import EmptyError, ModelError, RangeError
from curvoscope.models.gpt2_block import GPT2
from curvoscope.report.training_figures import training_figure
from curvoscope.training import BlockCurvature, CurvatureMonitor, Record

RECORDS, CHECKPOINT, FIGURE = "records.jsonl", "checkpoint.pt", "watch.png"
_DATA_SEEDS = 1_000_000  # apart: those of the training batches begin here, the probe's is the run's own
_SHOWN = 20  # rows of the live table
_OPTIMIZERS = ("sgd", "adam", "block-sgd", "block-adam")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is trained and how it is watched. The names are those of the options; all but `steps` belong to a run."""

    steps: int = 2000
    seed: int = 0
    d: int = 16
    norm: str = "pre"
    optimizer: str = "adam"
    lr: float = 3e-3
    sequences: int = 64
    every: int = 10
    budget: float = 0.1

    def __post_init__(self) -> None:
        checks.choice("optimizer", self.optimizer, _OPTIMIZERS)
        if self.steps < 1:
            raise RangeError("steps", f"got {self.steps}, expected at least 1")
        if not 0 <= self.seed < 1000:
            raise RangeError("seed", f"got {self.seed}, expected 0 to 999")
        if not 0 < self.lr < float("inf"):
            raise RangeError("lr", f"got {self.lr}, expected a positive number")


class _Run:
    """Model, optimizer and monitor; batch t is a function of the seed and of t, so a resumed run is the same run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.model = GPT2(d=options.d, norm=options.norm, seed=options.seed, dtype=torch.float32)
        self.loss = CrossEntropy()
        probe = [self._batch(options.seed)]
        kind, lr, weights = options.optimizer, options.lr, self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if kind == "sgd":
            self.optimizer = torch.optim.SGD(weights, lr=lr, momentum=0.9)
        elif kind == "adam":
            self.optimizer = torch.optim.Adam(weights, lr=lr)
        else:
            self.optimizer = BlockCurvature(self.model, self.loss, probe, lr, base=kind.removeprefix("block-"))
        self.monitor = CurvatureMonitor(
            self.model, self.loss, probe, every=options.every, budget=options.budget, seed=options.seed
        )
        self.monitor.watch(self.optimizer)

    def _batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = data.addition(self.options.sequences, seed=seed)
        return tokens[:, :-1], data.answer_targets(tokens)

    def step(self) -> Record | None:
        """One training step, watched."""
        inputs, targets = self._batch(_DATA_SEEDS * (self.options.seed + 1) + self.monitor.steps)
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return self.monitor.step(loss)

    def state(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {
            "options": dataclasses.asdict(self.options),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "monitor": self.monitor.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, once it is known to be of such a run."""
        mine = dataclasses.asdict(self.options)
        for name, value in state["options"].items():
            if name != "steps" and mine[name] != value:
                raise ModelError(name, f"is {mine[name]}, and was {value} in the run to resume; give --{name} {value}")
        self.monitor.load_state_dict(state["monitor"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def run(options: Options, out: Path, resume: bool, as_json: bool) -> int:
    """Train, showing a live table; write records.jsonl, checkpoint.pt and watch.png into `out`.

    Ctrl-C ends the run after the step at hand, and everything is written. The exit code is then 130.
    """
    found = _Run(options)
    commands.make_directory(out)
    if resume:
        found.load(_checkpoint(out / CHECKPOINT))
    records = found.monitor.records
    commands.write(out / RECORDS, "".join(_line(record) for record in records).encode())
    stderr = Console(stderr=True, highlight=False)
    live = Live(console=stderr, auto_refresh=False, transient=True)
    with _interruptible() as stopped, live if stderr.is_terminal else _silent(), (out / RECORDS).open("a") as file:
        try:
            while found.monitor.steps < options.steps and not stopped.is_set():
                record = found.step()
                if record is not None:
                    file.write(_line(record))
                    file.flush()
                    if live.is_started:
                        live.update(_table(records[-_SHOWN:]), refresh=True)
        finally:
            _save(out / CHECKPOINT, found.state())
    if not records:
        raise EmptyError("records", f"nothing was measured in {found.monitor.steps} steps; give a larger --budget")
    commands.write(out / FIGURE, commands.png(training_figure(records)))
    if as_json:
        print(_document(found))
    else:
        _show(found, out, stopped.is_set())
    return 130 if stopped.is_set() else 0


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C sets the event, and a second one interrupts at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _silent() -> Iterator[None]:
    yield


def _line(record: Record) -> str:
    return json.dumps(record.facts(), allow_nan=False) + "\n"


def _save(path: Path, state: dict[str, Any]) -> None:
    """Beside the old one and renamed, so that a run that dies here can still be resumed."""
    beside = path.with_name(f".{path.name}")
    try:
        torch.save(state, beside)
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        raise commands.OutputError("out", f"cannot write {path}: {error}") from error


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise ModelError("resume", f"there is no {path}; start a run without --resume") from None
    except Exception as error:
        raise ModelError("resume", f"{path} cannot be read: {error}") from error
    return state


def _table(records: list[Record]) -> Table:
    table = Table(title="curvature on the probe", title_justify="left")
    for heading in ("step", "loss", "λ max", "2/lr", "critical", "|g|", "g·Hg/g·g", "λ min", "trace", "functional"):
        table.add_column(heading, justify="right")
    for one in records:
        more = one.details
        numbers = (
            one.probe_loss,
            one.largest_eigenvalue,
            one.edge,
            one.critical_sharpness,
            one.gradient_norm,
            one.gradient_curvature,
            None if more is None else more.smallest_eigenvalue,
            None if more is None else more.trace,
            None if more is None else more.functional_share,
        )
        table.add_row(str(one.step), *("" if number is None else f"{float(number):.3g}" for number in numbers))
    return table


def _document(found: _Run) -> str:
    document = {
        "configuration": dataclasses.asdict(found.options),
        "steps": found.monitor.steps,
        "share_of_time": found.monitor.pace.share,
        "records": [record.facts() for record in found.monitor.records],
        "incidents": [incident.facts() for incident in found.monitor.incidents],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _show(found: _Run, out: Path, stopped: bool) -> None:
    console, monitor = commands.console(), found.monitor
    console.print(_table(monitor.records[-_SHOWN:]))
    share = monitor.pace.share
    console.print(f"{len(monitor.records)} measurements in {monitor.steps} steps, {share:.0%} of the time.")
    for incident in monitor.incidents:
        console.print(f"step {incident.step}: {incident.kind} {incident.message}", markup=False)
    if stopped:
        console.print("Stopped; the same command with --resume goes on.")
    for name in (FIGURE, RECORDS, CHECKPOINT):
        print(f"wrote {out / name}")
