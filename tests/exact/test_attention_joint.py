"""Entries through the matrix of the scores: the same as block by block, and as autodiff."""

import math

import pytest
import torch

import curvoscope as cv
from curvoscope.exact.attention.joint import joint_weights
from reference import attention, dense_hessian, normal, relative


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("loss_kind", ["mse", "cross_entropy", "per_token", "per_sequence"])
@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_many_tokens(activation, loss_kind, with_output, biased):
    """12 sequences of 5 tokens in 3 dimensions: the joint route is taken, and right."""
    r = normal(0)
    N, L, d, k, e = 12, 5, 3, 4, 3
    X, p = r(N, L, d), {"Q": r(d, k), "K": r(d, k), "V": r(d, e)}
    m = e
    if with_output:
        m = 2
        p["O"] = r(e, m)
    constants = {"b_V": r(1, e)} if biased else {}
    layer = cv.exact.SelfAttention(
        p["Q"], p["K"], p["V"], p.get("O"), **{name: bias[0] for name, bias in constants.items()},
        causal=True, activation=activation,
    )  # fmt: skip
    Y, U = r(N, L, m), r(m, 4)
    loss = {
        "mse": cv.losses.MSE(Y),
        "cross_entropy": cv.losses.CrossEntropy(torch.arange(N * L).view(N, L) % 4, U),
        "per_token": lambda F: (F * Y).logsumexp(-1).sum(),
        "per_sequence": lambda F: (F * Y).flatten(1).logsumexp(1).sum(),
    }[loss_kind]
    assert joint_weights(layer, layer.forward_pass(X)) == set(p) - {"K"}
    H = layer.hessian(X, loss)
    visible = torch.ones(L, L, dtype=torch.bool).tril()

    def function(parameters):
        everything = {**parameters, **constants}
        return attention(everything, X, scale=1 / math.sqrt(k), visible=visible, activation=activation)

    truth = dense_hessian(function, p, loss)
    for part in ("total", "outer", "functional"):
        entries = getattr(H, part).dense()
        assert relative(entries, getattr(truth, part), scale=truth.total) < 1e-10
        assert torch.equal(entries, entries.T)
        for row in H.names:
            for column in H.names:
                matrix = getattr(H, part)
                block = entries[matrix.ranges[row], matrix.ranges[column]]
                assert relative(matrix[row, column].dense(), block, scale=truth.total) < 1e-12
    assert relative(H.outer.dense() + H.functional.dense(), H.dense()) < 1e-13
    assert torch.count_nonzero(H.functional.dense()[H.total.ranges["V"], H.total.ranges["V"]]) == 0


def test_few_tokens_and_biased_scores_go_block_by_block():
    r = normal(1)
    biased = cv.exact.SelfAttention(r(3, 4), r(3, 4), r(3, 3), b_Q=r(4))
    assert not joint_weights(biased, biased.forward_pass(r(12, 5, 3)))
    layer = cv.exact.SelfAttention(r(6, 2), r(6, 2), r(6, 6))
    assert not joint_weights(layer, layer.forward_pass(r(1, 3, 6)))
