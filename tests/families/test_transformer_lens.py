"""TransformerLens: what its hooks report for each head is what the blocks' matrices give.

Version 4 has no HookedTransformer any more, so a stand-in writes down its parameters and formulas; where an older
version is installed, the real one is tested as well.
"""

import math

import pytest
import torch
from torch import einsum, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from curvoscope.curvature import CrossEntropy, hessian
from curvoscope.families.block_maps import blocks_of
from family_cases import ATTENTION, ATTENTION_BIASES, LAYER, MLP, MLP_BIASES, layers, matrices
from reference import relative

D, HEADS, HEAD, WIDTH, WORDS, LENGTH, DEPTH = 12, 4, 5, 20, 11, 5, 2  # heads * HEAD is not D
GATED = ["norm1", *ATTENTION, *ATTENTION_BIASES, "norm2", "mlp.gate", *MLP]
SIZES = {"n_layers": DEPTH, "d_model": D, "n_heads": HEADS, "d_head": HEAD, "n_ctx": LENGTH, "d_vocab": WORDS}
SIZES |= {"d_mlp": WIDTH, "act_fn": "gelu"}
GROUPED = SIZES | {"n_key_value_heads": 2, "gated_mlp": True, "act_fn": "silu", "normalization_type": "RMS"}
GROUPED |= {"positional_embedding_type": "rotary", "rotary_dim": 4}


def tokens():
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def shaken(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".qkv." not in name:  # shares its memory with q, k and v
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model.eval()


def parameters(module, **shapes):
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


class StandIn(nn.Module):
    """HookedTransformer's parameters, its names for what it computes, and its formulas where weights enter."""

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        mark = "" if kv_heads == HEADS else "_"
        self.embed = parameters(nn.Module(), W_E=(WORDS, D))
        self.pos_embed = parameters(nn.Module(), W_pos=(LENGTH, D))
        self.blocks = nn.ModuleList(nn.Module() for _ in range(DEPTH))
        for block in self.blocks:
            block.ln1, block.ln2 = (parameters(nn.Module(), w=(D,), b=(D,)) for _ in range(2))
            shared = {f"{mark}{name}": (kv_heads, D, HEAD) for name in ("W_K", "W_V")}
            shared |= {f"{mark}{name}": (kv_heads, HEAD) for name in ("b_K", "b_V")}
            own = {"W_Q": (HEADS, D, HEAD), "b_Q": (HEADS, HEAD), "W_O": (HEADS, HEAD, D), "b_O": (D,)}
            block.attn = parameters(nn.Module(), **own, **shared)
            block.mlp = parameters(nn.Module(), W_in=(D, WIDTH), b_in=(WIDTH,), W_out=(WIDTH, D), b_out=(D,))
        self.ln_final = parameters(nn.Module(), w=(D,), b=(D,))
        self.unembed = parameters(nn.Module(), W_U=(D, WORDS), b_U=(WORDS,))

    def run_with_cache(self, words):
        cache, mark = {}, "_" if hasattr(self.blocks[0].attn, "_W_K") else ""
        x = self.embed.W_E[words] + self.pos_embed.W_pos[: words.shape[1]]
        for i, block in enumerate(self.blocks):
            attn, mlp, here = block.attn, block.mlp, f"blocks.{i}."
            cache[f"{here}ln1.hook_normalized"] = x - x.mean(-1, keepdim=True)
            read = cache[f"{here}ln1.hook_normalized"] * block.ln1.w + block.ln1.b
            for name, prefix in (("q", ""), ("k", mark), ("v", mark)):
                W, b = (getattr(attn, f"{prefix}{kind}_{name.upper()}") for kind in "Wb")
                cache[f"{here}attn.hook_{name}"] = einsum("bpd,hde->bphe", read, W) + b
            cache[f"{here}attn.hook_z"] = cache[f"{here}attn.hook_q"].tanh()
            out = einsum("bphe,hed->bpd", cache[f"{here}attn.hook_z"], attn.W_O) + attn.b_O
            cache[f"{here}hook_attn_out"] = out
            x = x + out
            cache[f"{here}ln2.hook_normalized"] = x
            read = x * block.ln2.w + block.ln2.b
            cache[f"{here}mlp.hook_pre"] = einsum("bpd,dm->bpm", read, mlp.W_in) + mlp.b_in
            cache[f"{here}mlp.hook_post"] = cache[f"{here}mlp.hook_pre"].relu()
            cache[f"{here}hook_mlp_out"] = einsum("bpm,md->bpd", cache[f"{here}mlp.hook_post"], mlp.W_out) + mlp.b_out
            x = x + cache[f"{here}hook_mlp_out"]
        cache["ln_final.hook_normalized"] = x
        x = x * self.ln_final.w + self.ln_final.b
        return einsum("bpd,dv->bpv", x, self.unembed.W_U) + self.unembed.b_U, cache


def stand_in(kv_heads=HEADS):
    names = ["embed", "positions", *layers(LAYER), "final_norm", "unembed", "b_unembed"]
    return shaken(StandIn(kv_heads)), names, kv_heads


def hooked(sizes):
    lens = pytest.importorskip("transformer_lens")
    try:
        model = lens.HookedTransformer(lens.HookedTransformerConfig(**sizes))
    except ImportError:
        pytest.skip("this version of transformer_lens has no HookedTransformer")
    layer = LAYER if sizes is SIZES else [*GATED, *MLP_BIASES]
    start = ["embed", "positions"] if sizes is SIZES else ["embed"]
    names = [*start, *layers(layer), "final_norm", "unembed", "b_unembed"]
    return shaken(model), names, sizes.get("n_key_value_heads", HEADS)


def native(sizes):
    lens = pytest.importorskip("transformer_lens")
    if not hasattr(lens, "TransformerBridge"):
        pytest.skip("TransformerBridge is tested from version 4 on")
    start, layer = (["embed", "positions"], LAYER) if sizes is SIZES else (["embed"], GATED)
    names = [*start, *layers(layer), "final_norm", "unembed"]
    model = lens.TransformerBridge.boot_native(dict(sizes))
    return shaken(model), names, sizes.get("n_key_value_heads", HEADS)


def bridge(kind, compatible=False):
    transformers = pytest.importorskip("transformers")
    sources = pytest.importorskip("transformer_lens.model_bridge.sources")
    if not hasattr(sources, "boot_native"):
        pytest.skip("TransformerBridge is tested from version 4 on")
    if kind == "GPT2LMHeadModel":
        sizes = {"n_embd": D, "n_layer": DEPTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": WORDS}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        names = ["embed", "positions", *layers(LAYER), "final_norm"]
    else:
        sizes = {"hidden_size": D, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=WORDS, head_dim=4)
        names = ["embed", *layers(["norm1", *ATTENTION, "norm2", "mlp.gate", *MLP]), "final_norm", "unembed"]
    inner = shaken(getattr(transformers, kind)(config))
    model = sources.build_bridge_from_module(inner, kind, hf_config=config, tokenizer=None)
    if compatible:  # weights are folded and untied; the fused projection is left behind, unused
        model.enable_compatibility_mode()
        fused = [f"transformer.h.{i}._original_component.attn.qkv._original_component" for i in range(DEPTH)]
        left = [[f"{path}.weight", f"{path}.bias"] for path in fused]
        parts = (part for i in range(DEPTH) for part in [*(f"h.{i}.{name}" for name in LAYER), *left[i]])
        names = ["embed", "positions", *parts, "final_norm", "unembed"]
    return model, names, 2 if kind == "LlamaForCausalLM" else HEADS


CASES = {
    "stand-in": stand_in,
    "stand-in, grouped": lambda: stand_in(2),
    "HookedTransformer": lambda: hooked(SIZES),
    "HookedTransformer, grouped": lambda: hooked(GROUPED),
    "native": lambda: native(SIZES),
    "native, grouped": lambda: native(GROUPED),
    "bridge to GPT-2": lambda: bridge("GPT2LMHeadModel"),
    "bridge to Llama": lambda: bridge("LlamaForCausalLM"),
    "bridge to GPT-2, compatible": lambda: bridge("GPT2LMHeadModel", compatible=True),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def case(request):
    return CASES[request.param]()


def test_names_and_cover(case):
    model, names, kv_heads = case
    blocks = blocks_of(model)
    assert blocks.names == names
    assert blocks.covers(model)
    assert blocks.per_head().covers(model)
    blocks.check(model)
    assert blocks["h.1.attn.K"].heads == blocks["h.0.attn.V"].heads == kv_heads
    assert blocks["h.1.attn.Q"].heads == blocks["h.1.attn.O"].heads == HEADS


def test_the_matrices_give_what_the_hooks_report(case):
    model, _, kv_heads = case
    W = matrices(blocks_of(model), model)
    logits, cache = model.run_with_cache(tokens())

    def agree(found, expected):
        assert relative(found.detach(), expected.detach()) < 1e-5

    def scaled(norm, block):
        """gamma n + beta, beta only where the norm has one."""
        return cache[f"{norm}.hook_normalized"] * W[block][0] + W[block][1:].sum(0)

    for i in range(DEPTH):
        here, block = f"blocks.{i}.", f"h.{i}."
        read = scaled(f"{here}ln1", f"{block}norm1")
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            assert cache[f"{here}attn.hook_{name}"].shape[2] == heads
            for head in range(heads):
                weight, bias = f"{block}attn.{name.upper()}.{head}", f"{block}attn.b_{name.upper()}.{head}"
                agree(read @ W[weight] + W.get(bias, 0), cache[f"{here}attn.hook_{name}"][:, :, head])
        z = cache[f"{here}attn.hook_z"]
        outputs = sum(z[:, :, head] @ W[f"{block}attn.O.{head}"] for head in range(HEADS))
        agree(outputs + W.get(f"{block}attn.b_O", 0), cache[f"{here}hook_attn_out"])
        read, post, up = scaled(f"{here}ln2", f"{block}norm2"), cache[f"{here}mlp.hook_post"], W[f"{block}mlp.up"]
        if f"{block}mlp.gate" in W:  # the bias, if there is one, is added behind the gate
            agree(read @ W[f"{block}mlp.gate"], cache[f"{here}mlp.hook_pre"])
            agree(read @ up, cache[f"{here}mlp.hook_pre_linear"])
        else:
            agree(read @ up + W[f"{block}mlp.b_up"], cache[f"{here}mlp.hook_pre"])
        agree(post @ W[f"{block}mlp.down"] + W.get(f"{block}mlp.b_down", 0), cache[f"{here}hook_mlp_out"])
    last = scaled("ln_final", "final_norm")
    constant = W.get("b_unembed", model.unembed.b_U)  # no parameter in a compatible bridge
    agree(last @ W.get("unembed", W["embed"].T) + constant, logits)


def test_the_fused_projection_of_a_bridge_is_no_block_of_its_own():
    """It has the memory of q, k and v, and its model does not use it: the gradient is in those."""
    model = bridge("GPT2LMHeadModel")[0]
    blocks = blocks_of(model)
    fused = "transformer.h.1._original_component.attn.qkv._original_component"
    assert blocks["h.1.attn.K"].tied == (f"{fused}.weight",)
    assert blocks["h.1.attn.b_V"].tied == (f"{fused}.bias",)
    assert blocks["embed"].tied == ("lm_head._original_component.weight",)
    assert not blocks["h.1.mlp.up"].tied
    assert f"{fused}.weight" not in blocks.parameters
    loss = model(tokens(), return_type="logits").square().mean()
    names, values = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, values, allow_unused=True), strict=True))
    assert {name for name, gradient in gradients.items() if gradient is None} == set(names) - blocks.parameters
    assert math.isfinite(float(blocks.gather({name: gradients[name] for name in blocks.parameters}).norm()))


@pytest.mark.parametrize("patterns", [["h.0.attn.[QKV]"], ["*"]], ids=["some", "all"])  # all: also tied embeddings
@pytest.mark.parametrize("name", ["native", "bridge to GPT-2", "bridge to Llama", "bridge to GPT-2, compatible"])
def test_products_are_those_of_a_double_backward_pass(name, patterns):
    model = CASES[name]()[0].double().eval()
    blocks = blocks_of(model).select(*patterns)
    inputs, targets = tokens(), tokens().roll(1)
    before = model(inputs, return_type="logits").detach()
    H = hessian(model, CrossEntropy(), [(inputs, targets)], blocks)
    vector = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = H @ vector
    assert torch.equal(model(inputs, return_type="logits").detach(), before)

    parameters = dict(model.named_parameters())
    names = sorted(blocks.parameters)
    leaves = [parameters[name] for name in names]
    with sdpa_kernel(SDPBackend.MATH):
        loss = cross_entropy(model(inputs, return_type="logits").flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        flat = blocks.gather(dict(zip(names, gradients, strict=True)))
        products = torch.autograd.grad(flat, leaves, vector, materialize_grads=True)
    assert relative(found, blocks.gather(dict(zip(names, products, strict=True)))) < 1e-9
