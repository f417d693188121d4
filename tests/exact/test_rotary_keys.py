"""The functional part of key weights behind rotary positions, against nested automatic differentiation."""

import pytest
import torch

import curvoscope as cv
from curvoscope.exact.attention import rotary_keys
from curvoscope.exact.attention.rotary import PositionMatrices
from curvoscope.exact.attention.rotary_keys import RotaryKeys
from curvoscope.operators.block_matrix import Tiles
from reference import attention, dense_hessian, normal, relative

D, WIDTH, LENGTH, BASE = 5, 4, 6, 50.0


def case(heads, kv_heads, causal, sequences=2, dtype=torch.float64, seed=0, shift=1.0, base=BASE):
    r = normal(seed)
    weights = {"Q": r(D, heads * WIDTH), "K": r(D, kv_heads * WIDTH), "V": r(D, kv_heads * 3), "O": r(heads * 3, D)}
    X, Y = r(sequences, LENGTH, D) + shift, r(sequences, LENGTH, D)
    layer = cv.exact.SelfAttention(
        *(weight.to(dtype) for weight in weights.values()), heads=heads, kv_heads=kv_heads, causal=causal, rotary=base
    )
    H = layer.hessian(X.to(dtype), cv.losses.MSE(Y.to(dtype)))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    options = {"heads": heads, "kv_heads": kv_heads, "scale": WIDTH**-0.5, "rotary": base}
    options["visible"] = visible.tril() if causal else visible

    def function(parameters):
        return attention(weights | parameters, X, **options)

    truth = dense_hessian(function, {"K": weights["K"]}, lambda F: (F - Y).square().mean()).functional
    return H.functional["K"], truth


@pytest.mark.parametrize("heads, kv_heads, causal", [(1, 1, False), (2, 1, True), (4, 2, True)])
def test_every_answer_is_that_of_the_entries(heads, kv_heads, causal):
    block, truth = case(heads, kv_heads, causal)
    assert isinstance(block, RotaryKeys if kv_heads == 1 else Tiles)
    assert relative(block.dense(), truth) < 1e-12
    assert block.frobenius_norm().exact
    assert block.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-12)
    assert block.trace() == pytest.approx(float(truth.trace()), rel=1e-11, abs=1e-13 * float(truth.norm()))
    assert relative(block.diagonal().value, truth.diagonal()) < 1e-12
    columns = normal(1)(truth.shape[0], 3)
    assert relative(block @ columns, truth @ columns) < 1e-12


def test_any_positions_of_each_sequence_and_head_with_sinks():
    """Against automatic differentiation of the forward pass at the gradient of the loss."""
    r, heads, kv_heads = normal(4), 4, 2
    turns = [PositionMatrices(r(2, n, LENGTH, WIDTH, WIDTH)) for n in (heads, kv_heads)]
    weights = r(D, heads * WIDTH), r(D, kv_heads * WIDTH), r(D, kv_heads * 3), r(heads * 3, D)
    X, Y, sinks = r(2, LENGTH, D), r(2, LENGTH, D), r(heads)
    options = {"heads": heads, "kv_heads": kv_heads, "rotary": turns[0], "key_rotary": turns[1], "sinks": sinks}
    layer = cv.exact.SelfAttention(*weights, **options, q_norm=cv.exact.QueryKeyNorm(r(WIDTH)), causal=True)
    H = layer.hessian(X, cv.losses.MSE(Y))
    G = 2 * (layer(X) - Y) / Y.numel()

    def loss(W_K):
        moved = cv.exact.SelfAttention(weights[0], W_K.view_as(weights[1]), *weights[2:], **options, causal=True)
        moved.q_norm = layer.q_norm
        return (G * moved(X)).sum()

    truth = torch.autograd.functional.hessian(loss, weights[1].flatten())
    block = H.functional["K"]
    assert isinstance(block, Tiles) and block.frobenius_norm().exact
    assert relative(block.dense(), truth) < 1e-11
    assert block.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-11)
    assert block.trace() == pytest.approx(float(truth.trace()), rel=1e-9, abs=1e-12 * float(truth.norm()))


@pytest.mark.parametrize("heads, causal", [(1, False), (2, True)])
def test_ranges_of_queries(heads, causal, monkeypatch):
    """Two and three queries at a time, which see all keys or the first ones."""
    monkeypatch.setattr(rotary_keys, "_LEAST_PART", 2)
    for parts in (2, 3):
        monkeypatch.setattr(rotary_keys, "_PARTS", parts)
        block, truth = case(heads, 1, causal)
        assert block.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-12)
        assert block.trace() == pytest.approx(float(truth.trace()), rel=1e-11, abs=1e-13 * float(truth.norm()))
        assert relative(block.diagonal().value, truth.diagonal()) < 1e-12


def test_what_cancels_is_summed_in_double_precision():
    """A shift of all inputs adds little to the block if positions hardly turn the keys, but much to its two parts."""
    block, truth = case(1, 1, True, dtype=torch.float32, shift=30.0, base=1e300)
    assert block.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-3)


def test_batches_add_up():
    (first, one), (second, two) = case(2, 1, True, seed=1), case(2, 1, True, sequences=1, seed=2)
    assert isinstance(first + second, RotaryKeys)
    assert (first + second).frobenius_norm() == pytest.approx(float((one + two).norm()), rel=1e-12)


def test_a_small_memory_limit_and_single_precision():
    block, truth = case(4, 2, True, dtype=torch.float32)
    with cv.settings(memory_limit=2**14):
        assert block.frobenius_norm() == pytest.approx(float(truth.norm()), rel=1e-5)
        assert block.trace() == pytest.approx(float(truth.trace()), rel=1e-4)
        assert relative(block.diagonal().value.double(), truth.diagonal()) < 1e-4


def test_tiny_gradients_do_not_underflow():
    r = normal(3)
    layer = cv.exact.SelfAttention(r(D, WIDTH), r(D, WIDTH), r(D, D), rotary=BASE)
    X, G = r(LENGTH, D), r(LENGTH, D)
    plain, tiny = (layer.hessian(X, lambda F, s=s: s * (G * F).sum()).functional["K"] for s in (1.0, 1e-200))
    assert tiny.frobenius_norm() == pytest.approx(1e-200 * plain.frobenius_norm(), rel=1e-9)
