import math

import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd

from autodiff_cases import GPT, MLP, cross_entropy, points, tokens
from curvoscope.analysis.convergence import convergence
from curvoscope.analysis.samples import sample_losses, variance_law
from curvoscope.analysis.surface import Surface
from curvoscope.curvature import CrossEntropy, MeanLoss, blocks_of
from curvoscope.errors import LossError, RangeError
from curvoscope.losses import MSE, Contrastive, Regularised
from surface_cases import flat_loss, regression


def test_sample_losses_with_unequal_terms():
    model, (inputs, targets) = GPT(), tokens()
    surface = Surface(model.eval(), CrossEntropy(), [(inputs, targets)])
    found = sample_losses(surface, torch.zeros(1, surface.size, dtype=torch.float64))
    kept = [i for i in range(len(targets)) if bool((targets[i] != -100).any())]
    with torch.no_grad():
        expected = torch.stack([cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]) for i in kept])
        whole = cross_entropy(model(inputs), targets)
    torch.testing.assert_close(found.losses[0], expected)
    assert found.terms.tolist() == [int((targets[i] != -100).sum()) for i in kept]
    assert float(found.means) == pytest.approx(float(whole), rel=1e-12)
    assert float(found.deviations.mean()) == pytest.approx(0, abs=1e-14)


def test_rows_that_are_not_samples_are_refused():
    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model, X, y, _ = regression()
    mixing = Mixing(3, 1, bias=False, dtype=torch.float64)
    mixing.load_state_dict(model.state_dict())
    with pytest.raises(LossError, match="independent"):
        convergence(mixing, nn.functional.mse_loss, [(X, y)])
    with pytest.raises(LossError, match="MeanLoss"):
        convergence(model, lambda out, t: (out - t).square().mean().sqrt(), [(X, y)])
    fine = MeanLoss(lambda out, t: (out - t).square().mean())
    assert convergence(model, fine, [(X, y)]).samples == 40


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(reduction="sum"),
        Contrastive(nn.functional.mse_loss),
        Regularised(MSE(), lambda parameters: parameters["up.weight"].square().sum()),
    ],
    ids=["a sum", "rows that meet", "a penalty"],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused(loss):
    X, y = points(8)
    with pytest.raises(LossError, match="mean over terms of single rows"):
        convergence(MLP(), loss, [(X[:4], y[:4]), (X[4:], y[4:])])


# ---- the second-order law


def dense_law(model, x, y):
    """The coefficients from dense per-sample Hessians, with the unbiased N - 1."""
    losses, gradients, hessians = [], [], []
    for i in range(len(x)):
        function, w = flat_loss(model, x[i : i + 1], lambda out, i=i: (out - y[i : i + 1]).square().mean())
        losses.append(function(w).detach())
        gradients.append(grad(function)(w))
        hessians.append(jacfwd(grad(function))(w))
    values, G, H = torch.stack(losses), torch.stack(gradients), torch.stack(hessians)
    dH = H - H.mean(0)
    trace = dH.diagonal(dim1=1, dim2=2).sum(-1)
    n = len(x) / (len(x) - 1)
    return (
        (values.var(), n * (G - G.mean(0)).square().sum(1).mean(), n * ((values - values.mean()) * trace).mean()),
        (n * dH.square().sum((1, 2)).mean(), n * trace.square().mean()),
        (values, G, H),
    )


def test_the_second_order_law_against_dense_hessians_and_draws():
    model, (x, y) = MLP(nn.Tanh), points(10)
    law = variance_law(Surface(model, nn.functional.mse_loss, [(x[:4], y[:4]), (x[4:], y[4:])]), probes=64)
    (variance, gradients, coupling), (frobenius, trace), (values, G, H) = dense_law(model, x, y)
    assert law.method == "exact" and law.stderr == (0, 0, 0) and law.samples == 10
    assert law.losses == pytest.approx(float(variance), rel=1e-10)
    assert law.gradients == pytest.approx(float(gradients), rel=1e-10)
    assert law.coupling == pytest.approx(float(coupling), rel=1e-9)
    assert law.frobenius == pytest.approx(float(frobenius), rel=1e-9)
    assert law.trace == pytest.approx(float(trace), rel=1e-9)
    # V(τ) is the expected variance of the quadratic model: 4,000 antithetic pairs
    tau, generator = 0.2, torch.Generator().manual_seed(0)
    xi = tau * torch.randn(4000, G.shape[1], generator=generator, dtype=torch.float64)
    bend = torch.einsum("di,nij,dj->dn", xi, H, xi) / 2
    drawn = torch.stack([(values + sign * xi @ G.T + bend).var(1) for sign in (1, -1)]).mean(0)
    assert abs(float(drawn.mean()) - law(tau)) < 3 * float(drawn.std()) / math.sqrt(4000)


def test_the_second_order_law_from_few_probes_is_within_its_error_bars():
    model, (x, y) = MLP(nn.Tanh), points(10)
    surface = Surface(model, nn.functional.mse_loss, [(x, y)])
    (_, gradients, coupling), (frobenius, trace), _ = dense_law(model, x, y)
    worst = []
    for seed in range(6):
        law = variance_law(surface, probes=12, seed=seed)
        assert law.method == "hutchinson" and law.gradients == pytest.approx(float(gradients), rel=1e-10)
        found = torch.tensor([law.coupling, law.frobenius, law.trace])
        errors = (found - torch.stack([coupling, frobenius, trace])).abs() / torch.tensor(law.stderr)
        worst.append(errors)
    assert float(torch.stack(worst).square().mean().sqrt()) < 2
    assert law.error(0.5) > law.error(0.1) > 0
    with pytest.raises(RangeError, match="probes"):
        variance_law(surface, probes=2)


def test_the_law_with_unequal_terms_is_that_of_deviations():
    # losses quadratic in w with unequal weights: V(τ) must be the mean over draws of the measured variance
    model, (inputs, targets) = GPT(), tokens()
    surface = Surface(model.eval(), CrossEntropy(), [(inputs, targets)], blocks_of(model).select("h.0.norm1"))
    law = variance_law(surface, probes=surface.size)
    tau, generator = 0.02, torch.Generator().manual_seed(1)
    xi = tau * torch.randn(200, surface.size, generator=generator, dtype=torch.float64)
    found = sample_losses(surface, torch.cat([xi, -xi])).variances
    here = sample_losses(surface, 0 * xi[:1]).variances
    assert law.losses == pytest.approx(float(here), rel=1e-12)
    pairs = (found[:200] + found[200:]) / 2 - here
    assert abs(float(pairs.mean()) - (law(tau) - law.losses)) < 3 * float(pairs.std()) / math.sqrt(200) + 0.01 * abs(
        law(tau) - law.losses
    )
