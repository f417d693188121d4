import numpy as np
import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.analysis.convergence import convergence
from curvoscope.analysis.landscape import landscape
from curvoscope.analysis.scaling import scaling
from curvoscope.analysis.taylor import divergence, taylor
from curvoscope.report.analysis_figures import (
    convergence_figure,
    divergence_figure,
    landscape_figure,
    scaling_figure,
    taylor_figure,
)
from drawn_figures import assert_readable

MSE = nn.functional.mse_loss


def subject(rows=12):
    x, y = points(rows)
    return MLP(nn.Tanh), MSE, [(x, y)]


def family(size, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, size), nn.Tanh(), nn.Linear(size, 2)).double()
    return model, MSE, [points(6)]


def bowl():
    X = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    return model, MSE, [(X, X.sum(1, keepdim=True))]


FIGURES = {
    "taylor": lambda: taylor_figure(taylor(*subject())),
    "taylor of a quadratic": lambda: taylor_figure(taylor(*bowl(), "top")),
    "line": lambda: landscape_figure(landscape(*subject(), "top", points=7)),
    "plane": lambda: landscape_figure(landscape(*subject(), ["gradient", "random"], points=5)),
    "convergence": lambda: convergence_figure(convergence(*subject(), 2, [0.0, 0.1], orders=8, draws=1, probes=3)),
    "scaling": lambda: scaling_figure(scaling(family, [2, 4, 8], [0, 1], matvecs=16), "hidden units"),
    "divergence": lambda: divergence_figure(divergence(*bowl())),
}


def texts(figure):
    """Titles, labels and legends: what must not overlap nor be cut off."""
    found = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if axes.get_visible():
            found += [axes.title, axes.xaxis.label, axes.yaxis.label]
            found += axes.get_legend().get_texts() if axes.get_legend() else []
    return [text for text in found if text.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_words_neither_overlap_nor_are_cut_off(name):
    assert_readable(FIGURES[name](), texts)


def test_the_lines_of_the_expansion_are_its_numbers():
    found = taylor(*subject(), "top")
    figure = taylor_figure(found)
    top, bottom = figure.axes
    np.testing.assert_allclose(top.lines[0].get_ydata(), found.actual_change.abs().numpy())
    np.testing.assert_allclose(top.lines[1].get_ydata(), found.predicted_change.abs().numpy())
    np.testing.assert_allclose(bottom.lines[0].get_ydata(), found.error.numpy())
    assert any(found.radius in line.get_xdata() for line in top.lines)
    assert f"{found.radius:.2g}" in figure._suptitle.get_text()


def test_the_map_shows_the_losses_the_right_way_round():
    found = landscape(*subject(), ["gradient", "random"], radius=0.5, points=5)
    figure = landscape_figure(found)
    axes = figure.axes[0]
    assert "gradient" in axes.get_xlabel() and "random" in axes.get_ylabel()
    levels = axes.collections[0].levels
    assert levels[0] == pytest.approx(float(found.losses.min())) and levels[-1] == pytest.approx(
        float(found.losses.max())
    )
    assert float(found.losses[-1, 2]) < float(found.losses[0, 2])  # downhill is the first axis


def test_every_curve_of_the_convergence_has_its_null_line():
    found = convergence(*subject(), 2, [0.0, 0.1], orders=8, draws=1, probes=3)
    figure = convergence_figure(found)
    for axes, curve in zip(figure.axes, found.curves, strict=False):
        shown = {line.get_label(): line.get_ydata() for line in axes.lines}
        np.testing.assert_allclose(shown["measured, mean"], curve.mean.numpy())
        np.testing.assert_allclose(shown["random numbers"], curve.null.numpy())
        assert ("bound" in shown) == (curve.bound is not None)
        assert f"{curve.null_slope.value:.2f}" in axes.get_title()
    assert "stationary" in figure.axes[-1].get_title()


def test_points_and_laws_of_a_family():
    found = scaling(family, [2, 4, 8], [0, 1], matvecs=16)
    figure = scaling_figure(found, "hidden units")
    first = figure.axes[0]
    assert len(first.lines[0].get_xdata()) == 6
    assert f"exponent {found.law('largest_eigenvalue').exponent:.2f}" in first.get_title()
    assert sum(axes.get_visible() for axes in figure.axes) == 5


def test_growth_at_each_learning_rate_against_the_parabola():
    found = divergence(*bowl())
    figure = divergence_figure(found)
    right = figure.axes[1]
    shown = {line.get_label(): line.get_xydata() for line in right.lines}
    falls, rises = shown["loss falls"], shown["loss rises"]
    assert (falls[:, 0] < 1).all() and (rises[:, 0] > 1).all() and len(falls) + len(rises) == 8
    for x, y in [*falls, *rises]:
        assert y == pytest.approx((1 - 2 * x) ** 2, abs=1e-6)
    assert "exactly above" in figure._suptitle.get_text()
