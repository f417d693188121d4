"""Every example runs and draws."""

import runpy

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure

from fences import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("plot_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    state = torch.get_rng_state()
    try:
        variables = runpy.run_path(str(example))
    finally:
        torch.set_rng_state(state)
        plt.close("all")
    figures = [value for value in variables.values() if isinstance(value, Figure)]
    assert figures and all(figure.axes for figure in figures)
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(EXAMPLES) >= 4
