"""Laplace's method against the dense formulas."""

import math

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.errors import LossError, RangeError
from reference import normal


@pytest.fixture(scope="module")
def network():
    r = normal(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(r(*parameter.shape) / 2)
    return model, r(9, 3), r(9, 2), torch.arange(9) % 2


def dense(model, X):
    """Jacobians (rows, outputs, P) in the order of the model's parameters, by torch.func."""
    parameters = dict(model.named_parameters())
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (X,)))(parameters)
    return torch.cat([part.flatten(2) for part in found.values()], 2).detach()


@pytest.mark.parametrize("kind", ["cross-entropy", "squared error"])
def test_against_dense_formulas(network, kind):
    model, X, Y, labels = network
    prior, noise = 0.7, 0.3
    J = dense(model, X)
    with torch.no_grad():
        F = model(X)
    if kind == "cross-entropy":
        H = cv.hessian(model, nn.CrossEntropyLoss(), [(X[:4], labels[:4]), (X[4:], labels[4:])])
        found = cv.analysis.laplace(H, prior)
        likelihood = -float(nn.functional.cross_entropy(F, labels, reduction="sum"))
        p = F.softmax(1)
        S = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    else:
        H = cv.hessian(model, nn.MSELoss(), [(X, Y)])
        found = cv.analysis.laplace(H, prior, noise)
        likelihood = float(torch.distributions.Normal(F, math.sqrt(noise)).log_prob(Y).sum())
        S = torch.eye(2).double().expand(9, 2, 2) / noise
    size = J.shape[2]
    precision = torch.einsum("nap,nab,nbq->pq", J, S, J) + prior * torch.eye(size).double()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    evidence = likelihood - prior / 2 * float(weights @ weights) + size / 2 * math.log(prior)
    evidence -= float(torch.logdet(precision)) / 2
    assert found.log_likelihood == pytest.approx(likelihood, rel=1e-10)
    assert found.log_marginal_likelihood.exact
    assert found.log_marginal_likelihood == pytest.approx(evidence, rel=1e-8)
    truth = J[:3] @ torch.linalg.solve(precision, J[:3].mT)
    assert torch.allclose(found.predictive_variance(X[:3]), truth, rtol=1e-8, atol=1e-10)


def test_bad_input(network):
    model, X, Y, labels = network
    H = cv.hessian(model, nn.CrossEntropyLoss(), [(X, labels)])
    with pytest.raises(RangeError, match="prior"):
        cv.analysis.laplace(H, 0.0)
    with pytest.raises(RangeError, match="only MSE has a noise"):
        cv.analysis.laplace(H, 1.0, noise=0.1)
    with pytest.raises(LossError, match="not known to be convex"):
        cv.analysis.laplace(cv.hessian(model, lambda F, Y: (F - Y).pow(4).mean(), [(X, Y)]), 1.0)
