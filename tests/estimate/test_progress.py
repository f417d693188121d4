import io
import sys

import pytest

from curvoscope import estimate
from curvoscope.estimate import progress
from matrices import Dense, flat, rotated


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _shown(monkeypatch, work):
    """What `work` writes to a terminal. (Set within the test: pytest puts its own stderr in place before each.)"""
    with monkeypatch.context() as patch:
        stream = _Terminal()
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "xterm")
        work()
        return stream.getvalue()


def _trace():
    estimate.trace(Dense(rotated(flat(100))), matvecs=32)


def test_quick_work_shows_nothing(monkeypatch):
    assert _shown(monkeypatch, _trace) == ""


def test_slow_work_shows_a_bar_on_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    shown = _shown(monkeypatch, _trace)
    assert "trace" in shown and "100%" in shown
    assert capfd.readouterr() == ("", "")


def test_nothing_without_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    estimate.density(Dense(rotated(flat(100))), matvecs=32)
    assert capfd.readouterr() == ("", "")


def test_the_bar_goes_when_the_work_fails(monkeypatch):
    class Failing(Dense):
        def __matmul__(self, other):
            if self.products >= 16:
                raise KeyboardInterrupt
            return super().__matmul__(other)

    def work():
        with pytest.raises(KeyboardInterrupt):
            estimate.trace(Failing(rotated(flat(100))), matvecs=64, method="hutchinson")

    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    assert _shown(monkeypatch, work).endswith("\x1b[2K")  # the line is cleared


def test_slow_work_shows_a_bar_in_a_notebook(monkeypatch, capfd):
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    shell = InteractiveShell.instance()
    try:
        _trace()
        assert capfd.readouterr() == ("", "")  # IPython in a terminal that is none
        monkeypatch.setattr(type(shell), "kernel", None, raising=False)  # what a shell of Jupyter has
        with capture_output() as captured:
            _trace()
    finally:
        InteractiveShell.clear_instance()
    shown = [one.data["text/html"] for one in captured.outputs]
    assert "<progress value=32 max=32></progress> trace 32 of 32" in shown[-2]
    assert shown[-1] == "" and captured.stdout == captured.stderr == ""
