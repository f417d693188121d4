"""Small networks with the functions that people use, and their dense Hessians by nested autodiff in float64."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import scaled_dot_product_attention

from reference import Dense, dense_hessian


class MLP(nn.Module):
    def __init__(self, activation: type[nn.Module] = nn.GELU, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.act, self.down = nn.Linear(3, 4, dtype=dtype), activation(), nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class CausalSelfAttention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.c_fc, self.act, self.c_proj = nn.Linear(d, 2 * d), nn.GELU(approximate="tanh"), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Layer(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(d), CausalSelfAttention(d, heads)
        self.ln_2, self.mlp = nn.LayerNorm(d), Feedforward(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 in miniature: native layer norm, native attention, tied embeddings."""

    def __init__(self, layers: int = 1, d: int = 4, vocabulary: int = 6, context: int = 5) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.h = nn.ModuleList(Layer(d, 2) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.7)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def tokens(rows: int = 4, length: int = 5, vocabulary: int = 6) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, length), some of them ignored, unequally in each row."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(2))
    for row in range(rows):
        targets[row, length - row :] = -100
    return inputs, targets


def points(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64),
        torch.randn(rows, 2, generator=generator, dtype=torch.float64),
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch_cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def truth(model: nn.Module, inputs: Tensor, loss, blocks) -> Dense:
    """H, J^T S J and the rest over `blocks`, from all rows at once: jacfwd of grad of the model's function."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return truth_of(lambda p: functional_call(model, p, (inputs,)), parameters, loss, blocks)


def truth_of(function, parameters: dict[str, Tensor], loss, blocks) -> Dense:
    """The same for a function of named parameters."""
    with sdpa_kernel(SDPBackend.MATH):
        dense = dense_hessian(function, parameters, loss)
    numbers, start = {}, 0
    for name, p in parameters.items():
        numbers[name] = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
    order = blocks.gather(numbers)
    return Dense(*(matrix[order][:, order] for matrix in (dense.total, dense.outer, dense.functional)))


class Routed(nn.Module):
    """Layers in the order that the batch says, and the head that it says."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(4, 2, bias=False) for _ in range(2)])

    def forward(self, x, order, heads):
        z = torch.tanh(self.inner(x))
        for number in order:
            z = z + torch.tanh(self.layers[number](z))
        return sum(self.heads[number](z * k) for k, number in enumerate(heads, 1))


def routed_batches(routes):
    """One batch per pair of an order of layers and of heads."""
    torch.manual_seed(2)
    return [((torch.randn(3, 3).double(), *map(torch.tensor, some)), torch.tensor([0, 1, 1])) for some in routes]
