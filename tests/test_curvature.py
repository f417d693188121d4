"""cv.hessian as people call it: Hugging Face models, torch's losses, estimates by default."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens, truth, truth_of
from curvoscope.curvature import CrossEntropy, MeanLoss, ModelHessian, blocks_of, hessian
from curvoscope.errors import LossError, MemoryLimitError, ShapeError
from curvoscope.estimate import DiagonalEstimate, Estimate
from curvoscope.losses import MSE, objective_of
from curvoscope.losses import cross_entropy as closed_form
from curvoscope.operators import BlockHessian, LinearOperator
from matrices import within
from reference import normal, relative


def _gpt2(**settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 6, "vocab_size": 11, "initializer_range": 0.4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, **settings))
    return model.eval().double()


def _text():
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, 3:] = labels[2, 5:] = -100
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class TestHuggingFace:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_dict_batches_and_the_models_own_loss(self, attention):
        model, batch = _gpt2(attn_implementation=attention), _text()
        H = hessian(model, None, [batch])
        assert abs(H.loss - float(model(**batch).loss.detach())) < 1e-6
        chosen = blocks_of(model).select("h.1.attn.[QV]", "h.0.norm2", "h.0.mlp.b_down")
        parameters = {name: p.detach() for name, p in model.named_parameters() if name in chosen.parameters}
        dense = truth_of(
            lambda p: functional_call(model, p, (), {"input_ids": batch["input_ids"], "use_cache": False}).logits,
            parameters,
            lambda F: cross_entropy(F[:, :-1], batch["labels"][:, 1:]),
            chosen,
        )
        H = hessian(model, None, [batch], blocks=chosen)
        assert relative(H.total.dense(), dense.total) < 1e-9
        assert relative(H.outer.dense(), dense.outer) < 1e-9
        assert relative(H.functional.dense(), dense.functional, dense.total) < 1e-9

    def test_any_cut_of_padded_text(self):
        model, batch = _gpt2(), _text()
        whole = hessian(model, None, [batch])
        v = normal(1)(whole.shape[0])
        expected = whole @ v
        for cut in ([3, 1], [1, 1, 2]):
            split = [t.split(cut) for t in batch.values()]
            parts = [dict(zip(batch, rows, strict=True)) for rows in zip(*split, strict=True)]
            assert relative(hessian(model, None, parts) @ v, expected) < 1e-12
        assert relative(hessian(model, None, [batch], micro_batch=1) @ v, expected) < 1e-12
        assert relative(hessian(model, CrossEntropy(shift=True), [batch], micro_batch=3) @ v, expected) < 1e-12

    def test_loss_function_of_outputs_and_labels(self):
        model, batch = _gpt2(), _text()
        loss = MeanLoss(
            lambda outputs, labels: cross_entropy(outputs.logits[:, :-1], labels[:, 1:]),
            lambda outputs, labels: int((labels[:, 1:] != -100).sum()),
        )
        expected = hessian(model, None, [batch])
        v = normal(2)(expected.shape[0])
        for part in ("total", "outer", "functional"):
            found = getattr(hessian(model, loss, [batch], micro_batch=2), part) @ v
            assert relative(found, getattr(expected, part) @ v) < 1e-10

    def test_tied_embeddings_are_one_block_with_both_uses(self):
        model, batch = _gpt2(), _text()
        H = hessian(model, None, [batch])
        assert "embed" in H.names and "unembed" not in H.names
        untied = _gpt2(tie_word_embeddings=False)
        untied.load_state_dict({**model.state_dict(), "lm_head.weight": model.transformer.wte.weight})
        free = hessian(untied, None, [batch])
        a, b = "embed", "unembed"
        sums = free[a].dense() + _untransposed(free, a, b) + _untransposed(free, a, b).T + _both(free, b)
        assert relative(H["embed"].dense(), sums) < 1e-9

    def test_split_at_the_layer(self):
        model, batch = _gpt2(), _text()
        H = hessian(model, None, [batch], split="layer")
        total = hessian(model, None, [batch])
        for name in ("h.0.attn.V", "h.1.attn.V"):
            assert float(H.functional[name].dense().abs().max()) <= 1e-13
            assert float(total.functional[name].dense().abs().max()) > 1e-3
            assert relative(H.outer[name].dense(), total[name].dense()) < 1e-9


def _order(H):
    """Entries of the unembedding (d, v) in the order of the embedding (v, d)."""
    d, words = H.shapes["unembed"]
    return torch.arange(d * words).view(d, words).T.flatten()


def _untransposed(H, a, b):
    return H[a, b].dense()[:, _order(H)]


def _both(H, b):
    return H[b].dense()[_order(H)][:, _order(H)]


class TestLosses:
    def test_torchs_losses_are_recognised(self):
        assert isinstance(objective_of(nn.functional.mse_loss), MSE)
        assert isinstance(objective_of(nn.MSELoss()), MSE)
        assert isinstance(objective_of(nn.functional.cross_entropy), CrossEntropy)
        assert objective_of(nn.CrossEntropyLoss(ignore_index=3)).ignore_index == 3
        assert isinstance(objective_of(nn.CrossEntropyLoss(label_smoothing=0.1)), MeanLoss)
        assert objective_of(None) is None

    @pytest.mark.parametrize(
        "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]).double(), label_smoothing=0.1)]
    )
    def test_classes_in_the_second_axis(self, loss):
        class Pixels(MLP):
            def forward(self, x):
                return super().forward(x).movedim(-1, 1)

        model = Pixels()
        inputs = normal(3)(4, 5, 3)
        targets = torch.randint(0, 2, (4, 5), generator=torch.Generator().manual_seed(1))
        targets[0, :3] = -100
        dense = truth(model, inputs, lambda F: loss(F, targets), blocks_of(model))
        cut = [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]
        H = hessian(model, loss, cut)
        for part in ("total", "outer", "functional"):
            assert relative(getattr(H, part).dense(), getattr(dense, part), dense.total) < 1e-9

    def test_outputs_made_of_one_another_count_once(self):
        class Two(MLP):
            def forward(self, x):
                hidden = self.act(self.up(x))
                return {"hidden": hidden, "values": self.down(hidden)}

        model, (x, y) = Two(), points()
        loss = lambda out, Y: (out["values"] - Y).square().mean() + out["hidden"].pow(4).mean()  # noqa: E731
        H = hessian(model, loss, [(x, y)])

        class Joined(Two):
            def forward(self, x):
                out = super().forward(x)
                return torch.cat([out["hidden"], out["values"]], -1)

        joint = lambda F: (F[:, 4:] - y).square().mean() + F[:, :4].pow(4).mean()  # noqa: E731
        dense = truth(Joined(), x, joint, blocks_of(model))
        for part in ("total", "outer", "functional"):
            assert relative(getattr(H, part).dense(), getattr(dense, part), dense.total) < 1e-9

    def test_cross_entropy_keeps_its_digits_where_the_model_is_certain(self):
        """Logits 40 apart: S is of size 1e-17, and still right to 1e-9."""
        model = MLP()
        with torch.no_grad():
            model.down.weight.mul_(1e-3)
            model.down.bias.copy_(torch.tensor([40.0, 0.0]))
        x, targets = points()[0], torch.zeros(4, dtype=torch.int64)
        found = hessian(model, nn.functional.cross_entropy, [(x, targets)]).outer["down.bias"].dense()
        z = model(x).detach()
        p = torch.sigmoid(z[:, 1] - z[:, 0])
        expected = (p * torch.sigmoid(z[:, 0] - z[:, 1])).mean()
        sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double()
        assert expected < 1e-16 and relative(found, expected * sign) < 1e-9

    def test_a_large_vocabulary_in_chunks(self, monkeypatch):
        model, batch = GPT(), tokens()
        H = hessian(model, CrossEntropy(), [batch])
        v = normal(4)(H.shape[0])
        expected = H.outer @ v, H.total @ v
        monkeypatch.setattr(closed_form, "_CHUNK", 7)
        found = hessian(model, CrossEntropy(), [batch])
        assert relative(found.outer @ v, expected[0]) < 1e-13 and relative(found.total @ v, expected[1]) < 1e-13


class TestAnswers:
    def test_estimates_are_the_default_of_autodiff(self):
        H = hessian(GPT(), CrossEntropy(), [tokens()], method="autodiff")
        assert isinstance(H, BlockHessian) and isinstance(H, ModelHessian)
        block = H.total["h.0.attn.Q"]
        dense = block.dense()
        for found, expected in (
            (block.trace(), dense.trace()),
            (block.frobenius_norm(), dense.norm()),
            (block.spectral_norm(), torch.linalg.matrix_norm(dense, 2)),
        ):
            assert isinstance(found, Estimate)
            assert abs(float(found) - float(expected)) <= 5 * found.stderr + 1e-8 * float(dense.norm())
        assert isinstance(block.diagonal(), DiagonalEstimate)
        values = torch.linalg.eigvalsh(dense)
        largest = block.eigenvalues(1, "LA")[0]
        assert abs(largest.value - float(values[-1])) <= 1e-6 * float(values.abs().max())
        assert torch.allclose(block.eigenvalues(), values)
        rectangular = H.total["h.0.attn.Q", "h.0.mlp.up"]
        exact = float(torch.linalg.matrix_norm(rectangular.dense(), 2))
        assert abs(float(rectangular.spectral_norm()) - exact) < 1e-4 * exact
        with pytest.raises(ShapeError):
            rectangular.trace()
        assert isinstance(H.outer.trace(matvecs=16), Estimate)
        assert H.outer.trace(matvecs=16).matvecs <= 16
        assert block.norm_bound() >= float(values.abs().max())

    def test_dense_within_the_memory(self):
        H = hessian(MLP(), nn.MSELoss(), [points()])
        with pytest.raises(MemoryLimitError, match="26 x 26"):
            within(100, H.dense)
        assert H.dense().shape == H.shape == (26, 26)

    def test_to_scipy_and_algebra(self):
        H = hessian(MLP(), nn.MSELoss(), [points()])
        v = normal(1)(26)
        assert relative(torch.as_tensor(H.total.to_scipy() @ v.numpy()), H @ v) < 1e-13
        both = H.outer["up.weight"] + H.functional["up.weight"]
        assert isinstance(both, LinearOperator)
        assert relative(both @ v[:12], H["up.weight"] @ v[:12]) < 1e-12
        assert "26 x 26" in repr(H)

    def test_method_of(self):
        for method in ("auto", "autodiff"):
            H = hessian(MLP(), nn.MSELoss(), [points()], method=method)
            assert {H.method_of(name) for name in H.names} == {"autodiff"}

    def test_parameters_without_influence_have_a_zero_block(self):
        class Idle(MLP):
            def __init__(self):
                super().__init__()
                self.idle = nn.Parameter(torch.ones(3).double())

        H = hessian(Idle(), nn.MSELoss(), [points()])
        assert not H["idle"].dense().any() and not H["idle", "up.weight"].dense().any()
        v = normal(1)(29)
        assert relative((H @ v)[3:], hessian(MLP(), nn.MSELoss(), [points()]) @ v[3:]) < 1e-13

    def test_a_linear_model_has_no_functional_part(self):
        torch.manual_seed(0)
        model, (x, y) = nn.Linear(3, 2).double(), points()
        H = hessian(model, nn.MSELoss(), [(x, y)])
        assert not H.functional.dense().any()
        inputs = torch.cat([x, torch.ones(4, 1).double()], 1)
        expected = torch.kron(torch.eye(2).double(), inputs.T @ inputs) * 2 / 8
        assert abs(float(H.total.dense().norm() - expected.norm())) < 1e-12
        linear = hessian(model, lambda F, Y: F.mean(), [(x, y)])
        assert not linear.dense().any() and not linear.outer.dense().any()


class TestTheModelsOwnLoss:
    def _model(self, kind):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 13}
        if kind == "masked":
            config = transformers.BertConfig(**sizes, intermediate_size=8, initializer_range=1e-4)
            return transformers.BertForMaskedLM(config).eval()
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=1e-2)).eval()

    @pytest.mark.parametrize(("kind", "shift"), [("masked", False), ("causal", True)])
    def test_is_recognised_where_all_words_are_nearly_alike(self, kind, shift):
        """There the losses of shifted and of plain targets are almost the same number."""
        tokens = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(1))
        H = hessian(self._model(kind), None, [{"input_ids": tokens, "labels": tokens}])
        assert H._engine.objective.shift is shift

    def test_is_not_guessed_between_two(self):
        tokens = torch.full((2, 6), 3)
        model = self._model("causal")
        with torch.no_grad():
            model.transformer.wte.weight.zero_()
        with pytest.raises(LossError, match="two losses agree"):
            hessian(model, None, [{"input_ids": tokens, "labels": tokens}])
