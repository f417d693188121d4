"""A Hessian shares the weights with the model: a change is an error, never another number, unless they were copied."""

import copy

import pytest
import torch
from torch import nn

import curvoscope as cv
from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.autodiff.safety import WeightWatch
from curvoscope.errors import ChangedWeightsError, ModelError
from reference import normal, relative


def step(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def one_entry_through_data(model):
    next(model.parameters()).data.view(-1)[1] += 1e-3


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def loaded(model):
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def one_layer(model):
    with torch.no_grad():
        model.h[0].mlp.c_fc.bias[0] += 1


@pytest.fixture
def model():
    found, (inputs, targets) = GPT(), tokens()
    nn.functional.cross_entropy(found(inputs).flatten(0, 1), targets.flatten()).backward()
    return found


@pytest.mark.parametrize("change", [step, through_data, one_entry_through_data, loaded, one_layer])
@pytest.mark.parametrize("method", ["auto", "autodiff"])
def test_every_answer_after_a_change_is_an_error(model, change, method):
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()], method=method)
    v = normal(1)(H.shape[0])
    before = H @ v
    assert relative(H @ v, before) < 1e-13
    change(model)
    asked = (
        lambda: H @ v,
        lambda: H["h.0.attn.Q"].dense(),
        lambda: H.outer["h.0.mlp.up"] @ v[: H["h.0.mlp.up"].shape[1]],
        lambda: H.weights,
        lambda: H.trace(matvecs=4),
    )
    for question in asked:
        with pytest.raises(ChangedWeightsError, match=r"model: its weights have changed .* copy=True"):
            question()


@pytest.mark.parametrize("change", [step, one_entry_through_data])
def test_a_change_while_an_answer_is_computed_is_an_error_before_it_is_given(model, change):
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()], method="autodiff")
    block = H.outer["h.0.mlp.up"]
    products, count = block._engine.product, []

    def product(*arguments):
        count.append(1)
        if len(count) == 3:
            change(model)
        return products(*arguments)

    block._engine.product = product
    with pytest.raises(ChangedWeightsError, match="its weights have changed"):
        block.solve(normal(1)(block.shape[0]), 0.1, method="cg", preconditioner=None)
    assert len(count) > 2


def test_an_answer_reads_the_weights_when_it_begins_and_ends_and_not_for_each_product(model, monkeypatch):
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()], method="autodiff")
    read = []
    hashed = WeightWatch._hashed
    monkeypatch.setattr(WeightWatch, "_hashed", lambda watch: read.append(1) or hashed(watch))
    block = H.outer["h.0.mlp.up"]
    found = block.solve(normal(1)(block.shape[0]), 0.1, method="cg", preconditioner=None)
    assert len(read) == 2 < found.matvecs


def rows_swapped(weight):
    weight[[0, 1]] = weight[[1, 0]].clone()


def columns_swapped(weight):
    weight[:, [0, 2]] = weight[:, [2, 0]].clone()


def even_row_negated(weight):
    weight[1] *= -1


def two_entries_negated(weight):
    weight[[0, 2], [1, 0]] *= -1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(3, 4), (1024, 6), (5, 700)])
@pytest.mark.parametrize("change", [rows_swapped, columns_swapped, even_row_negated, two_entries_negated])
def test_entries_that_move_or_change_signs_through_data_are_seen(change, shape, dtype):
    """They leave the exclusive or of all bits as it was."""
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    watch = WeightWatch({"weight": weight})
    watch.check()
    change(weight.data)
    with pytest.raises(ChangedWeightsError, match=r"through \.data"):
        watch.check()


def test_weights_that_are_no_plain_floats_are_watched():
    weights = {
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "integers": torch.arange(3000, dtype=torch.int8),
        "not finite": torch.tensor([float("nan"), float("inf"), 1.0]),
        "empty": torch.empty(0),
    }
    watch = WeightWatch(weights)
    watch.check()
    weights["integers"].data[[5, 2700]] = weights["integers"][[2700, 5]].clone()
    with pytest.raises(ChangedWeightsError):
        watch.check()


@pytest.mark.parametrize("change", [step, through_data, one_entry_through_data, loaded, one_layer])
def test_copies_keep_the_hessian(model, change):
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()], copy=True)
    v, weights = normal(1)(H.shape[0]), H.weights
    before = H @ v
    change(model)
    assert relative(H @ v, before) < 1e-13 and torch.equal(H.weights, weights)


def test_a_closed_form_that_was_made_before_a_change_stays_what_it_was(model):
    H = cv.hessian(model, cv.losses.CrossEntropy(), [tokens()])
    expected = cv.hessian(copy.deepcopy(model), cv.losses.CrossEntropy(), [tokens()])["h.0.attn.Q"].dense()
    block = H["h.0.attn.Q"]
    assert H.method_of("h.0.attn.Q") == "exact" and float(block.trace()) != 0
    through_data(model)
    assert relative(block.dense(), expected) < 1e-12


def test_weights_are_shared_only_if_they_need_no_conversion():
    def shared(model):
        engine = Autodiff(model, cv.losses.MSE(), Batches([points()]), cv.blocks_of(model))
        return [engine.snapshot.weight(name).data_ptr() == p.data_ptr() for name, p in model.named_parameters()]

    assert all(shared(MLP()))
    assert not any(shared(MLP().bfloat16()))
    model = MLP()
    model.up.weight.data = model.up.weight.data.T.contiguous().T
    assert shared(model) == [False, True, True, True]


def test_a_model_moved_to_another_precision_leaves_the_hessian_alone():
    model = MLP()
    H = cv.hessian(model, cv.losses.MSE(), [points()])
    before = H.dense()
    model.float()
    assert relative(H.dense(), before) < 1e-13


def test_an_embedding_that_renormalises_itself_stays_as_it_is():
    class Renormalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(5, 3, max_norm=0.5).double(), nn.Linear(3, 2).double()

        def forward(self, x):
            return self.out(self.table(x))

    torch.manual_seed(0)
    model = Renormalised()
    before = model.table.weight.detach().clone()
    H = cv.hessian(model, nn.MSELoss(), [(torch.arange(5), normal(1)(5, 2))])
    assert float((H @ normal(2)(H.shape[0])).norm()) > 0
    assert torch.equal(model.table.weight, before)


def test_a_model_that_changes_its_weights_while_it_runs_is_refused():
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-9, 9)
            return super().forward(x)

    with pytest.raises(ChangedWeightsError, match="weight"):
        cv.hessian(Clamped(3, 2).double(), nn.MSELoss(), [points()])
    assert cv.hessian(Clamped(3, 2).double(), nn.MSELoss(), [points()], copy=True).shape == (8, 8)


class TestAModelThatScalesItsWeights:
    """RWKV divides some weights by powers of two, in place, when it first runs in evaluation mode."""

    @pytest.fixture
    def rwkv(self):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"vocab_size": 11, "hidden_size": 4, "attention_hidden_size": 4, "intermediate_size": 8}
        config = transformers.RwkvConfig(**sizes, num_hidden_layers=2, rescale_every=1, use_cache=False)
        tokens = torch.randint(0, 11, (2, 3))
        return transformers.RwkvForCausalLM(config).double().eval(), {"input_ids": tokens, "labels": tokens}

    def test_before_it_did_is_an_error(self, rwkv):
        model, batch = rwkv
        with pytest.raises(ModelError, match=r"rescales its weights on the next forward pass; run the model once"):
            cv.hessian(model, None, [batch])

    @pytest.mark.parametrize("every", [1, 6])
    def test_its_loss_is_left_as_it_was(self, rwkv, every):
        model, batch = rwkv
        model.config.rescale_every = every  # six: nothing to scale in two layers
        if every == 1:
            model(**batch)
        before = copy.deepcopy(model)(**batch).loss
        H = cv.hessian(model, None, [batch], method="autodiff")
        v = normal(1)(H.shape[0])
        assert relative(H @ v, H @ v) == 0
        assert torch.equal(copy.deepcopy(model)(**batch).loss, before)
