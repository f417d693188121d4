"""What a computation says that it will take, against what it takes; and that past the limit nothing is begun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import curvoscope as cv
from curvoscope import checks
from curvoscope.autodiff.snapshot import Written
from curvoscope.errors import MemoryLimitError, RangeError
from matrices import within
from memory_cases import CASES, CHUNKED, ENVIRONMENT

IDLE = 40 * 2**20  # bytes of resident memory that come and go with nothing


def table():
    """All cases in one process of their own, whose peak is reset from case to case."""
    if sys.platform != "linux":
        pytest.skip("the peak of resident memory is read and reset through /proc")
    here = Path(__file__).parent / "support"
    places = os.pathsep.join(filter(None, [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": places}
    command = [sys.executable, str(here / "memory_cases.py"), *CASES]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_predictions_within_a_factor_of_two():
    found = table()
    off = {name: one for name, one in found.items() if not 0.5 <= one["predicted"] / one["taken"] <= 2}
    assert not off
    for name, one in found.items():
        assert one["taken"] > 64 * 2**20, name  # far above the noise of an allocator
        if CASES[name] not in CHUNKED:
            assert one["least"] == one["again"] <= one["predicted"] and one["by then"] < IDLE, name


@pytest.fixture
def H():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
    X, Y = torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=generator)
    return cv.exact.SelfAttention(*weights, heads=2, causal=True).hessian(X, cv.losses.MSE(Y))


def test_a_byte_less_is_refused_and_the_least_suffices(H):
    truth = H.dense()
    for row in H.names:
        for column in H.names:
            block = H[row, column]
            with pytest.raises(MemoryLimitError) as first:
                within(1, block.dense)
            needed = first.value.needed
            assert needed >= 8 * block.shape[0] * block.shape[1]
            with pytest.raises(MemoryLimitError) as second:
                within(needed - 1, block.dense)
            assert second.value.needed == needed
            part = truth[H.total.ranges[row], H.total.ranges[column]]
            assert (within(needed, block.dense) - part).abs().max() <= 1e-15 * part.abs().max()


def test_a_scope_limits_what_has_no_argument_and_tells_what_was_predicted():
    layer = cv.exact.LinearMLP([torch.eye(4, dtype=torch.float64)])
    X = torch.ones(3, 4, dtype=torch.float64)
    with cv.settings() as memory:
        layer.jacobian(X)
    assert memory.predicted == 12 * (16 + 12) * 8
    with cv.settings(memory_limit=memory.predicted) as inner:
        layer.jacobian(X)
    assert inner.predicted == memory.predicted
    with cv.settings(memory_limit=memory.predicted - 1), pytest.raises(MemoryLimitError, match="the Jacobian in"):
        layer.jacobian(X)
    with pytest.raises(RangeError, match="memory_limit: got 0"), cv.settings(memory_limit=0):
        pass


def test_bytes_of_new_tensors_are_counted_and_those_of_views_are_not():
    given = torch.ones(10, dtype=torch.float64)
    with Written() as written:
        written.begin()
        (given + 1).view(2, 5).mul_(2)
        given.exp()
        assert written.most == 160
        written.begin()
        given.sin()
    assert written.most == 160


def test_scopes_nest():
    with cv.settings(memory_limit=100) as outer:
        with cv.settings(memory_limit=10), pytest.raises(MemoryLimitError):
            checks.fits(20, None, "this", "take less")
        checks.fits(50, None, "this", "take less")
        with cv.settings():  # none of its own
            assert checks.memory_budget() == 100
    assert outer.predicted == 50


def test_a_single_token_that_does_not_fit_is_refused():
    with (
        cv.settings(memory_limit=2**21),
        pytest.raises(MemoryLimitError, match="a single token needs 4 MiB") as refused,
    ):
        list(checks.chunks(5, 1, 2**22, 2**20))
    assert refused.value.needed == 2**22
