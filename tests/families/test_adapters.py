"""Adapters get the names of their weights, by structure or from PEFT; what is no adapter does not."""

import pytest
import torch
from torch import nn

from adapter_cases import RANK, Beside, D, Inside, Model, Quantised, Twice, adapted, batch, peft
from curvoscope import blocks_of
from curvoscope.blocks import layer_and_role
from curvoscope.families.adapters import adapters_of

ADAPTED = ["h.0.attn.Q", "h.0.attn.V", "h.0.attn.O", "h.0.mlp.up"]


@pytest.mark.parametrize("style", [Beside, Inside, Quantised])
@pytest.mark.parametrize("by_batch", [False, True], ids=["hints", "structure"])
def test_names_and_entries(style, by_batch):
    model = adapted(style)
    blocks = blocks_of(model, batch()[0] if by_batch else None)
    found = [name for name in blocks if name.endswith((".A", ".B"))]
    assert found == [f"{name}.{part}" for name in ADAPTED for part in "AB"]
    assert ("h.0.attn.Q" in blocks) == (style is not Quantised)  # eight bits are no block
    assert blocks.shapes["h.0.attn.Q.A"] == (D, RANK) and blocks.shapes["h.0.attn.Q.B"] == (RANK, D)
    assert blocks.covers(model) and layer_and_role("h.0.attn.Q.A") == ("h.0", "attn.Q.A")
    weights = dict(model.named_parameters())
    module = model.layers[0].self_attn.q_proj
    x = torch.randn(3, D, dtype=torch.float64)
    A, B = (blocks[f"h.0.attn.Q.{part}"].matrix(weights) for part in "AB")
    added = module(x) - (nn.functional.linear(x, module.codes * module.step, module.shift) if style is Quantised else 0)
    if style is not Quantised:
        added = added - x @ blocks["h.0.attn.Q"].matrix(weights) - blocks["h.0.attn.b_Q"].matrix(weights)
    torch.testing.assert_close(added, module.scale * x @ A @ B, rtol=1e-12, atol=1e-12)


def test_several_on_one_weight():
    torch.manual_seed(0)
    model = Model()
    model.layers[0].self_attn.q_proj = Twice(Beside(model.layers[0].self_attn.q_proj))
    found = adapters_of(model)
    assert sorted((one.scale, one.parts["A"].shape[1]) for one in found) == [(-2.0, 3), (0.5, 2)]
    assert {"h.0.attn.Q.A", "h.0.attn.Q.B", "h.0.attn.Q.A2", "h.0.attn.Q.B2"} <= set(blocks_of(model))


class Bottleneck(nn.Module):
    """Two linear maps in a row, with or without a function between them and a weight beside them."""

    def __init__(self, bend, beside):
        super().__init__()
        self.down, self.up, self.bend = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False), bend
        self.beside = nn.Linear(6, 6) if beside else None

    def forward(self, x):
        y = self.up(self.bend(self.down(x)))
        return y if self.beside is None else y + self.beside(x)


@pytest.mark.parametrize(
    "model",
    [
        Bottleneck(nn.Identity(), beside=False),
        Bottleneck(nn.ReLU(), beside=True),
        Model(),
        nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6), nn.Linear(6, 6)),
        nn.LazyLinear(3),
        Beside(nn.Linear(6, 6)).to("meta"),
    ],
    ids=["no weight", "bent", "none", "in a row", "lazy", "meta"],
)
def test_what_is_no_adapter(model):
    assert adapters_of(model) == []


def test_nothing_is_disturbed():
    model = Bottleneck(nn.Identity(), beside=True).train()
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call))
    state, before = torch.get_rng_state(), {name: one.clone() for name, one in model.state_dict().items()}
    assert [one.kind for one in adapters_of(model)] == ["lora"]
    assert not calls and model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, ["attn.Q.A", "attn.Q.B", "mlp.down.A", "mlp.down.B"]),
        ({"target_modules": ["v_proj"], "use_dora": True}, ["attn.V.A", "attn.V.B", "attn.V.magnitude"]),
        ({"target_modules": ["k_proj"], "feedforward_modules": [], "kind": "IA3Config"}, ["attn.K.ia3"]),
    ],
    ids=["LoRA", "DoRA", "IA3"],
)
def test_peft(options, names):
    model = peft(Model(), **options)
    for blocks in (blocks_of(model), blocks_of(model, batch()[0])):
        free = {name for name, one in model.named_parameters() if one.requires_grad}
        assert [name for name, b in blocks.items() if b.pieces[0].parameter in free] == [f"h.0.{n}" for n in names]
        assert blocks.covers(model)
