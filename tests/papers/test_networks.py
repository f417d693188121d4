import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, jacfwd

from curvoscope.errors import DtypeError, EmptyError, RangeError, ShapeError
from curvoscope.papers.networks import GPT2, PrimitiveLayerNorm
from curvoscope.papers.tasks import addition, answer_targets

KINDS = [("none", "softmax"), ("pre", "softmax"), ("none", "linear"), ("pre", "linear")]


def batch(sequences=3, seed=0):
    tokens = addition(sequences, seed=seed)
    return tokens[:, :-1], answer_targets(tokens)


def shaken(**options):
    """A model away from its initialisation, so that biases and the parameters of the norms matter."""
    model = GPT2(**options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def logits_by_hand(model, tokens, norm, activation):
    """One sequence, token by token, in numpy."""
    w = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}

    def normed(vector, name):
        if norm == "none":
            return vector
        deviation = vector - vector.sum() / len(vector)
        return (
            w[f"{name}.gamma"] * deviation / math.sqrt((deviation @ deviation) / len(vector) + 1e-5) + w[f"{name}.beta"]
        )

    stream = [w["W_E"][int(token)] + w["W_pos"][i] for i, token in enumerate(tokens)]
    for n in range(len(model.blocks)):
        b = {name.removeprefix(f"blocks.{n}."): value for name, value in w.items()}
        read = [normed(x, f"blocks.{n}.norm1") for x in stream]
        after = []
        for i, x in enumerate(stream):
            query = read[i] @ b["W_Q"] + b["b_Q"]
            scores = [query @ (read[j] @ b["W_K"] + b["b_K"]) / math.sqrt(len(x)) for j in range(i + 1)]
            if activation == "softmax":
                total = sum(math.exp(score) for score in scores)
                scores = [math.exp(score) / total for score in scores]
            mixed = sum(score * (read[j] @ b["W_V"] + b["b_V"]) for j, score in enumerate(scores))
            y = x + mixed @ b["W_O"] + b["b_O"]
            hidden = np.maximum(normed(y, f"blocks.{n}.norm2") @ b["W_up"] + b["b_up"], 0)
            after.append(y + hidden @ b["W_down"] + b["b_down"])
        stream = after
    return np.stack([normed(x, "norm") @ w["W_U"] + w["b_U"] for x in stream])


@pytest.mark.parametrize(("norm", "activation"), KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_logits_and_loss_by_hand(norm, activation, depth):
    model = shaken(d=5, depth=depth, norm=norm, activation=activation)
    inputs, targets = batch()
    logits = model(inputs)
    terms = []
    for n in range(len(inputs)):
        expected = logits_by_hand(model, inputs[n], norm, activation)
        np.testing.assert_allclose(logits[n].detach().numpy(), expected, rtol=1e-11, atol=1e-12)
        for i in range(11, 17):
            terms.append(math.log(np.exp(expected[i]).sum()) - expected[i, targets[n, i]])
    assert float(model.loss(inputs, targets).detach()) == pytest.approx(sum(terms) / len(terms), rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2])
def test_without_residual_the_attention_output_replaces_the_stream(depth):
    model = shaken(d=5, depth=depth, activation="linear", residual=False)
    inputs, targets = batch()
    x = model.residual_stream(inputs, 0)
    for block in model.blocks:
        F = block.attend(x)
        x = F + (F @ block.W_up + block.b_up).relu() @ block.W_down + block.b_down
    torch.testing.assert_close(model(inputs), x @ model.W_U + model.b_U, rtol=1e-13, atol=1e-13)
    F = model.attention()(model.attention_input(inputs))
    torch.testing.assert_close(model.tail(inputs, targets)(F), model.loss(inputs, targets), rtol=1e-13, atol=0)
    plain = GPT2(d=5, depth=depth, activation="linear", residual=False)  # without biases: of degree 3^depth
    before = plain(inputs)
    for parameter in (plain.W_E, plain.W_pos):
        parameter.data *= 2
    torch.testing.assert_close(plain(inputs), 2.0 ** (3**depth) * before)


def test_the_loss_starts_near_that_of_guessing():
    for seed in range(5):
        loss = float(GPT2(d=64, seed=seed).loss(*batch(64, seed)).detach())
        assert abs(loss - math.log(12)) < 0.25


@pytest.mark.parametrize(("norm", "activation"), KINDS)
def test_causal(norm, activation):
    model = shaken(d=6, depth=2, norm=norm, activation=activation)
    inputs, _ = batch(2)
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 12
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-13, atol=1e-13)
    assert float((before[:, 9:] - after[:, 9:]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize(("norm", "activation"), KINDS)
@pytest.mark.parametrize("block", [0, 1, -1])
def test_cut_at_the_attention_output_and_put_together_again(norm, activation, block):
    model = shaken(d=6, depth=2, norm=norm, activation=activation)
    inputs, targets = batch()
    X = model.attention_input(inputs, block)
    assert X.shape == (3, 17, 6)
    F = model.attention(block)(X)
    torch.testing.assert_close(F, model.blocks[block].attend(X).detach(), rtol=1e-12, atol=1e-13)
    whole = model.loss(inputs, targets)
    torch.testing.assert_close(model.tail(inputs, targets, block)(F), whole, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("norm", "activation"), KINDS)
@pytest.mark.parametrize(("depth", "block"), [(1, 0), (2, 0), (2, 1)])
def test_the_exact_hessian_of_the_cut_is_that_of_the_whole_network(norm, activation, depth, block):
    model = shaken(d=3, depth=depth, norm=norm, activation=activation)
    inputs, targets = batch(2)
    names = [f"blocks.{block}.W_{name}" for name in "QKVO"]
    weights = dict(model.named_parameters())

    def loss(flat):
        parts = dict(zip(names, flat.view(4, 3, 3), strict=True))
        logits = functional_call(model, {**weights, **parts}, inputs)
        return -logits[:, 11:17].log_softmax(-1).gather(-1, targets[:, 11:17, None]).mean()

    flat = torch.cat([weights[name].detach().flatten() for name in names])
    expected = jacfwd(grad(loss))(flat).detach()
    H = model.attention(block).hessian(model.attention_input(inputs, block), model.tail(inputs, targets, block))
    torch.testing.assert_close(H.dense(), expected, rtol=0, atol=1e-10 * float(expected.abs().max().detach()))


def test_layer_norm_is_torchs_and_its_mixed_derivatives_agree_in_either_order():
    norm = PrimitiveLayerNorm(7, torch.float64)
    generator = torch.Generator().manual_seed(0)
    gamma, beta, x = torch.randn(3, 7, generator=generator, dtype=torch.float64)

    def output(gamma, x):
        return functional_call(norm, {"gamma": gamma, "beta": beta}, x).pow(3).sum()

    expected = torch.nn.functional.layer_norm(x, (7,), gamma, beta, eps=1e-5)
    torch.testing.assert_close(functional_call(norm, {"gamma": gamma, "beta": beta}, x), expected)
    both = torch.func.hessian(output, argnums=(0, 1))(gamma, x)
    torch.testing.assert_close(both[0][1], both[1][0].mT)


def test_initialisation():
    model = GPT2(d=64, depth=2, norm="pre", seed=3)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        kind = name.split(".")[-1]
        if kind.startswith("W_"):
            # The standard error of a standard deviation over n draws is sd / sqrt(2 n).
            spread = float(parameter.std().detach()) / (0.8 / 8)
            assert abs(spread - 1) < 5 / math.sqrt(2 * parameter.numel()), name
        else:
            assert bool((parameter == (1 if kind == "gamma" else 0)).all()), name
    assert {name.split(".")[-1] for name, _ in model.named_parameters()} >= {"W_E", "W_pos", "W_U", "b_U"}
    assert model.blocks[0].W_up.shape == (64, 256) and model.blocks[0].W_down.shape == (256, 64)


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = GPT2(seed=5)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    again, other = GPT2(seed=5, norm="pre", activation="linear"), GPT2(seed=6)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
    assert not torch.equal(one.W_E, other.W_E)
    single = GPT2(seed=5, dtype=torch.float32)
    assert torch.equal(single.blocks[0].W_Q, one.blocks[0].W_Q.float())
    assert single(batch()[0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("d", 0),
        ("depth", 0),
        ("vocabulary", -1),
        ("context", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("norm", "post"),
        ("activation", "relu"),
    ],
)
def test_options_out_of_range_are_named(argument, value):
    with pytest.raises(RangeError, match=f"^{argument}: got '?{value}") as caught:
        GPT2(**{argument: value})
    assert caught.value.argument == argument


def test_bad_input_is_named():
    model = GPT2(d=4, depth=2)
    inputs, targets = batch()
    with pytest.raises(DtypeError, match=r"^dtype: got"):
        GPT2(dtype=torch.int64)
    with pytest.raises(DtypeError, match=r"^tokens: expected"):
        model(inputs.double())
    with pytest.raises(ShapeError, match=r"^tokens: got shape"):
        model(torch.zeros(2, 19, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"^tokens: got shape"):
        model(inputs[0])
    with pytest.raises(EmptyError, match=r"^tokens: is empty"):
        model(inputs[:0])
    with pytest.raises(RangeError, match=r"^tokens: from 0 to 12"):
        model(torch.tensor([[0, 12]]))
    with pytest.raises(RangeError, match=r"^tokens: from -1"):
        model(torch.tensor([[-1, 2]]))
    with pytest.raises(DtypeError, match=r"^targets: expected"):
        model.loss(inputs, targets.double())
    with pytest.raises(ShapeError, match=r"^targets: got shape"):
        model.loss(inputs, targets[:, :-1])
    with pytest.raises(EmptyError, match=r"^targets: every one"):
        model.loss(inputs, torch.full_like(targets, -100))
    with pytest.raises(RangeError, match=r"^targets: expected 0 to 11"):
        model.loss(inputs, torch.full_like(targets, 12))
    for block in (2, -3):
        with pytest.raises(RangeError, match=f"^block: got {block}"):
            model.attention(block)


@pytest.mark.parametrize("norm", ["none", "pre"])
def test_the_stack_is_the_network(norm):
    model = GPT2(4, depth=2, norm=norm, seed=1)
    tokens = addition(3, seed=2)
    inputs, targets = tokens[:, :-1], answer_targets(tokens)
    with torch.no_grad():
        found = model.exact_loss(targets)(model.stack()(model.residual_stream(inputs, 0)))
        expected = model.loss(inputs, targets)
    assert float(found) == pytest.approx(float(expected), rel=1e-13)


def test_a_stack_needs_residual_connections():
    with pytest.raises(RangeError, match="residual"):
        GPT2(4, residual=False).stack()
