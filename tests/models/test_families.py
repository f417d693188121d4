"""Each family: the names, that every entry is in one block, and that the blocks' matrices make the same model."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, ModelError
from curvoscope.models import GPT2
from curvoscope.models.families import blocks_of
from family_cases import (
    ATTENTION,
    ATTENTION_BIASES,
    CASES,
    DEPTH,
    HEADS,
    LAYER,
    LENGTH,
    WIDTH,
    D,
    layers,
    matrices,
    shaken,
)
from reference import relative


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def case(request):
    return CASES[request.param]()


def test_names_and_cover(case):
    blocks = blocks_of(case.model)
    assert blocks.names == case.names
    assert blocks.covers(case.model)
    assert blocks.per_head().covers(case.model)
    assert {name: block.tied for name, block in blocks.items() if block.tied} == case.tied
    blocks.check(case.model)


def test_the_matrices_make_the_same_model(case):
    W = matrices(blocks_of(case.model), case.model)
    x = case.embedded(W)
    for i in range(DEPTH):
        x, pattern = case.by_hand.layer({name.removeprefix(f"h.{i}."): matrix for name, matrix in W.items()}, x)
        assert relative(pattern, case.patterns[i].detach()) < case.tolerance
    assert relative(case.head(W, x), case.output.detach()) < case.tolerance


def test_heads(case):
    for name, block in blocks_of(case.model).items():
        leaf = name.rpartition("attn.")[2]
        shared = leaf in ("K", "V", "b_K", "b_V")
        expected = (None, None)
        if ".attn." in name and leaf != "b_O":
            expected = (case.by_hand.kv_heads if shared else HEADS, 0 if leaf == "O" else 1)
        assert (block.heads, block.axis) == expected


def test_own_model():
    model = shaken(GPT2(d=6, depth=2, norm="pre"))
    blocks = blocks_of(model)
    assert blocks.names == ["embed", "positions", *layers(LAYER), "final_norm", "unembed", "b_unembed"]
    assert blocks.covers(model)
    W = matrices(blocks, model)
    for i, block in enumerate(model.blocks):
        for leaf in ("Q", "K", "V", "O"):
            assert torch.equal(W[f"h.{i}.attn.{leaf}"], getattr(block, f"W_{leaf}"))
            assert torch.equal(W[f"h.{i}.attn.{leaf}.0"], getattr(block, f"W_{leaf}"))
            assert torch.equal(W[f"h.{i}.attn.b_{leaf}"][0], getattr(block, f"b_{leaf}"))
        for leaf in ("up", "down"):
            assert torch.equal(W[f"h.{i}.mlp.{leaf}"], getattr(block, f"W_{leaf}"))
            assert torch.equal(W[f"h.{i}.mlp.b_{leaf}"][0], getattr(block, f"b_{leaf}"))
        assert torch.equal(W[f"h.{i}.norm2"], torch.stack([block.norm2.gamma, block.norm2.beta]))
    assert torch.equal(W["embed"], model.W_E)
    assert torch.equal(W["unembed"], model.W_U)
    bare = blocks_of(GPT2(d=6, norm="none"))
    without = [name for name in LAYER if "norm" not in name]
    assert bare.names == ["embed", "positions", *layers(without, 1), "unembed", "b_unembed"]


@pytest.mark.parametrize("kdim", [None, 6])
def test_multihead_attention(kdim):
    model = shaken(nn.MultiheadAttention(D, HEADS, kdim=kdim, vdim=kdim and 7, batch_first=True))
    blocks = blocks_of(model)
    assert blocks.names == layers([*ATTENTION, *ATTENTION_BIASES], 1)
    assert blocks.covers(model)
    W, draw = matrices(blocks, model), torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, n, generator=draw, dtype=torch.float64) for n in (D, kdim or D, (kdim and 7) or D))
    found, patterns = model(q, k, v, average_attn_weights=False)
    outputs = 0
    for head in range(HEADS):
        query, key, value = (
            x @ W[f"h.0.attn.{leaf}.{head}"] + W[f"h.0.attn.b_{leaf}.{head}"]
            for leaf, x in zip("QKV", (q, k, v), strict=True)
        )
        pattern = (query @ key.mT / math.sqrt(D // HEADS)).softmax(-1)
        assert relative(pattern, patterns[:, head].detach()) < 1e-12
        outputs = outputs + pattern @ value @ W[f"h.0.attn.O.{head}"]
    assert relative(outputs + W["h.0.attn.b_O"], found.detach()) < 1e-12


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, WIDTH), 2, enable_nested_tensor=False)


def test_layers_inside_other_modules():
    assert blocks_of(nn.TransformerEncoderLayer(D, HEADS, WIDTH)).names == layers(LAYER, 1)
    wrapped = nn.ModuleDict({"words": nn.Embedding(5, D), "encoder": encoder(), "norm": nn.LayerNorm(D)})
    blocks = blocks_of(wrapped)
    assert blocks.names == ["words.weight", *layers(LAYER), "norm.weight", "norm.bias"]
    assert blocks["h.1.mlp.up"].pieces[0].parameter == "encoder.layers.1.linear1.weight"
    assert blocks.covers(wrapped)
    own = nn.ModuleList(nn.ModuleDict({"att": nn.MultiheadAttention(D, HEADS)}) for _ in range(2))
    assert blocks_of(own).names == layers([*ATTENTION, *ATTENTION_BIASES])
    assert blocks_of(own).covers(own)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_two_stacks_keep_their_names_apart():
    model = nn.Transformer(D, HEADS, 1, 2, WIDTH)
    blocks = blocks_of(model)
    assert blocks.covers(model)
    assert blocks.select("encoder.*").names == [*(f"encoder.{name}" for name in layers(LAYER, 1)), "encoder.final_norm"]
    assert blocks["decoder.layers.multihead_attn.h.1.attn.V"].pieces[0].parameter == (
        "decoder.layers.1.multihead_attn.in_proj_weight"
    )


def test_wrappers_change_nothing_but_the_parameters_names():
    plain = encoder()
    parallel, compiled = nn.DataParallel(plain), torch.compile(plain)
    for model, prefix in ((parallel, "module."), (compiled, "_orig_mod.")):
        blocks = blocks_of(model)
        assert blocks.names == blocks_of(plain).names
        assert blocks.parameters == {prefix + name for name in blocks_of(plain).parameters}
        blocks.check(model)
    compiled_inside = encoder()
    compiled_inside.layers[1] = torch.compile(compiled_inside.layers[1])
    assert blocks_of(compiled_inside).names == blocks_of(plain).names


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: c_attn is an nn.Linear."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(D, 3 * D), nn.Linear(D, D), HEADS

    def forward(self, x):
        query, key, value = self.c_attn(x).split(D, dim=2)
        return query, key, value


class MixedAttention(CausalSelfAttention):
    """Another class with the same names, where Q, K and V may stand in any order."""


def test_a_fused_linear_is_cut_only_where_its_order_is_known():
    nano, other, grouped = nn.Module(), nn.Module(), nn.Module()
    nano.attn, other.attn, grouped.attn = CausalSelfAttention(), MixedAttention(), CausalSelfAttention()
    grouped.attn.c_attn = nn.Linear(D, 2 * D)  # fewer keys and values than queries
    x = torch.randn(2, LENGTH, D)
    W = matrices(blocks_of(nano), nano)
    for leaf, expected in zip("QKV", nano.attn(x), strict=True):
        found = torch.cat([x @ W[f"h.0.attn.{leaf}.{i}"] + W[f"h.0.attn.b_{leaf}.{i}"] for i in range(HEADS)], -1)
        assert relative(found, expected.detach()) < 1e-5
    for model in (other, grouped):
        assert blocks_of(model).names == [name for name, _ in model.named_parameters()]


def nested(parts):
    """A module with these submodules, by path."""
    root = nn.Module()
    for path, module in parts.items():
        *parents, leaf = path.split(".")
        here = root
        for name in parents:
            if name not in dict(here.named_children()):
                here.add_module(name, nn.Module())
            here = here.get_submodule(name)
        here.add_module(leaf, module)
    return root


def test_paths_of_other_versions():
    """ViT before version 5 of transformers, and Gemma's norms, of which the third stands before the MLP."""
    vit, gemma = "vit.encoder.layer.0.", "model.layers.0."
    parts = {f"{vit}attention.attention.{name}": nn.Linear(D, D) for name in ("query", "key", "value")}
    parts |= {f"{vit}layernorm_{where}": nn.LayerNorm(D) for where in ("before", "after")}
    parts |= {f"{vit}attention.output.dense": nn.Linear(D, D), "vit.layernorm": nn.LayerNorm(D)}
    parts |= {f"{vit}intermediate.dense": nn.Linear(D, WIDTH), f"{vit}output.dense": nn.Linear(WIDTH, D)}
    assert blocks_of(nested(parts)).names == [*layers(LAYER, 1), "final_norm"]
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
    parts = {f"{gemma}{name}": nn.RMSNorm(D) for name in norms}
    parts |= {f"{gemma}self_attn.{name}_proj": nn.Linear(D, D, bias=False) for name in "qkvo"}
    blocks = blocks_of(nested(parts))
    assert blocks["h.0.norm2"].pieces[0].parameter == f"{gemma}pre_feedforward_layernorm.weight"
    assert blocks.names == [*layers(["norm1", *ATTENTION, "norm2"], 1), f"{gemma}post_attention_layernorm.weight"]


def test_a_parameter_may_have_the_name_of_a_block():
    model = GPT2(d=6)
    model.embed = nn.Parameter(torch.zeros(2))
    assert blocks_of(model)["embed"].shape == (12, 6)
    assert blocks_of(model)["embed (parameter)"].shape == (1, 2)
    assert blocks_of(model).covers(model)


def test_an_unknown_model_has_one_block_a_parameter():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(3, 4), nn.LayerNorm(4))
    model.temperature = nn.Parameter(torch.tensor(2.0))
    model.again = model[1]
    blocks = blocks_of(model)
    assert blocks.shapes == {
        "temperature": (1, 1),
        "0.weight": (3, 8),
        "0.bias": (1, 3),
        "1.weight": (4, 3),
        "1.bias": (1, 4),
        "2.weight": (1, 4),
        "2.bias": (1, 4),
    }
    assert blocks.covers(model)
    assert blocks["1.weight"].tied == ("again.weight",)
    for name, parameter in model.named_parameters():
        assert torch.equal(blocks[name].gather(dict(model.named_parameters())), parameter.flatten())
    assert blocks.per_head() == blocks


def test_models_that_have_no_blocks():
    with pytest.raises(EmptyError, match="model: has no parameters"):
        blocks_of(nn.ReLU())
    with pytest.raises(ModelError, match="weight: is not initialised yet"):
        blocks_of(nn.LazyLinear(3))


def test_the_whole_way_from_gradients_to_directions():
    """The gradient of a function of one head's entries alone, through scatter, is what gather takes from the model."""
    model = CASES["TransformerEncoder, pre"]().model
    x = torch.randn(1, LENGTH, D, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    block = blocks_of(model).per_head()["h.1.attn.K.2"]
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(vector):
        step = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        block.scatter(vector, step)
        moved = {name: parameter + step[name] for name, parameter in parameters.items()}
        return torch.func.functional_call(model, moved, (x,)).square().sum()

    direct = torch.autograd.functional.jacobian(loss, torch.zeros(block.size, dtype=torch.float64))
    names = list(parameters)
    gradients = torch.autograd.grad(model(x).square().sum(), [model.get_parameter(name) for name in names])
    assert relative(block.gather(dict(zip(names, gradients, strict=True))), direct) < 1e-12


def test_nothing_heavy_is_imported():
    code = "import sys, curvoscope.models.families; print([m for m in sys.modules if m.startswith('transformer')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_result_is_a_blocks():
    assert isinstance(blocks_of(nn.Linear(2, 2)), Blocks)
