"""Experts in closed form, as feed-forward layers on the tokens that are routed to them, against autodiff."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

import curvoscope as cv
from adapter_cases import D, Model, batch
from family_cases import shaken
from reference import normal, relative

LOSS = cv.losses.CrossEntropy()
EXPERTS, WIDTH = 3, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.rise, self.fall = nn.Linear(D, WIDTH), nn.Linear(D, WIDTH), nn.Linear(WIDTH, D)

    def forward(self, x):
        return self.fall(silu(self.gate(x)) * self.rise(x))


class Modules(nn.Module):
    """One module per expert."""

    def __init__(self):
        super().__init__()
        self.several = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x, number):
        return self.several[number](x)


class Stacked(nn.Module):
    """The weights of all experts in two tensors, gate and up in one of them."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, D) / 3)
        self.fall = nn.Parameter(torch.randn(EXPERTS, D, WIDTH) / 3)

    def forward(self, x, number):
        gate, up = linear(x, self.both[number]).chunk(2, -1)
        return linear(silu(gate) * up, self.fall[number])


class Columns(nn.Module):
    """As before, stored the other way round, and chosen by a tensor."""

    def __init__(self):
        super().__init__()
        self.gate, self.rise = (nn.Parameter(torch.randn(EXPERTS, D, WIDTH) / 3) for _ in range(2))
        self.fall = nn.Parameter(torch.randn(EXPERTS, WIDTH, D) / 3)

    def forward(self, x, number):
        place = torch.tensor(number)
        return (silu(x @ self.gate[place]) * (x @ self.rise[place])) @ self.fall[place]


class Routed(nn.Module):
    """The two best experts of each token, with their shares; the last expert may see none."""

    def __init__(self, experts, reached=EXPERTS):
        super().__init__()
        self.experts, self.router, self.reached = experts, nn.Linear(D, EXPERTS, bias=False), reached

    def forward(self, x):
        tokens = x.flatten(0, 1)
        logits = self.router(tokens) + 5 * normal(7)(len(tokens), EXPERTS)
        shares, chosen = logits[:, : self.reached].softmax(-1).topk(2)
        found = torch.zeros_like(tokens)
        for number in range(EXPERTS):
            token, place = torch.where(chosen == number)
            if len(token):
                found = found.index_add(0, token, self.experts(tokens[token], number) * shares[token, place, None])
        return found.view(x.shape)


def mixture(kind, depth=2, reached=EXPERTS):
    torch.manual_seed(0)
    model = Model(depth)
    for layer in model.layers:
        layer.mlp = Routed(kind(), reached)
    return shaken(model)


def compared(model, chosen, split="model"):
    blocks = cv.blocks_of(model, batch(3)[0]).select(chosen)
    return [cv.hessian(model, LOSS, batch(3), blocks, method=m, split=split) for m in ("auto", "autodiff")]


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        (Modules, 1),
        (Stacked, 1),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in (Modules, Stacked, Columns)),
    ],
)
def test_every_expert(kind, depth):
    """With two layers, tokens mix behind the first one."""
    H, R = compared(mixture(kind, depth), "*.mlp.experts.*")
    assert len(H.names) >= depth * 3 * EXPERTS and all(name.startswith("h.") for name in H.names)
    for part in ("outer", "functional"):
        dense = getattr(R, part).dense()
        for row in H.names:
            assert H.method_of(row, part) == "exact", row
            for column in (name for name in H.names if name.rpartition(".")[0] == row.rpartition(".")[0]):
                here = dense[R.total.ranges[row], R.total.ranges[column]]
                assert relative(getattr(H, part)[row, column].dense(), here, dense) < 1e-9, (part, row, column)
    between = "h.0.mlp.experts.0.down", "h.0.mlp.experts.1.up"
    assert relative(H[between].dense(), R[between].dense(), R.dense()) < 1e-9  # of two experts, by autodiff


@pytest.mark.parametrize("kind", [Modules, Stacked])
def test_split_at_the_layer(kind):
    H, R = compared(mixture(kind, depth=1), "h.0.mlp.experts.1.*", split="layer")
    for name in H.names:
        assert H.method_of(name, "functional") == "exact"
        for part in ("outer", "functional"):
            expected = getattr(R, part)[name].dense()
            assert relative(getattr(H, part)[name].dense(), expected, R[name].dense()) < 1e-9


@pytest.mark.parametrize("kind", [Modules, Stacked])
def test_an_expert_without_tokens(kind):
    H, _ = compared(mixture(kind, depth=1, reached=2), "*.mlp.experts.*")
    reason = "a batch sends no token to this expert"
    for name in (name for name in H.names if ".experts.2." in name):
        assert H.plan[name, "outer"].reason.startswith(reason) and H.method_of(name) == "autodiff"
        assert not bool(H[name].dense().any())
    assert H.method_of("h.0.mlp.experts.0.up") == "exact"


def test_a_router_has_no_closed_form():
    H, _ = compared(mixture(Modules, depth=1), "*.mlp.router")
    assert H.method_of("h.0.mlp.router") == "autodiff"
    assert "choice of experts" in H.plan["h.0.mlp.router", "outer"].reason
