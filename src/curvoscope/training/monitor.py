"""`CurvatureMonitor`: the curvature of the loss while a model is trained, within a budget of time."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Blocks
from curvoscope.curvature import trainable
from curvoscope.errors import EmptyError, ModelError, NonFiniteError, RangeError
from curvoscope.models.families import blocks_of
from curvoscope.operators.batches import BatchError, Batches
from curvoscope.operators.objectives import LossFunction
from curvoscope.operators.safety import undisturbed
from curvoscope.training import quantities
from curvoscope.training.attention_rows import AttentionRows
from curvoscope.training.pace import Clock, Pace
from curvoscope.training.records import Details, Incident, Record

_log = logging.getLogger(__name__)


@runtime_checkable
class ScalarWriter(Protocol):
    """TensorBoard's SummaryWriter, or whatever takes numbers as it does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class CurvatureMonitor:
    """Measures the Hessian of the loss on a probe while training goes on.

        monitor = CurvatureMonitor(model, loss_fn, probe)
        monitor.watch(optimizer)                   # for the critical sharpness, and the learning rate
        for inputs, targets in loader:
            ...
            optimizer.step()
            monitor.step(loss)
        monitor.records

    The model runs at copies of its weights in evaluation mode, so dropout is off. Weights, gradients, modes, buffers
    and random states are what they would be without the monitor, to the bit. What fails inside `step` is logged and
    kept in `incidents`, and training goes on. When the loss is not finite the monitor pauses until it is again.

    Args:
        model, loss_fn, blocks: as in `cv.hessian`.
        probe: the data to measure on, as the batches of `cv.hessian`: a list, the same all the time.
        every: steps from one measurement to the next, at least.
        budget: the share of the time, from the first step on, that measurements may take. Half of it is for λ_max, the
            gradient, the critical sharpness and attention; the other for the `Details`, which take many products, so
            they come more seldom. The first measurement is made at once, so the bound holds from then on when it
            has been earned. 1: no bound.
        matvecs: products with the Hessian for each number of the details.
        seed: of the estimates.
        writer: gets each record's numbers by `add_scalar`.
        on_record: called with each record.
        clock: seconds, for the budget.
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
        seed: int = 0,
        writer: ScalarWriter | None = None,
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
        self._blocks = blocks if blocks is not None else trainable(model, blocks_of(model))
        self._blocks.check(model)
        self._batches = _batches(probe)
        self._attention = AttentionRows(model)
        self._matvecs, self._seed, self._writer, self._on_record = matvecs, seed, writer, on_record
        self._vectors: dict[str, Tensor] = {}  # the last eigenvectors: "top", "bottom"
        self._steps = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[Any] = []
        self._decision: bool | None = None  # whether the next call of `step` measures, once that is known
        self._before: dict[str, Tensor] | None = None
        self._move: Tensor | None = None  # of the optimizer's last step, (P,)

    # ---- in a training loop

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the learning rate from the optimizer, and record the direction of its steps when a measurement is due.

        Of several parameter groups the largest learning rate counts. The hooks change nothing; `close` removes them.
        """
        _learning_rate(optimizer)
        self.close()
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Let go of the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._optimizer, self._before, self._move = [], None, None, None

    def step(self, loss: Tensor | float | None = None, lr: float | None = None) -> Record | None:
        """Tell of a training step, after the optimizer has made it; measure if it is time.

        Args:
            loss: of the step, to be recorded; None where it is not known.
            lr: the learning rate; None: that of the optimizer given to `watch`.
        """
        if lr is None and self._optimizer is None:
            raise RangeError("lr", "is not given; pass step(loss, lr), or call watch(optimizer) first")
        if lr is not None and not (lr >= 0 and math.isfinite(lr)):
            raise RangeError("lr", f"got {lr}, expected a learning rate")
        self._steps += 1
        value = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        decided, self._decision = self._decision, None
        move, self._move = self._move, None
        if value is not None and not math.isfinite(value):
            self._pause(f"the loss is {value}")
            return None
        elapsed = self.pace.elapsed
        if not (self.pace.cheap.allows(self._steps, elapsed) if decided is None else decided):
            return None
        costly = self.pace.costly.allows(self._steps, elapsed)
        with self._guarded():
            return self.measure(value, lr, details=costly, move=move)
        return None

    def measure(
        self,
        loss: float | None = None,
        lr: float | None = None,
        *,
        details: bool = True,
        move: Tensor | None = None,
    ) -> Record:
        """Measure now, whatever the budget, and record it; errors are raised.

        Args:
            loss, lr: as in `step`.
            details: whether to measure the details too.
            move: the optimizer's last step (P,), over the blocks in their order; None: no critical sharpness.
        """
        if lr is None and self._optimizer is not None:
            lr = _learning_rate(self._optimizer)
        start, seed = self.pace.clock(), self._seed + len(self.records)
        found: Details | None = None
        with self.pace.measuring(self.pace.cheap, self._steps), self._looking():
            for _ in self._batches:  # raises when the probe is no longer what it was
                pass
            surface = Surface(self._model, self._loss_fn, self._probe, self._blocks)
            H, known = surface.hessian, self._vectors
            top, known["top"] = quantities.largest(H, known.get("top"), seed)
            norm, along = quantities.gradient_curvature(H, surface.gradient())
            critical = quantities.critical_sharpness(surface, move, lr) if move is not None and lr else None
            attention = self._attention.summaries(surface.engine)
        if details:
            with self.pace.measuring(self.pace.costly, self._steps), self._looking():
                bottom, known["bottom"] = quantities.smallest(H, known.get("bottom"), self._matvecs, seed)
                found = quantities.details(H, top, bottom, self._matvecs, seed)
        seconds = self.pace.clock() - start
        record = Record(self._steps, loss, lr, surface.loss, top, norm, along, critical, attention, found, seconds)
        self.records.append(record)
        if self.paused:
            self.paused = False
            self._note("resumed", "")
        self._tell(record)
        return record

    # ---- state

    @property
    def steps(self) -> int:
        """How many steps it has been told of."""
        return self._steps

    def state_dict(self) -> dict[str, Any]:
        """Records, eigenvectors and the number of steps, and what they are of: numbers, strings and tensors only."""
        return {
            "model": self._shape_of_model(),
            "probe": self._print_of_probe(),
            "steps": self._steps,
            "records": [record.facts() for record in self.records],
            "incidents": [incident.facts() for incident in self.incidents],
            "vectors": dict(self._vectors),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another monitor of the same model and probe was. The account of time starts afresh."""
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
            raise BatchError("state", "is of another probe: its curve would not go on; give the probe of that run")
        self._steps = int(state["steps"])
        self.records = [Record.from_facts(facts) for facts in state["records"]]
        self.incidents = [Incident(**facts) for facts in state["incidents"]]
        self._vectors = dict(state["vectors"])
        for record in self.records:
            self.pace.cheap.resume(record.step, record.seconds)
            if record.details is not None:
                self.pace.costly.resume(record.step, record.seconds)

    def _shape_of_model(self) -> dict[str, list[int]]:
        return {name: list(shape) for name, shape in self._blocks.shapes.items()}

    def _print_of_probe(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        with undisturbed(self._model, self._batches.generators):
            for batch in self._batches:
                digest.update(batch.fingerprint())
        return digest.hexdigest()

    # ---- around the optimizer's step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        start = self.pace.clock()
        self._before, self._move = None, None
        self._decision = self.pace.cheap.allows(self._steps + 1, self.pace.elapsed)
        if self._decision:
            with self._guarded():
                self._before = self._weights()
            self.pace.cheap.overhead(self.pace.clock() - start)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        start = self.pace.clock()
        with self._guarded():
            after = self._weights()
            self._move = self._blocks.gather({name: after[name].double() - before[name].double() for name in after})
        self.pace.cheap.overhead(self.pace.clock() - start)

    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self._model.named_parameters())
        return {name: parameters[name].detach().clone() for name in sorted(self._blocks.parameters)}

    # ---- what may go wrong

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """The model in evaluation mode; everything is put back at the end."""
        with undisturbed(self._model, self._batches.generators):
            for module in self._model.modules():
                module.training = False
            yield

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever fails inside is noted, and does not go further."""
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
        _log.warning("curvature monitor %s at step %d%s", kind, self._steps, message and f": {message}")

    def _tell(self, record: Record) -> None:
        if self._writer is not None:
            for name, value in record.scalars().items():
                self._writer.add_scalar(f"curvature/{name}", value, record.step)
        if self._on_record is not None:
            self._on_record(record)


def _batches(probe: Iterable[Any]) -> Batches:
    """The probe, once it is known to be the same on two passes."""
    try:
        return Batches(probe)
    except EmptyError as error:
        raise EmptyError("probe", "is empty; give a list with at least one batch (inputs, targets)") from error


def _learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest of the groups."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    if not rates:
        name = type(optimizer).__name__
        raise RangeError("optimizer", f"{name} has no 'lr' in its parameter groups; call step(loss, lr) without watch")
    return max(float(rate) for rate in rates)
