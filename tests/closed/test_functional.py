"""The functional part at each layer's output, from the gradient there alone: exact, shared passes, and never an S."""

import pytest
import torch
from torch import nn

from autodiff_cases import GPT, tokens
from curvoscope.closed import closed_forms
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from family_cases import CASES
from family_cases import tokens as words
from reference import normal, relative

LANGUAGE = ("GPT2LMHeadModel", "Llama", "Llama, no biases, one key head", "BertForMaskedLM")


def _language(case):
    model = CASES[case]().model
    model.set_attn_implementation("sdpa")
    return model, CrossEntropy(), [(words(), words().flip(0))]


def _layers(names):
    found = {}
    for name in names:
        if ".attn." in name or ".mlp." in name:
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


@pytest.fixture
def without_curvature(monkeypatch):
    """No S may be made, and the outer part is never worth it."""

    def refuse(*arguments):
        raise AssertionError("the loss Hessian at a layer's output was asked for")

    monkeypatch.setattr(closed_forms, "DownstreamLoss", refuse)
    monkeypatch.setattr("curvoscope.closed.plan._QUESTIONS", 0)


@pytest.mark.parametrize("case", LANGUAGE)
def test_all_blocks_of_all_layers(case, without_curvature):
    """Every pair of blocks of a layer against products by autodiff, to 1e-9 of the layer's largest entry."""
    model, loss, batches = _language(case)
    H, reference = (hessian(model, loss, batches, split="layer", method=method) for method in ("auto", "autodiff"))
    layers = _layers(H.names)
    assert set(layers) == {"h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"}
    for names in layers.values():
        expected = reference.functional.select(names)
        dense = expected.dense()
        for i, row in enumerate(names):
            assert H.method_of(row, "functional") == H.plan[row, "functional"].method == "exact"
            for column in names[i:]:
                here = dense[expected.ranges[row], expected.ranges[column]]
                assert relative(H.functional[row, column].dense(), here, dense) < 1e-9


@pytest.mark.parametrize("case", LANGUAGE)
def test_what_a_block_answers(case, without_curvature):
    model, loss, batches = _language(case)
    blocks = blocks_of(model).select("h.0.attn.[QKVO]", "h.1.mlp.*")
    H, reference = (
        hessian(model, loss, batches, blocks, split="layer", method=method) for method in ("auto", "autodiff")
    )
    for name in H.names:
        block, dense = H.functional[name], reference.functional[name].dense()
        size = float(dense.norm())
        v = normal(1)(dense.shape[0])
        assert block.frobenius_norm().exact and block.trace().exact
        assert abs(block.frobenius_norm() - size) <= 1e-9 * size
        assert abs(block.trace() - float(dense.trace())) <= 1e-9 * size
        assert float((block.diagonal() - dense.diagonal()).abs().max()) <= 1e-9 * size
        assert float((block @ v - dense @ v).norm()) <= 1e-9 * size * float(v.norm())
        ends = torch.linalg.eigvalsh(dense)
        assert abs(float(block.eigenvalues(1, "LA")[0]) - float(ends[-1])) <= 1e-9 * size


def test_eigenvalues_of_a_large_block_by_lanczos(without_curvature):
    """More than all its eigenvalues are taken of."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(48, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    X, Y = normal(1)(1, 6, 48), normal(2)(1, 6, 48)
    blocks = blocks_of(model).select("h.0.attn.[QK]", "h.0.mlp.up")
    H = hessian(model, nn.MSELoss(), [(X, Y)], blocks, split="layer")
    for name in H.names:
        block = H.functional[name]
        assert block.shape[0] > 2048
        values, vectors = block.eigenvalues(2, "LM", vectors=True)
        assert values.exact
        assert float((block @ vectors - vectors * torch.as_tensor(values)).norm()) < 1e-9 * float(
            block.frobenius_norm()
        )
        assert float(values.square().sum()) < float(block.frobenius_norm()) ** 2 * (1 + 1e-9)


def test_several_batches_add_up_with_their_weights(without_curvature):
    """Batches of unequal length, with targets that are left out, in micro-batches."""
    model, inputs, targets = GPT(2), *tokens(4, 5)
    targets = targets.clone()
    targets[2, 1:4] = -100
    batches = [(inputs[:1, :3], targets[:1, :3]), (inputs[1:], targets[1:])]
    for micro_batch in (None, 1):
        H, reference = (
            hessian(model, CrossEntropy(), batches, split="layer", method=method, micro_batch=micro_batch)
            for method in ("auto", "autodiff")
        )
        for name in ("h.0.attn.Q", "h.0.attn.K", "h.1.mlp.up"):
            dense = reference.functional[name].dense()
            assert relative(H.functional[name].dense(), dense) < 1e-9
            assert abs(H.functional[name].frobenius_norm() - float(dense.norm())) < 1e-9 * float(dense.norm())
        pair = "h.0.attn.V", "h.0.attn.Q"
        assert relative(H.functional[pair].dense(), reference.functional[pair].dense()) < 1e-9


class TestPasses:
    def test_one_backward_pass_serves_all_layers(self, without_curvature):
        """For each batch a forward pass at the weights and one at shaken ones, and one backward pass from the loss."""
        model, forward, backward = GPT(3), [], []
        H = hessian(model, CrossEntropy(), [tokens(), tokens(3)], split="layer")
        model.register_forward_hook(lambda *_: forward.append(1))
        model.lm_head.register_full_backward_hook(lambda *_: backward.append(1))
        for names in _layers(H.names).values():
            for name in names:
                H.functional[name].frobenius_norm()
        assert len(forward) == 2 * 2 and len(backward) == 2

    def test_layer_by_layer_where_memory_is_short(self, without_curvature):
        model = GPT(2)
        H, reference = (hessian(model, CrossEntropy(), [tokens()], split="layer") for _ in range(2))
        H._closed._groups = H._closed._passed_together(room=0)
        for name in ("h.0.attn.Q", "h.1.mlp.up", "h.0.attn.K"):
            assert H.functional[name].frobenius_norm() == reference.functional[name].frobenius_norm()
        assert len(H._closed._passes) + len(H._closed._batches) == 1

    def test_no_second_derivative_is_needed(self, without_curvature):
        """A head that autograd differentiates once only."""

        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, g):
                return 2 * g

        class Headed(GPT):
            def forward(self, words):
                return Once.apply(super().forward(words))

        class Plain(GPT):
            def forward(self, words):
                return 2 * super().forward(words)

        found, expected = (
            hessian(model(2), CrossEntropy(), [tokens()], split="layer").functional["h.0.attn.Q"].frobenius_norm()
            for model in (Headed, Plain)
        )
        assert abs(found - expected) < 1e-12 * expected


class TestPlan:
    def test_each_part_has_its_method(self, without_curvature):
        H = hessian(GPT(2), CrossEntropy(), [tokens()], split="layer")
        for name in ("h.0.attn.Q", "h.1.mlp.up"):
            assert [H.plan[name, part].method for part in ("outer", "functional", "total")] == [
                "autodiff",
                "exact",
                "autodiff",
            ]
            row = H.plan[name, "functional"]
            assert row.products == 0 and row.bytes > 0 and "from the gradient at its output" in row.reason
            assert H.method_of(name, "functional") == "exact" and H.method_of(name, "outer") == "autodiff"
            assert H.method_of(name) == "autodiff"

    def test_at_the_models_output_the_functional_part_needs_the_curvature(self, without_curvature):
        H = hessian(GPT(2), CrossEntropy(), [tokens()])
        assert H.method_of("h.0.attn.Q", "functional") == "autodiff"

    def test_memory(self, monkeypatch):
        H = hessian(GPT(2), CrossEntropy(), [tokens()], split="layer")
        needed = H.plan["h.0.attn.Q", "functional"].bytes
        monkeypatch.setattr(closed_forms.checks, "memory_budget", lambda: needed - 1)
        H = hessian(GPT(2), CrossEntropy(), [tokens()], split="layer")
        assert H.plan["h.0.attn.Q", "functional"].reason == "its closed form does not fit into memory"
        assert H.method_of("h.0.attn.Q", "functional") == "autodiff"
