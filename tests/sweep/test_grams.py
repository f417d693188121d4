"""Gram matrices of the walk against inner products of gradients that autograd forms, sample by sample."""

import pytest
import torch
import transformers
from torch import nn

import curvoscope as cv
from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.curvature import trainable
from curvoscope.losses import objective_of
from curvoscope.sweep.cotangents import cotangents
from curvoscope.sweep.layers import without_cache
from curvoscope.sweep.run import _Sweeping

SAMPLES = 6


def words(*shapes, vocabulary=23):
    torch.manual_seed(1)
    return [torch.randint(1, vocabulary, shape) for shape in shapes]


def labelled(*shapes):
    return [{"input_ids": ids, "labels": ids} for ids in words(*shapes)]


def gpt2():
    config = transformers.GPT2Config(vocab_size=23, n_embd=8, n_head=2, n_layer=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config), None, labelled((2, 7), (1, 5))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=12,
    )
    return transformers.LlamaForCausalLM(config), None, labelled((2, 7))


def bert():
    config = transformers.BertConfig(
        vocab_size=23, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=12
    )
    (ids,) = words((3, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    ids[1, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return transformers.BertForMaskedLM(config), None, [batch]


def t5():
    config = transformers.T5Config(
        vocab_size=23, d_model=8, d_kv=4, num_heads=2, num_layers=2, d_ff=12, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), None, labelled((2, 5))


def albert():
    config = transformers.AlbertConfig(
        vocab_size=23,
        embedding_size=6,
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=3,
        intermediate_size=12,
    )
    return transformers.AlbertForMaskedLM(config), None, labelled((2, 5))


def vit():
    config = transformers.ViTConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=12, image_size=8, patch_size=4
    )
    torch.manual_seed(2)
    batch = {"pixel_values": torch.randn(3, 3, 8, 8).double(), "labels": torch.tensor([0, 1, 1])}
    return transformers.ViTForImageClassification(config), None, [batch]


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=23,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=12,
        num_local_experts=3,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config), None, labelled((2, 5))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    X, Y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2), nn.MSELoss(), [(X, Y), (X[:1, :3], Y[:1, :3])]


def convolutions():
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 5))
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), [(torch.randn(4, 3, 5).double(), torch.arange(4))]


class Unusual(nn.Module):
    """Weights on the left, in slices, in products of their own, and one used three times, once transposed."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.randn(12, 4))
        self.left = nn.Parameter(torch.randn(3, 5))
        self.low, self.high = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.shared = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):  # (n, 5, 4)
        q, k, v = (x @ part.T for part in self.fused.chunk(3))
        y = (q @ k.mT).softmax(-1) @ v @ (self.low @ self.high)
        y = y @ self.shared + torch.tanh(y @ self.shared) @ self.shared.T
        return torch.stack([self.left @ one for one in y]) * self.scale


def unusual():
    X = torch.randn(2, 5, 4).double()
    return Unusual(), nn.MSELoss(), [(X, X[:, :3])]


FLOAT32_NORMS = [llama, t5, mixtral]  # their norms round to float32 inside
CASES = [gpt2, llama, bert, t5, albert, vit, mixtral, encoder, convolutions, unusual]


def sampled(make, cut):
    """The Gram matrices of the walk, and the gradients of each row by autograd."""
    torch.manual_seed(0)
    model, loss, batches = make()
    model = model.double().eval()
    with without_cache(model):
        blocks = trainable(model, cv.blocks_of(model))
        engine = Autodiff(model, objective_of(loss), Batches(batches), blocks)
        sweeping = _Sweeping(engine, 3, None, None)
        sweeping._cut = cut
        sweeping._examine()
        sweeping._add_chunk(SAMPLES)
        rows = blocks.per_head()
        found = torch.zeros(SAMPLES, sum(rows.sizes.values()), dtype=torch.float64)
        weights, leaves = engine.snapshot.leaves(sorted(blocks.parameters))
        with engine.running():
            for draw in sweeping._draws(SAMPLES, 0)[0]:
                outputs = engine.snapshot(weights, draw.batch)
                F, draws = cotangents(engine.objective, outputs, draw.batch.targets)
                for sample, seed in zip(draw.samples, draw.seeds, strict=True):
                    gradients = torch.autograd.grad(
                        F, list(leaves.values()), draws.draw(seed), retain_graph=True, materialize_grads=True
                    )
                    found[sample] = rows.gather(dict(zip(leaves, gradients, strict=True)))
    return sweeping, rows, found


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cut", [True, False], ids=["layers", "whole"])
def test_against_gradients(make, cut):
    sweeping, rows, gradients = sampled(make, cut)
    assert set(sweeping.sweep.chunks[0]) == set(rows)
    largest = float(gradients.square().sum(1).max())
    rounding = torch.finfo(torch.float32 if make in FLOAT32_NORMS else torch.float64).eps
    for name, some in zip(rows, gradients.split(list(rows.sizes.values()), 1), strict=True):
        K = sweeping.sweep.chunks[0][name]
        torch.testing.assert_close(K, some @ some.T, rtol=1e4 * rounding, atol=1e3 * rounding * largest)


def test_many_tokens_form_gradients():
    """With more tokens than rows the gradients are formed, some rows at a time: the same numbers."""

    def make():
        X = torch.randn(40, 3).double()
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
        return model, nn.MSELoss(), [(X, X), (X[:7], X[:7])]

    sweeping, rows, gradients = sampled(make, True)
    for name, some in zip(rows, gradients.split(list(rows.sizes.values()), 1), strict=True):
        torch.testing.assert_close(sweeping.sweep.chunks[0][name], some @ some.T, rtol=1e-10, atol=1e-14)


class Carrier(nn.Module):
    """A layer that hands a tensor to the next one beside its output."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x):
        y = torch.tanh(self.linear(x)) + sum(self.held)
        self.held[:] = [y * y]
        return y


class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = []
        self.layers = nn.ModuleList([Carrier(self.held) for _ in range(3)])

    def forward(self, x):
        self.held.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_that_cannot_run_alone():
    """The sweep sees that a path between layers is missing, and takes the model whole."""
    torch.manual_seed(0)
    X = torch.randn(6, 4).double()
    batches = [(X, torch.zeros_like(X))]
    model = Carried().double()
    sweep = cv.sweep(model, nn.MSELoss(), batches, samples=256, seed=0)
    exact = cv.hessian(model, nn.MSELoss(), batches).outer
    for name in sweep.names:
        low, high = sweep.trace(name).interval(0.9999)
        assert low <= exact[name].trace() <= high
