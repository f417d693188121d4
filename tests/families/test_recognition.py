"""Roles by structure: against the tables of paths, against the classes' own attributes, and in models without names."""

import functools
import re

import pytest
import torch
from torch import nn

import curvoscope as cv
import zoo
from curvoscope.blocks import layer_and_role
from curvoscope.curvature import trainable
from reference import relative

QUICK = {
    *("nn.TransformerEncoder", "nn.MultiheadAttention", "nn.TransformerDecoder", "GPT2LMHeadModel", "LlamaForCausalLM"),
    *("GPTNeoXForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "FalconForCausalLM", "GPTBigCodeForCausalLM"),
    *("Olmo2ForCausalLM", "Exaone4ForCausalLM", "Gemma2ForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"),
    *("BertForMaskedLM", "AlbertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("SwinForImageClassification", "ViTForImageClassification", "SiglipModel", "JambaForCausalLM", "nn.LSTM"),
}
WITHOUT_ATTENTION = {
    *("nn.LSTM", "low rank", "convolutions", "FNetForMaskedLM", "ConvNextForImageClassification"),
    *("ResNetForImageClassification", "PoolFormerForImageClassification"),
}
RECURRENT = {"MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "RwkvForCausalLM"}  # by tables


def cases(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def recognised(name):
    """A model and its blocks, which no test changes."""
    model, _, batches = zoo.build(name)
    return model, cv.blocks_of(model, batches[0])


def is_named(model, name):
    return name not in dict(model.named_parameters())


# ---- against the tables of paths

OTHER_STACKS = {  # the tables know one of several stacks, or name the attentions of a decoder one by one
    *("nn.TransformerDecoder", "BlipForConditionalGeneration", "LlavaForConditionalGeneration"),
    "ViltForQuestionAnswering",  # has two tables of positions
}


@pytest.mark.parametrize(
    "name", cases(name for name in zoo.cases() if name not in OTHER_STACKS | WITHOUT_ATTENTION | RECURRENT)
)
def test_names_agree_with_those_of_the_tables(name):
    model, blocks = recognised(name)
    assert blocks.covers(model) and blocks.per_head().covers(model)
    trainable(model, blocks).check(model)
    table = cv.blocks_of(model)
    known = [label for label in table if is_named(model, label)]
    assert [label for label in blocks if label in known] == known
    for label in known:
        found, expected = blocks[label], table[label]
        assert found.pieces == expected.pieces and found.tied == expected.tied
        if (name, label.rpartition(".")[2]) != ("DiffLlamaForCausalLM", "O"):  # whose heads are pairs of heads
            assert (found.heads, found.axis) == (expected.heads, expected.axis)


@pytest.mark.parametrize("name", cases(sorted(WITHOUT_ATTENTION & set(zoo.cases()))))
def test_without_attention_no_name_is_given(name):
    model, blocks = recognised(name)
    own, parameters = {name for name in blocks if is_named(model, name)}, dict(model.named_parameters())
    assert all(name.rpartition(".")[0] in parameters for name in own)  # adapters have the names of their weights
    assert bool(own) == (name == "low rank") and len(blocks) == len(parameters)
    assert "no attention was found" in blocks.table()


# ---- against the classes' own attributes
# What a role is called in the classes of transformers; norms lie, and have a table of their own below.

QUERY, KEY, VALUE, OUTPUT = (
    r"(q_proj|query|q_lin|Wq|q|query_proj|q_b_proj)",
    r"(k_proj|key|k_lin|Wk|k|key_proj)",
    r"(v_proj|value|v_lin|Wv|v|value_proj)",
    r"(o_proj|out_proj|out_lin|Wo|o|projection|(cross)?(attention|attn)\.(output\.)?dense|(self_attn|attention)\.output"
    r"(\.dense)?|self_attention\.dense|self_attn\.dense|post_attention\.conv1d|multi_head_attention\.dense|attn\.c_proj)",
)
FUSED = r"(c_attn|query_key_value|qkv_proj|Wqkv|in_proj|qkv|kv_b_proj)"
END = r"([._](weight|bias))?"
ATTRIBUTES = {
    "attn.Q": f"({QUERY}|{FUSED})",
    "attn.K": f"({KEY}|{FUSED})",
    "attn.V": f"({VALUE}|{FUSED})",
    "attn.O": OUTPUT,
    "attn.b_Q": f"({QUERY}|{FUSED}|q_bias|r_w_bias)",
    "attn.b_K": f"({KEY}|{FUSED})",
    "attn.b_V": f"({VALUE}|{FUSED}|v_bias)",
    "mlp.up": r"(mlp\.c_fc|mlp\.fc_in|fc1|dense_h_to_4h|up_proj|wi(_1)?|lin1|intermediate\.dense|intermediate_dense"
    r"|linear1|layer_1|ffn|ffn\.0|gate_up_proj|Wi|intermediate\.conv1d)",
    "mlp.gate": r"(gate_proj|gate_up_proj|Wi|wi_0)",
    "mlp.gate_up": r"gate_up_proj(_bias)?",
    "mlp.down": r"(mlp\.c_proj|mlp\.fc_out|fc2|dense_4h_to_h|down_proj(_bias)?|wo|lin2|output\.dense|output_dense"
    r"|linear2|layer_2|ffn_output|ffn\.2|mlp\.Wo|output\.conv1d)",
    "mlp.router": r"(mlp\.gate|router|router\.classifier|shared_expert_gate)",
    "attn.q_norm": r"q_(layer)?norm",
    "attn.k_norm": r"k_(layer)?norm",
    "attn.sinks": "sinks",
    "attn.scale": "(lambda_1|layer_scale1.lambda1)",
    "mlp.scale": "(lambda_2|layer_scale2.lambda1)",
    "attn.Q_latent": "q_a_proj",
    "attn.KV_latent": "kv_a_proj_with_mqa",
    "attn.q_latent_norm": "q_a_layernorm",
    "attn.kv_latent_norm": "kv_a_layernorm",
    "embed": r"(wte|embed_tokens|tokens_embed|word_embeddings?|embed_in|w|shared|tok_embeddings|embeddings"
    r"|token_embedding|lm_head\.decoder)",
    "unembed": r"(lm_head|embed_out|proj_out|cls\.predictions\.decoder|pred_layer\.proj)",
    "b_unembed": r"(predictions|(generator_)?lm_head|embed_out|vocab_projector|pred_layer\.proj|decoder|lm_loss)",
    "patch": r"(projection|proj|patch_embedding|conv_layers\.0)",
    "norm_cross": r"(encoder_attn_layer_norm|layer\.1\.layer_norm|crossattention\.output\.LayerNorm|norm2)",
}
PLAIN_NORMS = {
    "norm1": r"(ln_1|input_layernorm|norm_?1|layernorm1|layer_norm1(\.\d+)?|self_attn_layer_norm|attn_norm"
    r"|sa_layer_norm|attention(\.output)?\.LayerNorm|layer\.0\.layer_norm|layernorm_before|attention\.ln|rel_attn\.layer_norm"
    r"|post_attention\.layernorm|layer_norm|temporal_pre_norm)",
    "norm2": r"(ln_2|post_attention_layernorm|norm_?[23]|layernorm2|layer_norm2(\.\d+)?|final_layer_norm|mlp_norm"
    r"|output_layer_norm|output\.LayerNorm|full_layer_layer_norm|layer\.[12]\.layer_norm|layernorm_after|layer\.\d+\.(ln|LayerNorm)"
    r"|ff\.layer_norm|output\.layernorm|pre_ff_layernorm|pre_feedforward_layernorm|channel_pre_norm|head\.layernorm)",
}
BEHIND = {"norm1_post": "post_attention_layernorm", "norm2_post": "post_feedforward_layernorm"}
NORMS = {  # classes whose norms are not where their names or those of others say
    **{f"{name}ForCausalLM": BEHIND for name in ("Olmo2", "Olmo3", "Exaone4")},
    **{
        f"{name}ForCausalLM": BEHIND | {"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm"}
        for name in ("Gemma2", "Gemma3")
    },
    "Glm4ForCausalLM": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    | {"norm1_post": "post_self_attn_layernorm", "norm2_post": "post_mlp_layernorm"},
    "Swinv2ForImageClassification": {"norm1_post": "layernorm_before", "norm2_post": "layernorm_after"},
}
CROSS = re.compile("encoder_attn|EncDecAttention|crossattention|multihead_attn")


@pytest.mark.parametrize("name", cases(name for name in zoo.cases() if name not in WITHOUT_ATTENTION | RECURRENT))
def test_roles_are_those_of_the_attributes(name):
    """No role is wrong, layers have the numbers of their modules, and nearly all that the batch reaches is named."""
    model, blocks = recognised(name)
    expected = ATTRIBUTES | NORMS.get(name, PLAIN_NORMS)
    for label, block in blocks.items():
        found = layer_and_role(re.sub(r"(?<=\.)pool(?=\.)", "h.0", label))
        role = found[1] if found else label.rpartition(".")[2]
        role = re.sub(r"mlp\.(experts\.\d+|shared)\.", "mlp.", role)
        kind = role.split(".")[0]
        if not is_named(model, label):
            continue
        plain = re.sub(r"^cross\.", "attn.", role)
        plain = plain if plain in expected else plain.replace("b_", "")
        for piece in block.pieces:
            if plain in expected:
                assert re.search(rf"(^|\.){expected[plain]}{END}$", piece.parameter), (label, piece.parameter)
            if kind in ("attn", "cross") and role.rpartition(".")[2] in "QKVO":
                assert (kind == "cross") == bool(CROSS.search(piece.parameter)), (label, piece.parameter)
            if found and not block.tied and kind not in ("pool",):
                numbers = re.findall(r"(?<=\.)\d+(?=\.)", f".{piece.parameter}")
                positions = role.rpartition(".")[2].startswith("positions")
                assert not numbers or positions or re.search(r"h\.(\d+)", label + ".h.0")[1] in numbers, label
    reached = {label: block for label, block in blocks.items() if "does not reach" not in block.note}
    total = sum(block.size for block in reached.values())
    assert sum(block.size for label, block in reached.items() if is_named(model, label)) > 0.95 * total


def halves(W, heads, parts):
    """The rows of each part of a weight that holds its parts head by head."""
    return W.unflatten(0, (heads, parts, -1)).unbind(1)


def code_gen(W):
    groups = W.unflatten(0, (4, -1))
    query, value, key = groups.chunk(3, 1)
    return [part.flatten(0, 1) for part in (query, key, value)]


LAYOUTS = {  # rows of the fused weight that make query, key and value, as the class itself cuts them
    "GPT2LMHeadModel": ("attn.c_attn", lambda W: W.T.chunk(3)),
    "GPTNeoXForCausalLM": ("attention.query_key_value", lambda W: [p.flatten(0, 1) for p in halves(W, 2, 3)]),
    "BloomForCausalLM": ("self_attention.query_key_value", lambda W: [p.flatten(0, 1) for p in halves(W, 2, 3)]),
    "CodeGenForCausalLM": ("attn.qkv_proj", code_gen),
    "FalconForCausalLM": ("self_attention.query_key_value", lambda W: W.split([8, 4, 4])),
    "GPTBigCodeForCausalLM": ("attn.c_attn", lambda W: W.split([8, 4, 4])),
}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name in zoo.cases()])
def test_fused_weights_are_cut_to_the_bit(name):
    model, blocks = recognised(name)
    path, cut = LAYOUTS[name]
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    for i in range(2):
        stored = next(W for key, W in parameters.items() if key.endswith(f"{i}.{path}.weight"))
        for role, expected in zip("QKV", cut(stored), strict=True):
            block = blocks[f"h.{i}.attn.{role}"]
            assert torch.equal(block.matrix(parameters), expected.T)
            heads = [block.head(n).matrix(parameters) for n in range(block.heads)]
            assert torch.equal(torch.cat(heads, 1), expected.T)


def test_blocks_of_several_ranges_carry_products():
    """The Hessian over the parts of a fused weight is that over the weight, in another order."""
    model, loss, batches = zoo.build("GPTNeoXForCausalLM")
    blocks = cv.blocks_of(model, batches[0]).select("h.0.attn.[QKV]")
    assert blocks["h.0.attn.Q"].side_by_side
    H = cv.hessian(model, loss, batches, blocks=blocks, method="autodiff")
    fused = cv.blocks_of(model).select("gpt_neox.layers.0.attention.query_key_value.weight")
    whole = cv.hessian(model, loss, batches, blocks=fused, method="autodiff")
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    blocks.scatter(v, tensors)
    assert torch.equal(blocks.gather(tensors), v)
    product = whole @ fused.gather(tensors)
    fused.scatter(product, tensors)
    assert relative(H @ v, blocks.gather(tensors)) < 1e-10


# ---- names that lied


def test_a_pooling_head_is_no_layer():
    _, blocks = recognised("SiglipModel")
    assert blocks["vision_model.pool.attn.Q"].pieces[0].parameter == "vision_model.head.attention.in_proj_weight"
    assert blocks["vision_model.h.0.attn.Q"].pieces[0].parameter.endswith("encoder.layers.0.self_attn.q_proj.weight")
    assert layer_and_role("vision_model.pool.attn.Q") is None


def test_the_final_norm_of_stages_is_that_of_the_model():
    _, blocks = recognised("SwinForImageClassification")
    assert [piece.parameter for piece in blocks["final_norm"].pieces] == [
        "swin.layernorm.weight",
        "swin.layernorm.bias",
    ]
    assert not any(name.endswith("final_norm") for name in blocks if name != "final_norm")


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_final_norm_behind_that_of_the_last_layer(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    by_structure, by_name = cv.blocks_of(model, torch.randn(2, 5, 8)), cv.blocks_of(model)
    assert by_structure.names == by_name.names and by_structure["final_norm"] == by_name["final_norm"]


def test_the_unembedding_stands_under_no_stack():
    _, blocks = recognised("BartForConditionalGeneration")
    assert "lm_head.weight" in blocks["embed"].tied
    assert {"encoder.h.0.attn.Q", "decoder.h.0.attn.Q", "decoder.h.0.cross.Q", "decoder.h.0.norm_cross"} <= set(blocks)


# ---- models without names that tell

D, HEADS, WORDS = 12, 3, 9


def cross_entropy_of_tokens(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Einsums(nn.Module):
    """One tensor per weight, with an axis of heads; RMS norms; everything at the top of one module."""

    def __init__(self):
        super().__init__()
        shapes = {"a": (WORDS, D), "b": (HEADS, D, 4), "c": (HEADS, D, 4), "d": (HEADS, D, 5), "e": (HEADS, 5, D)}
        shapes |= {"f": (D, 20), "g": (20, D), "h": (D, WORDS), "i": (D,), "j": (D,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 3))

    def norm(self, x, gain):
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def forward(self, tokens):
        x = self.a[tokens]
        y = self.norm(x, self.i)
        q, k, v = (torch.einsum("nld,hdk->nhlk", y, W) for W in (self.b, self.c, self.d))
        weights = torch.exp(torch.einsum("nhik,nhjk->nhij", q, k) / 2)
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + torch.einsum("nhlk,hkd->nld", weights @ v, self.e)
        return (x + (self.norm(x, self.j) @ self.f).relu() @ self.g) @ self.h


class Renamed(nn.Module):
    """Two post-norm layers of nn.Linear, keys before queries before values in one weight, under meaningless names."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Embedding(WORDS, D), nn.Embedding(7, D)
        self.gamma = nn.ModuleList(
            nn.ModuleDict(
                {"u": nn.Linear(D, 3 * D), "v": nn.Linear(D, D), "w": nn.LayerNorm(D)}
                | {"x": nn.Linear(D, 20), "y": nn.Linear(20, D), "z": nn.LayerNorm(D)}
            )
            for _ in range(2)
        )
        self.delta = nn.Linear(D, WORDS)

    def forward(self, tokens):
        x = self.alpha(tokens) + self.beta(torch.arange(tokens.shape[1]))
        for part in self.gamma:
            k, q, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in part["u"](x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = part["w"](x + part["v"](mixed.transpose(1, 2).flatten(2)))
            x = part["z"](x + part["y"](nn.functional.gelu(part["x"](x))))
        return self.delta(x)


class Parallel(nn.Module):
    """A gated feed-forward layer beside attention with one key head, which normalises its queries and keys."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.first, self.q, self.k, self.end = (nn.RMSNorm(n) for n in (D, 4, 4, D))
        self.into, self.out = nn.Linear(D, 12 + 4 + 4, bias=False), nn.Linear(12, D)
        self.wide, self.down = nn.Linear(D, 40), nn.Linear(20, D)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = self.into(self.first(x)).split([12, 4, 4], -1)
        up, gate = self.wide(self.first(x)).chunk(2, -1)
        q, k = self.q(q.unflatten(-1, (HEADS, 4))).transpose(1, 2), self.k(k)[:, None]
        weights = (q @ k.mT / 2).softmax(-1)
        mixed = (weights @ v[:, None]).transpose(1, 2).flatten(2)
        return self.last(self.end(x + self.out(mixed) + self.down(nn.functional.silu(gate) * up)))


def made(kind):
    torch.manual_seed(0)
    return kind().double(), torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(1))


def test_weights_with_an_axis_of_heads():
    model, tokens = made(Einsums)
    blocks = cv.blocks_of(model, tokens)
    where = {name: [piece.parameter for piece in block.pieces] for name, block in blocks.items()}
    assert where == {
        **{"embed": ["a"], "h.0.norm1": ["i"], "h.0.attn.Q": ["b"], "h.0.attn.K": ["c"], "h.0.attn.V": ["d"]},
        **{"h.0.attn.O": ["e"], "h.0.norm2": ["j"], "h.0.mlp.up": ["f"], "h.0.mlp.down": ["g"], "unembed": ["h"]},
    }
    W = dict(model.named_parameters())
    assert [blocks[f"h.0.attn.{role}"].heads for role in "QKVO"] == [HEADS] * 4
    assert torch.equal(blocks["h.0.attn.Q"].matrix(W), model.b.permute(1, 0, 2).flatten(1))
    assert torch.equal(blocks.per_head()["h.0.attn.O.1"].matrix(W), model.e[1])


def test_renamed_modules():
    model, tokens = made(Renamed)
    blocks, W = cv.blocks_of(model, (tokens, tokens)), dict(model.named_parameters())
    layer = ["norm1", *(f"attn.{r}" for r in "QKVO"), *(f"attn.b_{r}" for r in "QKVO"), "norm2", "mlp.up", "mlp.down"]
    layer += ["mlp.b_up", "mlp.b_down"]
    layers = [f"h.{i}.{role}" for i in range(2) for role in layer]
    assert blocks.names == ["embed", "positions", *layers, "unembed", "b_unembed"]
    assert blocks.covers(model)
    for i, part in enumerate(model.gamma):
        key, query, value = part["u"].weight.chunk(3)
        for role, expected in (("Q", query), ("K", key), ("V", value), ("O", part["v"].weight)):
            assert torch.equal(blocks[f"h.{i}.attn.{role}"].matrix(W), expected.T)
        assert [piece.parameter for piece in blocks[f"h.{i}.norm2"].pieces] == [
            f"gamma.{i}.z.weight",
            f"gamma.{i}.z.bias",
        ]


def test_a_parallel_layer_with_fused_weights():
    model, tokens = made(Parallel)
    blocks, W = cv.blocks_of(model, {"tokens": tokens}), dict(model.named_parameters())
    query, key, value = model.into.weight.split([12, 4, 4])
    up, gate = model.wide.weight.chunk(2)
    for role, expected in (("attn.Q", query), ("attn.K", key), ("attn.V", value), ("mlp.up", up), ("mlp.gate", gate)):
        assert torch.equal(blocks[f"h.0.{role}"].matrix(W), expected.T)
    assert blocks.covers(model)
    assert {"norm1", "attn.q_norm", "attn.k_norm", "attn.O", "mlp.down"} <= {n.removeprefix("h.0.") for n in blocks}
    assert "final_norm" in blocks and "unembed" in blocks
    assert [blocks[f"h.0.attn.{role}"].heads for role in "QKVO"] == [HEADS, 1, 1, HEADS]


class Weighing(Parallel):
    """Causal attention of two key heads with a softmax of another spelling."""

    def __init__(self, weigh, tiled=False):
        super().__init__()
        self.weigh, self.tiled = weigh, tiled
        self.into, self.out = nn.Linear(D, 16 + 8 + 8, bias=False), nn.Linear(16, D)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.into(self.first(x)).split([16, 8, 8], -1))
        k, v = (t.repeat(1, 2, 1, 1) if self.tiled else t.repeat_interleave(2, 1) for t in (k, v))
        scores, seen = q @ k.mT / 2, torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        x = x + self.out((self.weigh(scores, seen) @ v).transpose(1, 2).flatten(2))
        return self.last(self.end(x + self.down(nn.functional.silu(self.wide(self.first(x))[..., :20]))))


def over_sum(powers, around=lambda total: total):
    return powers / around(powers.sum(-1, keepdim=True))


def minus_log_sum(logits):
    return (logits - logits.logsumexp(-1)[..., None]).exp()


SOFTMAXES = {  # and whether attention with it is that of a softmax of torch
    "masked powers": (lambda s, seen: over_sum((s - s.amax(-1, keepdim=True)).exp() * seen), True),
    "filled powers": (lambda s, seen: over_sum(s.exp().masked_fill(~seen, 0)), True),
    "chosen powers": (lambda s, seen: over_sum(torch.where(seen, s.exp(), s.new_zeros(()))), True),
    "a clamped sum": (lambda s, seen: over_sum(s.exp() * seen, lambda total: total.clamp_min(1e-9)), True),
    "one in the sum": (lambda s, seen: over_sum(s.exp() * seen, lambda total: total + 1), False),
    "log-softmax": (lambda s, seen: s.masked_fill(~seen, -torch.inf).log_softmax(-1).exp(), True),
    "logsumexp": (lambda s, seen: minus_log_sum(s.masked_fill(~seen, -torch.inf)), True),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_by_hand(name):
    weigh, is_exact = SOFTMAXES[name]
    model, tokens = made(lambda: Weighing(weigh))
    blocks = cv.blocks_of(model, tokens)
    assert [blocks[f"h.0.attn.{role}"].heads for role in "QKVO"] == [4, 2, 2, 4]
    H = cv.hessian(model, cross_entropy_of_tokens, [(tokens, tokens)], blocks.select("h.0.attn.Q"))
    assert H.method_of("h.0.attn.Q") == ("exact" if is_exact else "autodiff")


def test_key_heads_in_another_order():
    model, tokens = made(lambda: Weighing(lambda s, seen: s.masked_fill(~seen, -torch.inf).softmax(-1), tiled=True))
    blocks = cv.blocks_of(model, tokens).select("h.0.attn.[QK]")
    H = cv.hessian(model, cross_entropy_of_tokens, [(tokens, tokens)], blocks)
    assert H.method_of("h.0.attn.K") == "autodiff"
    assert "runs of consecutive heads" in H.plan["h.0.attn.K", "total"].reason


# ---- cost and traces


def test_one_forward_pass_and_no_trace():
    model, _, batches = zoo.build("GPT2LMHeadModel")
    model.train()
    model.transformer.wte.weight.requires_grad_(False)
    runs, state = [], {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    random = torch.get_rng_state()
    cv.blocks_of(model, batches[0])
    handle.remove()
    assert len(runs) == 1
    assert torch.equal(torch.get_rng_state(), random) and all(module.training for module in model.modules())
    assert not model.transformer.wte.weight.requires_grad and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Averaging(Renamed):
    """A layer that mixes tokens by sums, before two of attention."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(D, D)

    def forward(self, tokens):
        x = self.alpha(tokens)
        x = x + self.mean(x.cumsum(1))
        for part in self.gamma:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in part["u"](x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            x = part["w"](x + part["v"](mixed.transpose(1, 2).flatten(2)))
            x = x + self.mean(x.cumsum(1))
        return self.delta(x)


def test_what_is_not_conclusive_keeps_its_name_and_says_why():
    model, tokens = made(Averaging)
    blocks = cv.blocks_of(model, tokens)
    note = blocks["mean.weight"].note
    assert "neither as attention nor as a feed-forward layer" in note
    assert note in blocks.table() and "h.1.attn.V" in blocks


def test_a_batch_of_another_form_is_refused():
    with pytest.raises(cv.CurvoscopeError, match="batch: got a str"):
        cv.blocks_of(nn.Linear(2, 2), "tokens")
