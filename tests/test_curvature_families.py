"""`cv.hessian` against the dense Hessian by `jacfwd(grad)` in float64, for every family of models."""

import pytest
import torch
from torch.func import functional_call

import curvoscope as cv
from autodiff_cases import truth_of
from family_cases import CASES, tokens
from reference import relative

CHOSEN = {
    "GPT2LMHeadModel": ["embed", "h.0.attn.*"],  # one tensor for Q, K and V; the embedding is tied
    "GPT2LMHeadModel, untied": ["h.1.*", "final_norm"],
    "Llama": ["h.0.attn.*", "h.1.norm1"],
    "Llama, no biases, one key head": ["h.0.mlp.*"],
    "BertForMaskedLM": ["h.0.attn.[QKV]", "h.0.norm*", "b_unembed"],
    "ViTForImageClassification": ["h.0.attn.*", "positions"],
    "TransformerEncoder, pre": ["h.0.attn.*", "h.1.mlp.up"],  # one tensor, transposed, for Q, K and V
    "TransformerEncoder, post": ["h.1.*"],
}


def _all_in_double(model, monkeypatch):
    """Attention by torch's own function, and no norm that rounds to float32 inside: two ways to one derivative can
    otherwise not agree to more than seven digits."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            kind = type(module)
            monkeypatch.setattr(kind, "forward", _root_mean_square)


def _root_mean_square(norm, x):
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def _input(name):
    generator = torch.Generator().manual_seed(4)
    if name.startswith("ViT"):
        return torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    if name.startswith("TransformerEncoder"):
        return torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    return tokens()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture(params=CHOSEN, scope="module")
def family(request, monkeypatch_module):
    model = CASES[request.param]().model
    _all_in_double(model, monkeypatch_module)
    inputs = _input(request.param)
    output = model(inputs)
    output = getattr(output, "logits", output).detach()
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    every = cv.blocks_of(model)
    names = [name for pattern in CHOSEN[request.param] for name in every.select(pattern)]
    blocks = cv.Blocks(every[name] for name in names)

    def loss(outputs, expected):  # convex, not quadratic, and not mixing rows
        difference = getattr(outputs, "logits", outputs) - expected
        return (difference.square() + 0.1 * difference**4).mean()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    used = {name: parameters[name] for name in parameters if name in blocks.parameters}

    def function(chosen):
        outputs = functional_call(model, {**parameters, **chosen}, (inputs,), tie_weights=True)
        return getattr(outputs, "logits", outputs)

    dense = truth_of(function, used, lambda outputs: loss(outputs, targets), blocks)
    return model, loss, inputs, targets, blocks, dense


@pytest.mark.parametrize("cut", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_every_family_against_dense(family, cut):
    model, loss, inputs, targets, blocks, dense = family
    batches = list(zip(inputs.split(cut), targets.split(cut), strict=True))
    H = cv.hessian(model, loss, batches, blocks, method="autodiff")
    for part in ("total", "outer", "functional"):
        expected = getattr(dense, part)
        assert relative(getattr(H, part).dense(), expected, dense.total) < 1e-9
        assert relative(expected, expected.T, dense.total) < 1e-9


@pytest.mark.slow
def test_heads_and_off_diagonal_blocks(family):
    model, loss, inputs, targets, blocks, dense = family
    heads = blocks.per_head()
    H = cv.hessian(model, loss, [(inputs, targets)], heads, method="autodiff")
    numbers, start = {}, 0
    for name, block in blocks.items():
        numbers[name] = torch.arange(start, start + block.shape[0] * block.shape[1]).view(block.shape)
        start += block.shape[0] * block.shape[1]

    def places(name):
        """Where the entries of a head stand in the order of the whole blocks."""
        if name in numbers:
            return numbers[name].flatten()
        whole, _, head = name.rpartition(".")
        return numbers[whole].chunk(blocks[whole].heads, blocks[whole].axis)[int(head)].flatten()

    assert len(heads) > len(blocks) or not any(block.heads for block in blocks.values())
    for row, column in zip(heads, [*list(heads)[1:], next(iter(heads))], strict=True):
        for part in ("total", "outer"):
            expected = getattr(dense, part)[places(row)][:, places(column)]
            assert relative(getattr(H, part)[row, column].dense(), expected, dense.total) < 1e-9
