"""Drawn attention layers of every variant, beside the same function for autodiff."""

import math
from functools import partial

import torch
from hypothesis import strategies as st

import curvoscope as cv
from reference import attention


def _loss_at(kind, N, L, m, generator):
    """A function of the dtype that gives the loss."""
    r = partial(torch.randn, generator=generator, dtype=torch.float64)
    Y, targets = r(N, L, m), torch.randint(0, 5, (N, L), generator=generator)
    U, b = r(m, 5), r(5)
    if N * L > 1:
        targets[0, 0] = -100
    return lambda dtype: _losses(kind, targets, *(tensor.to(dtype) for tensor in (Y, U, b)))


def _losses(kind, targets, Y, U, b):
    if kind == "mse":
        return cv.losses.MSE(Y)
    if kind == "cross_entropy":
        return cv.losses.CrossEntropy(targets, unembedding=U, bias=b)
    if kind == "per_token":
        return lambda F: 0.3 * ((F * Y).logsumexp(-1).sum() + (F**4).sum() / 10)
    if kind == "per_sequence":
        return lambda F: (F * Y).flatten(1).logsumexp(1).sum()
    return lambda F: (F * Y).flatten().logsumexp(0) + F.mean() ** 2


@st.composite
def problems(draw, dtypes=(torch.float64,)):
    """A layer, its input, a loss, and the same function over a dict of parameters, in float64, for autodiff."""
    dtype = draw(st.sampled_from(dtypes))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (7, 7)]))
    small = heads > 3
    N, L = draw(st.integers(1, 2)), draw(st.integers(1, 3 if small else 5))
    d, d_k, d_v = (draw(st.integers(1, 2 if small else 4)) for _ in range(3))
    rotary = draw(st.sampled_from([None, None, None, 100.0]))
    d_k += d_k % 2 if rotary else 0
    output = draw(st.sampled_from(["W_O", "concat", "sum"]))
    combine = "sum" if output == "sum" else "concat"
    activation = draw(st.sampled_from(["softmax", "softmax", "linear"]))
    biases, wrt_input = draw(st.booleans()), draw(st.booleans())
    causal, mask_kind = draw(st.booleans()), draw(st.sampled_from([None, None, "boolean", "additive"]))
    temperature, scale = draw(st.sampled_from([1.0, 0.5, 3.0])), draw(st.sampled_from([0.3, 1.0, 2.0]))
    loss_kind = draw(st.sampled_from(["mse", "cross_entropy", "per_token", "per_sequence", "mixing"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    r = partial(torch.randn, generator=generator, dtype=torch.float64)

    X = scale * r(N, L, d)
    p = {"Q": r(d, heads * d_k), "K": r(d, kv_heads * d_k), "V": r(d, kv_heads * d_v)}
    m = 3 if output == "W_O" else d_v * (1 if combine == "sum" else heads)
    if output == "W_O":
        p["O"] = r(heads * d_v, m)
    if biases:
        p |= {
            "b_Q": r(1, heads * d_k),
            "b_K": r(1, kv_heads * d_k),
            "b_V": r(1, kv_heads * d_v),
            "b_O": r(1, m),
        }
    visible = torch.ones(N, L, L, dtype=torch.bool)
    mask, logit_bias = None, 0.0
    if mask_kind == "boolean":
        mask = torch.rand(N, L, L, generator=generator) < 0.6
        mask |= torch.eye(L, dtype=torch.bool)
        visible &= mask
    elif mask_kind == "additive":
        mask = r(L, L)
        if L > 1:
            mask[-1, 0] = -math.inf
        visible &= mask > -math.inf
        logit_bias = mask.masked_fill(mask == -math.inf, 0.0)
    if causal:
        visible = visible.tril()
    layer = cv.exact.SelfAttention(
        *(p[name].to(dtype) if name in p else None for name in "QKVO"),
        *(p[b][0].to(dtype) if biases else None for b in ("b_Q", "b_K", "b_V", "b_O")),
        heads=heads,
        kv_heads=kv_heads,
        combine=combine,
        activation=activation,
        temperature=temperature,
        causal=causal,
        rotary=rotary,
    )
    loss_at = _loss_at(loss_kind, N, L, m, generator)
    H = layer.hessian(X.to(dtype), loss_at(dtype), mask, biases=biases, wrt_input=wrt_input)
    if wrt_input:
        p["X"] = X.reshape(N * L, d)

    def function(parameters):
        return attention(
            parameters,
            X,
            heads=heads,
            kv_heads=kv_heads,
            scale=1 / (temperature * math.sqrt(d_k)),
            visible=visible,
            logit_bias=logit_bias,
            activation=activation,
            combine=combine,
            rotary=rotary,
        )

    return layer, X.to(dtype), mask, H, function, p, loss_at(torch.float64)
