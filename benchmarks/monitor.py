"""The monitor's share of the time on the addition model against its budget; training is the same to the bit.

Two trainings, one of them watched, take turns of some steps each, and the time is that of the processor: what else
the machine does counts for neither.
"""

import time

import torch

from curvoscope.curvature import CrossEntropy
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from curvoscope.training import CurvatureMonitor

BUDGETS = (0.1, 0.25)
SECONDS = 30.0  # of each training that is watched
TURN = 50  # steps


class _Stopwatch:
    """Seconds of the processor while it runs."""

    def __init__(self) -> None:
        self._passed, self._since = 0.0, 0.0
        self._running = False

    def __call__(self) -> float:
        return self._passed + (time.process_time() - self._since if self._running else 0.0)

    def __enter__(self) -> None:
        self._since, self._running = time.process_time(), True

    def __exit__(self, *error: object) -> None:
        self._passed, self._running = self(), False


class _Training:
    def __init__(self, budget: float | None) -> None:
        self.model, self._loss = GPT2(norm="pre", dtype=torch.float32), CrossEntropy()
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.seconds, self.steps = _Stopwatch(), 0
        self.monitor: CurvatureMonitor | None = None
        if budget is not None:
            self.monitor = CurvatureMonitor(self.model, self._loss, [_batch(0)], budget=budget, clock=self.seconds)
            self.monitor.watch(self._optimizer)

    def turn(self) -> None:
        with self.seconds:
            for _ in range(TURN):
                inputs, targets = _batch(1000 + self.steps)
                self._optimizer.zero_grad()
                loss = self._loss(self.model(inputs), targets)
                loss.backward()
                self._optimizer.step()
                if self.monitor is not None:
                    self.monitor.step(loss)
                self.steps += 1


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = tasks.addition(64, seed=seed)
    return tokens[:, :-1], tasks.answer_targets(tokens)


def _compare(budget: float) -> dict[str, object]:
    _Training(None).turn()  # first imports and allocations are no part of it
    watched, plain = _Training(budget), _Training(None)
    while watched.seconds() < SECONDS:
        watched.turn()
        plain.turn()
    assert watched.monitor is not None
    records, pairs = watched.monitor.records, zip(watched.model.parameters(), plain.model.parameters(), strict=True)
    return {
        "seconds": SECONDS,
        "steps": watched.steps,
        "share_by_its_own_account": watched.monitor.pace.share,
        "share_by_comparison": 1 - plain.seconds() / watched.seconds(),
        "measurements": len(records),
        "with_update_lens": sum(record.update is not None for record in records),
        "with_details": sum(record.details is not None for record in records),
        "same_to_the_bit": all(torch.equal(a, b) for a, b in pairs),
    }


def run() -> dict[str, object]:
    torch.set_num_threads(1)
    return {f"budget {budget}": _compare(budget) for budget in BUDGETS}
