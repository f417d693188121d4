"""Layers, losses and models with numbers from 1e-30 to 1e30: the right number or a typed error, never NaN, inf or 0.

The truth is an exact relation (a Hessian is homogeneous of known degrees, and powers of two cost no digit), the same
numbers in float64, or hundreds of decimal digits.
"""

import itertools
import math

import mpmath
import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope import losses
from curvoscope.curvature import hessian
from curvoscope.errors import CurvoscopeError, NonFiniteError, RangeError
from many_digits import Case
from reference import normal

TINY, HUGE = 2.0**-100, 2.0**100  # 1e-30 and 1e30, and no rounding


def answers(operator):
    """All that a block can be asked, as tensors in float64; None for a typed error."""
    questions = {
        "dense": operator.dense,
        "product": lambda: operator @ torch.linspace(-1, 1, operator.shape[1], dtype=operator.dtype),
        "frobenius_norm": operator.frobenius_norm,
        "spectral_norm": operator.spectral_norm,
    }
    if operator.symmetric:
        questions |= {name: getattr(operator, name) for name in ("trace", "diagonal", "eigenvalues")}
    found = {}
    for name, ask in questions.items():
        try:
            answer = ask()
            found[name] = answer.double() if torch.is_tensor(answer) else torch.tensor(answer, dtype=torch.float64)
        except NonFiniteError as error:
            assert error.argument in (name, "product"), error
            found[name] = None
    return found


class Scales:
    """Normal tensors, each multiplied by its own power of ten."""

    def __init__(self, exponents, dtype, seed=0):
        self._draw, self._exponents, self._dtype = normal(seed), iter(exponents), dtype

    def __call__(self, *shape):
        return (10.0 ** next(self._exponents) * self._draw(*shape)).to(self._dtype)


def _attention(w, to):
    weights = [w(3, 4), w(3, 4), w(3, 4), w(4, 3)]
    return cv.exact.SelfAttention(*map(to, weights), heads=2, causal=True), w(2, 3, 3)


def _feedforward(activation):
    def build(w, to):
        weights = [w(3, 4), w(4), w(4, 3), w(3)]
        return cv.exact.FeedForward(*map(to, weights), activation=activation), w(2, 2, 3)

    return build


def _layer_norm(w, to):
    return cv.exact.LayerNorm(to(w(4)), to(w(4))), w(2, 3, 4)


def _rms_norm(w, to):
    return cv.exact.RMSNorm(to(w(4))), w(2, 3, 4)


def _linear(w, to):
    return cv.exact.LinearMLP([to(w(3, 2)), to(w(2, 3)), to(w(3, 2))]), w(2, 2, 3)


def _block(w, to):
    weights, up, down, gamma, X = [w(3, 2), w(3, 2), w(3, 2), w(2, 3)], w(3, 4), w(4, 3), w(3), w(2, 3, 3)
    norms = [cv.exact.RMSNorm(to(gamma)) for _ in range(2)]
    attention = cv.exact.SelfAttention(*map(to, weights), causal=True)
    mlp = cv.exact.FeedForward(to(up), None, to(down), None, activation="gelu")
    return cv.exact.TransformerBlock(attention, mlp, *norms), X


LAYERS = {
    "attention": (_attention, 5),
    "relu": (_feedforward("relu"), 5),
    "gelu": (_feedforward("gelu"), 5),
    "silu": (_feedforward("silu"), 5),
    "LayerNorm": (_layer_norm, 3),
    "RMSNorm": (_rms_norm, 2),
    "LinearMLP": (_linear, 4),
    "TransformerBlock": (_block, 8),
}


def _table(count):
    """One tensor tiny or huge, all alike, and mixtures of huge and tiny."""
    for place in range(count):
        size = (-30, 20, -12, 12, -20, 30, -6, 6)[place]
        yield tuple(size if i == place else 0 for i in range(count))
    for size in (-12, 6):
        yield (size,) * count
    for low, high in ((-6, 6), (30, -30)):
        yield tuple(low if i % 2 else high for i in range(count))


@pytest.mark.parametrize("name", LAYERS)
def test_float32_is_right_or_refuses(name):
    """Against the same numbers in float64. A right answer may be below the least float, and then it is 0."""
    build, count = LAYERS[name]
    right = refused = 0
    for number, exponents in enumerate(_table(count)):
        kind = ("mse", "cross-entropy")[number % 2]
        found, truth = (_hessian(build, exponents, kind, number, dtype) for dtype in (torch.float32, torch.float64))
        if found is None or truth is None:
            refused += 1
            continue
        part, row = ("total", "outer", "functional")[number % 3], found.names[number % len(found.names)]
        expected, size = answers(getattr(truth, part)[row]), float(truth.total[row].dense().abs().max())
        for question, value in answers(getattr(found, part)[row]).items():
            if value is None or expected[question] is None:
                refused += 1
                continue
            limit = 2e-3 * truth[row].shape[0] * size + 100 * torch.finfo(torch.float32).tiny
            assert float((value - expected[question]).abs().max()) <= limit, (exponents, part, row, question)
            right += 1
    assert right > refused  # refusing everything would be too easy


def _hessian(build, exponents, kind, seed, dtype):
    """None for a typed error that names a tensor."""
    try:
        layer, X = build(Scales(exponents, torch.float32, seed), lambda tensor: tensor.to(dtype))
        X = X.to(dtype)
        F = layer(X)
        draw = normal(seed + 1)
        Y, U = draw(*F.shape), draw(F.shape[-1], 5)
        targets = torch.arange(F[..., 0].numel()).view(F.shape[:-1]) % 5
        loss = losses.MSE(Y.to(dtype)) if kind == "mse" else losses.CrossEntropy(targets, U.to(dtype))
        return layer.hessian(X, loss)
    except CurvoscopeError as error:
        assert isinstance(error, NonFiniteError | RangeError) and error.argument
        return None


@pytest.mark.parametrize("scale", [TINY, HUGE])
def test_attention_moves_scale_between_inputs_and_weights(scale):
    """X s and W / s give the same output: H(W, W') grows by s², H(W, O) by s, and H(O, O) stays."""
    draw = normal(0)
    X, weights, W_O, Y = draw(2, 4, 3), [draw(3, 4) for _ in range(3)], draw(4, 3), draw(2, 4, 3)
    plain = cv.exact.SelfAttention(*weights, W_O, heads=2).hessian(X, losses.MSE(Y))
    moved = cv.exact.SelfAttention(*(w / scale for w in weights), W_O, heads=2).hessian(scale * X, losses.MSE(Y))
    for row, column in (("Q", "Q"), ("Q", "K"), ("K", "V"), ("Q", "O"), ("V", "V"), ("O", "O")):
        factor = scale ** ((row != "O") + (column != "O"))
        here, there = answers(plain[row, column]), answers(moved[row, column])
        for question, value in here.items():
            rounding = 1e-11 * float(value.abs().max())
            assert torch.allclose(there[question] / factor, value, rtol=0, atol=rounding), question


@pytest.mark.parametrize("dtype, scale", [(torch.float64, TINY), (torch.float64, HUGE), (torch.float32, 2.0**-40)])
@pytest.mark.parametrize("norm", [cv.exact.LayerNorm, cv.exact.RMSNorm])
def test_norms_know_no_scale(norm, dtype, scale):
    """N(s x; s² ε) = N(x; ε): the block of γ stays, that of x shrinks by s²."""
    draw = normal(1)
    gamma, X, Y = draw(5).to(dtype), draw(2, 3, 5).to(dtype), losses.MSE(draw(2, 3, 5).to(dtype))
    plain = norm(gamma, eps=1e-3).hessian(X, Y, wrt_input=True)
    moved = norm(gamma, eps=1e-3 * scale**2).hessian(scale * X, Y, wrt_input=True)
    for name, factor in (("gamma", 1.0), ("X", scale**-2)):
        here, there = answers(plain.total[name]), answers(moved.total[name])
        for question, value in here.items():
            rounding = 100 * torch.finfo(dtype).eps * float(value.abs().max())
            assert torch.allclose(there[question] / factor, value, rtol=0, atol=rounding), question


def test_a_row_without_variance_needs_eps():
    with pytest.raises(RangeError, match="eps"):
        cv.exact.LayerNorm(torch.ones(3).double(), eps=0.0).hessian(
            torch.full((2, 3), 1e-30).double(), losses.MSE(torch.zeros(2, 3).double())
        )


DIGITS = {
    "tiny inputs: all scores nearly equal": {"X": 1e-30},
    "huge inputs, tiny weights": {"X": 1e30, "Q": 1e-30, "K": 1e-30, "V": 1e-30},
    "huge values and targets": {"V": 1e30, "Y": 1e30},
    "tiny queries, huge keys": {"Q": 1e-30, "K": 1e30},
    "saturated by huge inputs": {"X": 20.0, "Q": 3.0},
}


@pytest.mark.parametrize("name", DIGITS)
def test_attention_to_all_digits(name):
    with mpmath.workdps(600):
        case = Case(**DIGITS[name])
        for row, column in ((0, 0), (0, 2), (2, 2)):
            truth = case.block(row, column)
            size = float(truth.abs().max())
            assert size > 0
            block = case.H["QKV"[row], "QKV"[column]]
            assert float((block.dense() - truth).abs().max()) < 1e-10 * size
            assert block.frobenius_norm() == pytest.approx(size * float((truth / size).norm()), rel=1e-10)


@pytest.mark.parametrize("z", [5.0, 40.0, 150.0, 350.0])
def test_saturated_cross_entropy(z):
    """Two words with logits ±z: G = -2p, S = 4p(1 - p), p = 1/(1 + e^2z), down to 1e-304."""
    U, F = torch.tensor([[1.0, -1.0]], dtype=torch.float64), torch.full((1, 1, 1), z, dtype=torch.float64)
    p = math.exp(-2 * z) / (1 + math.exp(-2 * z))
    found = losses.CrossEntropy(torch.zeros(1, 1, dtype=torch.int64), U).at(F)
    assert float(found.gradient) == pytest.approx(-2 * p, rel=1e-12)
    assert float(found.curvature.apply(torch.ones(1, 1, 1).double())) == pytest.approx(4 * p * (1 - p), rel=1e-12)


def test_a_large_loss_is_finite_in_float64():
    F, Y = torch.full((1, 2, 1), 1e100, dtype=torch.float64), torch.zeros(1, 2, 1, dtype=torch.float64)
    assert losses.at(losses.MSE(Y), F, squeeze=False).value == pytest.approx(1e200)
    with pytest.raises(NonFiniteError, match="loss"):
        losses.at(losses.MSE(Y.float()), F.float().clamp_max(1e30), squeeze=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_are_zeros(dtype):
    """Zero inputs or weights: what is zero is 0, and nothing is NaN."""
    draw = normal(2)
    for X, W in itertools.product((0.0, 1.0), repeat=2):
        weights = [(W * draw(3, 4)).to(dtype) for _ in range(3)]
        H = cv.exact.SelfAttention(*weights).hessian((X * draw(4, 3)).to(dtype), losses.MSE(draw(4, 4).to(dtype)))
        for name in H.names:
            found = answers(H[name])
            assert all(torch.isfinite(value).all() for value in found.values())
            if X == 0:
                assert all(not bool(value.any()) for value in found.values())


@pytest.mark.parametrize(
    "scale, dtype", [(1e-12, torch.float32), (1e12, torch.float32), (1e-100, torch.float64), (1e100, torch.float64)]
)
@pytest.mark.parametrize("method", ["auto", "autodiff"])
def test_a_linear_model(scale, dtype, method):
    """f = x W^T: H = (2 / n m) X^T X (x) I, of degree two in the inputs."""
    draw = normal(3)
    X, Y = draw(5, 3), draw(5, 2)
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(0)
    H = hessian(model, nn.MSELoss(), [((scale * X).to(dtype), Y.to(dtype))], method=method)
    truth = torch.kron(torch.eye(2, dtype=torch.float64), 2 / 10 * X.T @ X)
    block, eps = H["weight"], 1e4 * torch.finfo(dtype).eps
    for found, expected in (
        (block.trace(), truth.trace()),
        (block.frobenius_norm(), truth.norm()),
        (block.spectral_norm(), torch.linalg.matrix_norm(truth, 2)),
        (block.eigenvalues(1, "LA")[0], torch.linalg.eigvalsh(truth)[-1]),
        (block.density().support[1], torch.linalg.eigvalsh(truth)[-1]),
    ):
        assert float(found) / scale / scale == pytest.approx(float(expected), rel=eps)


def test_a_model_whose_curvature_overflows():
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(0)
    H = hessian(model, nn.MSELoss(), [(torch.full((5, 3), 1e25), torch.ones(5, 2))])
    for ask in (H["weight"].trace, H["weight"].frobenius_norm, H["weight"].dense, lambda: H @ torch.ones(6)):
        with pytest.raises(NonFiniteError, match=r"product|dense"):
            ask()


@pytest.mark.parametrize(
    "sizes, argument", [((1e-20, 1e20, 1, 1), "W_Q"), ((1, 1e12, 1, 1e-12), "X"), ((1, 1, 1e-30, 1e10), "W_V")]
)
def test_tiny_and_huge_factors_do_not_meet_in_float32(sizes, argument):
    draw = normal(4, torch.float32)
    *weights, X = (size * draw(3, 3) for size in sizes)
    with pytest.raises(RangeError, match=f"{argument}: has entries up to .* vanish in torch.float32"):
        cv.exact.SelfAttention(*weights).hessian(X, losses.MSE(draw(3, 3)))
    H = cv.exact.SelfAttention(*(w.double() for w in weights)).hessian(X.double(), losses.MSE(draw(3, 3).double()))
    assert torch.isfinite(H.dense()).all()
