"""`CurvatureMonitor`: the curvature of the loss during training, within a budget of time."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.analysis.attention_heads import AttentionMoments
from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import BatchError, Batches
from curvoscope.autodiff.safety import undisturbed
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, ModelError, NonFiniteError, RangeError
from curvoscope.families.block_maps import chosen_blocks
from curvoscope.losses.objectives import LossFunction
from curvoscope.settings import chosen_seed
from curvoscope.training import quantities
from curvoscope.training.loggers import logger_of
from curvoscope.training.outlets import Outlets
from curvoscope.training.pace import Clock, Pace
from curvoscope.training.records import Details, Incident, Record
from curvoscope.training.runs import StoredRun
from curvoscope.training.steps import WatchedOptimizer
from curvoscope.training.updates import alone, update_of

_log = logging.getLogger(__name__)


class CurvatureMonitor:
    """Measure the Hessian of the loss on a probe during training.

    The model runs at copies of its weights in evaluation mode, so dropout is off. Weights, gradients, modes, buffers
    and random states are bit-for-bit the same as without the monitor. Failures inside `step` are logged and kept in
    `incidents`, and training continues. While the loss is not finite, the monitor pauses.

    Args:
        model, loss_fn, blocks: as in `cv.hessian`.
        probe: the data to measure on, as the batches of `cv.hessian`: a list that stays the same.
        every: the minimum number of steps between two measurements.
        budget: the share of the time, from the first step on, that measurements may take. A third of it is for λ_max,
            the gradient, the optimizer's step and attention; the rest for the `Details`, which take many products and
            so are measured less often. The first measurement is made at once, so the bound holds only after enough
            training time. 1: no bound.
        matvecs: products with the Hessian for each number of the details.
        seed: for the estimates.
        store: a run of a `RunStore`, which gets records and incidents one by one.
        logger: gets each record's numbers: "wandb", "trackio" or "mlflow" for the tool's current run, TensorBoard's
            SummaryWriter, a logger of Lightning, or any object with `log(values, step)`, see `Logger`.
        on_record: called with each record.
        clock: returns seconds, for the budget.

    Example:
        >>> import torch
        >>> from curvoscope.training import CurvatureMonitor
        >>> model, loss_fn = torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss()
        >>> inputs, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> monitor = CurvatureMonitor(model, loss_fn, probe=[(inputs, targets)], every=2, budget=1.0)
        >>> monitor.watch(optimizer)  # for the learning rate and the critical sharpness
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     loss = loss_fn(model(inputs), targets)
        ...     loss.backward()
        ...     optimizer.step()
        ...     _ = monitor.step(loss)
        >>> [(record.step, round(float(record.largest_eigenvalue), 3)) for record in monitor.records]
        [(1, 4.0), (3, 4.0)]
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        probe: Iterable[Any],
        blocks: Blocks | None = None,
        every: int = 10,
        budget: float = 0.1,
        *,
        matvecs: int = 16,
        seed: int | None = None,
        store: StoredRun | None = None,
        logger: Any = None,
        on_record: Callable[[Record], None] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        if matvecs < 8:
            raise RangeError("matvecs", f"got {matvecs}, expected at least 8 products")
        self.pace = Pace(every, budget, clock)
        self.records: list[Record] = []
        self.incidents: list[Incident] = []
        self.paused = False
        self._model, self._loss_fn, self._probe = model, loss_fn, probe
        self._blocks = chosen_blocks(model, blocks)
        self._blocks.check(model)
        self._frozen = set() if blocks is not None else _frozen(model)
        self._batches = _batches(probe)
        self._attention = AttentionMoments(model)
        self._matvecs, self._seed = matvecs, chosen_seed(seed)
        self._outlets = Outlets(store, None if logger is None else logger_of(logger), on_record)
        self._vectors: dict[str, Tensor] = {}  # the last eigenvectors: "top", "bottom"
        self._steps = 0
        self._optimizer: WatchedOptimizer | None = None
        self._decision: bool | None = None  # whether the next call of `step` measures, once that is known

    # ---- in a training loop

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the learning rate from the optimizer, and record the direction of its steps when a measurement is due.

        The largest learning rate of the parameter groups counts. The hooks change nothing; `close` removes them.

        Args:
            optimizer: the optimizer that trains the model.
        """
        watched = WatchedOptimizer(optimizer, self._model, self._blocks, self._decide, self._beside)
        self.close()
        self._optimizer = watched

    def skip_to(self, steps: int) -> None:
        """Count from `steps` on, for a training that began without this monitor, as one that is resumed.

        Args:
            steps: the number of steps made so far; a smaller number than the monitor's own changes nothing.
        """
        self._steps = max(self._steps, steps)

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        if self._optimizer is not None:
            self._optimizer.close()
        self._optimizer, self._decision = None, None

    def step(self, loss: Tensor | float | None = None, lr: float | None = None) -> Record | None:
        """Count a training step, after the optimizer has made it; measure if a measurement is due.

        Args:
            loss: the loss of the step, for the record; None if unknown.
            lr: the learning rate; None: the one that the optimizer given to `watch` made the step with.

        Returns:
            The record, or None if nothing was measured.
        """
        if lr is None and self._optimizer is None:
            raise RangeError("lr", "is not given; pass step(loss, lr), or call watch(optimizer) first")
        if lr is not None and not (lr >= 0 and math.isfinite(lr)):
            raise RangeError("lr", f"got {lr}, expected a learning rate")
        self._steps += 1
        value = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        decided, self._decision = self._decision, None
        move = None if self._optimizer is None else self._optimizer.last_move()
        if self._optimizer is not None:
            rate = self._optimizer.last_rate()
            lr = rate if lr is None else lr
        if value is not None and not math.isfinite(value):
            self._pause(f"the loss is {value}")
            return None
        if not (self.pace.due(self._steps) if decided is None else decided):
            return None
        with self._guarded():
            return self.measure(value, lr, details=self.pace.details_due(self._steps), move=move)
        return None

    def measure(
        self,
        loss: float | None = None,
        lr: float | None = None,
        *,
        details: bool = True,
        move: Tensor | None = None,
    ) -> Record:
        """Measure now, whatever the budget, and record it.

        Errors are raised, except those of store, logger and `on_record`.

        Args:
            loss: as in `step`.
            lr: the learning rate; None: the optimizer's present one.
            details: whether to measure the details, too.
            move: the optimizer's last step (P,), over the blocks in their order; None: neither critical sharpness nor
                `Update`.

        Returns:
            The record.
        """
        if lr is None and self._optimizer is not None:
            lr = self._optimizer.learning_rate
        start, seed = self.pace.clock(), self._seed + len(self.records)
        found: Details | None = None
        with self.pace.measuring(self.pace.cheap, self._steps), self._looking():
            for _ in self._batches:  # raises when the probe is no longer what it was
                pass
            if thawed := self._frozen - _frozen(self._model):
                raise ModelError(
                    "model",
                    f"{min(thawed)!r} was frozen when the monitor was made and is trained now; make another monitor, "
                    "or give blocks=",
                )
            surface = Surface(self._model, self._loss_fn, self._probe, self._blocks)
            H, known = surface.hessian, self._vectors
            top, known["top"] = quantities.largest(H, known.get("top"), seed)
            norm, along = quantities.gradient_curvature(H, surface.gradient())
            critical = quantities.critical_sharpness(surface, move, lr) if move is not None and lr else None
            attention = quantities.attention_summaries(self._attention, surface.engine)
            update = None if move is None else update_of(surface, move)
        if details:
            with self.pace.measuring(self.pace.costly, self._steps), self._looking():
                bottom, known["bottom"] = quantities.smallest(H, known.get("bottom"), self._matvecs, seed)
                ends = torch.stack([known["top"], known["bottom"]], 1)
                found = quantities.details(H, top, bottom, ends, self._matvecs, seed)
                update = None if move is None or update is None else alone(surface, move, update)
        seconds = self.pace.clock() - start
        record = Record(
            self._steps, loss, lr, surface.loss, top, norm, along, critical, attention, found, seconds, update
        )
        self.records.append(record)
        if self.paused:
            self.paused = False
            self._note("resumed", "")
        self._hand_on(record)
        return record

    # ---- state

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._steps

    def state_dict(self) -> dict[str, Any]:
        """Records, eigenvectors and steps, and what identifies model and probe: numbers, strings and tensors only."""
        return {
            "model": self._shape_of_model(),
            "probe": self._print_of_probe(),
            "steps": self._steps,
            "records": [record.facts() for record in self.records],
            "incidents": [incident.facts() for incident in self.incidents],
            "vectors": dict(self._vectors),
            "pace": self.pace.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a monitor of the same model and probe. The time account starts afresh.

        Args:
            state: from `state_dict`. It must be of blocks with the same names and shapes, and of a probe with the same
                data.
        """
        here, there = self._shape_of_model(), state["model"]
        if here != there:
            differing = sorted({*here, *there}, key=lambda name: (here.get(name) == there.get(name), name))
            name = differing[0]
            raise ModelError(
                "state",
                f"is of another model: block {name!r} is {there.get(name)} there and {here.get(name)} here; "
                "resume with the model of that run, or start a new one",
            )
        if state["probe"] != self._print_of_probe():
            raise BatchError("state", "belongs to another probe: its curve cannot continue; give the probe of that run")
        self._steps = int(state["steps"])
        self.records = [Record.from_facts(facts) for facts in state["records"]]
        self.incidents = [Incident(**facts) for facts in state["incidents"]]
        self.paused = next((one.kind == "paused" for one in reversed(self.incidents) if one.kind != "failed"), False)
        self._vectors = dict(state["vectors"])
        self.pace.load_state_dict(state["pace"])

    def _shape_of_model(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, shape in self._blocks.shapes.items()}

    def _print_of_probe(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        with undisturbed(self._model, self._batches.generators):
            for batch in self._batches:
                digest.update(batch.fingerprint())
        return digest.hexdigest()

    # ---- what may go wrong

    def _decide(self) -> bool:
        """Whether to measure after the step that is about to be made."""
        self._decision = self.pace.due(self._steps + 1)
        return self._decision

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Around what is done in addition to measurements: guarded, and its time is counted."""
        start = self.pace.clock()
        with self._guarded():
            yield
        self.pace.cheap.overhead(self.pace.clock() - start)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Put the model in evaluation mode; restore everything at the end."""
        with undisturbed(self._model, self._batches.generators):
            for module in self._model.modules():
                module.training = False
            yield

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Note every failure inside and do not raise it."""
        try:
            yield
        except NonFiniteError as error:
            self._pause(str(error))
        except Exception as error:
            self._vectors = {}
            self._note("failed", f"{type(error).__name__}: {error}")
            _log.debug("the measurement that failed", exc_info=error)

    def _pause(self, message: str) -> None:
        self._vectors = {}  # of weights that no training came from
        if not self.paused:
            self.paused = True
            self._note("paused", message)

    def _note(self, kind: str, message: str) -> None:
        self.incidents.append(Incident(self._steps, kind, message))
        self._outlets.note(self.incidents[-1])
        _log.warning("curvature monitor %s at step %d%s", kind, self._steps, message and f": {message}")

    def _hand_on(self, record: Record) -> None:
        with self._beside():
            for message in self._outlets.tell(record):
                self._note("failed", message)


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _batches(probe: Iterable[Any]) -> Batches:
    """The probe, once it is known to be the same on two passes."""
    try:
        return Batches(probe)
    except EmptyError as error:
        raise EmptyError("probe", "is empty; give a list with at least one batch (inputs, targets)") from error
