"""Curvature through depth against autodiff at the output of every layer."""

import math

import pytest
import torch
from torch.func import grad, jacfwd, jacrev

import curvoscope as cv
from curvoscope.analysis import AttentionSummary, propagation
from curvoscope.closed import layer_curvatures
from curvoscope.errors import EmptyError, ModelError, ShapeError
from curvoscope.exact.block import Stack
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from curvoscope.report.depth_figures import propagation_figure, propagation_map
from reference import normal

TOKENS = tasks.addition(2, seed=0)
INPUTS, TARGETS = TOKENS[:, :-1], tasks.answer_targets(TOKENS)


def _model(norm, depth=2):
    model = GPT2(4, depth=depth, norm=norm, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def _norms(matrix):
    matrix = matrix.detach()
    return float(torch.linalg.matrix_norm(matrix, 2)), float(matrix.norm())


def _truth(model, block):
    """S, its functional part and the layer's Jacobian at the attention output of `block`, dense."""
    X = model.attention_input(INPUTS, block)
    attend = model.blocks[block].attend
    F = attend(X).detach()
    tail, n = model.tail(INPUTS, TARGETS, block), F.numel()
    S = jacfwd(grad(tail))(F).reshape(n, n)

    def logits(F):
        x = model.blocks[block].after_attention(model.residual_stream(INPUTS, block).detach(), F)
        for later in model.blocks[block + 1 :]:
            x = later(x)
        return model._logits(x)

    def loss(values):
        return torch.nn.functional.cross_entropy(values.flatten(0, 1), TARGETS.flatten(), ignore_index=-100)

    out = logits(F).detach()
    J = jacrev(logits)(F).reshape(-1, n).detach()
    S_out = jacfwd(grad(loss))(out).reshape(len(J), len(J))
    jacobian = jacrev(attend)(X).reshape(n, n).detach()
    return S, S - J.T @ S_out @ J, jacobian


@pytest.mark.parametrize("norm", ["none", "pre"])
def test_a_model_against_autodiff_at_every_attention_layer(norm):
    model = _model(norm)
    found = propagation(model, (INPUTS, TARGETS), cv.curvature.CrossEntropy())
    layers = {layer.name: layer for layer in found.layers}
    assert list(layers) == ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    assert found.loss == pytest.approx(float(model.loss(INPUTS, TARGETS).detach()), rel=1e-12)
    for block in range(2):
        layer = layers[f"h.{block}.attn"]
        S, functional, jacobian = _truth(model, block)
        expected = (*_norms(S), *_norms(functional), _norms(jacobian)[0])
        measured = layer.spectral, layer.frobenius, layer.functional_spectral, layer.functional_frobenius
        for estimate, value in zip((*measured, layer.jacobian), expected, strict=True):
            assert abs(estimate.value - value) <= 1e-9 * value + 1e-12 * expected[0] + 4 * estimate.stderr
        assert layer.spectral.stderr == layer.frobenius.stderr == layer.functional_frobenius.stderr == 0
        assert set(layer.blocks) == {
            f"h.{block}.attn.{role}" for role in ("Q", "K", "V", "O", "b_Q", "b_K", "b_V", "b_O")
        }
        A = model.attention(block).moments(model.attention_input(INPUTS, block)).attention
        entropy = float(-(A * A.clamp_min(1e-300).log()).sum(-1).mean())
        assert layer.attention.entropy == pytest.approx(entropy, rel=1e-9)
        assert 0 < layer.attention.variance < 1
    assert layers["h.0.mlp"].attention is None
    assert (
        layers["h.0.mlp"].functional_frobenius.value > 0 == layers["h.1.mlp"].functional_frobenius.value
        or norm == "pre"
    )


def test_block_norms_are_those_of_the_hessian():
    model = _model("pre")
    loss = cv.curvature.CrossEntropy()
    found = propagation(model, (INPUTS, TARGETS), loss)
    H = cv.hessian(model, loss, [(INPUTS, TARGETS)], method="autodiff")
    for layer in found.layers:
        for name, norm in layer.blocks.items():
            assert norm.value == pytest.approx(float(H.total[name].dense().norm()), rel=1e-8)


def test_matrix_free_where_the_curvature_is_too_large(monkeypatch):
    model = _model("none")
    loss = cv.curvature.CrossEntropy()
    exact = propagation(model, (INPUTS, TARGETS), loss)
    monkeypatch.setattr(layer_curvatures, "_MOST_PRODUCTS", 0)
    found = propagation(model, (INPUTS, TARGETS), loss, tolerance=0.1)
    for one, other in zip(found.layers, exact.layers, strict=True):
        for name in ("spectral", "frobenius", "functional_frobenius"):
            estimate, truth = getattr(one, name), getattr(other, name).value
            assert abs(estimate.value - truth) <= 5 * estimate.stderr + 1e-9 * truth
        assert one.frobenius.matvecs > 0


def test_one_hot_rows_have_no_entropy_and_no_spread():
    model = _model("none", depth=1)
    with torch.no_grad():
        model.blocks[0].W_Q.mul_(1e7)
    layer = propagation(model, (INPUTS, TARGETS), cv.curvature.CrossEntropy()).layers[0]
    assert layer.attention.entropy < 1e-3
    assert abs(layer.attention.variance) < 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_are_no_distributions_have_no_entropy(causal):
    draw, X = normal(4), normal(8)(2, 4, 3)
    weights = [draw(3, 3) for _ in range(3)]
    summaries = {
        activation: AttentionSummary.of(
            cv.exact.SelfAttention(*weights, activation=activation, causal=causal).moments(X)
        )
        for activation in ("softmax", "linear")
    }
    assert summaries["linear"].entropy is None and math.isfinite(summaries["linear"].variance)
    assert 0 < summaries["softmax"].entropy < math.log(4)


class TestStack:
    def _stack(self, placement, depth=2):
        draw = normal(5)

        def block():
            attention = cv.exact.SelfAttention(*(draw(4, 4) / 2 for _ in range(4)), causal=True)
            feedforward = cv.exact.FeedForward(draw(4, 6) / 2, draw(6) / 4, draw(6, 4) / 2, draw(4) / 4, "gelu")
            norms = (
                [] if placement == "none" else [cv.exact.LayerNorm(1 + draw(4) / 4, draw(4) / 4, 1e-5) for _ in "12"]
            )
            return cv.exact.TransformerBlock(attention, feedforward, *norms, placement=placement)

        return Stack([block() for _ in range(depth)])

    @pytest.mark.parametrize("placement", ["pre", "post", "none"])
    def test_at_the_input_against_autodiff(self, placement):
        stack, X, Y = self._stack(placement), normal(6)(2, 3, 4), normal(7)(2, 3, 4)
        loss = cv.losses.MSE(Y)
        found = propagation(stack, (X, loss))
        assert found.layers[0].name == "input"
        assert found.layers[0].jacobian is None
        S = jacfwd(grad(lambda x: _plain(stack, x).sub(Y).square().mean()))(X).reshape(24, 24)
        assert found.layers[0].spectral.value == pytest.approx(_norms(S)[0], rel=1e-9)
        assert found.layers[0].frobenius.value == pytest.approx(_norms(S)[1], rel=1e-9)
        assert found.loss == pytest.approx(float((stack(X) - Y).square().mean()), rel=1e-12)
        last = found.layers[-1]  # above it there is only the loss, or a norm
        if placement != "post":
            assert last.spectral.value == pytest.approx(2 / 24, rel=1e-12)
            assert last.functional_frobenius.value == 0
        assert found.growth() == pytest.approx(found.layers[0].spectral.value / last.spectral.value)


def _plain(stack, x):
    """The stack written with torch's primitives."""
    for block in stack.layers:
        a, f = block.attention, block.feedforward

        def attend(x, a=a):
            scores = (x @ a.W_Q) @ (x @ a.W_K).mT / math.sqrt(a.W_Q.shape[1])
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return scores.masked_fill(~visible, -math.inf).softmax(-1) @ (x @ a.W_V) @ a.W_O

        def feed(x, f=f):
            W = f.weights
            return torch.nn.functional.gelu(x @ W["W1"] + W["b1"]) @ W["W2"] + W["b2"]

        def normed(norm, x):
            centred = x - x.mean(-1, keepdim=True)
            return norm.gamma * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + norm.beta

        if block.placement == "pre":
            x = x + attend(normed(block.norm1, x))
            x = x + feed(normed(block.norm2, x))
        elif block.placement == "post":
            x = normed(block.norm1, x + attend(x))
            x = normed(block.norm2, x + feed(x))
        else:
            x = x + attend(x)
            x = x + feed(x)
    return x


class TestErrors:
    def test_a_model_without_known_layers(self):
        model = torch.nn.Linear(3, 2).double()
        with pytest.raises(ModelError, match="no attention or feed-forward layer"):
            propagation(model, (normal(0)(4, 3), normal(1)(4, 2)), torch.nn.MSELoss())

    def test_several_batches(self):
        H = cv.hessian(
            _model("none"), cv.curvature.CrossEntropy(), [(INPUTS[:1], TARGETS[:1]), (INPUTS[1:], TARGETS[1:])]
        )
        with pytest.raises(cv.curvature.BatchError, match="2 micro-batches"):
            next(H.layer_curvatures())

    def test_figures(self):
        with pytest.raises(EmptyError, match="networks"):
            propagation_figure({}, "none")
        with pytest.raises(ShapeError, match="1 steps for 0"):
            propagation_map([1], [], "none")


def test_figures_show_every_layer_and_network(tmp_path):
    loss = cv.curvature.CrossEntropy()
    found = {norm: propagation(_model(norm), (INPUTS, TARGETS), loss) for norm in ("none", "pre")}
    figure = propagation_figure(found, "title")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["none", "pre"]
    labels = [text.get_text() for text in figure.axes[2].get_xticklabels()]
    assert labels == ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]
    line = figure.axes[0].containers[0].lines[0]
    assert list(line.get_ydata()) == [layer.spectral.value for layer in found["none"].layers]
    figure.savefig(tmp_path / "depth.png")
    assert not any(axes.texts for axes in figure.axes)
    chart = propagation_map([0, 10], [found["none"], found["none"]], "title")
    assert chart.axes[0].images[0].get_array().shape == (4, 2)
    chart.savefig(tmp_path / "map.png")


def test_a_panel_without_a_number_says_so():
    """Behind the last attention layer there is a ReLU network alone: both layers' outputs have no functional part."""
    found = propagation(_model("none", depth=1), (INPUTS, TARGETS), cv.losses.CrossEntropy())
    assert [layer.functional_spectral.value for layer in found.layers] == [0, 0]
    figure = propagation_figure({"one layer": found}, "title")
    assert not figure.axes[1].containers and figure.axes[1].texts[0].get_text() == "zero, or not measured"


def test_the_tolerance_reaches_blocks_without_a_closed_form(monkeypatch):
    """Blocks that are left to autodiff are estimated to the tolerance, not with the default budget."""
    monkeypatch.setattr("curvoscope.closed.closed_forms.ClosedForms.block", lambda *arguments: None)
    model = GPT2(8, depth=1, norm="pre", seed=3)
    found = propagation(model, (INPUTS, TARGETS), cv.losses.CrossEntropy(), tolerance=0.5)
    blocks = found.layers[0].blocks
    plain = cv.hessian(model, cv.losses.CrossEntropy(), [(INPUTS, TARGETS)], method="autodiff")
    assert any(norm.matvecs < plain[name].frobenius_norm().matvecs for name, norm in blocks.items())
