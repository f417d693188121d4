"""The monitor's share of the time on the addition model against its budget; training is the same to the bit."""

import time

import torch

from curvoscope import data
from curvoscope.curvature import CrossEntropy
from curvoscope.models.gpt2_block import GPT2
from curvoscope.training import CurvatureMonitor

BUDGET = 0.1
SECONDS = 60.0


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = data.addition(64, seed=seed)
    return tokens[:, :-1], data.answer_targets(tokens)


def _train(steps: int | None, watched: bool) -> tuple[GPT2, CurvatureMonitor | None, float, int]:
    """So many steps, or as many as fit in `SECONDS`."""
    model, loss_fn = GPT2(norm="pre", dtype=torch.float32), CrossEntropy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = CurvatureMonitor(model, loss_fn, [_batch(0)], budget=BUDGET) if watched else None
    if monitor is not None:
        monitor.watch(optimizer)
    start, done = time.perf_counter(), 0
    while done < steps if steps is not None else time.perf_counter() - start < SECONDS:
        inputs, targets = _batch(1000 + done)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss)
        done += 1
    return model, monitor, time.perf_counter() - start, done


def run() -> dict[str, object]:
    torch.set_num_threads(1)
    first, monitor, with_monitor, steps = _train(None, True)
    second, _, without, _ = _train(steps, False)
    assert monitor is not None
    same = all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    return {
        "steps": steps,
        "budget": BUDGET,
        "share_by_its_own_account": monitor.pace.share,
        "share_by_comparison": 1 - without / with_monitor,
        "measurements": len(monitor.records),
        "with_details": sum(record.details is not None for record in monitor.records),
        "same_to_the_bit": same,
    }
