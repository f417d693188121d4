"""Each family: the names, that every entry is in one block, and that the blocks' matrices make the same model."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, ModelError
from curvoscope.families.block_maps import blocks_of
from curvoscope.papers.networks import GPT2
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
    """nanoGPT's attention: c_attn is an nn.Linear with Q, K and V one after the other."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(D, 3 * D), nn.Linear(D, D), HEADS
        self.attn_dropout, self.resid_dropout, self.dropout = nn.Dropout(0.5), nn.Dropout(0.5), 0.5

    def parts(self, x):
        """Queries, keys and values, (N, L, d) each."""
        return self.c_attn(x).split(D, dim=2)

    def heads(self, part):
        return part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x):
        query, key, value = (self.heads(part) for part in self.parts(x))
        mixed = scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))


class MinGPTAttention(CausalSelfAttention):
    """minGPT's: the same with a mask in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))

    def forward(self, x):
        query, key, value = (self.heads(part) for part in self.parts(x))
        scores = query @ key.mT / math.sqrt(D // HEADS)
        scores = scores.masked_fill(self.bias[:, :, : x.shape[1], : x.shape[1]] == 0, -math.inf)
        mixed = self.attn_dropout(scores.softmax(-1)) @ value
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


def another_layout(name, parts=None, heads=None):
    """A class of nanoGPT's name whose fused weight is read in another way."""

    class CausalSelfAttention(globals()["CausalSelfAttention"]):
        pass

    CausalSelfAttention.parts = parts or CausalSelfAttention.parts
    CausalSelfAttention.heads = heads or CausalSelfAttention.heads
    return pytest.param(CausalSelfAttention, id=name)


def in_order(*order):
    return lambda self, x: [self.c_attn(x).split(D, dim=2)[i] for i in order]


def by_head(self, x):
    """Each head has its own query, key and value together, as in GPT-NeoX."""
    return [part.flatten(2) for part in self.c_attn(x).unflatten(-1, (HEADS, 3, -1)).unbind(-2)]


OTHER_LAYOUTS = [
    another_layout("K, Q, V", in_order(1, 0, 2)),
    another_layout("Q, V, K", in_order(0, 2, 1)),
    another_layout("V, Q, K", in_order(2, 0, 1)),
    another_layout("heads first", by_head),
    another_layout("heads last", heads=lambda self, part: part.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2)),
]


def holder(attention):
    model = nn.Module()
    model.attn = attention
    return model


@pytest.mark.parametrize("kind", [CausalSelfAttention, MinGPTAttention])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_fused_linear_is_cut_where_it_holds_query_key_and_value_in_order(kind, zeros):
    model, x = holder(kind()), torch.randn(2, LENGTH, D)
    if zeros:  # as some initialisations have it: the weights themselves tell nothing
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    before, state = torch.random.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    W = matrices(blocks_of(model), model)
    assert torch.equal(torch.random.get_rng_state(), before) and all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for leaf, expected in zip("QKV", model.attn.parts(x), strict=True):
        found = torch.cat([x @ W[f"h.0.attn.{leaf}.{i}"] + W[f"h.0.attn.b_{leaf}.{i}"] for i in range(HEADS)], -1)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")],
)
def test_names_do_not_depend_on_what_is_set_around(setting):
    nano, other = holder(CausalSelfAttention()), holder(OTHER_LAYOUTS[0].values[0]())
    expected = [blocks_of(model).names for model in (nano, other)]
    with setting():
        assert [blocks_of(model).names for model in (nano, other)] == expected


@pytest.mark.parametrize("kind", OTHER_LAYOUTS)
def test_a_fused_linear_of_another_layout_keeps_its_name(kind):
    model = holder(kind())
    assert blocks_of(model).names == [name for name, _ in model.named_parameters()]


def test_a_fused_linear_that_cannot_be_tried_keeps_its_name():
    class Positions(CausalSelfAttention):
        def forward(self, x, positions):
            return super().forward(x + positions)

    class Elsewhere(CausalSelfAttention):
        def forward(self, x):
            return x @ self.c_attn.weight.T

    grouped, headless = CausalSelfAttention(), CausalSelfAttention()
    grouped.c_attn = nn.Linear(D, 2 * D)  # fewer keys and values than queries
    del headless.n_head
    for attention in (Positions(), Elsewhere(), grouped, headless):
        model = holder(attention)
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


class LlamaLike(nn.Module):
    """A layer with Llama's names; `order` says in which way its norms are used."""

    def __init__(self, norms):
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(D, D, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(D, D, bias=False) for name in ("gate", "up", "down")})
        self.dropout = nn.Dropout(0.1)
        for name in norms:
            self.add_module(name, nn.RMSNorm(D))


class Before(LlamaLike):  # Llama
    def forward(self, x):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        residual = x
        x = self.post_attention_layernorm(x)
        return residual + self.mlp(x)


class Behind(LlamaLike):  # OLMo 2, with Llama's names
    def forward(self, x):
        x = x + self.input_layernorm(self.self_attn(x))
        x += self.post_attention_layernorm(self.mlp(x))
        return x


class BehindTheSums(LlamaLike):  # the first Transformer
    def forward(self, x):
        x = self.input_layernorm(x + self.self_attn(x))
        return self.post_attention_layernorm(x + self.mlp(x))


class Either(LlamaLike):
    def __init__(self, norms, first=True):
        super().__init__(norms)
        self.first = first

    def forward(self, x, swap=False):
        if self.first:
            x = x + self.self_attn(self.input_layernorm(x))
        if not self.first:
            x = x + self.input_layernorm(self.self_attn(x))
        if swap:  # nobody knows
            return x + self.mlp(self.post_attention_layernorm(x))
        return x + self.post_attention_layernorm(self.mlp(x))


class Twice(LlamaLike):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(self.post_attention_layernorm(x)))
        return x + self.mlp(x)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        (Before, ("norm1", "norm2")),
        (Behind, ("norm1_post", "norm2_post")),
        (BehindTheSums, ("norm1", "norm2")),
        (Either, ("norm1", None)),
        (lambda names: Either(names, first=False), ("norm1_post", None)),
        (Twice, ("norm1", None)),
        (lambda names: torch.compile(Before(names)), ("norm1", "norm2")),
    ],
)
def test_a_norm_is_named_by_its_place_in_the_forward_pass(kind, roles):
    names = ("input_layernorm", "post_attention_layernorm")
    layer = kind(names)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    found = {piece.parameter.split(".")[-2]: name for name, block in blocks_of(model).items() for piece in block.pieces}
    for name, role in zip(names, roles, strict=True):
        raw = next(path for path, _ in model.named_parameters() if name in path)
        assert found[name] == (raw if role is None else f"h.0.{role}")
    assert blocks_of(model).covers(model)


def test_a_name_that_may_be_two_norms_stays_where_there_is_no_forward():
    model = nested({f"layers.0.self_attn.{name}_proj": nn.Linear(D, D, bias=False) for name in "qkvo"})
    model.layers.get_submodule("0").post_attention_layernorm = nn.RMSNorm(D)
    assert blocks_of(model).names == [*layers(ATTENTION, 1), "layers.0.post_attention_layernorm.weight"]


def test_attention_beside_a_stack_is_no_layer_of_it():
    """Pooling by attention, as SigLIP has it: neither layer 0 nor any other one."""
    unknown = {f"layers.{i}.attention.qkv": nn.Linear(D, 3 * D) for i in range(2)}
    pooled = nested(unknown | {"head.attention": nn.MultiheadAttention(D, HEADS)})
    assert blocks_of(pooled).names == [name for name, _ in pooled.named_parameters()]
    known = nn.ModuleDict({"encoder": encoder(), "pool": nn.MultiheadAttention(D, HEADS)})
    assert [name for name in blocks_of(known) if name.startswith("pool.")] == [
        name for name, _ in known.named_parameters() if name.startswith("pool.")
    ]
    alone = nested({"attention": nn.MultiheadAttention(D, HEADS), "readout.0": nn.Linear(D, D)})
    assert blocks_of(alone).select("h.0.attn.*").names == layers([*ATTENTION, *ATTENTION_BIASES], 1)


def test_what_stands_around_several_stacks_is_not_the_first_ones():
    projections = {f"self_attn.{name}_proj": D for name in "qkvo"}
    parts = {
        f"{side}.layers.0.{name}": nn.Linear(n, n) for side in ("encoder", "decoder") for name, n in projections.items()
    }
    parts |= {"shared.embed_tokens": nn.Embedding(5, D), "decoder.norm": nn.LayerNorm(D), "lm_head": nn.Linear(D, 5)}
    model = nested(parts)
    model.embed_tokens = model.shared.embed_tokens
    blocks = blocks_of(model)
    places = {"unembed": "lm_head.weight", "b_unembed": "lm_head.bias", "decoder.final_norm": "decoder.norm.weight"}
    assert {name: blocks[name].pieces[0].parameter for name in places} == places
    assert not [name for name in blocks if name.startswith("encoder.") and "unembed" in name]
    assert blocks.covers(model)


def test_a_query_weight_that_holds_gates_as_well_keeps_its_name():
    sizes = {"q": (D, 2 * D), "k": (D, D), "v": (D, D), "o": (D, D)}  # Qwen3-Next
    model = nested({f"layers.0.self_attn.{name}_proj": nn.Linear(*size) for name, size in sizes.items()})
    assert blocks_of(model).names == [name for name, _ in model.named_parameters()]


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
    code = "import sys, curvoscope.families.block_maps; print([m for m in sys.modules if m.startswith('transformer')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_result_is_a_blocks():
    assert isinstance(blocks_of(nn.Linear(2, 2)), Blocks)


class Residual(nn.Module):
    """One attention on a stream."""

    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return x + self.attn(x)


@pytest.mark.parametrize("kind", OTHER_LAYOUTS)
def test_with_a_batch_a_fused_linear_of_another_layout_is_cut(kind):
    model, x = Residual(kind()).double().eval(), torch.randn(2, LENGTH, D, dtype=torch.float64)
    blocks, W = blocks_of(model, x), dict(model.named_parameters())
    for leaf, expected in zip("QKV", model.attn.parts(x), strict=True):
        found = x @ blocks[f"h.0.attn.{leaf}"].matrix(W) + blocks[f"h.0.attn.b_{leaf}"].matrix(W)
        assert relative(found.detach(), expected.detach()) < 1e-12


def test_with_a_batch_own_models_have_the_same_names():
    model = GPT2(d=6, depth=2, norm="pre")
    assert blocks_of(model, torch.randint(0, 10, (2, 7))).names == blocks_of(model).names
