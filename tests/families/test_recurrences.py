"""Layers that mix tokens by a recurrence: entries against the classes' own attributes, and what a block moves."""

import sys
import types

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import curvoscope as cv
import zoo
from curvoscope.blocks import layer_and_role
from reference import relative

pytest.importorskip("transformers")
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.rwkv import modeling_rwkv


def built(name):
    model, loss, (batch,) = zoo.build(name)
    return model, loss, batch


def matrices(model, blocks):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: block.matrix(parameters) for name, block in blocks.items()}


# ---- entries against the classes' own attributes


def mamba(m):
    step, B, C = m.x_proj.weight.split([m.time_step_rank, m.ssm_state_size, m.ssm_state_size])
    x, z = m.in_proj.weight.chunk(2)
    found = {"in": x.T, "gate": z.T, "delta_in": step.T, "B": B.T, "C": C.T, "delta": m.dt_proj.weight.T}
    found |= {"b_delta": m.dt_proj.bias[None], "A": m.A_log, "D": m.D[None], "out": m.out_proj.weight.T}
    norms = {
        "delta_norm": "dt_layernorm",
        "B_norm": "b_layernorm",
        "C_norm": "c_layernorm",
    }  # those of Falcon are fixed
    weights = {role: getattr(getattr(m, path, None), "weight", None) for role, path in norms.items()}
    found |= {role: W[None] for role, W in weights.items() if isinstance(W, torch.nn.Parameter)}
    return found | {"conv": m.conv1d.weight[:, 0], "b_conv": m.conv1d.bias[None]}


def mamba2(m):
    states = m.n_groups * m.ssm_state_size
    z, x, B, C, step = m.in_proj.weight.split([m.intermediate_size, m.intermediate_size, states, states, m.num_heads])
    found = {"in": x.T, "gate": z.T, "B": B.T, "C": C.T, "delta": step.T, "b_delta": m.dt_bias[None]}
    found |= {"A": m.A_log[None], "D": m.D[None], "norm": m.norm.weight[None], "out": m.out_proj.weight.T}
    return found | {"conv": m.conv1d.weight[:, 0], "b_conv": m.conv1d.bias[None]}


def rwkv(m):
    found = {"R": m.receptance.weight.T, "K": m.key.weight.T, "V": m.value.weight.T, "out": m.output.weight.T}
    found |= {"shift_R": m.time_mix_receptance[0], "shift_K": m.time_mix_key[0], "shift_V": m.time_mix_value[0]}
    return found | {"decay": m.time_decay[None], "bonus": m.time_first[None]}


def griffin(m):
    lru = m.rg_lru
    found = {"in": m.linear_x.weight.T, "gate": m.linear_y.weight.T, "out": m.linear_out.weight.T}
    found |= {"b_in": m.linear_x.bias[None], "b_gate": m.linear_y.bias[None], "b_out": m.linear_out.bias[None]}
    found |= {"conv": m.conv_1d.weight[:, 0], "b_conv": m.conv_1d.bias[None], "A": lru.recurrent_param[None]}
    found |= {f"{one}_gate": getattr(lru, f"{one}_gate_weight").flatten(0, 1) for one in ("input", "recurrent")}
    return found | {f"b_{one}_gate": getattr(lru, f"{one}_gate_bias").reshape(1, -1) for one in ("input", "recurrent")}


CLASSES = {  # the stack, the module that mixes tokens, its parts, and what else a layer has
    "MambaForCausalLM": ("backbone.layers", "mixer", mamba, {"norm1": "norm"}),
    "FalconMambaForCausalLM": ("backbone.layers", "mixer", mamba, {"norm1": "norm"}),
    "Mamba2ForCausalLM": ("backbone.layers", "mixer", mamba2, {"norm1": "norm"}),
    "RwkvForCausalLM": ("rwkv.blocks", "attention", rwkv, {"norm1": "ln1", "norm2": "ln2"}),
    "JambaForCausalLM": ("model.layers", "mamba", mamba, {"norm1": "input_layernorm", "norm2": "pre_ff_layernorm"}),
    "RecurrentGemmaForCausalLM": (
        "model.layers",
        "temporal_block",
        griffin,
        {"norm1": "temporal_pre_norm", "norm2": "channel_pre_norm"},
    ),
}
WITHOUT_ATTENTION = ["MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM", "RwkvForCausalLM"]
SLOW = {"FalconMambaForCausalLM", "RecurrentGemmaForCausalLM"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CLASSES]


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_those_of_the_attributes(name):
    model, _, batch = built(name)
    stack, path, parts, others = CLASSES[name]
    blocks = cv.blocks_of(model, batch)
    found = matrices(model, blocks)
    assert blocks.covers(model)
    mixing = [(i, layer) for i, layer in enumerate(model.get_submodule(stack)) if _mixes(layer, path, parts)]
    assert mixing
    for i, layer in mixing:
        expected = {f"mixer.{role}": W for role, W in parts(getattr(layer, path)).items()}
        for role, norm in others.items():
            module = getattr(layer, norm)
            rows = [module.weight, *([module.bias] if getattr(module, "bias", None) is not None else [])]
            expected[role] = torch.stack(rows)
        for role, W in expected.items():
            assert torch.equal(found[f"h.{i}.{role}"], W), (i, role)
        named = {role for one in found if (where := layer_and_role(one)) and where[0] == f"h.{i}" for role in where[1:]}
        assert {role for role in named if role.startswith("mixer.")} == {r for r in expected if r.startswith("mixer.")}
    parameters = dict(model.named_parameters())
    share = sum(block.size for label, block in blocks.items() if label not in parameters)
    assert share > 0.95 * sum(blocks.sizes.values())


def _mixes(layer, path, parts):
    module = getattr(layer, path, None)
    return module is not None and (parts is not griffin or hasattr(module, "rg_lru"))


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_a_batch_changes_nothing_without_attention(name):
    model, _, batch = built(name)
    blocks = cv.blocks_of(model)
    assert blocks.names == cv.blocks_of(model, batch).names
    assert all(name not in dict(model.named_parameters()) for name in blocks)
    more = {"Mamba2ForCausalLM": {"unembed"}, "RwkvForCausalLM": {"embed_norm", "unembed"}}  # the others' are tied
    around = {"embed", "final_norm"} | more.get(name, set())
    assert {label for label in blocks if layer_and_role(label) is None} == around
    if name.startswith("Rwkv"):
        layer, found = model.rwkv.blocks[1].feed_forward, matrices(model, blocks)
        expected = {"R": layer.receptance, "up": layer.key, "down": layer.value}
        assert all(torch.equal(found[f"h.1.channel.{role}"], module.weight.T) for role, module in expected.items())
        assert torch.equal(found["h.1.channel.shift_K"], layer.time_mix_key[0])


# ---- what a block moves: operands of the recurrence, seen from outside


def watched(monkeypatch, file, function, operands):
    """Let calls of a function leave copies of its operands in a list, one dict per call."""
    calls, real = [], getattr(file, function)

    def recording(*arguments, **keywords):
        given = dict(zip(operands, arguments, strict=False)) | keywords
        calls.append({name: given[name].detach().clone() for name in operands if isinstance(given.get(name), Tensor)})
        return real(*arguments, **keywords)

    monkeypatch.setattr(file, function, recording)
    return calls


RECURRENCES = {
    "MambaForCausalLM": (
        (modeling_mamba, "mamba_selective_scan", ("x", "delta", "A", "B", "C", "D", "z", "delta_bias")),
        {"gate": {"z"}, "A": {"A"}, "D": {"D"}, "B": {"B"}, "C": {"C"}, "delta": {"delta"}, "delta_in": {"delta"}}
        | {"in": {"x", "B", "C", "delta"}, "conv": {"x", "B", "C", "delta"}, "b_delta": {"delta_bias"}, "out": set()},
    ),
    "Mamba2ForCausalLM": (
        (modeling_mamba2, "mamba2_chunk_scan", ("x", "delta", "A", "B", "C", "chunk_size", "D", "dt_bias")),
        {"gate": set(), "A": {"A"}, "D": {"D"}, "B": {"B"}, "C": {"C"}, "delta": {"delta"}, "in": {"x"}}
        | {"conv": {"x", "B", "C"}, "b_delta": {"dt_bias"}, "norm": set(), "out": set()},
    ),
    "RwkvForCausalLM": (
        (modeling_rwkv, "rwkv_linear_attention", ("decay", "bonus", "K", "V")),
        {"decay": {"decay"}, "bonus": {"bonus"}, "K": {"K"}, "V": {"V"}, "shift_K": {"K"}, "shift_V": {"V"}}
        | {"R": set(), "shift_R": set(), "out": set()},
    ),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_block_moves_the_operand_that_it_is_named_after(name, monkeypatch):
    """In its own layer exactly the operands of its role, in the layer before none."""
    where, moved = RECURRENCES[name]
    model, _, batch = built(name)
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}
    calls = watched(monkeypatch, *where)

    def operands():
        calls.clear()
        with torch.no_grad():
            outputs = model(input_ids=batch["input_ids"]).logits
        return list(calls), outputs

    before, plain = operands()
    blocks = cv.blocks_of(model)
    for role, expected in moved.items():
        block = blocks[f"h.1.mixer.{role}"]
        old = block.gather(parameters).clone()
        block.scatter(old + 0.1, parameters)
        after, outputs = operands()
        block.scatter(old, parameters)
        changed = [{k for k in a if not torch.equal(a[k], b[k])} for a, b in zip(before, after, strict=True)]
        assert changed[:2] == [set(), expected], role
        assert not torch.equal(outputs, plain), role


# ---- fused kernels


class OnceOnly(torch.autograd.Function):
    """The scan of torch, as a kernel that has a first derivative only."""

    @staticmethod
    def forward(ctx, scan, *operands):
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in operands]
            ctx.made = scan(*leaves), leaves
        return ctx.made[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, direction):
        return None, *torch.autograd.grad(ctx.made[0], ctx.made[1], direction)


def test_a_kernel_without_second_derivatives_gives_way_to_torch(monkeypatch):
    """As it is chosen if the package mamba_ssm is there; it is back afterwards, and the model itself still uses it."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as choosing

    plain = modeling_mamba.mamba_selective_scan.__wrapped__
    used = []

    def kernel(u, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        used.append(1)

        def scan(u, dt, A, B, C, D, z, bias):
            return plain(u, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=delta_softplus)

        return OnceOnly.apply(scan, u, dt, A, B, C, D, z, delta_bias)

    monkeypatch.setitem(sys.modules, "mamba_ssm", types.SimpleNamespace(selective_scan_fn=kernel))
    model, loss, batch = built("MambaForCausalLM")
    blocks = cv.blocks_of(model).select("h.0.mixer.[ABC]")
    v = torch.randn(sum(blocks.sizes.values()), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = cv.hessian(model, loss, [batch], blocks=blocks) @ v
    fused = choosing("selective_scan_fn", "mamba_ssm")(plain)
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", fused)
    model(input_ids=batch["input_ids"], use_cache=False)
    assert used
    used.clear()
    H = cv.hessian(model, loss, [batch], blocks=blocks)
    assert relative(H @ v, expected) < 1e-12 and H.method_of("h.0.mixer.A") == "autodiff"
    assert not used and modeling_mamba.mamba_selective_scan is fused
