"""Models with adapters: plain LoRA layers written here in three styles, and those of PEFT."""

import math

import pytest
import torch
from torch import nn

from family_cases import shaken
from reference import relative

D, HEADS, WIDTH, WORDS, LENGTH, RANK = 6, 2, 5, 7, 3, 2


class Beside(nn.Module):
    """x W + b + s x A B, around another module."""

    def __init__(self, base, rank=RANK, scale=0.5):
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.rise = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.rise(self.down(x))


class Twice(Beside):
    """A second adapter on the weight of another."""

    def __init__(self, first, rank=3, scale=-2.0):
        super().__init__(first.base, rank, scale)
        self.others, self.other_scale = nn.ParameterList([first.down.weight, first.rise.weight]), first.scale

    def forward(self, x):
        return super().forward(x) + self.other_scale * x @ self.others[0].T @ self.others[1].T


class Inside(nn.Linear):
    """The same, as a linear layer with two more parameters, stored the other way round."""

    def __init__(self, base, rank=RANK, scale=2.0):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.first = nn.Parameter(torch.zeros(base.in_features, rank))
        self.second = nn.Parameter(torch.zeros(rank, base.out_features))
        self.scale = scale

    def forward(self, x):
        return super().forward(x) + (x @ self.first) @ self.second * self.scale


class Quantised(nn.Module):
    """A frozen weight in eight bits, with a step for each output, and an adapter beside it."""

    def __init__(self, base, rank=RANK, scale=1.5):
        super().__init__()
        weight = base.weight.detach()
        step = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / step).round().to(torch.int8))
        self.register_buffer("step", step)
        self.register_buffer("shift", None if base.bias is None else base.bias.detach())
        self.first = nn.Parameter(torch.zeros(base.in_features, rank))
        self.second = nn.Parameter(torch.zeros(rank, base.out_features))
        self.scale = scale

    def forward(self, x):
        frozen = nn.functional.linear(x, self.codes * self.step, self.shift)
        return frozen + x @ self.first @ self.second * self.scale


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))
        self.num_heads, self.causal = HEADS, causal

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / math.sqrt(D // HEADS)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(D, WIDTH), nn.Linear(WIDTH, D)

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attn, self.mlp = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A causal Transformer with the names of Llama."""

    def __init__(self, depth=1):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, D), nn.LayerNorm(D)
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.lm_head = nn.Linear(D, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def adapted(style, names=("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"), depth=1, seed=0):
    """The model with adapters of one style, its own weights frozen, all of it away from the initialisation."""
    torch.manual_seed(seed)
    model = Model(depth)
    for path, module in list(model.named_modules()):
        if path.endswith(names):
            model.set_submodule(path, style(module))
    model = shaken(model)
    own = ("down.weight", "rise.weight", "first", "second")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(own) and not name.endswith("mlp.down.weight"))
    return model


def peft(model, **options):
    """The model with adapters of PEFT, away from their initialisation."""
    found = pytest.importorskip("peft")
    kind = options.pop("kind", "LoraConfig")
    return shaken(found.get_peft_model(model, getattr(found, kind)(**options)))


def batch(rows=2, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, WORDS, (2, rows, LENGTH), generator=generator))]


def gradient(model, loss, batches, blocks):
    """The gradient of the mean loss over the blocks, by autograd, for one batch."""
    ((inputs, targets),) = batches
    parameters = {name: one for name, one in model.named_parameters() if name in blocks.parameters}
    found = torch.autograd.grad(loss(model(inputs), targets), list(parameters.values()))
    return blocks.gather(dict(zip(parameters, found, strict=True)))


def assert_parts(H, R, tolerance=1e-9):
    """Every pair of blocks of both parts of H against the products of R, relative to its largest entry."""
    for part in ("outer", "functional"):
        dense = getattr(R, part).dense()
        for i, row in enumerate(H.names):
            for column in H.names[i:]:
                here = dense[R.total.ranges[row], R.total.ranges[column]]
                assert relative(getattr(H, part)[row, column].dense(), here, dense) < tolerance, (part, row, column)
