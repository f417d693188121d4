"""The declarations: what the papers' settings say, and that each figure runs, judges and draws on a small grid."""

import math

import numpy as np
import pytest
import torch
from torch.func import grad, jacfwd

from curvoscope.errors import RangeError
from curvoscope.papers import tasks
from curvoscope.papers.experiments import NAMES, Row, Task, find, left_out, panel_figures, panel_pages
from curvoscope.papers.experiments.figures import fig8, load
from curvoscope.papers.experiments.setting import Setting

SMALL = {"d": 4, "sequences": 2, "train": 20, "pull": 5.0, "long": 20}
FEWER_SEEDS = {"optimizers": 5}
DIGITS = {"hidden": 6, "checkpoints": (0, 2), "images": 32, "descent": 2, "passes": 3, "group": 8}
DIGITS |= {"orders": 8, "draws": 2, "probes": 3, "distances": (0.0, 0.003)}


def small(figure):
    """The figure with a small network, where its configuration has one."""
    fields = type(figure.configuration).model_fields
    changes = {name: value for name, value in {**SMALL, **DIGITS, "width": 6}.items() if name in fields}
    if figure.name == "heads":
        changes["d"] = 16  # the most heads
    if figure.name == "optimizers":
        changes["steps"], changes["sample"] = dict.fromkeys(figure.configuration.steps, 20), 20
    return figure.configuration.model_copy(update=changes)


def measured(name):
    """Seed 0 of the quick grid, thinned where it is long."""
    figure = load(name)
    configuration = small(figure)
    points = figure.quick_points if len(figure.quick_points) < 40 else figure.quick_points[::4]
    return figure, [
        Row(point, 0, value)
        for point in points
        for value in figure.measure(configuration, point, 0, figure.draw(point, 0))
    ]


LONGER = {"divergence", "optimizers", "heads", "phases", "gap-loss", "gap-entries", "gap-norms", "gap-gradient"}
LONGER |= {"depth", "ggn", "fig6", "fig7", "fig8"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONGER else []) for name in NAMES]
)
def test_each_figure_measures_judges_and_draws(name):
    if name in left_out():
        pytest.skip("an extra that it needs is not installed")
    figure, rows = measured(name)
    assert figure.name == name
    assert all(math.isfinite(row.found.value) and row.found.stderr >= 0 for row in rows)
    keys = {
        (str(row.point), row.seed, row.found.layer, row.found.block, row.found.part, row.found.quantity, row.found.at)
        for row in rows
    }
    assert len(keys) == len(rows)  # the store would drop the second of two
    verdicts = figure.verdicts(rows)
    assert verdicts and all(verdict.statement for verdict in verdicts)
    panels = figure.panels(rows)
    drawn = panel_figures.draw(figure.title, panels, figure.columns)
    drawn.set_layout_engine("none")  # to arrange the panels takes longer than all else
    assert panel_figures.encode(drawn, "png")[:4] == b"\x89PNG"
    assert "plotly" in panel_pages.page(figure.title, panels, figure.columns)


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_grid_is_a_part_of_the_full_one(name):
    figure = load(name)
    full = figure.grid(quick=False)
    assert all(entry in full for entry in figure.grid(quick=True))
    assert figure.seeds == FEWER_SEEDS.get(name, 20) and all(figure.seconds(point) > 0 for point in figure.points)


def test_grids_of_the_paper():
    logarithmic = 10 ** np.linspace(-2, 1, 20)
    for name in ("fig3a", "fig3b"):
        assert np.allclose([point["sigma"] for point in load(name).points], logarithmic, rtol=1e-15)
    short = [p["sigma"] for p in load("fig5").points if p["grid"] == "up to 1"]
    long = [p["sigma"] for p in load("fig5").points if p["grid"] == "up to 10"]
    assert np.allclose(short, np.linspace(0.1, 1, 20)) and np.allclose(long, np.linspace(0.1, 10, 20))
    assert {(p["depth"]) for p in load("fig6").points} == {1, 2, 3, 4, 5}
    for depth in (1, 2, 3):
        sigma = [p["sigma"] for p in load("fig7").points if p["depth"] == depth]
        assert np.allclose(sigma, 10 ** np.linspace(-1, 0, 20), rtol=1e-15)
    assert len(load("fig8").points) == 100


def test_settings_of_the_paper():
    assert load("fig3a").configuration == Setting(d=128, norm="none", loss="ce", sequences=64)
    assert load("fig3b").configuration == Setting(norm="pre")
    assert load("fig6").configuration == load("fig3a").configuration
    assert load("fig7").configuration == Setting(attention="linear", residual=False, loss="mse")
    model = load("fig7").configuration.network(seed=0, depth=2)
    assert len(model.blocks) == 2 and not model.blocks[0].residual and model.blocks[0].W_up.shape == (128, 512)


def test_linear_attention_has_the_exact_exponents_at_every_depth():
    """Homogeneous of degree 3^D: the outer part has degree 2·3^D to rounding, whatever the network."""
    _, rows = measured("fig7")
    found = {(v.depth, v.layer, v.block): v for v in load("fig7").verdicts(rows) if v.part == "outer"}
    assert len(found) == 2 * (1 + 2 + 3)
    for (depth, _, _), verdict in found.items():
        assert verdict.fitted == pytest.approx(2 * 3**depth, abs=1e-8) and verdict.agrees


def test_the_linear_mlp_against_autodiff():
    configuration = fig8.LinearNetworkConfiguration(width=5, sequences=2)
    values = fig8.measure(configuration, {"depth": 3, "sigma": 0.7}, 1, 0)
    embeddings, network = configuration.network(1, 3, 0.7)
    assert [tuple(weight.shape) for weight in network.weights] == [(5, 5), (5, 5), (5, 12)]
    tokens = tasks.addition(2, seed=0)[:, 11:17]
    for layer, value in enumerate(values):

        def loss(flat, layer=layer):
            weights = list(network.weights)
            weights[layer] = flat.view_as(weights[layer])
            F = embeddings[tokens]
            for weight in weights:
                F = F @ weight
            return (F - torch.nn.functional.one_hot(tokens, 12)).square().sum()

        dense = jacfwd(grad(loss))(network.weights[layer].flatten())
        assert value.value == pytest.approx(float(dense.norm()), rel=1e-11) and value.layer == layer + 1
    bound = 1 / 128**0.5
    _, network = fig8.LinearNetworkConfiguration().network(0, 1, 1.0)
    assert bound * 0.99 < float(network.weights[0].abs().max()) <= bound


def test_unknown_figures_and_near_names():
    assert [figure.name for figure in find(["all"])] == list(NAMES)
    assert [figure.name for figure in find(["fig8", "fig3a", "fig8"])] == ["fig8", "fig3a"]
    with pytest.raises(RangeError, match=r"^NAME: there is no figure 'fig3'; did you mean .*fig3a"):
        find(["fig8", "fig3"])
    with pytest.raises(RangeError, match=r"^NAME: there is no figure 'qqqq'; there are all, fig1"):
        find(["qqqq"])
    with pytest.raises(RangeError, match=r"^NAME: is missing"):
        find([])


def test_a_task_says_what_it_is():
    assert str(Task(load("fig7"), {"depth": 2, "sigma": 0.123456}, 3)) == "fig7 at depth 2, sigma 0.1235, seed 3"


@pytest.mark.slow
def test_growth_rates_of_the_paper():
    figure = load("fig3a")
    rows = [
        Row(point, 0, value) for point in figure.points for value in figure.measure(figure.configuration, point, 0, 0)
    ]
    fitted = {(v.block, v.part): v for v in figure.verdicts(rows)}
    for key, exponent in {("Q", "outer"): 6, ("Q", "functional"): 5, ("V", "outer"): 2}.items():
        assert fitted[key].fitted == pytest.approx(exponent, abs=0.1)
    assert fitted["V", "functional"].agrees
