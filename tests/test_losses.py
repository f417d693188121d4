"""G and S of the losses against autodiff, in the sparsest form that each has."""

import pytest
import torch
from torch.func import grad, jacfwd

from curvoscope import losses
from curvoscope.losses import PairCurvature, ScalarCurvature, SoftmaxCurvature, TokenCurvature
from reference import normal, relative

N, L, M = 3, 4, 2


def _cases():
    r = normal(0)
    Y, targets = r(N, L, M), torch.arange(N * L).view(N, L) % 5
    ignored = targets.masked_fill(targets == 1, -100)
    return {
        "mse": (losses.MSE(Y), ScalarCurvature),
        "cross entropy": (losses.CrossEntropy(targets, r(M, 5)), SoftmaxCurvature),
        "ignored targets and bias": (losses.CrossEntropy(ignored, r(M, 5), r(5)), SoftmaxCurvature),
        "per token": (lambda F: (F * Y).logsumexp(-1).sum(), TokenCurvature),
        "callable mse": (lambda F: ((F - Y) ** 2).mean(), TokenCurvature),
        "torch cross entropy": (
            lambda F: torch.nn.functional.cross_entropy(F.flatten(0, 1), targets.flatten() % M),
            TokenCurvature,
        ),
        "one sequence at a time": (lambda F: (F * Y).flatten(1).logsumexp(1).sum(), PairCurvature),
        "neighbouring tokens": (lambda F: (F[:, 1:] * F[:, :-1]).sum() ** 3, PairCurvature),
        "all sequences": (lambda F: (F * Y).flatten().logsumexp(0), PairCurvature),
        "two distant tokens": (lambda F: (F**2).sum() + F[0, 1, 0] * F[2, 3, 1], PairCurvature),
        "linear": (lambda F: (F * Y).sum(), TokenCurvature),
    }


@pytest.mark.parametrize("name", _cases())
def test_value_gradient_and_hessian(name):
    loss, kind = _cases()[name]
    F = normal(1)(N, L, M)
    found = losses.at(loss, F, squeeze=False)
    assert abs(found.value - float(loss(F))) < 1e-14 * (1 + abs(found.value))
    assert torch.allclose(found.gradient, grad(loss)(F), rtol=0, atol=1e-13)
    S = jacfwd(grad(loss))(F).reshape(N * L * M, N * L * M)
    identity = torch.eye(N * L * M, dtype=torch.float64).view(-1, N, L, M)
    applied = found.curvature.apply(identity).reshape(N * L * M, -1)
    assert relative(applied, S, scale=S.abs().max() + 1) < 1e-12
    assert isinstance(found.curvature, kind)
    if isinstance(found.curvature, PairCurvature):
        mixes_sequences = name in ("neighbouring tokens", "all sequences", "two distant tokens")
        assert found.curvature.blocks.shape[0] == (1 if mixes_sequences else N)


@pytest.mark.parametrize("ports", [(None, None), (slice(0, 1), slice(1, 2)), ("tensor", "tensor"), (None, "tensor")])
def test_curvature_through_ports(ports):
    r = normal(2)
    W, U, F = r(3, M), r(M, 5), r(N, L, M)
    ports = tuple(W if port == "tensor" else port for port in ports)
    left, right = (losses.through(torch.eye(M, dtype=torch.float64), port).T for port in ports)
    softmax = losses.CrossEntropy(torch.arange(N * L).view(N, L) % 5, U).at(F).curvature
    S = jacfwd(grad(losses.CrossEntropy(torch.arange(N * L).view(N, L) % 5, U)))(F).reshape(N * L, M, N * L, M)
    expected = torch.stack([left @ S[t, :, t] @ right.T for t in range(N * L)])
    assert torch.allclose(softmax.between(*ports, 0, N * L), expected, rtol=0, atol=1e-14)
    blocks = torch.stack([S[t, :, t] for t in range(N * L)]).view(N, L, M, M)
    assert torch.allclose(TokenCurvature(blocks).between(*ports, 3, 7), expected[3:7], rtol=0, atol=1e-14)
    scalar = ScalarCurvature(0.3).between(*ports, torch.eye(M, dtype=torch.float64))
    assert torch.allclose(scalar, 0.3 * left @ right.T)


def test_cross_entropy_keeps_its_digits_when_the_softmax_saturates():
    """Two words, logits +-z: S = p (1 - p) (u_1 - u_2)^2 and p = 1 / (1 + exp(2 z)), known to all digits."""
    z, U = 40.0, torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    F = torch.full((1, 1, 1), z, dtype=torch.float64)
    p = 1 / (1 + torch.tensor(2 * z, dtype=torch.float64).exp())
    found = losses.CrossEntropy(torch.zeros(1, 1, dtype=torch.int64), U).at(F)
    assert abs(float(found.gradient) / float(-2 * p) - 1) < 1e-12
    assert abs(float(found.curvature.between(None, None, 0, 1)) / float(4 * p * (1 - p)) - 1) < 1e-12
    assert abs(float(found.curvature.apply(torch.ones(1, 1, 1).double())) / float(4 * p * (1 - p)) - 1) < 1e-12
