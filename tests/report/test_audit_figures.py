"""The figure of errors against stored floats: every point is inside its panel, whatever was audited."""

import pytest
import torch

import curvoscope as cv
from curvoscope.report.audit_figures import error_figure
from drawn_figures import drawn

CASES = {
    "one size": ["kfac", "shampoo"],  # both store two floats per weight
    "one approximation": ["diagonal"],
    "many sizes": ["diagonal", "kfac", "neurons"],
}


@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_points_and_ticks(names):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()
    X, Y = torch.randn(2, 8, 6, dtype=torch.float64)
    H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])
    figure = error_figure(cv.analysis.audit(H, ["0.weight", "2.weight"], names), "A title")
    drawn(figure)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    first, second = (axes.get_position().width for axes in panels)
    assert first == pytest.approx(second)
    for axes in panels:
        low, high = axes.get_xlim()
        assert high / low >= 9.9
        points = [float(x) for line in axes.lines for x in line.get_xdata()]
        assert len(points) >= len(names) and all(low < x < high for x in points)
        ticks = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert len(ticks) >= 2 and not any("10^" in tick.get_text() for tick in ticks)
