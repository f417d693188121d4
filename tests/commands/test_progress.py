"""One bar for many measurements: on a terminal, after a second, and none of the estimators' own beside it."""

import io
import sys

import pytest

from curvoscope.commands import progress
from curvoscope.settings import current


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Called in the test itself: pytest puts its own stream in place between a fixture and the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_quick_work_shows_nothing(monkeypatch):
    stderr = terminal(monkeypatch)
    with progress.work(2) as step:
        step("one")
        step("two")
    assert stderr.getvalue() == ""


def test_long_work_says_what_it_does(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    with progress.work(2) as step:
        step("h.0.attn.Q, outer")
        assert not current().progress  # an estimator inside draws no bar
        print("a warning", file=sys.stderr)
    assert "h.0.attn.Q, outer" in stderr.getvalue() and "a warning" in stderr.getvalue()
    assert sys.stderr is stderr


def test_no_terminal_no_bar(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    with pytest.raises(KeyboardInterrupt), progress.work(1) as step:
        step("one")
        raise KeyboardInterrupt
    assert stream.getvalue() == "" and sys.stderr is stream


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((0.2,), "1 second"),
        ((40,), "40 seconds"),
        ((80, 320), "1 to 5 minutes"),
        ((20, 320), "1 to 5 minutes"),
        ((100, 110), "2 minutes"),
        ((3000, 7560), "0.8 to 2.1 hours"),
    ],
)
def test_durations(seconds, words):
    assert progress.duration(*seconds) == words
