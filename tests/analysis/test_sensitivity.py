"""The ledger of a change of weights against dense Hessians in float64, its sums, its errors and its standard errors."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import curvoscope as cv
from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth
from curvoscope.analysis import recipes, sensitivity
from curvoscope.analysis.fitting import log_slope
from curvoscope.blocks import Blocks
from curvoscope.curvature import CrossEntropy, blocks_of
from model_folders import make, saved
from surface_cases import flat_loss, state

SCALES = tuple(2.0**-k for k in range(5))


def moved(model, size=0.01, seed=0):
    """The state dict after a random change of all parameters, tied ones alike."""
    generator = torch.Generator().manual_seed(seed)
    noise = {id(p): size * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()}
    return {name: p.detach() + noise[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def displacement(model, changed):
    """δ over the blocks of the model."""
    return blocks_of(model).gather({name: changed[name] - p.detach() for name, p in model.named_parameters()})


def test_every_number_against_the_dense_hessian():
    model, (x, y) = GPT(), tokens()
    changed, before = moved(model), state(model)
    ledger = sensitivity(model, CrossEntropy(), [(x[:3], y[:3]), (x[3:], y[3:])], changed)
    blocks = blocks_of(model)
    assert ledger.names == tuple(blocks.names) and ledger.sizes == tuple(blocks.sizes.values())
    function, w = flat_loss(model, (x,), lambda out: cross_entropy(out, y))
    d, g = displacement(model, changed), grad(function)(w)
    H = truth(model, x, lambda F: cross_entropy(F, y), blocks)
    cuts = list(blocks.sizes.values())
    parts = {name: torch.block_diag(*[torch.ones(1, n).double() for n in cuts]) @ (d * (M @ d)) / 2
             for name, M in (("outer", H.outer), ("functional", H.functional), ("second", H.total))}  # fmt: skip
    first = torch.stack([one.sum() for one in (g * d).split(cuts)])
    scale = float(sum(one.abs().sum() for one in parts.values()))
    for i, row in enumerate(ledger.rows):
        assert row.first == pytest.approx(float(first[i]), abs=1e-11)
        for name in parts:
            assert getattr(row, name) == pytest.approx(float(parts[name][i]), abs=1e-10 * scale)
        piece = slice(sum(cuts[:i]), sum(cuts[: i + 1]))
        alone = torch.zeros_like(d)
        alone[piece] = d[piece]
        assert row.alone == pytest.approx(float(g @ alone + alone @ H.total @ alone / 2), abs=1e-11)
        assert row.measured == pytest.approx(float(function(w + alone) - function(w)), abs=1e-12)
        assert row.remainder == pytest.approx(row.measured - row.alone, abs=1e-12)
        assert row.norm == pytest.approx(float(alone.norm())) and row.relative == pytest.approx(
            float(alone.norm() / w[piece].norm())
        )
        for j, other in enumerate(ledger.names):
            there = torch.zeros_like(d)
            there[sum(cuts[:j]) : sum(cuts[: j + 1])] = d[sum(cuts[:j]) : sum(cuts[: j + 1])]
            assert ledger.pairs[row.block, other] == pytest.approx(
                float(alone @ H.total @ there) / 2, abs=1e-10 * scale
            )
    assert ledger.loss == pytest.approx(float(function(w)))
    assert ledger.measured == pytest.approx(float(function(w + d) - function(w)), abs=1e-12)
    assert state(model).keys() == before.keys() and all(torch.equal(before[k], v) for k, v in state(model).items())


def test_the_ledger_adds_up():
    model, (x, y) = GPT(), tokens()
    ledger = sensitivity(model, CrossEntropy(), [(x, y)], moved(model, 0.1), unit="batch")
    rows, matrix = ledger.rows, ledger.pairs.matrix
    scale = float(matrix.abs().sum())
    assert ledger.predicted == pytest.approx(sum(row.first + row.second for row in rows), abs=1e-10 * scale)
    assert ledger.measured == pytest.approx(ledger.predicted + ledger.remainder, abs=1e-12)
    assert sum(row.share for row in rows) == pytest.approx(1, abs=1e-10)
    for i, row in enumerate(rows):
        assert row.second == pytest.approx(row.outer + row.functional, abs=1e-10 * scale)
        assert float(matrix[i].sum()) == pytest.approx(row.second, abs=1e-10 * scale)
    assert torch.equal(matrix, matrix.T)
    assert len(ledger.pairs) == len(rows) ** 2 == len(list(ledger.pairs))
    with pytest.raises(cv.CurvoscopeError, match=r"pairs: there is no 'h\.9'"):
        ledger.pairs["h.9", "embed"]


@pytest.mark.slow
def test_without_pairs_the_rows_are_the_same():
    model, (x, y) = GPT(), tokens()
    both = [sensitivity(model, CrossEntropy(), [(x, y)], moved(model), pairs) for pairs in (True, False)]
    for with_pairs, without in zip(*(ledger.rows for ledger in both), strict=True):
        assert without.second == with_pairs.second and without.alone is None and without.measured is None
    for question in (lambda: both[1].pairs, lambda: both[1].rank_correlation):
        with pytest.raises(cv.CurvoscopeError, match="pairs: the ledger was made with pairs=False"):
            question()


@pytest.mark.slow
def test_standard_errors_are_those_of_a_mean_by_terms_over_sequences():
    model, (x, y) = GPT(), tokens()
    changed = moved(model, 0.1)
    ledger = sensitivity(model, CrossEntropy(), [(x[:2], y[:2]), (x[2:], y[2:])], changed)
    terms = (y != -100).sum(1).double().numpy()
    alone = [sensitivity(model, CrossEntropy(), [(x[i : i + 1], y[i : i + 1])], changed) for i in range(4)]
    share = terms / terms.sum()

    def check(found, values):
        mean = share @ values
        expected = np.sqrt(4 / 3 * np.sum((share * (values - mean)) ** 2))
        assert found.value == pytest.approx(mean, rel=1e-9, abs=1e-13)
        assert found.stderr == pytest.approx(expected, rel=1e-6) and found.degrees == 3
        assert found.method == "mean of 4 sequences"

    for number in ("loss", "predicted", "measured", "remainder"):
        check(getattr(ledger, number), np.array([float(getattr(one, number)) for one in alone]))
    for i, row in enumerate(ledger.rows):
        check(row.remainder, np.array([float(one.rows[i].remainder) for one in alone]))
        check(row.second, np.array([float(one.rows[i].second) for one in alone]))
    pair = ledger.names[0], ledger.names[3]
    check(ledger.pairs[pair], np.array([float(one.pairs[pair]) for one in alone]))
    assert alone[0].measured.stderr == 0  # one sequence shows no spread


@pytest.mark.slow
def test_batches_as_units():
    model, (x, y) = GPT(), tokens()
    batches, changed = [(x[:2], y[:2]), (x[2:], y[2:])], moved(model)
    rows, whole = (sensitivity(model, CrossEntropy(), batches, changed, unit=unit) for unit in ("sequence", "batch"))
    assert whole.measured.method == "mean of 2 batches" and whole.measured == pytest.approx(rows.measured, abs=1e-12)
    torch.testing.assert_close(whole.pairs.matrix, rows.pairs.matrix)


class Mixing(nn.Module):
    """Rows of a batch meet."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2).double()

    def forward(self, x):
        return self.lin(x - x.mean(0))


@pytest.mark.parametrize(
    ("model", "loss"),
    [(Mixing(), nn.MSELoss()), (MLP(), cv.losses.Contrastive(lambda F, Y: (F @ F.T - Y @ Y.T).square().mean()))],
)
def test_rows_that_meet_stay_together(model, loss):
    x, y = points(6)
    ledger = sensitivity(model, loss, [(x, y)], moved(model))
    assert ledger.units.name == "batch" and ledger.measured.method == "mean of 1 batch"
    again = sensitivity(model, loss, [(x, y)], moved(model), unit="batch")
    assert ledger.predicted == again.predicted


def test_a_sum_and_a_penalty():
    model, (x, y) = MLP(nn.Tanh), points(6)
    changed = moved(model)
    mean, total = (
        sensitivity(model, nn.MSELoss(reduction=kind), [(x[:4], y[:4]), (x[4:], y[4:])], changed)
        for kind in ("mean", "sum")
    )
    assert total.predicted == pytest.approx(12 * mean.predicted) and total.measured == pytest.approx(12 * mean.measured)
    assert total.measured.stderr == pytest.approx(12 * mean.measured.stderr)
    decayed = cv.losses.Regularised(nn.MSELoss(), lambda p: sum(one.square().sum() for one in p.values()))
    ledger = sensitivity(model, decayed, [(x, y)], changed)
    w, d = (blocks_of(model).gather(one) for one in ({n: p.detach() for n, p in model.named_parameters()}, changed))
    penalty = float(d.square().sum() - w.square().sum())
    assert ledger.measured == pytest.approx(mean.measured + penalty)
    assert ledger.predicted == pytest.approx(mean.predicted + penalty)  # a quadratic has no remainder


QUICK = {"int4": recipes.int4, "prune": recipes.prune}
ALL = QUICK | {
    "int8": recipes.int8,
    "int3, groups": lambda model: recipes.int3(model, group=4, symmetric=False),
    "nf4": lambda model: recipes.nf4(model, group=8),
    "fp8": recipes.fp8,
    "2:4": recipes.prune_2_4,
    "heads": lambda model: recipes.drop_heads(model, {"h.0.attn": [1]}),
    "neurons": recipes.drop_neurons,
    "layers": lambda model: recipes.drop_layers(model, ["h.1"]),
    "low rank": recipes.low_rank,
    "average": lambda model: recipes.average(model, moved(model, 0.3)),
    "lora": lambda model: recipes.merge_lora(
        model, {"h.0.attn.V": (torch.ones(8, 1).double(), torch.linspace(-1, 1, 8).double()[None])}
    ),
}


@pytest.mark.parametrize(
    "recipe", [pytest.param(one, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, one in ALL.items()]
)
def test_the_remainder_is_of_third_order(recipe):
    """The exponent of the remainder in ε is 3.0 ± 0.1 for every recipe."""
    model, (x, y) = GPT(layers=2, d=8), tokens()
    changed = recipe(model)
    whole = sensitivity(model, CrossEntropy(), [(x, y)], changed, False, unit="batch")
    start = 1e-2 * float(torch.tensor(whole.norms).max().reciprocal())  # so small that higher orders do not show
    scales = [start * scale for scale in SCALES]
    found = sensitivity(model, CrossEntropy(), [(x, y)], changed, False, unit="batch", scales=scales).scaled
    remainders = torch.tensor([abs(one.remainder) for one in found], dtype=torch.float64)
    slope = log_slope(torch.tensor(scales, dtype=torch.float64), remainders)
    assert 2.9 < slope.value < 3.1, slope
    assert found[0].predicted == pytest.approx(scales[0] * sum(r.first for r in whole.rows)
                                               + scales[0] ** 2 * sum(r.second for r in whole.rows))  # fmt: skip


def test_a_quadratic_loss_has_no_remainder():
    model, (x, y) = nn.Linear(3, 2).double(), points(5)
    ledger = sensitivity(model, nn.MSELoss(), [(x, y)], moved(model, 1.0))
    assert abs(ledger.remainder) < 1e-12 and ledger.rows[0].functional == 0
    assert all(row.measured == pytest.approx(row.alone) for row in ledger.rows)


@pytest.mark.slow
def test_changes_as_model_state_folder_and_recipe(tmp_path):
    model = make("gpt2")
    other = saved(tmp_path / "other", initializer_range=0.31)
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}
    changes = (other, other.state_dict(), tmp_path / "other", str(tmp_path / "other"), lambda model: other.state_dict())
    found = [sensitivity(model, None, [batch], change, False) for change in changes]
    assert len({(one.predicted.value, one.measured.value) for one in found}) == 1
    assert found[0].measured != 0


def test_single_heads_are_predicted_and_measured_alone():
    model, (x, y) = GPT(layers=2, d=8), tokens()
    heads = blocks_of(model).select("*.attn.O").per_head()
    ledger = sensitivity(model, CrossEntropy(), [(x, y)], recipes.drop_heads, blocks=heads)
    assert ledger.names == ("h.0.attn.O.0", "h.0.attn.O.1", "h.1.attn.O.0", "h.1.attn.O.1")
    loss = float(cross_entropy(model(x), y).detach())
    for layer in range(2):
        for head in range(2):
            dropped = recipes.drop_heads(model, {f"h.{layer}.attn": [head]})
            dropped.pop("lm_head.weight")  # tied
            expected = float(cross_entropy(functional_call(model, dropped, (x,)), y).detach()) - loss
            assert ledger.rows[2 * layer + head].measured == pytest.approx(expected, abs=1e-12)
    correlation = ledger.rank_correlation
    ranks = [np.argsort(np.argsort([float(getattr(row, key)) for row in ledger.rows])) for key in ("alone", "measured")]
    assert correlation == pytest.approx(np.corrcoef(*ranks)[0, 1]) and correlation.stderr >= 0


def test_blocks_leave_out_what_changes_elsewhere():
    model, (x, y) = GPT(), tokens()
    changed = moved(model, 0.1)
    some = blocks_of(model).select("h.0.attn.[QKV]")
    ledger = sensitivity(model, CrossEntropy(), [(x, y)], changed, blocks=some)
    mixed = recipes.mix(model, dict.fromkeys(some, changed))
    whole = sensitivity(model, CrossEntropy(), [(x, y)], mixed)
    assert ledger.names == tuple(some.names) and ledger.measured == pytest.approx(whole.measured, abs=1e-12)
    assert [row.block for row in whole.changed] == some.names
    stays = next(row for row in whole.rows if row.block == "embed")
    assert stays.first == stays.second == stays.measured == stays.norm == 0


@pytest.mark.slow
def test_single_precision_agrees_with_double():
    double, (x, y) = GPT(layers=2), tokens()
    single = GPT(layers=2).float()
    changed = moved(double, 0.1)
    small = {name: tensor.float() for name, tensor in changed.items()}
    one, other = (
        sensitivity(double, CrossEntropy(), [(x, y)], changed),
        sensitivity(single, CrossEntropy(), [(x, y)], small),
    )
    scale = float(one.pairs.matrix.abs().sum())
    assert abs(one.predicted - other.predicted) < 1e-4 * scale
    assert abs(one.measured - other.measured) < other.rounding + 1e-4 * abs(one.measured)
    assert (
        float((one.pairs.matrix.sum(1) - torch.tensor([row.second for row in other.rows])).abs().max()) < 1e-4 * scale
    )


def test_the_table_in_words():
    model, (x, y) = MLP(), points()
    ledger = sensitivity(model, nn.MSELoss(), [(x, y)], moved(model))
    lines = str(ledger).splitlines()
    assert "predicted change" in lines[0] and len(lines) == 2 + len(ledger.rows)
    most = max(ledger.rows, key=lambda row: abs(row.first + row.second))
    assert lines[2].split()[0] == most.block and f"<th scope='row'>{most.block}</th>" in ledger._repr_html_()
    assert dataclasses.is_dataclass(ledger) and isinstance(ledger.predicted, cv.Estimate)


def test_too_few_blocks_for_a_correlation():
    model, (x, y) = MLP(), points()
    ledger = sensitivity(model, nn.MSELoss(), [(x, y)], recipes.int4)
    with pytest.raises(cv.CurvoscopeError, match="changed: 2 blocks change"):
        _ = ledger.rank_correlation


# ---- bad input


def refused(changed, model=None, **options):
    model, (x, y) = model or GPT(), tokens()
    with pytest.raises(cv.CurvoscopeError) as error:
        sensitivity(model, CrossEntropy(), [(x, y)], changed, **options)
    return str(error.value)


def test_tied_weights_changed_apart():
    state = moved(GPT())
    assert "changed: 'lm_head.weight' is tied to 'wte.weight'" in refused(
        state | {"lm_head.weight": state["wte.weight"] + 1}
    )


def test_other_shapes_and_vocabularies_name_the_tensor():
    assert "changed: 'wte.weight' is (6, 4) in the model and (7, 4) after" in refused(GPT(vocabulary=7))
    assert refused(GPT(d=8)).startswith("changed: 'wte.weight' is (6, 4)")
    assert "changed: has 'h.1.ln_1.weight', which is not in the model" in refused(GPT(layers=2))
    assert "changed: has no tensor 'h.1." in refused(GPT(), GPT(layers=2))


def test_integer_weights_and_non_finite_ones():
    state = moved(GPT())
    name = "h.0.mlp.c_fc.weight"
    assert refused(state | {name: state[name].to(torch.int8)}).startswith(f"changed: {name!r} is torch.int8")
    assert refused(state | {name: state[name] * float("nan")}).startswith(f"changed: {name!r} has entries that are NaN")


def test_a_model_that_stores_integers():
    model, changed = GPT(), moved(GPT())
    weight = model.h[0].mlp.c_fc.weight
    model.h[0].mlp.c_fc.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    said = "changed: 'h.0.mlp.c_fc.weight' is torch.int8 in the model, expected floating point"
    assert refused(changed, model).startswith(said)


def test_nothing_changes_or_only_what_is_frozen():
    model = GPT()
    assert refused(model.state_dict()).startswith("changed: every tensor is the model's own")
    model.wpe.weight.requires_grad_(False)
    assert refused(moved(model), model).startswith("changed: 'wpe.weight' changes but is frozen")
    some = Blocks([blocks_of(model)["embed"]])
    assert refused(recipes.int4, model, blocks=some).startswith("changed: nothing changes in the blocks")


@pytest.mark.slow
def test_a_folder_that_lacks_a_tensor(tmp_path):
    from safetensors.torch import load_file, save_file

    model = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("transformer.h.0.mlp.c_fc.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    batch = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    with pytest.raises(cv.CurvoscopeError, match=r"h\.0\.mlp\.c_fc\.weight"):
        sensitivity(model, None, [batch], tmp_path)


def test_other_kinds_of_change():
    assert refused(3.0).startswith("changed: got float; expected a model, a state dict, a folder or a recipe")
    assert refused(lambda model: None).startswith("changed: got")
    assert refused(moved(GPT()), unit="token").startswith("unit: got 'token'")
    assert refused(moved(GPT()), scales=[float("inf")]).startswith("scales: got [inf]")


def test_a_buffer_that_changes():
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(3, 2, dtype=torch.float64)
            self.register_buffer("shift", torch.ones(2).double())

    model, (x, y) = Shifted(), points()
    with pytest.raises(cv.CurvoscopeError, match="changed: 'shift' is a buffer with changed values"):
        sensitivity(model, nn.MSELoss(), [(x, y)], model.state_dict() | {"shift": torch.zeros(2).double()})
