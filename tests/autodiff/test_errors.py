"""What is refused, and what is said about it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.blocks import Blocks
from curvoscope.curvature import BatchError, CrossEntropy, MeanLoss, blocks_of, hessian
from curvoscope.errors import (
    BlockNameError,
    CurvoscopeError,
    DeviceError,
    DtypeError,
    EmptyError,
    LossError,
    ModelError,
    NonFiniteError,
    RangeError,
    ShapeError,
)
from distributed_workers import OnceTanh
from reference import normal, relative

MSE = nn.functional.mse_loss


class TestModel:
    @pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(2), nn.AlphaDropout(0.2)])
    def test_training_mode(self, module):
        model = nn.Sequential(MLP(), module.double())
        with pytest.raises(ModelError, match=rf"1 \({type(module).__name__}\).*model\.eval\(\)"):
            hessian(model, MSE, [points()])
        hessian(model.eval(), MSE, [points()])

    def test_dropout_inside_attention(self):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True, dtype=torch.float64)
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
        with pytest.raises(ModelError, match="self_attn"):
            hessian(layer, MSE, [(torch.zeros(2, 3, 4).double(), torch.zeros(2, 3, 4).double())])

    def test_training_mode_without_chance_is_fine(self):
        model, batch = MLP(), points()
        v = normal(1)(26)
        assert torch.equal(hessian(model.train(), MSE, [batch]) @ v, hessian(model.eval(), MSE, [batch]) @ v)

    def test_a_loss_that_changes(self):
        class Noisy(MLP):
            def forward(self, x):
                return super().forward(x) + 0.01 * torch.randn(1)

        with pytest.raises(LossError, match=r"two identical calls gave the losses \d.*eval"):
            hessian(Noisy(), MSE, [points()])

    def test_compiled_models_run_eagerly(self):
        model, batch = GPT(), tokens()
        plain = hessian(model, CrossEntropy(), [batch])
        v = normal(1)(plain.shape[0])
        expected = plain @ v
        for compiled in (torch.compile(model), _compiled_inside(GPT())):
            assert relative(hessian(compiled, CrossEntropy(), [batch]) @ v, expected) < 1e-12

    def test_frozen_parameters(self):
        model = MLP()
        model.up.weight.requires_grad_(False)
        H = hessian(model, MSE, [points()])
        assert H.names == ["up.bias", "down.weight", "down.bias"]
        with pytest.raises(ModelError, match=r"up\.weight.*frozen"):
            hessian(model, MSE, [points()], blocks=blocks_of(model))
        with pytest.raises(EmptyError, match="frozen"):
            hessian(model.requires_grad_(False), MSE, [points()])

    def test_integer_weights(self):
        model = MLP()
        model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
        with pytest.raises(DtypeError, match=r"table.*int64"):
            hessian(model, MSE, [points()], blocks=blocks_of(model))
        assert "table" not in hessian(model, MSE, [points()]).names

    def test_several_devices(self):
        model = MLP()
        blocks = blocks_of(model)
        model.down.to("meta")
        with pytest.raises(DeviceError, match=r"cpu, meta.*model\.to"):
            hessian(model, MSE, [points()], blocks=blocks)
        with pytest.raises(DeviceError, match="no data"):
            hessian(model.to("meta"), MSE, [points()], blocks=blocks)

    def test_device_is_where_the_operator_lives(self):
        H = hessian(MLP(), MSE, [points()], device="cpu")
        assert H.total.device == torch.device("cpu")


def _compiled_inside(model):
    model.h[0].mlp.compile()
    return model


class TestBatches:
    def test_generators(self):
        stream = (batch for batch in [points()])
        with pytest.raises(BatchError, match=r"generator.*only once.*list"):
            hessian(MLP(), MSE, stream)
        list(stream)
        with pytest.raises(BatchError, match=r"generator.*only once.*list"):
            hessian(MLP(), MSE, stream)

    def test_shuffling_loaders(self):
        loader = DataLoader(TensorDataset(*points(8)), batch_size=2, shuffle=True)
        with pytest.raises(BatchError, match=r"batch \d differs.*shuffle=False"):
            hessian(MLP(), MSE, loader)

    def test_an_iterable_that_shrinks_or_grows(self):
        class Changing:
            def __init__(self, lengths):
                self.lengths = iter(lengths)

            def __iter__(self):
                return iter([points()] * next(self.lengths))

        with pytest.raises(BatchError, match="1 on this pass, 2 on the first"):
            hessian(MLP(), MSE, Changing([2, 1]))
        with pytest.raises(BatchError, match="batch 1 differs"):
            hessian(MLP(), MSE, Changing([1, 2]))

    def test_data_changed_after_the_first_look(self):
        inputs, targets = points()
        H = hessian(MLP(), MSE, [(inputs, targets)], memory_limit=1)
        inputs += 1
        with pytest.raises(BatchError, match="batch 0 differs"):
            H @ normal(1)(26)

    def test_an_option_of_the_call_changed_after_the_first_look(self):
        class Halved(MLP):
            def forward(self, inputs, half=False):
                return super().forward(inputs / 2 if half else inputs)

        inputs, targets = points()
        batch = {"inputs": inputs, "half": False, "labels": targets}
        H = hessian(Halved(), MSE, [batch], memory_limit=1)
        batch["half"] = True
        with pytest.raises(BatchError, match="batch 0 differs"):
            H @ normal(1)(26)

    @pytest.mark.parametrize(
        "batches, error, text",
        [
            ([], EmptyError, "there are none"),
            ([(torch.zeros(0, 3), torch.zeros(0, 2))], EmptyError, "batch 0 has no rows"),
            ([points(), 3], BatchError, "batch 1 is a int"),
            ([(torch.zeros(1, 3),)], BatchError, "batch 0 is a tuple of 1"),
            ((torch.zeros(1, 3), torch.zeros(1, 2)), BatchError, "batch 0 is a Tensor"),
            (torch.zeros(1, 3), BatchError, r"one Tensor.*\[\(inputs, targets\)\]"),
            ({"labels": 1}, BatchError, "one dict"),
            ([{"input_ids": torch.zeros(1, 3)}], BatchError, "without 'labels'.*input_ids"),
            ([("text", torch.zeros(1, 2))], BatchError, "no tensors"),
        ],
    )
    def test_forms(self, batches, error, text):
        with pytest.raises(error, match=text):
            hessian(MLP(), MSE, batches)

    def test_micro_batch(self):
        with pytest.raises(RangeError, match=r"micro_batch: got 0"):
            hessian(MLP(), MSE, [points()], micro_batch=0)

    def test_tuples_and_dicts_of_inputs(self):
        class Two(MLP):
            def forward(self, x, scale):
                return super().forward(x) * scale

        model, (x, y) = Two(), points()
        v, scale = normal(1)(26), torch.tensor(2.0, dtype=torch.float64)
        positional = hessian(model, MSE, [((x, scale), y)], micro_batch=3) @ v
        assert relative(hessian(model, MSE, [({"x": x, "scale": scale}, y)]) @ v, positional) < 1e-13
        assert relative(hessian(model, MSE, [{"x": x, "scale": scale, "labels": y}]) @ v, positional) < 1e-13


class TestLoss:
    @pytest.mark.parametrize(
        "loss, text",
        [
            (lambda F, Y: (F - Y).square(), r"scalar tensor.*shape \(4, 2\)"),
            (lambda F, Y: 1.0, "scalar tensor.*float"),
            (nn.CrossEntropyLoss(reduction="none"), "reduction='none'"),
        ],
    )
    def test_no_mean(self, loss, text):
        with pytest.raises(LossError, match=text):
            hessian(MLP(), loss, [points()])

    def test_detached(self):
        H = hessian(MLP(), lambda F, Y: (F.detach() - Y).square().mean(), [points()])
        with pytest.raises(LossError, match="detaches"):
            H @ normal(1)(26)

    def test_penalties_of_parameters(self):
        model = MLP()
        with pytest.raises(LossError, match="uses parameters directly"):
            hessian(model, lambda F, Y: MSE(F, Y) + model.up.weight.square().sum(), [points()])

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_not_finite(self, value):
        x, y = points()
        broken = x.clone()
        broken[2, 1] = value
        with pytest.raises(NonFiniteError, match="on batch 1"):
            hessian(MLP(nn.Softplus), MSE, [(x, y), (broken, y)])

    def test_targets_that_do_not_fit(self):
        model, (inputs, targets) = GPT(), tokens()
        with pytest.raises(ShapeError, match="targets"):
            hessian(model, CrossEntropy(), [(inputs, targets[:, 1:])])
        with pytest.raises(RangeError, match="6 is outside the vocabulary 0 to 5"):
            hessian(model, CrossEntropy(), [(inputs, targets.where(targets != 3, 6))])
        with pytest.raises(ShapeError, match="expected integers, or probabilities of the shape of the logits"):
            hessian(model, CrossEntropy(), [(inputs, targets.double())])
        with pytest.raises(ShapeError, match="targets"):
            hessian(MLP(), MSE, [(torch.zeros(4, 3).double(), torch.zeros(4).double())])

    def test_all_targets_ignored(self):
        inputs, targets = tokens()
        with pytest.raises(EmptyError, match="ignored"):
            hessian(GPT(), CrossEntropy(), [(inputs, torch.full_like(targets, -100))])

    def test_no_loss_at_all(self):
        with pytest.raises(LossError, match="loss_fn"):
            hessian(Labelled(loss=None), None, [{"x": points()[0], "labels": points()[1]}])
        with pytest.raises(LossError, match="not a known one"):
            hessian(Labelled(loss=torch.ones(())), None, [{"x": points()[0], "labels": points()[1]}])


class Labelled(MLP):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, x, labels=None):
        class Output:
            logits, loss = super(Labelled, self).forward(x), self.loss

        return Output()


class TestSelection:
    def test_names_and_choices(self):
        model = GPT()
        H = hessian(model, CrossEntropy(), [tokens()])
        with pytest.raises(BlockNameError, match=r"no 'h\.0\.attn\.q'.*h\.0\.attn\.Q"):
            H["h.0.attn.q"]
        with pytest.raises(BlockNameError, match="no 'x'"):
            H.method_of("x")
        with pytest.raises(EmptyError):
            Blocks([])
        for bad in ({"method": "fast"}, {"split": "block"}, {"memory_limit": 0}):
            with pytest.raises(RangeError, match=next(iter(bad))):
                hessian(model, CrossEntropy(), [tokens()], **bad)

    def test_blocks_of_another_model(self):
        with pytest.raises(CurvoscopeError, match=r"h\.1"):
            hessian(GPT(1), CrossEntropy(), [tokens()], blocks=blocks_of(GPT(2)))

    def test_no_closed_form(self):
        with pytest.raises(ModelError, match="no closed form"):
            hessian(MLP(), MSE, [points()], method="exact")

    def test_layers_do_not_mix(self):
        H = hessian(GPT(), CrossEntropy(), [tokens()], split="layer")
        with pytest.raises(ModelError, match=r"h\.0\.attn\.Q.*h\.0\.mlp\.up.*split='model'"):
            H.outer["h.0.attn.Q", "h.0.mlp.up"] @ torch.zeros(32).double()
        with pytest.raises(ModelError, match="split"):
            H.functional @ torch.ones(H.shape[0]).double()
        with pytest.raises(ModelError, match=r"wte.*other than through the output"):
            H.outer["embed"] @ torch.ones(24).double()
        H @ torch.ones(H.shape[0]).double()

    def test_a_layer_that_runs_twice(self):
        class Twice(MLP):
            def forward(self, x):
                return super().forward(super().forward(x).repeat(1, 2)[:, :3])

        H = hessian(Twice(), MSE, [points()], split="layer")
        with pytest.raises(ModelError, match=r"up.*ran 2 times"):
            H.outer["up.weight"] @ torch.ones(12).double()

    def test_a_parameter_that_acts_beside_its_layer_only(self):
        class Beside(MLP):
            def __init__(self):
                super().__init__()
                self.up.gain = nn.Parameter(torch.ones(2, dtype=torch.float64))

            def forward(self, x):
                return super().forward(x) * self.up.gain

        H = hessian(Beside(), MSE, [points()], split="layer")
        with pytest.raises(ModelError, match=r"up\.gain: acts nowhere on the output of 'up'"):
            H.outer["up.gain"] @ torch.ones(2).double()
        with pytest.raises(ModelError, match=r"up\.gain: also affects the loss other than through the output of 'up'"):
            H.outer["up.gain", "up.weight"] @ torch.ones(12).double()

    def test_a_layer_that_returns_no_tensor(self):
        class Named(nn.Linear):
            def forward(self, x):
                return {"hidden": super().forward(x)}

        class Model(MLP):
            def __init__(self):
                super().__init__()
                self.up = Named(3, 4, dtype=torch.float64)

            def forward(self, x):
                return self.down(self.act(self.up(x)["hidden"]))

        H = hessian(Model(), MSE, [points()], split="layer")
        with pytest.raises(ModelError, match=r"up: returns dict, not a tensor"):
            H.outer["up.weight"] @ torch.ones(12).double()

    def test_vectors(self):
        H = hessian(MLP(), MSE, [points()])
        with pytest.raises(ShapeError, match=r"\(26,\)"):
            H @ torch.zeros(25).double()
        with pytest.raises(DtypeError, match="vector"):
            H @ torch.zeros(26)
        with pytest.raises(NonFiniteError, match="vector"):
            H @ torch.full((26,), math.inf).double()


def test_terms_of_a_plain_function_are_found():
    """Two rows with 5 and 1 targets: rows would give equal weights."""
    model, (inputs, targets) = GPT(), tokens(2)
    targets[0], targets[1] = torch.arange(5), torch.tensor([1, -100, -100, -100, -100])
    loss = lambda F, Y: nn.functional.cross_entropy(F.flatten(0, 1), Y.flatten())  # noqa: E731
    apart = [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]
    expected = hessian(model, CrossEntropy(), [(inputs, targets)])
    v = normal(1)(expected.shape[0])
    counted = MeanLoss(loss, lambda F, Y: int((Y != -100).sum()))
    assert relative(hessian(model, counted, apart) @ v, expected @ v) < 1e-12
    assert relative(hessian(model, loss, apart) @ v, expected @ v) < 1e-12


def test_a_function_without_a_second_derivative_is_not_left_out_silently():
    H = hessian(MLP(OnceTanh), MSE, [points()])
    with pytest.raises(ModelError, match=r"once_differentiable.*hvp='difference'"):
        H @ torch.ones(H.shape[0], dtype=torch.float64)
