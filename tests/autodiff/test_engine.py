"""The matrix-free Hessian and its two parts against dense nested autodiff in float64."""

import copy
from collections import OrderedDict
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth, truth_of
from curvoscope import curvature
from curvoscope.autodiff import graph_products
from curvoscope.autodiff.graph import unless_unbatched
from curvoscope.curvature import CrossEntropy, MeanLoss, MeanSquaredError, blocks_of
from curvoscope.errors import BlockNameError
from reference import normal, relative

PARTS = ("total", "outer", "functional")
hessian = partial(curvature.hessian, method="autodiff")


def _gpt(layers=1):
    model, (inputs, targets) = GPT(layers), tokens()
    blocks = blocks_of(model)
    return model, CrossEntropy(), inputs, targets, blocks


def _mlp(activation):
    model, (inputs, targets) = MLP(activation), points()
    return model, MeanSquaredError(), inputs, targets, blocks_of(model)


class ByKeyword(MLP):
    """Its activation is called in a way that a forward hook does not see."""

    def forward(self, x):
        return self.down(self.act(input=self.up(x)))


def _by_keyword():
    _, *rest = _mlp(nn.GELU)
    return ByKeyword(), *rest


CASES = {
    "by keyword": _by_keyword,
    "gelu": lambda: _mlp(nn.GELU),
    "relu": lambda: _mlp(nn.ReLU),
    "silu": lambda: _mlp(nn.SiLU),
    "tanh": lambda: _mlp(nn.Tanh),
    "gpt": _gpt,
    "two layers": lambda: _gpt(2),
}


@cache
def _case(name):
    model, loss, inputs, targets, blocks = CASES[name]()
    return (
        hessian(model, loss, [(inputs, targets)]),
        truth(model, inputs, lambda F: _mean(loss, F, targets), blocks),
        (model, loss, inputs, targets, blocks),
    )


def _mean(loss, F, targets):
    if isinstance(loss, MeanSquaredError):
        return (F - targets).square().mean()
    return cross_entropy(F, targets)


@pytest.fixture(params=CASES)
def case(request):
    return _case(request.param)


class TestAgainstDense:
    @pytest.mark.parametrize("part", PARTS)
    def test_all_entries(self, case, part):
        H, dense, (_, _, _, _, blocks) = case
        assert H.names == blocks.names and H.shapes == blocks.shapes
        found = getattr(H, part).dense()
        assert relative(found, getattr(dense, part), dense.total) < 1e-9
        assert torch.equal(found, found.T)

    @pytest.mark.parametrize("part", PARTS)
    def test_products_of_the_whole_and_of_pairs(self, case, part):
        H, dense, _ = case
        matrix, expected = getattr(H, part), getattr(dense, part)
        r = normal(1)
        v, columns = r(expected.shape[0]), r(expected.shape[0], 3)
        assert relative(matrix @ v, expected @ v) < 1e-9
        assert relative(matrix @ columns, expected @ columns) < 1e-9
        first, last = H.names[0], H.names[-2]
        for row, column in ((first, last), (last, first), (last, last)):
            block = matrix[row, column]
            entries = expected[matrix.ranges[row], matrix.ranges[column]]
            v = r(entries.shape[1])
            assert relative(block @ v, entries @ v, dense.total) < 1e-9
            assert relative(block.T.dense(), entries.T, dense.total) < 1e-9

    def test_both_parts_from_one_pass(self, case):
        """One below the other, of the diagonal block and of a whole column; several vectors at a time or one."""
        H, dense, _ = case
        name = H.names[1]
        columns = normal(5)(H[name].shape[0], 3)
        for rows in (None, H.names):
            places = torch.cat([torch.arange(H.total.shape[0])[H.total.ranges[row]] for row in rows or [name]])
            stacked = H.stacked(name, rows)
            assert stacked.shape == (2 * len(places), len(columns))
            halves = (stacked @ columns).chunk(2)
            for half, part in zip(halves, ("outer", "functional"), strict=True):
                expected = getattr(dense, part)[places][:, H.total.ranges[name]] @ columns
                assert relative(half, expected, dense.total) < 1e-9
            assert relative(stacked @ columns[:, 0], (stacked @ columns)[:, 0]) < 1e-13
        with pytest.raises(BlockNameError, match="there is no 'nowhere'"):
            H.stacked(name, ["nowhere"])

    def test_parts_add_up_to_rounding(self, case):
        H, _, _ = case
        v = normal(2)(H.shape[0])
        assert relative(H.outer @ v + H.functional @ v, H.total @ v) < 1e-13
        assert relative(H @ v, H.total @ v) == 0

    def test_the_outer_part_has_no_negative_eigenvalues(self, case):
        H, _, _ = case
        values = torch.linalg.eigvalsh(H.outer.dense())
        assert values[0] > -1e-12 * values[-1]

    def test_other_weights_give_another_product(self, case):
        H, _, (model, loss, inputs, targets, _) = case
        v = normal(3)(H.shape[0])
        before = H @ v
        model = copy.deepcopy(model)
        kept = hessian(model, loss, [(inputs, targets)], copy=True)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.3).add_(0.05)
        other = hessian(model, loss, [(inputs, targets)])
        assert relative(other @ v, before) > 0.01
        assert relative(kept @ v, before) < 1e-13  # it belongs to the weights that it was made with


def test_torch_func_hessian_is_wrong_through_layer_norm_and_this_is_right():
    H, _, (model, _, inputs, targets, _) = _case("gpt")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        nested = torch.func.hessian(lambda p: cross_entropy(functional_call(model, p, (inputs,)), targets))(parameters)
    gamma, weight = "ln_f.weight", "wpe.weight"
    one, two = nested[gamma][weight].flatten(1), nested[weight][gamma].flatten(0, 1).T
    assert relative(one, two) > 0.01  # torch's own is not symmetric
    ours = H.total["final_norm", "positions"].dense()[: one.shape[0]]
    assert relative(ours, two) < 1e-9
    assert relative(H["positions", "final_norm"].dense().T[: one.shape[0]], two) < 1e-9


class TestCuts:
    """The mean runs over all loss terms, however the data is cut."""

    @pytest.mark.parametrize("cut", [[4], [3, 1], [1, 3], [2, 2], [1, 1, 1, 1]])
    @pytest.mark.parametrize("part", PARTS)
    def test_any_cut_into_batches(self, cut, part):
        _, dense, (model, loss, inputs, targets, _) = _case("gpt")
        H = hessian(model, loss, list(zip(inputs.split(cut), targets.split(cut), strict=True)))
        assert H.terms == int((targets != -100).sum())
        assert relative(getattr(H, part).dense(), getattr(dense, part), dense.total) < 1e-9

    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_micro_batches(self, rows):
        _, dense, (model, loss, inputs, targets, _) = _case("gpt")
        H = hessian(model, loss, [(inputs, targets)], micro_batch=rows)
        assert relative(H.dense(), dense.total) < 1e-9

    def test_padding_of_unequal_length(self):
        """Rows of 3 and 5 tokens, padded or not: causal attention never sees what follows."""
        model, (inputs, targets) = GPT(), tokens(2)
        targets[0, 3:] = -100
        targets[1] = torch.tensor([1, 2, 3, 4, 5])
        together = hessian(model, CrossEntropy(), [(inputs, targets)])
        short = (inputs[:1, :3], targets[:1, :3])
        apart = hessian(model, CrossEntropy(), [short, (inputs[1:], targets[1:])])
        v = normal(4)(together.shape[0])
        assert relative(apart @ v, together @ v) < 1e-12

    def test_a_batch_whose_targets_are_all_ignored_counts_nothing(self):
        _, dense, (model, loss, inputs, targets, _) = _case("gpt")
        H = hessian(model, loss, [(inputs, targets), (inputs, torch.full_like(targets, -100))])
        v = normal(5)(H.shape[0])
        assert relative(H @ v, dense.total @ v) < 1e-9

    def test_squared_error_counts_entries_and_other_losses_rows_or_what_they_say(self):
        model, (inputs, targets) = MLP(), points()
        dense = truth(model, inputs, lambda F: (F - targets).square().mean(), blocks_of(model)).total
        cut = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
        for loss in (
            nn.functional.mse_loss,
            nn.MSELoss(),
            lambda F, Y: (F - Y).square().mean(),
            MeanLoss(lambda F, Y: (F - Y).square().mean(), lambda F, Y: F.numel()),
        ):
            assert relative(hessian(model, loss, cut).dense(), dense) < 1e-9


class TestWays:
    """One number, whichever way it is computed."""

    @pytest.mark.parametrize("part", PARTS)
    def test_recomputing_gives_the_same(self, part):
        kept, _, (model, loss, inputs, targets, _) = _case("gpt")
        batches = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
        anew = hessian(model, loss, batches, memory_limit=1)
        v = normal(6)(kept.shape[0])
        assert relative(getattr(anew, part) @ v, getattr(kept, part) @ v) < 1e-13
        assert not anew.total._engine._kept
        some = hessian(model, loss, batches, memory_limit=200_000)
        assert relative(getattr(some, part) @ v, getattr(kept, part) @ v) < 1e-13

    @pytest.mark.parametrize("part", PARTS)
    def test_one_after_the_other_or_at_once(self, part, monkeypatch):
        H, _, _ = _case("two layers")
        columns = normal(7)(H.shape[0], 5)
        together = getattr(H, part) @ columns
        monkeypatch.setattr(graph_products, "_AT_ONCE", -1)
        assert relative(getattr(H, part) @ columns, together) < 1e-13

    def test_a_lack_of_memory_is_not_taken_for_an_operation_that_cannot_be_batched(self):
        assert unless_unbatched(lambda: torch.func.vmap(float)(torch.ones(2))) is None
        with pytest.raises(RuntimeError, match="allocate"):
            unless_unbatched(lambda: torch.empty(2**58, dtype=torch.uint8))

    def test_any_callable_gives_what_the_closed_form_does(self):
        _, dense, (model, _, inputs, targets, _) = _case("gpt")
        terms = lambda logits, labels: int((labels != -100).sum())  # noqa: E731
        other = hessian(model, MeanLoss(cross_entropy, terms), [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])])
        for part in PARTS:
            assert relative(getattr(other, part).dense(), getattr(dense, part), dense.total) < 1e-9

    def test_graphs_of_other_selections_give_way(self):
        model, loss, inputs, targets, _ = _gpt(2)
        H = hessian(model, loss, [(inputs, targets)])
        v = normal(8)(16)
        alone = H.total["h.1.attn.Q"] @ v
        engine = H.total._engine
        small = next(iter(engine._kept.values()))[0].nbytes
        whole = H.total @ normal(9)(H.shape[0])
        large = list(engine._kept.values())[1][0].nbytes
        assert small < 0.7 * large  # the layers below are not in the graph of a late block
        engine._budget = large + small // 2
        del engine._kept
        engine._kept = OrderedDict()
        assert torch.equal(H.total["h.1.attn.Q"] @ v, alone)
        assert torch.equal(H.total @ normal(9)(H.shape[0]), whole)
        assert len(engine._kept) == 1
        assert relative(H.total["h.1.attn.Q"] @ v, alone) < 1e-13 and len(engine._kept) == 1

    @pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 1e-4)])
    def test_precision(self, dtype, error):
        model, loss, inputs, targets, blocks = _gpt()
        model = model.to(dtype)
        H = hessian(model, loss, [(inputs, targets)])
        assert H.total.dtype == torch.float32
        dense = truth(GPTLike(model), inputs, lambda F: cross_entropy(F, targets), blocks)
        for part in PARTS:
            assert relative(getattr(H, part).dense().double(), getattr(dense, part), dense.total) < error
        assert all(p.dtype == dtype for p in model.parameters())

    def test_heads_and_selections(self):
        H, dense, (model, loss, inputs, targets, blocks) = _case("gpt")
        chosen = blocks.select("*.attn.[QV]").per_head()
        heads = hessian(model, loss, [(inputs, targets)], blocks=chosen)
        assert heads.names == ["h.0.attn.Q.0", "h.0.attn.Q.1", "h.0.attn.V.0", "h.0.attn.V.1"]
        d = 4
        columns = H.total.ranges["h.0.attn.Q"].start + torch.arange(16).view(d, d)[:, 2:].flatten()
        assert relative(heads.total["h.0.attn.Q.1"].dense(), dense.total[columns][:, columns], dense.total) < 1e-9
        picked = heads.total.select(["h.0.attn.V.1", "h.0.attn.Q.0"])
        assert relative(picked["h.0.attn.Q.0"].dense(), heads.total["h.0.attn.Q.0"].dense()) < 1e-13
        assert picked.names == ["h.0.attn.V.1", "h.0.attn.Q.0"]


def GPTLike(model):
    """The same weights in float64."""
    copy = GPT(len(model.h))
    copy.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return copy


class TestLayerSplit:
    def test_parts_of_attention_at_its_own_output(self):
        model, loss, inputs, targets, _ = _gpt(2)
        H = hessian(model, loss, [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])], split="layer")
        by_model, dense, _ = _case("two layers")
        for layer in ("h.0", "h.1"):
            names = [f"{layer}.attn.{letter}" for letter in "QKVO"]
            for row in names:
                for column in names:
                    parts = H.outer[row, column].dense() + H.functional[row, column].dense()
                    entries = dense.total[by_model.total.ranges[row], by_model.total.ranges[column]]
                    assert relative(parts, entries, dense.total) < 1e-9
            value = H.functional[f"{layer}.attn.V"].dense()
            assert float(value.abs().max()) <= 1e-14
            assert float(by_model.functional[f"{layer}.attn.V"].dense().abs().max()) > 1e-3
            assert float(H.functional[f"{layer}.attn.Q"].dense().abs().max()) > 1e-6

    def test_outer_is_the_jacobian_around_the_hessian_of_the_tail(self):
        model, loss, inputs, targets, blocks = _gpt(1)
        H = hessian(model, loss, [(inputs, targets)], split="layer", blocks=blocks.select("h.0.attn.*"))
        layer = model.h[0]
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            residual = model.wte(inputs) + model.wpe.weight
            X = layer.ln_1(residual)

        def tail(F):
            x = residual + F
            return cross_entropy(model.lm_head(model.ln_f(x + layer.mlp(layer.ln_2(x)))), targets)

        model.requires_grad_(False)

        def attention(parameters):
            inner = {name.removeprefix("h.0.attn."): p for name, p in parameters.items()}
            return functional_call(layer.attn, inner, (X,))

        named = {f"h.0.attn.{name}": p.detach() for name, p in layer.attn.named_parameters()}
        dense = truth_of(attention, named, tail, H.outer._blocks)
        for part in PARTS:
            assert relative(getattr(H, part).dense(), getattr(dense, part), dense.total) < 1e-9

    def test_linear_and_norm_layers_alone_are_their_own(self):
        model, (inputs, targets) = MLP(), points()
        H = hessian(model, nn.MSELoss(), [(inputs, targets)], split="layer")
        for name in H.names:
            assert float(H.functional[name].dense().abs().max()) == 0  # linear in its weight
            assert relative(H.outer[name].dense(), H.total[name].dense()) < 1e-12
