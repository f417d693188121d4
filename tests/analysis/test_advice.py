import dataclasses

import pytest
import torch
from torch import nn

from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.analysis.advice import ALIKE, APART, SPIKE, Findings, advice
from curvoscope.analysis.measurements import Extremes, Measurement
from curvoscope.analysis.scales import input_scales
from curvoscope.analysis.spectra import Distances
from curvoscope.analysis.taylor import divergence, taylor
from curvoscope.errors import EmptyError, ModelError, RangeError, ShapeError
from curvoscope.estimate import Estimate
from surface_cases import state


def known(value):
    return Estimate(float(value), 0.0, 0, "exact")


def row(block, top, part="total"):
    return Measurement(block, part, (2, 2), "exact", known(top), known(top), known(top))


def extremes(largest):
    return Extremes(4, known(largest), known(-1))


def distances(names, values):
    return Distances(names, values, torch.full_like(values, 1e-6))


def only(found, subject):
    (one,) = [item for item in found if item.subject == subject]
    return one


def test_no_measurement_no_advice():
    assert advice(None) == []
    assert advice(Findings()) == []
    assert advice(Findings(learning_rate=0.1, momentum=0.9)) == []


def test_nothing_is_advised_where_nothing_stands_out():
    calm = Findings(
        rows=[row("Q", 2.0), row("V", 3.0), row("V", 300.0, "outer")],
        extremes=extremes(-1.0),
        distances=distances(("Q", "V"), torch.tensor([[0, 0.9], [0.9, 0]], dtype=torch.float64)),
        sharpness={0: 3.0, 10: 2.0},
        gradient_norms=[1.0] * 50,
        input_scales={"h.0": 1.0},
        learning_rate=0.1,
    )
    assert advice(calm) == []


def test_the_cap_is_where_gradient_descent_diverges():
    X = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1)
    data = [(X, X.sum(1, keepdim=True))]
    found = advice(Findings(extremes=extremes(2 / 3 * 9)))  # H = 2/3 diag(1, 4, 9)
    cap = only(found, "learning-rate cap").settings["learning rate"]
    assert cap == pytest.approx(1 / 3)
    run = divergence(model, nn.functional.mse_loss, data, [0.99 * cap, 1.01 * cap])
    assert run.rises.tolist() == [False, True]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_cap_with_momentum_against_the_iteration(momentum):
    cap = only(advice(Findings(extremes=extremes(5.0), momentum=momentum)), "learning-rate cap").settings[
        "learning rate"
    ]
    for factor, grows in ((0.98, False), (1.02, True)):
        # heavy ball on ½ 5 w²: its companion matrix has spectral radius above 1 exactly beyond the cap
        matrix = torch.tensor([[1 + momentum - 5 * factor * cap, -momentum], [1.0, 0.0]], dtype=torch.float64)
        assert (float(torch.linalg.eigvals(matrix).abs().max()) > 1) == grows


def test_a_learning_rate_above_the_cap_is_called_so():
    high = only(advice(Findings(extremes=extremes(10.0), learning_rate=0.5)), "learning-rate cap")
    assert "too large" in high.recommendation and high.value == 5 and high.threshold == 2
    low = only(advice(Findings(extremes=extremes(10.0), learning_rate=0.1)), "learning-rate cap")
    assert "below the cap" in low.recommendation
    assert "= 0.2" in str(high) and "threshold 2" in str(high)


def test_warm_up_lasts_until_the_sharpness_is_below_the_edge():
    found = only(advice(Findings(sharpness={0: 100.0, 50: 40.0, 200: 15.0}, learning_rate=0.1)), "warm-up")
    assert found.value == pytest.approx(10) and found.threshold == 2
    assert found.settings == {"learning rate": pytest.approx(0.02), "steps": 200.0}
    never = only(advice(Findings(sharpness={0: 100.0, 50: 40.0}, learning_rate=0.1)), "warm-up")
    assert "not seen" in never.recommendation and "steps" not in never.settings
    alone = advice(Findings(extremes=extremes(100.0), learning_rate=0.1))
    assert {item.subject for item in alone} == {"learning-rate cap", "warm-up"}
    assert only(alone, "warm-up").quantity == "learning rate × λ max"  # at a step that nobody told


def test_rates_by_block_are_in_the_inverse_ratio_of_their_curvature():
    rows = [row("Q", 0.1), row("V", 50.0), row("O", 5.0), row("K", -1.0), row("Q", 1e9, "outer")]
    found = only(advice(Findings(rows=rows)), "per-block learning rates")
    assert found.value == pytest.approx(500) and found.threshold == APART
    assert found.settings == {"Q": pytest.approx(500), "V": 1.0, "O": pytest.approx(10)}


def test_normalisation_is_asked_for_where_the_input_is_large_or_small():
    found = advice(Findings(input_scales={"a": 1.2, "b": 40.0, "c": 0.01}))
    assert [(item.subject, item.blocks, item.value) for item in found] == [
        ("normalisation", ("b",), 40.0),
        ("normalisation", ("c",), 0.01),
    ]


def test_clipping_of_spikes_and_of_long_steps():
    found = only(advice(Findings(gradient_norms=[1.0] * 30 + [50.0])), "clipping")
    assert found.value == 50 and found.threshold == SPIKE and found.settings == {"gradient norm": 10.0}
    assert advice(Findings(gradient_norms=[1.0, 50.0])) == []  # too few to know a median
    model, (x, y) = MLP(nn.Tanh), points(6)
    line = taylor(model, nn.functional.mse_loss, [(x, y)])
    rate = 3 * line.radius / line.direction.length
    long = only(advice(Findings(taylor=line, learning_rate=rate)), "clipping")
    assert long.value == pytest.approx(3 * line.radius) and long.threshold == line.radius
    assert long.settings["gradient norm"] == pytest.approx(line.direction.length / 3)
    assert advice(Findings(taylor=line, learning_rate=rate / 6)) == []
    assert advice(Findings(taylor=line)) == []


def test_blocks_share_a_rate_where_all_their_spectra_are_alike():
    values = torch.ones(4, 4, dtype=torch.float64) - torch.eye(4)
    values[0, 1] = values[1, 0] = 0.1
    values[1, 2] = values[2, 1] = 0.1  # near 1 but not near 0
    found = advice(Findings(distances=distances(("Q", "K", "V", "O"), values)))
    (one,) = found
    assert one.blocks == ("Q", "K") and one.value == pytest.approx(0.1) and one.threshold == ALIKE


def test_every_piece_of_advice_has_its_measurement():
    everything = Findings(
        rows=[row("Q", 1.0), row("V", 100.0)],
        extremes=extremes(100.0),
        distances=distances(("Q", "V"), torch.zeros(2, 2, dtype=torch.float64)),
        sharpness={0: 100.0},
        gradient_norms=[1.0] * 30 + [50.0],
        input_scales={"h.0": 30.0},
        learning_rate=0.5,
    )
    found = advice(everything)
    assert len({item.subject for item in found}) == 6
    for item in found:
        assert item.quantity and item.recommendation
        assert item.value > item.threshold or item.subject == "shared adaptive learning rate"
    for name in ("rows", "distances", "gradient_norms", "input_scales"):  # take a measurement away, and its advice goes
        empty = () if name in ("rows", "gradient_norms") else None if name == "distances" else {}
        assert len(advice(dataclasses.replace(everything, **{name: empty}))) == len(found) - 1


def test_findings_that_are_refused():
    for change in ({"learning_rate": -1.0}, {"learning_rate": float("nan")}, {"momentum": 1.0}):
        with pytest.raises(RangeError):
            Findings(**change)
    model, (x, y) = MLP(nn.Tanh), points(6)
    with pytest.raises(ShapeError, match="along 'random'"):
        Findings(taylor=taylor(model, nn.functional.mse_loss, [(x, y)], "random"))


# ---- scales


def test_the_scale_of_each_layers_input():
    model, (x, y) = MLP(nn.Tanh), points(6)
    before = state(model)
    found = input_scales(model, [(3 * x[:2], y[:2]), (3 * x[2:], y[2:])])
    assert list(found) == ["up", "down"]
    assert found["up"] == pytest.approx(3 * float(x.square().mean().sqrt()))
    hidden = model.act(model.up(3 * x)).detach()
    assert found["down"] == pytest.approx(float(hidden.square().mean().sqrt()))
    assert not model.up._forward_pre_hooks and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_normalised_layers_have_unit_inputs_and_embeddings_are_left_out():
    model, (inputs, targets) = GPT(), tokens()
    with torch.no_grad():
        for norm in (model.h[0].ln_1, model.h[0].ln_2):
            norm.weight.fill_(1), norm.bias.zero_()
    found = input_scales(model.eval(), [(inputs, targets)])
    assert found["h.0.attn.c_attn"] == pytest.approx(1, rel=1e-3)
    assert found["h.0.mlp.c_fc"] == pytest.approx(1, rel=1e-3)
    assert set(found) == {"h.0.attn.c_attn", "h.0.mlp.c_fc"}  # what reads the residual stream


def test_models_without_scales_are_refused():
    with pytest.raises(EmptyError, match="matrix"):
        input_scales(nn.LayerNorm(2), [(torch.ones(1, 2), torch.ones(1, 2))])
    with pytest.raises(ModelError, match="dropout"):
        input_scales(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), [(torch.ones(1, 2), torch.ones(1, 2))])
