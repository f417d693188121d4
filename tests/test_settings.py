"""One context for memory limit, progress and seed."""

import threading

import pytest
import torch

import curvoscope as cv
from curvoscope import checks, estimate
from curvoscope.errors import MemoryLimitError, RangeError
from curvoscope.settings import current
from matrices import Dense, flat, rotated


def test_what_is_not_given_stays_as_it_is_outside():
    with cv.settings(memory_limit=1000, seed=3), cv.settings(progress=False) as inner:
        assert (inner.memory_limit, inner.progress, inner.seed) == (1000, False, 3)
        with cv.settings(memory_limit=10, progress=True):
            assert (current().memory_limit, current().progress, current().seed) == (10, True, 3)
        assert checks.memory_budget() == 1000
    assert (current().memory_limit, current().progress, current().seed) == (None, True, 0)


def test_an_error_ends_the_scope():
    with pytest.raises(ZeroDivisionError), cv.settings(seed=1):
        raise ZeroDivisionError
    assert current().seed == 0
    with pytest.raises(RangeError, match="memory_limit: got -1"), cv.settings(memory_limit=-1):
        pass


def test_what_is_predicted_reaches_the_scopes_around():
    with cv.settings() as outer:
        with cv.settings(memory_limit=10) as inner, pytest.raises(MemoryLimitError):
            checks.fits(20, None, "this", "take less")
        checks.predict(7)
    assert (inner.predicted, outer.predicted) == (20, 20)


def test_threads_have_settings_of_their_own():
    seen = []
    with cv.settings(memory_limit=10):
        thread = threading.Thread(target=lambda: seen.append(current().memory_limit))
        thread.start()
        thread.join()
    assert seen == [None]


def test_the_seed_is_the_default_of_all_estimators():
    block = cv.exact.LinearMLP([torch.eye(9, dtype=torch.float64)])
    block = block.hessian(rotated(flat(9)), cv.losses.MSE(rotated(flat(9), 1)))["W1"]
    questions = {
        "trace": lambda **o: block.trace(matvecs=8, **o),
        "frobenius_norm": lambda **o: block.frobenius_norm(matvecs=8, **o),
        "spectral_norm": lambda **o: block.spectral_norm(matvecs=4, **o),
        "diagonal": lambda **o: block.diagonal(matvecs=8, **o)[0],
        "eigenvalues": lambda **o: estimate.eigenvalues(block, 1, matvecs=8, **o)[0],
        "density": lambda **o: block.density(matvecs=16, **o).moment(1),
        "any matrix": lambda **o: estimate.trace(Dense(rotated(flat(99))), matvecs=8, **o),
    }
    for name, ask in questions.items():
        first, fifth = ask().value, ask(seed=5).value
        with cv.settings(seed=5):
            assert ask().value == fifth, name
            assert ask(seed=0).value == first, name
        assert first != fifth, name


def test_no_progress_bar_if_not_wanted(monkeypatch):
    from curvoscope.estimate import progress

    drawn = []
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: drawn.append(1) or False, raising=False)
    with cv.settings(progress=False):
        estimate.trace(Dense(rotated(flat(99))), matvecs=8)
    assert not drawn
    estimate.trace(Dense(rotated(flat(99))), matvecs=8)
    assert drawn


def test_random_directions_take_the_seed_of_the_settings():
    model, probe = torch.nn.Linear(3, 1).double(), [(torch.eye(3).double(), torch.zeros(3, 1).double())]

    def line(**options):
        found = cv.analysis.taylor(model, torch.nn.MSELoss(), probe, "random", torch.tensor([0.1, 0.2]), **options)
        return found.actual

    with cv.settings(seed=5):
        inside = line()
    assert torch.equal(inside, line(seed=5))
    assert torch.equal(line(), line(seed=0)) and not torch.equal(inside, line())
