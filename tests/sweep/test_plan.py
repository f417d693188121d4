"""The plan of a sweep: how many samples, and how long, from the time of one gradient by a clock of the test."""

from types import SimpleNamespace

import pytest
import torch

import curvoscope as cv
from curvoscope.sweep import SweepPlan, run
from curvoscope.sweep.plan import planned


def test_a_plan_comes_first_and_once(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    torch.manual_seed(0)
    model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    told = []
    batches = [(X, X[:, :2])]
    sweep = cv.sweep(model, torch.nn.MSELoss(), batches, samples=16, micro_batch=1, plan=told.append, tell=told.append)
    assert told[0] == SweepPlan(16, 16, 2.5, 4)
    assert told[0].seconds == (20.0, 20.0)  # half a gradient per sample
    assert not any(isinstance(one, SweepPlan) for one in told[1:])
    clock = iter([0.0, 1.0])
    cv.sweep(model, torch.nn.MSELoss(), batches, samples=48, micro_batch=1, plan=told.append, earlier=sweep)
    assert told[-1] == SweepPlan(32, 32, 1.0, 4)


@pytest.mark.parametrize(
    ("tolerance", "known", "expected"),
    [(0.1, 0, (64, 256)), (0.1, 128, (0, 128)), (0.1, 512, (0, 0)), (0.01, 0, (64, 1024)), (0.5, 0, (64, 64))],
)
def test_samples_of_a_tolerance(tolerance, known, expected):
    assert planned(tolerance, None, known, 1.0, 1)[:2] == expected
