"""The table of a sweep that runs: in a terminal the largest first above a bar, elsewhere one line per block."""

import io

import torch
from rich.console import Console

import curvoscope as cv
from curvoscope.commands import live_table
from curvoscope.commands.live_table import LiveTable


def shown(console, tolerance=0.2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    X, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    with LiveTable(console, 4, tolerance) as live:
        return cv.sweep(model, torch.nn.CrossEntropyLoss(), [(X, labels)], tolerance=tolerance, tell=live.take), live


def test_lines_of_a_file():
    stream = io.StringIO()
    sweep, live = shown(Console(file=stream, width=100), tolerance=0.08)
    assert sweep.samples > 64 and not live.draws
    lines = stream.getvalue().splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(sweep.names)
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_has_the_largest_first_and_a_bar(monkeypatch):
    monkeypatch.setattr(live_table, "_PAUSE", 0.0)
    stream = io.StringIO()
    console = Console(file=stream, width=100, height=40, force_terminal=True, legacy_windows=False)
    sweep, live = shown(console)
    assert live.draws and live.last.names == sweep.names
    last = stream.getvalue().rpartition("The largest of 4 blocks")[2]
    order = sorted(sweep.names, key=lambda name: -sweep.frobenius_norm(name))
    places = [last.index(name) for name in order]
    assert places == sorted(places)
    assert "64 of about" in last and "left" in last


def test_a_quiet_console_shows_nothing():
    stream = io.StringIO()
    shown(Console(file=stream, quiet=True, force_terminal=True))
    assert stream.getvalue() == ""
