"""Every way to the small matrices of attention's and of the tokenwise layers' blocks leads to the same ones."""

import itertools

import pytest
import torch

import curvoscope as cv
from curvoscope.exact.attention.blocks import AttentionBlocks, weights_of
from curvoscope.operators.terms import Term
from reference import normal

N, L, D = 2, 3, 6


def _loss(kind, r, width):
    if kind == "mse":
        return cv.losses.MSE(r(N, L, width))
    words = {"few words": 2, "many words": 9}[kind]
    return cv.losses.CrossEntropy(torch.arange(N * L).view(N, L) % words, r(width, words))


def _terms(layer, loss, X):
    """All terms of all pairs of weights with cores that vary from token to token, and the pair they belong to."""
    passed = layer.forward_pass(X)
    blocks = AttentionBlocks(layer, passed, loss.at(passed.F))
    weights = [part for name, shape in layer.shapes(layer.biases).items() for part in weights_of(layer, name, shape)]
    for left, right in itertools.product(weights, weights):
        for terms in (blocks.outer, blocks.functional):
            for term in terms(left, right):
                if isinstance(term, Term):
                    yield left is right, term


def _check(core, same):
    """A core against its matrices for all tokens at once."""
    tokens = N * L
    truth = core.dense(0, tokens).clone()
    size = float(truth.abs().max().clamp_min(1e-300))

    def close(found, expected):
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= 1e-9 * size

    assert truth.shape == (tokens, *core.shape) and core.T.shape == core.shape[::-1]
    close(core.T.dense(0, tokens), truth.mT)
    for start, stop in ((0, L), (L, tokens), (1, 2), (L, L + 2), (L + 1, tokens)):
        close(core.dense(start, stop), truth[start:stop])
        close(core.T.dense(start, stop), truth[start:stop].mT)
        if core.shape[0] == core.shape[1]:
            for one in (core, core.T):
                close(one.diagonal(start, stop), truth[start:stop].diagonal(dim1=1, dim2=2))
                close(one.trace(start, stop), truth[start:stop].diagonal(dim1=1, dim2=2).sum(1))
    for one, expected in ((core, truth), (core.T, truth.mT)):
        form = one.token_form()
        if form is not None:
            group = torch.arange(tokens) // form.tokens
            close(form.left[group].mT @ form.inner(0, tokens) @ form.right[group], expected)
            close(form.inner(L + 1, tokens), form.inner(0, tokens)[L + 1 :])
    assert core.symmetric or not same  # then half of the entries is enough
    if core.symmetric:
        close(truth, truth.mT)


LAYERS = {
    "one head": {},
    "heads that share keys": {"heads": 2, "kv_heads": 1},
    "linear": {"heads": 2, "kv_heads": 2, "activation": "linear"},
    "rotary": {"heads": 2, "kv_heads": 2, "rotary": 100.0},
}


@pytest.mark.parametrize("output", [True, False], ids=["output weight", "no output weight"])
@pytest.mark.parametrize("sharp", [False, True], ids=["soft", "sharp"])
@pytest.mark.parametrize("loss", ["mse", "few words", "many words"])
@pytest.mark.parametrize("kind", LAYERS)
def test_attention(kind, loss, sharp, output):
    r, options = normal(5), LAYERS[kind]
    heads, kv = options.get("heads", 1), options.get("kv_heads", 1)
    k, e = 4, 3
    scores = 12.0 if sharp else 0.7
    W_O = r(heads * e, 5) if output else None
    layer = cv.exact.SelfAttention(scores * r(D, heads * k), r(D, kv * k), r(D, kv * e), W_O, causal=True, **options)
    count = 0
    for same, term in _terms(layer, _loss(loss, r, 5 if output else heads * e), r(N, L, D)):
        _check(term.core, same and term.left is term.right)
        count += 1
    assert count >= 4


@pytest.mark.parametrize("loss", ["mse", "few words", "many words"])
@pytest.mark.parametrize("kind", ["feed-forward", "gated", "layer norm", "rms norm"])
def test_tokenwise_layers(kind, loss):
    r, m = normal(6), 4
    if kind == "feed-forward":
        layer = cv.exact.FeedForward(r(D, 5), r(5), r(5, m), r(m), "gelu")
    elif kind == "gated":
        layer = cv.exact.FeedForward(r(D, 5), None, r(5, m), None, "silu", W_gate=r(D, 5))
    else:
        layer, m = (cv.exact.LayerNorm(r(D), r(D)) if kind == "layer norm" else cv.exact.RMSNorm(r(D))), D
    H = layer.hessian(r(N, L, D), _loss(loss, r, m))
    count = 0
    for row, column in itertools.product(H.names, H.names):
        for part in (H.outer, H.functional):
            for term in part[row, column].terms:
                if isinstance(term, Term):
                    _check(term.core, row == column and term.left is term.right)
                    count += 1
    assert count >= 1
