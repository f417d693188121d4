"""`curvoscope watch`: train a small model with the monitor on; stop at any time, continue with --resume."""

import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from curvoscope import commands
from curvoscope.commands.document import REPORTS
from curvoscope.commands.reproduce import STORE
from curvoscope.commands.watch_report import DOCUMENT, run_facts, write_report
from curvoscope.commands.watch_run import TrainingRun, WatchOptions, load, save
from curvoscope.database import StoreError
from curvoscope.errors import EmptyError
from curvoscope.training import Incident, Record, RunStore, StoredRun
from curvoscope.training.loggers import tool_of
from curvoscope.versions import versions

CHECKPOINT = "checkpoint.pt"
_SHOWN = 20  # rows of the live table
_FEW = 3  # records that make no curve
_SAVED_EVERY = 20.0  # seconds from one checkpoint to the next, at most


def run(options: WatchOptions, out: Path, resume: bool, as_json: bool, logger: str | None = None) -> int:
    """Train, showing a live table; write store.sqlite, checkpoint.pt, watch.json, figures and a report into `out`.

    Records go into the store one by one, and the checkpoint is written now and then: a run that is killed can be
    resumed, and ends with the weights that it would have had. Ctrl-C ends the run after the step at hand, and
    everything is written. The exit code is then 130. `logger` names a tool that gets the numbers, in a run of its own.
    """
    tool = None if logger is None else tool_of(logger)
    commands.make_directory(out)
    state = load(out / CHECKPOINT) if resume else None
    configuration = dataclasses.asdict(options)
    with RunStore(out / STORE) as store, ExitStack() as stack:
        # a new run in an old directory leaves what is there
        name = f"run {len(store.names) + 1}" if state is None else state["run"]
        stored = StoredRun(store, name)
        started = None if tool is None else stack.enter_context(tool.started(out, name, configuration))
        training = TrainingRun(options, stored, started)
        if state is not None:
            training.load(state)
        store.run(name, {"configuration": configuration, "versions": versions()})
        _restore(stored, training)
        stopped = _train(training, name, out / CHECKPOINT)
        records, incidents = _measured(stored, training)
    if not records:
        raise EmptyError("records", f"nothing was measured in {training.monitor.steps} steps; give a larger --budget")
    document = write_report(out, _facts(training, name, records, incidents))
    if as_json:
        print(document, end="")
    else:
        _show(training, records, incidents, out, stopped)
    return 130 if stopped else 0


def _train(training: TrainingRun, name: str, checkpoint: Path) -> bool:
    """Train until the last step or Ctrl-C; return whether it was Ctrl-C."""
    monitor, steps = training.monitor, training.options.steps
    stderr = Console(stderr=True, highlight=False)
    live = Live(console=stderr, auto_refresh=False, transient=True)

    def keep() -> float:
        save(checkpoint, {"run": name, "versions": versions(), **training.state()})
        return time.monotonic()

    with _interruptible() as stopped, live if stderr.is_terminal else nullcontext():
        saved = keep()
        try:
            while monitor.steps < steps and not stopped.is_set():
                record = training.step()
                if record is not None and live.is_started:
                    live.update(_table(monitor.records[-_SHOWN:]), refresh=True)
                if (record is not None and record.details is not None) or time.monotonic() - saved > _SAVED_EVERY:
                    saved = keep()
        finally:
            keep()
        return stopped.is_set()


# ---- what is kept


def _restore(stored: StoredRun, training: TrainingRun) -> None:
    """What the checkpoint has, in case the store has lost it. What the store has beyond the checkpoint stays: the
    resumed run comes by the same weights."""
    for record in training.monitor.records:
        stored.add(record)
    for incident in training.monitor.incidents:
        stored.note(incident)


def _measured(stored: StoredRun, training: TrainingRun) -> tuple[list[Record], list[Incident]]:
    """The records and incidents of the store and of this process, which has more of them if the store failed."""
    kept: tuple[list[Record], list[Incident]] = [], []
    try:
        kept = stored.records(), stored.incidents()
    except StoreError as error:
        kept[1].append(Incident(training.monitor.steps, "failed", str(error)))
    records = {one.step: one for one in (*kept[0], *training.monitor.records)}
    incidents = dict.fromkeys((*kept[1], *training.monitor.incidents))
    return sorted(records.values(), key=lambda one: one.step), sorted(incidents, key=lambda one: one.step)


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


# ---- what is shown


def _table(records: list[Record]) -> Table:
    table = Table(title="Curvature on the probe", title_justify="left")
    for heading in (
        "step",
        "loss",
        "λ max",
        "2/lr",
        "critical",
        "|g|",
        "g·Hg/g·g",
        "δ·Hδ/δ·δ",
        "λ min",
        "trace",
        "functional",
    ):
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
            None if one.update is None else one.update.sharpness,
            None if more is None else more.smallest_eigenvalue,
            None if more is None else more.trace,
            None if more is None else more.functional_share,
        )
        table.add_row(str(one.step), *("" if number is None else f"{float(number):.3g}" for number in numbers))
    return table


def _facts(training: TrainingRun, name: str, records: list[Record], incidents: list[Incident]) -> dict[str, Any]:
    return run_facts(name, dataclasses.asdict(training.options), versions(), records, incidents) | {
        "title": f"Curvature during training on {training.options.task}",
        "about": training.about,
        "steps": training.monitor.steps,
        "share_of_time": training.monitor.pace.share,
    }


def _show(training: TrainingRun, records: list[Record], incidents: list[Incident], out: Path, stopped: bool) -> None:
    console, monitor = commands.console(), training.monitor
    for line in training.about:
        console.print(line, markup=False)
    console.print(_table(records[-_SHOWN:]))
    share = monitor.pace.share
    remedy = "a larger --budget" if training.options.budget < 1 else "a smaller --every"
    more = f"; give {remedy} for more" if len(records) < _FEW else ""
    taken = "1 measurement" if len(records) == 1 else f"{len(records)} measurements"
    console.print(f"{taken} in {monitor.steps} steps, {share:.0%} of the time{more}.")
    for incident in incidents:
        console.print(f"step {incident.step}: {incident.kind} {incident.message}", markup=False)
    if stopped:
        console.print("Stopped; run the same command with --resume to continue.")
    for name in (*REPORTS, STORE, CHECKPOINT, DOCUMENT):
        print(f"wrote {out / name}")
