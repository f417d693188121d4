"""Small random models of each family, and the same models computed by hand from the matrices of their blocks.

Attention is that of `reference`; the pattern of each head is computed once more from the matrices of single heads.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from reference import attention, rotations

D, DEPTH, HEADS, WIDTH, LENGTH, WORDS = 12, 2, 4, 20, 5, 11

ATTENTION = [f"attn.{name}" for name in ("Q", "K", "V", "O")]
ATTENTION_BIASES = [f"attn.b_{name}" for name in ("Q", "K", "V", "O")]
MLP, MLP_BIASES = ["mlp.up", "mlp.down"], ["mlp.b_up", "mlp.b_down"]
LAYER = ["norm1", *ATTENTION, *ATTENTION_BIASES, "norm2", *MLP, *MLP_BIASES]


@dataclass
class Case:
    """A model, what it computes, and how to compute the same by hand."""

    model: nn.Module
    output: Tensor
    patterns: list[Tensor]  # of each layer, (N, heads, L, L)
    names: list[str]
    by_hand: "ByHand"
    embedded: object  # the stream before the first layer, from the matrices
    head: object  # the output, from the matrices and the stream after the last layer
    tolerance: float = 1e-10
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class ByHand:
    """A stack of layers computed from the matrices of the blocks."""

    placement: str = "pre"
    eps: float = 1e-5
    activation: object = gelu
    causal: bool = False
    kv_heads: int = HEADS
    rotary: float | None = None

    def norm(self, W: Tensor, x: Tensor) -> Tensor:
        if len(W) == 1:
            return W[0] * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        centred = x - x.mean(-1, keepdim=True)
        return W[0] * centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() + W[1]

    def attend(self, W: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        parts = {name.removeprefix("attn."): matrix for name, matrix in W.items() if name in ATTENTION}
        parts |= {name.removeprefix("attn."): matrix[0] for name, matrix in W.items() if name in ATTENTION_BIASES}
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        visible = visible.tril() if self.causal else visible
        scale = 1 / math.sqrt(W["attn.Q"].shape[1] // HEADS)
        options = {"heads": HEADS, "kv_heads": self.kv_heads, "scale": scale, "visible": visible, "rotary": self.rotary}
        patterns = []
        for head in range(HEADS):
            shared = head // (HEADS // self.kv_heads)
            query = x @ W[f"attn.Q.{head}"] + W.get(f"attn.b_Q.{head}", 0)
            key = x @ W[f"attn.K.{shared}"] + W.get(f"attn.b_K.{shared}", 0)
            if self.rotary is not None:
                R = rotations(x.shape[1], query.shape[-1], self.rotary)
                query, key = (R @ query[..., None])[..., 0], (R @ key[..., None])[..., 0]
            patterns.append((scale * query @ key.mT).masked_fill(~visible, -math.inf).softmax(-1))
        return attention(parts, x, **options), torch.stack(patterns, 1)

    def mlp(self, W: dict[str, Tensor], x: Tensor) -> Tensor:
        up = x @ W["mlp.up"] + W.get("mlp.b_up", 0)
        gate = x @ W["mlp.gate"] + W.get("mlp.b_gate", 0) if "mlp.gate" in W else None
        hidden = self.activation(up) if gate is None else self.activation(gate) * up
        return hidden @ W["mlp.down"] + W.get("mlp.b_down", 0)

    def layer(self, W: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        if self.placement == "post":
            attended, pattern = self.attend(W, x)
            x = self.norm(W["norm1"], x + attended)
            return self.norm(W["norm2"], x + self.mlp(W, x)), pattern
        attended, pattern = self.attend(W, self.norm(W["norm1"], x))
        x = x + attended
        return x + self.mlp(W, self.norm(W["norm2"], x)), pattern


def shaken(model):
    """The model in float64, away from its initialisation, so that biases and norms matter."""
    generator = torch.Generator().manual_seed(1)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def tokens():
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def layers(names, depth=DEPTH):
    return [f"h.{i}.{name}" for i in range(depth) for name in names]


def hf(name, config, **options):
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    made = model_class.config_class(attn_implementation="eager", **config, **options)
    return shaken(model_class(made))


def gpt2(name="GPT2LMHeadModel", **options):
    sizes = {"n_embd": D, "n_layer": DEPTH, "n_head": HEADS, "n_inner": WIDTH, "n_positions": LENGTH + 2}
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    model = hf(name, sizes | words, **options)
    found = model(tokens(), output_attentions=True)
    by_hand = ByHand(activation=lambda x: gelu(x, approximate="tanh"), causal=True)
    after = "transformer." if name == "GPT2LMHeadModel" else ""
    tied = name == "GPT2LMHeadModel" and options.get("tie_word_embeddings", True)

    def head(W, x):
        x = by_hand.norm(W["final_norm"], x)
        return x if not after else x @ (W["embed"].T if tied else W["unembed"])

    return Case(
        model,
        found[0],
        found.attentions,
        ["embed", "positions", *layers(LAYER), "final_norm", *([] if tied or not after else ["unembed"])],
        by_hand,
        lambda W: W["embed"][tokens()] + W["positions"][:LENGTH],
        head,
        tied={"embed": ("lm_head.weight",)} if tied else {},
    )


def llama(biases=True, kv_heads=2):
    sizes = {"hidden_size": D, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
    options = {"num_key_value_heads": kv_heads, "vocab_size": WORDS, "head_dim": 4}  # heads wider than d / heads
    model = hf("LlamaForCausalLM", sizes | options, attention_bias=biases, mlp_bias=biases)
    found = model(tokens(), output_attentions=True)
    by_hand = ByHand(eps=1e-6, activation=silu, causal=True, kv_heads=kv_heads, rotary=10000.0)
    attention_part = [*ATTENTION, *(ATTENTION_BIASES if biases else [])]
    mlp_part = ["mlp.gate", *MLP, *(["mlp.b_gate", *MLP_BIASES] if biases else [])]
    return Case(
        model,
        found.logits,
        found.attentions,
        ["embed", *layers(["norm1", *attention_part, "norm2", *mlp_part]), "final_norm", "unembed"],
        by_hand,
        lambda W: W["embed"][tokens()],
        lambda W, x: by_hand.norm(W["final_norm"], x) @ W["unembed"],
        tolerance=1e-5,  # its norms, rotations and softmax are float32 inside
    )


def bert(name="BertForMaskedLM"):
    sizes = {"hidden_size": D, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
    model = hf(name, sizes | {"vocab_size": WORDS, "max_position_embeddings": LENGTH + 2})
    found = model(tokens(), output_attentions=True)
    by_hand = ByHand(placement="post", eps=1e-12)
    prefix = "" if name == "BertModel" else "bert."
    pooler = [f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias"]
    dense, norm = (f"cls.predictions.transform.{part}" for part in ("dense", "LayerNorm"))
    after = {
        "BertModel": pooler,
        "BertForMaskedLM": [f"{dense}.weight", f"{dense}.bias", f"{norm}.weight", f"{norm}.bias", "b_unembed"],
        "BertForSequenceClassification": [*pooler, "classifier.weight", "classifier.bias"],
    }

    def embedded(W):
        x = W["embed"][tokens()] + W["positions"][:LENGTH]
        return by_hand.norm(W["embed_norm"], x + W[f"{prefix}embeddings.token_type_embeddings.weight"][0])

    def head(W, x):
        if name == "BertModel":
            return x
        if name == "BertForMaskedLM":
            x = gelu(x @ W[f"{dense}.weight"].T + W[f"{dense}.bias"])
            x = by_hand.norm(torch.cat([W[f"{norm}.weight"], W[f"{norm}.bias"]]), x)
            return x @ W["embed"].T + W["b_unembed"]
        pooled = (x[:, 0] @ W[pooler[0]].T + W[pooler[1]]).tanh()
        return pooled @ W["classifier.weight"].T + W["classifier.bias"]

    start = ["embed", "positions", f"{prefix}embeddings.token_type_embeddings.weight", "embed_norm"]
    tied = {"embed": ("cls.predictions.decoder.weight",), "b_unembed": ("cls.predictions.decoder.bias",)}
    return Case(
        model,
        found[0],
        found.attentions,
        [*start, *layers(LAYER), *after[name]],
        by_hand,
        embedded,
        head,
        tied=tied if name == "BertForMaskedLM" else {},
    )


def vit(name="ViTForImageClassification"):
    sizes = {"hidden_size": D, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
    model = hf(name, sizes | {"image_size": 4, "patch_size": 2})
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = model(images, output_attentions=True)
    by_hand = ByHand(eps=1e-12)
    prefix = "" if name == "ViTModel" else "vit."
    patch = [f"{prefix}embeddings.patch_embeddings.projection.{part}" for part in ("weight", "bias")]

    def embedded(W):
        patches = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(2, 4, 12)
        x = patches @ W[patch[0]].T + W[patch[1]]
        return torch.cat([W[f"{prefix}embeddings.cls_token"].expand(2, 1, D), x], 1) + W["positions"]

    def head(W, x):
        x = by_hand.norm(W["final_norm"], x)
        return x if name == "ViTModel" else x[:, 0] @ W["classifier.weight"].T + W["classifier.bias"]

    after = (
        ["pooler.dense.weight", "pooler.dense.bias"] if name == "ViTModel" else ["classifier.weight", "classifier.bias"]
    )
    return Case(
        model,
        found[0],
        found.attentions,
        [f"{prefix}embeddings.cls_token", "positions", *patch, *layers(LAYER), "final_norm", *after],
        by_hand,
        embedded,
        head,
        tolerance=1e-5,  # its softmax is float32 inside
    )


def encoder(norm_first, bias=True):
    layer = nn.TransformerEncoderLayer(D, HEADS, WIDTH, 0.0, norm_first=norm_first, batch_first=True, bias=bias)
    model = shaken(nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(D), enable_nested_tensor=False))
    x = torch.randn(2, LENGTH, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    by_hand = ByHand(placement="pre" if norm_first else "post", activation=relu)
    patterns, stream = [], x
    for part in model.layers:
        read = part.norm1(stream) if norm_first else stream
        patterns.append(part.self_attn(read, read, read, average_attn_weights=False)[1])
        stream = part(stream)
    without = [name for name in LAYER if ".b_" not in name]
    if not bias:  # norms without a bias have one row, which would be an RMSNorm to `ByHand`
        by_hand.norm = lambda W, x: ByHand.norm(by_hand, torch.cat([W, torch.zeros_like(W)]) if len(W) == 1 else W, x)
    return Case(
        model,
        model(x),
        patterns,
        [*layers(LAYER if bias else without), "final_norm"],
        by_hand,
        lambda W: x,
        lambda W, x: by_hand.norm(W["final_norm"], x),
    )


CASES = {
    "GPT2LMHeadModel": gpt2,
    "GPT2LMHeadModel, untied": lambda: gpt2(tie_word_embeddings=False),
    "GPT2Model": lambda: gpt2("GPT2Model"),
    "Llama": llama,
    "Llama, no biases, one key head": lambda: llama(biases=False, kv_heads=1),
    "BertForMaskedLM": bert,
    "BertModel": lambda: bert("BertModel"),
    "BertForSequenceClassification": lambda: bert("BertForSequenceClassification"),
    "ViTForImageClassification": vit,
    "ViTModel": lambda: vit("ViTModel"),
    "TransformerEncoder, pre": lambda: encoder(norm_first=True),
    "TransformerEncoder, post": lambda: encoder(norm_first=False),
    "TransformerEncoder, no biases": lambda: encoder(norm_first=True, bias=False),
}


def matrices(blocks, model):
    """The matrices of all blocks and of all single heads."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: block.matrix(parameters) for part in (blocks, blocks.per_head()) for name, block in part.items()}
