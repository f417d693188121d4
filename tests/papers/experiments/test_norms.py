"""The norms of the sweeps against dense Hessians by automatic differentiation, cut at the logits."""

import pytest
import torch
from torch.func import functional_call, grad, jacfwd
from torch.nn.functional import one_hot

from curvoscope.papers.experiments import lower_layers
from curvoscope.papers.experiments.lower_layers import lower_layer_norms
from curvoscope.papers.experiments.setting import Setting, logit_loss
from curvoscope.papers.experiments.top_layer import kronecker_norm, merged, top_layer_norms

SETTINGS = [
    Setting(d=5, sequences=3),
    Setting(d=5, sequences=3, norm="pre"),
    Setting(d=5, sequences=3, attention="linear", residual=False, loss="mse"),
    Setting(d=5, sequences=3, attention="linear", norm="pre", loss="mse"),
]


def shaken(setting, depth):
    """Biases and the parameters of the norms away from zero and one, so that they matter."""
    model = setting.swept(0, depth, 0.7)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.split(".")[-1].startswith("W_"):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def loss_at_logits(kind, tokens):
    """The issue's words, written out anew: positions 11 to 16."""
    if kind == "mse":
        return lambda z: (z - one_hot(tokens[:, 11:17], 12)).square().sum()
    return lambda z: -z.log_softmax(-1).gather(-1, tokens[:, 12:18, None]).mean()


def dense_parts(setting, model, layer, block):
    tokens = setting.additions()
    name, weights = f"blocks.{layer}.W_{block}", dict(model.named_parameters())
    start = weights[name].flatten()
    loss = loss_at_logits(setting.loss, tokens)

    def logits(flat):
        return functional_call(model, {**weights, name: flat.view(setting.d, setting.d)}, tokens)[:, 11:17]

    z = logits(start)
    total = jacfwd(grad(lambda flat: loss(logits(flat))))(start)
    J = jacfwd(logits)(start).reshape(z.numel(), -1)
    S = jacfwd(grad(lambda flat: loss(flat.view_as(z))))(z.flatten())
    outer = J.T @ S @ J
    return {"outer": outer, "functional": total - outer, "total": total}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_top_layer(setting, depth):
    model = shaken(setting, depth)
    found = top_layer_norms(model, setting.additions(), setting.loss)
    assert len(found) == 6
    for block in "QV":
        parts = dense_parts(setting, model, depth - 1, block)
        for part, dense in parts.items():
            tolerance = 1e-11 * float(parts["total"].norm())
            assert found[block, part] == pytest.approx(float(dense.norm()), rel=1e-10, abs=tolerance)
        if setting.norm == "none":
            assert found["V", "functional"] == 0.0  # exactly: the tail is piecewise linear


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2]], ids=str)
def test_lower_layers(setting, monkeypatch):
    monkeypatch.setattr(lower_layers, "TOLERANCE", 0.01)
    monkeypatch.setattr(lower_layers, "_MOST_PROBES", 4000)
    setting = setting.model_copy(update={"d": 8})  # 64 dimensions, of which a sketch spans 16
    model = shaken(setting, 3)
    found = lower_layer_norms(model, setting.additions(), setting.loss, seed=0)
    assert set(found) == {(i, b, p) for i in (0, 1) for b in "QV" for p in ("outer", "functional", "total")}
    for (layer, block, part), estimate in found.items():
        norm = float(dense_parts(setting, model, layer, block)[part].norm())
        if part == "outer":
            assert estimate.value == pytest.approx(norm, rel=1e-10) and estimate.stderr == 0
        else:
            assert estimate.stderr <= 0.01 * estimate.value
            assert estimate.value == pytest.approx(norm, rel=0.05)


def test_lower_layers_are_a_function_of_the_seed():
    setting = Setting(d=4, sequences=2)
    model = setting.swept(0, 2, 0.5)
    once, again, other = (lower_layer_norms(model, setting.additions(), "ce", seed) for seed in (1, 1, 2))
    assert once == again and once != other
    assert lower_layer_norms(setting.swept(0, 1, 0.5), setting.additions(), "ce", 0) == {}


@pytest.mark.parametrize("kind", ["ce", "mse"])
def test_loss_at_the_logits(kind):
    tokens = Setting(sequences=2).additions()
    logits = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss, found = loss_at_logits(kind, tokens), logit_loss(kind, logits, tokens)
    torch.testing.assert_close(found.gradient, grad(loss)(logits))
    S = jacfwd(grad(lambda z: loss(z.view_as(logits))))(logits.flatten())
    blocks = (found.root @ found.root.mT).reshape(12, 12, 12)
    torch.testing.assert_close(torch.block_diag(*blocks), S)


def test_the_sweep_scales_the_embeddings_and_nothing_else():
    setting = Setting(d=8)
    small, large = (dict(setting.swept(3, 2, sigma).named_parameters()) for sigma in (0.25, 1.0))
    for name, weight in small.items():
        factor = 0.25 if name in ("W_E", "W_pos") else 1.0
        torch.testing.assert_close(weight, factor * large[name], rtol=0, atol=0)
    spread = torch.cat([setting.swept(seed, 1, 2.0).W_E.flatten() for seed in range(40)]).std()
    assert abs(float(spread) / 2 - 1) < 0.05
    assert small["W_pos"].shape == (18, 8)


def test_kronecker_norm_with_equal_vectors():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 4, generator=generator, dtype=torch.float64)[[0, 1, 0, 2, 1]]
    cores = torch.randn(5, 2, 3, generator=generator, dtype=torch.float64)
    dense = sum(torch.kron(torch.outer(v, v), c) for v, c in zip(vectors, cores, strict=True))
    assert len(merged(vectors, cores)[0]) == 3
    for chosen in ((vectors, cores), merged(vectors, cores)):
        assert kronecker_norm(*chosen) == pytest.approx(float(dense.norm()), rel=1e-13)
