"""Recipes against numpy, against the model without what they drop, and the tensors they cannot take."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import curvoscope as cv
from autodiff_cases import GPT, tokens
from curvoscope.analysis import recipes
from curvoscope.analysis.recipes import number_formats
from curvoscope.curvature import blocks_of
from model_folders import make
from surface_cases import state


def integers(w, bits, symmetric):
    """One group of weights (n,) rounded to the nearest level, by numpy."""
    if symmetric:
        levels = np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)) * np.abs(w).max() / (2 ** (bits - 1) - 1)
    else:
        step = (max(w.max(), 0) - min(w.min(), 0)) / (2**bits - 1)
        zero = np.round(-min(w.min(), 0) / step)
        levels = (np.arange(2**bits) - zero) * step
    return levels[np.abs(w[:, None] - levels).argmin(1)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", ["tensor", "channel", 4])
@pytest.mark.parametrize(("recipe", "bits"), [(recipes.int8, 8), (recipes.int4, 4), (recipes.int3, 3)])
def test_integers_against_numpy(recipe, bits, group, symmetric):
    torch.manual_seed(bits)
    model = nn.Linear(8, 3).double()
    found = recipe(model, group, symmetric)
    W = model.weight.detach().numpy()  # (out, in): a channel is a row
    groups = {"tensor": W.reshape(1, -1), "channel": W, 4: W.reshape(-1, 4)}[group]
    expected = np.stack([integers(w, bits, symmetric) for w in groups]).reshape(W.shape)
    np.testing.assert_allclose(found["weight"].numpy(), expected, atol=1e-12)
    assert found["bias"] is model.state_dict()["bias"] or torch.equal(found["bias"], model.bias)


def test_nf4_and_fp8_take_the_nearest_level():
    torch.manual_seed(0)
    model = nn.Linear(64, 4).double()
    W = model.weight.detach()
    nf4 = recipes.nf4(model)["weight"] / W.abs().amax(1, keepdim=True)
    levels = torch.tensor(number_formats._NF4).double()
    nearest = levels[(W[..., None] / W.abs().amax(1)[:, None, None] - levels).abs().argmin(-1)]
    torch.testing.assert_close(nf4, nearest)
    scale = W.abs().amax(1, keepdim=True) / 448
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    fp8 = recipes.fp8(model)["weight"]
    best = ((W / scale)[..., None] - codes).abs().min(-1).values
    torch.testing.assert_close((fp8 / scale - W / scale).abs(), best)


@pytest.mark.slow
def test_groups_follow_the_inputs_in_every_layout():
    """GPT-2 stores (in, out) and fuses Q, K, V; Llama stores (out, in): the same matrix is rounded alike."""
    torch.manual_seed(1)
    fused = make("gpt2")
    W = fused.transformer.h[0].attn.c_attn.weight.detach()  # (8, 24)
    expected = torch.stack([torch.tensor(integers(w, 4, True)) for w in W.double().T.numpy()]).T
    found = recipes.int4(fused)["transformer.h.0.attn.c_attn.weight"]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    llama = make("llama")
    W = llama.model.layers[0].mlp.up_proj.weight.detach()
    expected = torch.stack([torch.tensor(integers(w, 4, True)) for w in W.double().numpy()])
    found = recipes.int4(llama)["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(recipes.int4(llama)["model.embed_tokens.weight"], llama.model.embed_tokens.weight)


def test_zeros_stay_zero():
    model = nn.Linear(4, 2).double()
    nn.init.zeros_(model.weight)
    for recipe in (recipes.int8, recipes.int4, recipes.fp8, lambda m: recipes.nf4(m, group=4)):
        assert not recipe(model)["weight"].any()
    assert not recipes.int3(model, symmetric=False)["weight"].any()


def test_pruning():
    torch.manual_seed(2)
    model = nn.Linear(8, 6).double()
    W = model.weight.detach()
    pruned = recipes.prune(model, 0.25)["weight"]
    gone = pruned == 0
    assert int(gone.sum()) == 12 and float(W[gone].abs().max()) < float(W[~gone].abs().min())
    assert torch.equal(pruned[~gone], W[~gone])
    fours, kept = W.view(6, 2, 4), recipes.prune_2_4(model)["weight"].view(6, 2, 4)
    assert bool(((kept != 0).sum(-1) == 2).all())
    torch.testing.assert_close(kept.abs().sum(-1), fours.abs().topk(2, -1).values.sum(-1))


def outputs(model, state, x):
    changed = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}  # tied to wte
    with torch.no_grad():
        return functional_call(model, changed, (x,))


def test_a_dropped_head_is_a_head_whose_output_is_zero():
    model, (x, _) = GPT(layers=2, d=8), tokens()
    dropped = outputs(model, recipes.drop_heads(model, {"h.1.attn": [0]}), x)

    def without(module, arguments):
        y = arguments[0].clone()
        y[..., :4] = 0
        return (y,)

    with torch.no_grad(), model.h[1].attn.c_proj.register_forward_pre_hook(without):
        torch.testing.assert_close(dropped, model(x))


def test_dropped_layers_and_neurons():
    model, (x, _) = GPT(layers=2, d=8), tokens()
    before = state(model)
    dropped = outputs(model, recipes.drop_layers(model, ["h.0"]), x)
    shorter = GPT(layers=2, d=8)
    shorter.h = shorter.h[1:]
    with torch.no_grad():
        torch.testing.assert_close(dropped, shorter(x))
    down = recipes.drop_neurons(model, 0.5)["h.0.mlp.c_proj.weight"]  # (out, neurons)
    gone = down.norm(dim=0) == 0
    norms = model.h[0].mlp.c_proj.weight.detach().norm(dim=0)
    assert int(gone.sum()) == 8 and float(norms[gone].max()) < float(norms[~gone].min())
    assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


def test_low_rank_is_the_best_of_its_rank():
    torch.manual_seed(3)
    model = nn.Linear(6, 5).double()
    W, found = model.weight.detach(), recipes.low_rank(model, 0.4)["weight"]
    values = torch.linalg.svdvals(W)
    assert int(torch.linalg.matrix_rank(found)) == 2
    torch.testing.assert_close((W - found).norm(), values[2:].norm())


def mixture(name):
    config = getattr(transformers, f"{name}Config")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 1}
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config(**sizes, **heads, num_local_experts=3))


@pytest.mark.parametrize(("name", "inputs_first"), [("Mixtral", False), ("GptOss", True)])
def test_every_expert_is_a_matrix_of_its_own(name, inputs_first):
    model = mixture(name)
    blocks = dict(model.named_parameters())
    for part in ("gate_up_proj", "down_proj"):
        path = f"model.layers.0.mlp.experts.{part}"
        W = blocks[path].detach()
        found, thin = recipes.int4(model)[path], recipes.low_rank(model, 0.25)[path]
        for before, after, reduced in zip(W, found, thin, strict=True):
            before, after = (before.T, after.T) if inputs_first else (before, after)  # a row per channel
            expected = np.stack([integers(w, 4, True) for w in before.double().numpy()])
            np.testing.assert_allclose(after.numpy(), expected, atol=1e-6)
            assert int(torch.linalg.matrix_rank(reduced)) == round(0.25 * min(before.shape))
    assert torch.equal(recipes.int4(model)["lm_head.weight"], blocks["lm_head.weight"])
    for change in (recipes.drop_neurons, lambda one: recipes.drop_layers(one, ["h.0"])):
        with pytest.raises(cv.CurvoscopeError, match=r"the role of .*experts.* is not known by name"):
            change(model)


def test_a_stack_of_matrices_whose_inputs_are_unknown():
    model = nn.Module()
    model.stack, model.linear = nn.Parameter(torch.randn(2, 4, 3)), nn.Linear(3, 2)
    model.positions = nn.Parameter(torch.randn(1, 5, 3))
    with pytest.raises(cv.CurvoscopeError, match=r"'stack' is \(2, 4, 3\), and which axis is its inputs is not known"):
        recipes.int4(model)
    del model.stack
    found = recipes.int4(model)
    assert torch.equal(found["positions"], model.positions) and not torch.equal(
        found["linear.weight"], model.linear.weight
    )
    with pytest.raises(cv.CurvoscopeError, match=r"'positions' is \(1, 5, 3\), and which axis is its inputs"):
        recipes.int4(model, names=["positions"])


def test_recurrent_weights_are_stored_by_outputs():
    torch.manual_seed(0)
    model = nn.LSTM(4, 2).double()
    expected = np.stack([integers(w, 3, True) for w in model.weight_ih_l0.detach().numpy()])
    np.testing.assert_allclose(recipes.int3(model)["weight_ih_l0"].numpy(), expected, atol=1e-12)


def jamba():
    torch.manual_seed(0)
    config = transformers.JambaConfig(
        **{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_experts": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"mamba_d_state": 4, "mamba_dt_rank": 2},
    )
    return transformers.JambaForCausalLM(config)


def test_layers_of_which_a_part_is_not_known_by_name():
    model = jamba()
    found = recipes.int4(model)
    for name, W in model.named_parameters():
        if "feed_forward" in name and name.endswith("proj.weight"):
            expected = np.stack([integers(w, 4, True) for w in W.detach().double().numpy()])
            np.testing.assert_allclose(found[name].numpy(), expected, atol=1e-6)
    with pytest.raises(cv.CurvoscopeError, match=r"the role of .*feed_forward.* is not known by name"):
        recipes.drop_layers(model, ["h.0"])


def test_dropped_layers_of_mixers():
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=4)
    model, x = transformers.MambaForCausalLM(config).eval(), torch.arange(6)[None]
    model.load_state_dict(recipes.drop_layers(model, ["h.0"]))
    with torch.no_grad():
        dropped = model(x, use_cache=False).logits
        model.backbone.layers = model.backbone.layers[1:]
        torch.testing.assert_close(dropped, model(x, use_cache=False).logits)


def test_merging_averaging_and_mixing():
    model = GPT(d=8)
    A, B = torch.randn(8, 2).double(), torch.randn(2, 8).double()
    merged = recipes.merge_lora(model, {"h.0.attn.K": (A, B)}, 0.5)
    blocks = blocks_of(model)
    change = {name: merged[name] - p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(blocks["h.0.attn.K"].matrix(change), 0.5 * A @ B)
    assert not blocks["h.0.attn.Q"].gather(change).any() and not blocks["h.0.attn.V"].gather(change).any()
    mean = recipes.average(model, merged, 0.25)
    torch.testing.assert_close(mean["h.0.attn.c_attn.weight"], 0.75 * model.h[0].attn.c_attn.weight.detach()
                               + 0.25 * merged["h.0.attn.c_attn.weight"])  # fmt: skip
    mixed = recipes.mix(model, {"h.0.attn.K": merged, "h.0.mlp.up": recipes.int3})
    torch.testing.assert_close(mixed["h.0.attn.c_attn.weight"], merged["h.0.attn.c_attn.weight"])
    assert torch.equal(mixed["h.0.mlp.c_fc.weight"], recipes.int3(model)["h.0.mlp.c_fc.weight"])
    assert torch.equal(mixed["h.0.mlp.c_proj.weight"], model.h[0].mlp.c_proj.weight)


def test_tied_weights_change_together():
    model = GPT()
    found = recipes.int4(model, names=["embed"])
    assert not torch.equal(found["wte.weight"], model.wte.weight)
    assert torch.equal(found["wte.weight"], found["lm_head.weight"])


@pytest.mark.parametrize(
    ("make_state", "said"),
    [
        (lambda: recipes.int4(nn.Linear(6, 2), group=4), "group: 'weight' has 6 inputs, which 4 does not divide"),
        (lambda: recipes.prune_2_4(nn.Linear(6, 2)), "model: 'weight' has 6 inputs, which 4 does not divide"),
        (lambda: recipes.int4(nn.Linear(6, 2), group="row"), "group: got 'row', expected"),
        (lambda: recipes.int4(nn.Linear(6, 2), group=0), "group: got 0, expected"),
        (lambda: recipes.prune(nn.Linear(6, 2), 1.5), "share: got 1.5, expected a share"),
        (lambda: recipes.low_rank(nn.Linear(6, 2), -0.5), "share: got -0.5"),
        (lambda: recipes.int8(nn.LayerNorm(4)), "model: LayerNorm has no weight matrix"),
        (lambda: recipes.drop_heads(nn.Linear(6, 2)), "model: Linear has no block attn.O"),
        (lambda: recipes.drop_heads(GPT(), {"h.3.attn": [0]}), "heads: there is no 'h.3.attn' among h.0.attn"),
        (lambda: recipes.drop_heads(GPT(), {"h.0.attn": [2]}), r"heads: 'h.0.attn' has 2 heads, got \[2\]"),
        (lambda: recipes.drop_layers(GPT(), ["h.4"]), "layers: got 'h.4', expected some of h.0"),
        (lambda: recipes.drop_layers(GPT(), []), "layers: got None"),
        (
            lambda: recipes.merge_lora(GPT(), {"h.0.attn.K": (torch.ones(3, 1), torch.ones(1, 4))}),
            r"adapters: 'h.0.attn.K': A \(3, 1\) and B \(1, 4\) do not make \(4, 4\)",
        ),
        (lambda: recipes.int4(GPT(), names=["nothing"]), "patterns: 'nothing' matches none"),
    ],
)
def test_what_a_recipe_cannot_take(make_state, said):
    with pytest.raises(cv.CurvoscopeError, match=said):
        make_state()


def test_weights_stored_as_integers():
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(torch.ones(2, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(cv.CurvoscopeError, match=r"model: 'weight' is torch\.int8: it is quantised already"):
        recipes.int4(model)
