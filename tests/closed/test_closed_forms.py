"""Where layers are read and how they are recognised: the right closed form, or none at all."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autodiff_cases import GPT, cross_entropy, tokens
from curvoscope.closed.layers import layers_of
from curvoscope.closed.passes import LayerRecorder, shaken
from curvoscope.closed.rebuilding import fitting, rebuild
from curvoscope.curvature import CrossEntropy, blocks_of, hessian
from curvoscope.errors import ModelError
from family_cases import CASES, LENGTH
from family_cases import shaken as moved
from family_cases import tokens as words
from reference import normal, relative

SITES = {  # of layer 1: input, output of attention; input, output of the feed-forward layer
    "GPT2LMHeadModel": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "Llama": ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
    "BertForMaskedLM": ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"),
    "ViTForImageClassification": ("attention.q_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2"),
    "TransformerEncoder, pre": ("self_attn", "self_attn", "linear1", "linear2"),
}


def _run(model, layer, inputs, weights=None):
    """The record of a layer while the model runs, at other weights if given."""
    with torch.no_grad(), LayerRecorder(model, layer) as recorder:
        model(*inputs) if weights is None else torch.func.functional_call(model, weights, inputs)
    return recorder.record


@pytest.mark.parametrize("case", SITES)
def test_where_the_layers_are(case):
    model = CASES[case]().model
    layers = {layer.name: layer for layer in layers_of(model, blocks_of(model))}
    assert list(layers) == ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    attention, feedforward = layers["h.1.attn"], layers["h.1.mlp"]
    found = [attention.input, attention.output, feedforward.input, feedforward.output]
    assert [site.side for site in found] == ["input", "output", "input", "output"]
    for site, path in zip(found, SITES[case], strict=True):
        assert f".{site.path}".endswith(f".1.{path}")


def test_a_layer_is_read_by_what_its_module_says():
    """The causal mask, the scale and the activation of GPT-2's layers."""
    case = CASES["GPT2LMHeadModel"]()
    for layer in layers_of(case.model, blocks_of(case.model)):
        record = _run(case.model, layer, (words(),))
        parameters = {name: p.detach() for name, p in case.model.named_parameters()}
        reading = fitting(layer, parameters, record)[0][0]
        if layer.kind == "mlp":
            assert reading.activation == "gelu_tanh"
        else:
            assert (reading.activation, reading.masked) == ("softmax", True)
            assert abs(reading.scale - 1 / math.sqrt(3)) < 1e-15
            A = (
                rebuild(layer, parameters, record, reading)
                .layer.forward_pass(record.X, record.arguments["attention_mask"])
                .A
            )
            assert relative(A, case.patterns[int(layer.name[2])].detach()) < 1e-12


def test_zeros_in_the_weights_hide_nothing():
    """At O = V = 0 and Q = 0 the output is the same for every mask, scale and activation; its curvature is not."""
    model = GPT(2)
    with torch.no_grad():
        for layer in model.h:
            for weight in (layer.attn.c_proj.weight, layer.attn.c_attn.weight, layer.mlp.c_proj.weight):
                weight.zero_()
            layer.attn.c_proj.bias.zero_()
    blocks = blocks_of(model).select("*.attn.[QKVO]", "*.mlp.up", "*.mlp.down")
    found, expected = (
        hessian(model, CrossEntropy(), [tokens()], blocks, method=method) for method in ("exact", "autodiff")
    )
    dense = expected.dense()
    for row, column in (("h.0.attn.V", "h.0.attn.O"), ("h.1.mlp.up", "h.1.mlp.down"), ("h.1.attn.Q", "h.1.attn.V")):
        assert relative(found[row, column].dense(), expected[row, column].dense(), dense) < 1e-9


class Attention(nn.Module):
    """A c_attn, c_proj layer as nanoGPT has it, with something else inside."""

    def __init__(self, compute):
        super().__init__()
        self.n_head, self.compute = 2, compute
        self.c_attn, self.c_proj = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(self.compute(q, k, v).transpose(1, 2).flatten(2))


Attention.__name__ = "CausalSelfAttention"


def _with(compute):
    model = GPT()
    model.h[0].attn = Attention(compute).double()
    return moved(model)


KNOWN = {
    "causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "open": scaled_dot_product_attention,
    "linear": lambda q, k, v: (q @ k.mT / math.sqrt(2)).tril() @ v,
    "another scale": lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.5),
    "capped scores": lambda q, k, v: (5 * (q @ k.mT / math.sqrt(2) / 5).tanh()).softmax(-1) @ v,
    "normalised queries": lambda q, k, v: scaled_dot_product_attention(nn.functional.normalize(q, dim=-1), k, v),
}
UNKNOWN = {
    "sigmoid": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, "its scores are not found in the graph"),
    "float32 inside": (
        lambda q, k, v: (q @ k.mT / math.sqrt(2)).float().softmax(-1).double() @ v,
        "its softmax computes in lower precision, torch.float32",
    ),
    "more than softmax": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v) + 1e-9 * v,
        "no closed form gives its output, the nearest is off by .* lower precision",
    ),
    "powers": (
        lambda q, k, v: ((q @ k.mT) ** 3).softmax(-1) @ v,
        "its scores pass through a function that is neither linear nor a soft cap",
    ),
    "queries of powers": (
        lambda q, k, v: scaled_dot_product_attention(q**3, k, v),
        "its queries or keys are not a linear map of a norm of their projections",
    ),
    "powers of one query": (
        lambda q, k, v: scaled_dot_product_attention(torch.cat([q[..., :1, :] ** 3, q[..., 1:, :]], -2), k, v),
        "its queries or keys are not a linear map of a norm of their projections",
    ),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_kinds_of_attention(kind):
    model = _with(KNOWN[kind])
    blocks = blocks_of(model).select("h.0.attn.[QV]")
    found, expected = (
        hessian(model, CrossEntropy(), [tokens()], blocks, method=method) for method in ("exact", "autodiff")
    )
    assert relative(found["h.0.attn.Q", "h.0.attn.V"].dense(), expected["h.0.attn.Q", "h.0.attn.V"].dense()) < 1e-9


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_only_looks_like_attention(kind):
    compute, cause = UNKNOWN[kind]
    model = _with(compute)
    H = hessian(model, CrossEntropy(), [tokens()])
    assert H.plan["h.0.attn.Q", "total"].method == "exact"
    assert H.method_of("h.0.attn.Q") == "autodiff" and H.method_of("h.0.mlp.up") == "exact"
    assert H.plan["h.0.attn.Q", "total"].method == "autodiff" and re.match(cause, H.plan["h.0.attn.Q", "total"].reason)
    with pytest.raises(ModelError, match=rf"h\.0\.attn\.Q.*{cause}.*method='auto'"):
        hessian(model, CrossEntropy(), [tokens()], blocks_of(model).select("*.attn.*"), method="exact")


class Adapted(nn.Module):
    """A projection with a bent term of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.down = base, nn.Linear(base.in_features, 1, bias=False)
        self.up = nn.Linear(1, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x).tanh())


def test_adapters():
    """In the first projection the layer is another one, in the last its weights act beside the output that is read."""
    for path, layer, other in (("mlp.c_fc", "mlp.up", "attn.Q"), ("attn.c_proj", "attn.Q", "mlp.up")):
        model = GPT()
        model.h[0].set_submodule(path, Adapted(model.h[0].get_submodule(path)))
        H = hessian(model.double(), CrossEntropy(), [tokens()])
        assert H.method_of(f"h.0.{layer}") == "autodiff" and H.method_of(f"h.0.{other}") == "exact"


def test_attention_to_another_sequence_has_no_closed_form():
    model = moved(nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True))
    x, memory, y = normal(1)(2, 3, 6), normal(2)(2, 3, 6), normal(3)(2, 3, 6)
    H = hessian(model, nn.MSELoss(), [((x, memory), y)])
    methods = {name: H.method_of(name) for name in H.names if name.endswith("attn.Q")}
    assert methods == {"self_attn.h.0.attn.Q": "exact", "multihead_attn.h.0.attn.Q": "autodiff"}


def test_rotary_tables_that_differ_between_sequences():
    case = CASES["Llama, no biases, one key head"]()
    case.model.set_attn_implementation("sdpa")
    positions = torch.arange(LENGTH) + torch.tensor([[0], [3]])
    blocks = blocks_of(case.model).select("h.1.attn.[QK]")
    for inputs in (
        {"input_ids": words(), "position_ids": positions},
        {"input_ids": words(), "position_ids": positions[1:].expand(2, -1)},
    ):
        found, expected = (
            hessian(case.model, CrossEntropy(), [(inputs, words())], blocks, split="layer", method=method)
            for method in ("exact", "autodiff")
        )
        for row in blocks:
            dense = expected.functional[row, "h.1.attn.Q"].dense()
            assert relative(found.functional[row, "h.1.attn.Q"].dense(), dense) < 1e-9


def test_inside_another_module_and_compiled():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    plain = hessian(GPT(), CrossEntropy(), [tokens()], method="autodiff")["h.0.attn.Q"].dense()
    for model in (Outer(GPT()), torch.compile(GPT(), backend="eager")):
        H = hessian(model, CrossEntropy(), [tokens()])
        assert H.method_of("h.0.attn.Q") == "exact"
        assert relative(H["h.0.attn.Q"].dense(), plain) < 1e-9


def test_shaken_weights_are_all_different_and_the_same_each_time():
    weights = {"matrix": torch.zeros(3, 4), "bias": torch.ones(2), "scale": torch.tensor(2.0), "table": torch.arange(3)}
    first, second = shaken(weights), shaken(weights)
    for name in ("matrix", "bias", "scale"):
        assert torch.equal(first[name], second[name]) and bool((first[name] != weights[name]).all())
    assert torch.equal(first["table"], weights["table"])
    assert not weights["matrix"].any()


def test_queries_that_see_nothing_give_nothing():
    """nn.MultiheadAttention with -inf everywhere in a row: zeros from torch's kernel, so F is the output's bias."""
    model = moved(nn.MultiheadAttention(4, 2, batch_first=True))

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x, mask):
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    mask = torch.zeros(3, 3, dtype=torch.float64)
    mask[1] = -math.inf
    x, y = normal(1)(2, 3, 4), normal(2)(2, 3, 4)
    masked = Masked()
    assert torch.equal(masked(x, mask)[:, 1].detach(), model.out_proj.bias.detach().expand(2, 4))
    blocks = blocks_of(masked)
    loss = lambda F, Y: (F - Y).square().mean()  # noqa: E731
    found, expected = (
        hessian(masked, loss, [({"x": x, "mask": mask}, y)], blocks, method=method) for method in ("exact", "autodiff")
    )
    dense = expected.dense()
    for row in blocks:
        assert relative(found[row, "h.0.attn.O"].dense(), expected[row, "h.0.attn.O"].dense(), dense) < 1e-9


def test_the_loss_may_be_any_function_of_the_outputs():
    model, (inputs, targets) = GPT(2), tokens()
    blocks = blocks_of(model).select("h.1.mlp.*")
    found, expected = (
        hessian(model, loss, [(inputs, targets)], blocks, method=method)["h.1.mlp.up"].dense()
        for loss, method in ((cross_entropy_of_rows, "exact"), (CrossEntropy(), "autodiff"))
    )
    assert relative(found, expected) < 1e-9


def cross_entropy_of_rows(logits, targets):
    return cross_entropy(logits, targets)


def test_rotary_keys_have_an_exact_functional_part_at_any_size(monkeypatch):
    monkeypatch.setattr("curvoscope.closed.closed_forms._MOST_DENSE", 4)
    case = CASES["Llama, no biases, one key head"]()
    case.model.set_attn_implementation("sdpa")
    blocks = blocks_of(case.model).select("h.*.attn.K")
    options = {"blocks": blocks, "split": "layer"}
    H = hessian(case.model, CrossEntropy(), [(words(), words())], **options)
    for name in H.names:
        assert (H.method_of(name, "functional"), H.method_of(name, "outer")) == ("exact", "autodiff")
        products = hessian(case.model, CrossEntropy(), [(words(), words())], method="autodiff", **options)
        truth = products.functional[name].dense()
        assert H.functional[name].frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-5)  # a float32 softmax
