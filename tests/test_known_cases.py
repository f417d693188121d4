"""Hessians known by hand: the analytic cases and random matrices that programs of this kind are tried on."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import curvoscope as cv
from curvoscope.curvature import CrossEntropy
from reference import normal, relative


def _gaussian(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _linear(inputs, outputs, seed, bias=False):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).double()


class Quadratic(nn.Module):
    """½ wᵀ A w, whatever the input: the Hessian is A."""

    def __init__(self, A, w):
        super().__init__()
        self.A, self.w = A, nn.Parameter(w)

    def forward(self, rows):
        return (0.5 * self.w @ self.A @ self.w).expand(len(rows))


def _mean(outputs, targets):
    return outputs.mean()


def _of_matrix(A):
    return cv.hessian(Quadratic(A, normal(0)(len(A))), _mean, [(torch.zeros(1), torch.zeros(1))])


def _with_spectrum(eigenvalues, seed=0):
    basis = torch.linalg.qr(_gaussian(seed, len(eigenvalues), len(eigenvalues))).Q
    return basis @ torch.diag(eigenvalues) @ basis.T


class TestRegression:
    @pytest.mark.parametrize("cut", [(12,), (5, 7), (1, 1, 10)])
    def test_least_squares(self, cut):
        """1/(N o) |X Wᵀ - Y|²: 2/(N o) I ⊗ XᵀX, whatever W; nothing functional."""
        X, Y = _gaussian(1, 12, 4), _gaussian(2, 12, 3)
        H = cv.hessian(_linear(4, 3, 0), mse_loss, list(zip(X.split(cut), Y.split(cut), strict=True)))
        expected = 2 / 36 * torch.kron(torch.eye(3, dtype=torch.float64), X.T @ X)
        assert relative(H.dense(), expected) < 1e-13
        assert relative(H.outer.dense(), expected) < 1e-13
        assert float(H.functional.dense().abs().max()) < 1e-15

    def test_least_squares_with_intercept(self):
        X, Y = _gaussian(1, 12, 4), _gaussian(2, 12, 1)
        H = cv.hessian(_linear(4, 1, 0, bias=True), mse_loss, [(X, Y)])
        rows = torch.cat([X, torch.ones(12, 1, dtype=torch.float64)], 1)
        assert relative(H.dense(), 2 / 12 * rows.T @ rows) < 1e-13

    def test_logistic(self):
        """1/N Σ p (1-p) x xᵀ."""
        X, model = 3 * _gaussian(1, 20, 5), _linear(5, 1, 3)
        y = (_gaussian(2, 20, 1) > 0).double()
        H = cv.hessian(model, binary_cross_entropy_with_logits, [(X, y)])
        p = (X @ model.weight.T).detach().sigmoid()
        expected = (X * p * (1 - p)).T @ X / 20
        assert relative(H.dense(), expected) < 1e-13
        assert float(torch.linalg.eigvalsh(H.dense())[0]) > 0

    def test_multinomial(self):
        """1/N Σ (diag p - p pᵀ) ⊗ x xᵀ; adding one vector to all classes' weights changes nothing."""
        X, model = _gaussian(1, 20, 5), _linear(5, 4, 3)
        y = torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(0))
        H = cv.hessian(model, cross_entropy, [(X, y)])
        p = (X @ model.weight.T).detach().softmax(-1)
        cores = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        expected = sum(torch.kron(core, torch.outer(x, x)) for core, x in zip(cores, X, strict=True)) / 20
        assert relative(H.dense(), expected) < 1e-13
        shared = torch.ones(4, dtype=torch.float64)[:, None] * _gaussian(5, 5)
        assert float((H @ shared.flatten()).abs().max()) < 1e-15

    def test_separated_classes_have_no_curvature_left(self):
        """p (1-p) of a logit of 800 underflows to zero: the Hessian is 0, not NaN."""
        model = _linear(1, 1, 0)
        nn.init.constant_(model.weight, 800.0)
        X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        H = cv.hessian(model, binary_cross_entropy_with_logits, [(X, (X > 0).double())])
        assert float(H.dense()) == 0.0


class TestLinearNetworks:
    """KFAC's Kronecker product is exact where the derivative by the output does not depend on the sample."""

    def test_blocks_of_the_gauss_newton_matrix(self):
        sizes = (5, 4, 3, 2)
        torch.manual_seed(0)
        pairs = pairwise(sizes)
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs)).double()
        X, Y = _gaussian(1, 9, 5), _gaussian(2, 9, 2)
        H = cv.hessian(model, mse_loss, [(X, Y)])
        weights = [layer.weight.detach() for layer in model]
        for i, name in enumerate(H.names):
            inputs = X
            for W in weights[:i]:
                inputs = inputs @ W.T
            after = torch.eye(2, dtype=torch.float64)
            for W in reversed(weights[i + 1 :]):
                after = after @ W
            expected = 2 / 18 * torch.kron(after.T @ after, inputs.T @ inputs)
            assert relative(H.outer[name].dense(), expected) < 1e-12, name
            assert float(H.functional[name].dense().abs().max()) < 1e-14, name  # linear in each weight

    def test_scalar_chain(self):
        """½ (a b x - y)² as a mean square: the Hessian in (a, b), with a minimum's and a saddle's signs."""
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        x, y = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[6.0]], dtype=torch.float64)
        for a, b in ((1.0, 3.0), (0.0, 0.0)):
            nn.init.constant_(model[0].weight, a)
            nn.init.constant_(model[1].weight, b)
            H = cv.hessian(model, mse_loss, [(x, y)])
            residual = 2 * a * b - 6
            expected = 2 * torch.tensor(
                [[4 * b * b, 4 * a * b + 2 * residual], [4 * a * b + 2 * residual, 4 * a * a]], dtype=torch.float64
            )
            assert relative(H.dense(), expected) < 1e-14
            values = torch.linalg.eigvalsh(H.dense())
            assert (values[0] < -1) == (a == 0.0)


class TestKnownSpectra:
    def test_any_symmetric_matrix(self):
        A = _gaussian(0, 7, 7)
        A = A + A.T
        H = _of_matrix(A)
        assert relative(H.dense(), A) < 1e-14
        for name, value in (("trace", A.trace()), ("frobenius_norm", A.norm())):
            assert math.isclose(float(getattr(H.total, name)()), float(value), rel_tol=1e-12)

    @pytest.mark.parametrize("condition", [1e2, 1e6, 1e12])
    def test_logarithmic_spectrum(self, condition):
        eigenvalues = torch.logspace(0, -math.log10(condition), 300, dtype=torch.float64)
        H = _of_matrix(_with_spectrum(eigenvalues))
        largest = H.total.eigenvalues(3, "LA", tolerance=1e-8)
        for estimate, value in zip(largest, eigenvalues[:3].flip(0), strict=True):
            assert abs(estimate.value - float(value)) < max(3 * estimate.stderr, 1e-6)

    def test_both_ends_of_an_indefinite_spectrum(self):
        eigenvalues = torch.cat([torch.linspace(-1, 1, 298), torch.tensor([-7.0, 9.0])]).double()
        H = _of_matrix(_with_spectrum(eigenvalues))
        assert abs(H.total.eigenvalues(1, "LA", tolerance=1e-6)[0].value - 9) < 1e-4
        assert abs(H.total.eigenvalues(1, "SA", tolerance=1e-6)[0].value + 7) < 1e-4

    def test_low_rank(self):
        factor = _gaussian(0, 200, 3)
        H = _of_matrix(factor @ factor.T)
        found = H.total.eigenvalues(3, "LA", tolerance=1e-8)
        truth = torch.linalg.svdvals(factor).square()
        assert relative(torch.tensor([e.value for e in found]).double().flip(0), truth) < 1e-7

    def test_semicircle(self):
        """Wigner: eigenvalues of a symmetric Gaussian matrix of entry variance 1/n lie between -2 and 2."""
        n = 400
        A = _gaussian(3, n, n)
        density = _of_matrix((A + A.T) / math.sqrt(2 * n)).total.density(matvecs=200, seed=0)
        nodes, weights = density.nodes, density.weights / density.probes
        assert abs(float((weights * nodes**2).sum()) - 1) < 0.05
        assert abs(float((weights * nodes**4).sum()) - 2) < 0.2  # the second Catalan number
        assert float(nodes.abs().max()) < 2.2

    def test_marchenko_pastur(self):
        """Least squares on N Gaussian rows of n entries: XᵀX/N has its spectrum within (1 ± sqrt(n/N))²."""
        rows, n = 1200, 300
        X = _gaussian(4, rows, n)
        H = cv.hessian(_linear(n, 1, 0), mse_loss, [(X, torch.zeros(rows, 1, dtype=torch.float64))])
        low, high = (1 - math.sqrt(n / rows)) ** 2, (1 + math.sqrt(n / rows)) ** 2
        largest = H.total.eigenvalues(1, "LA", tolerance=1e-4)[0].value / 2
        smallest = H.total.eigenvalues(1, "SA", tolerance=1e-4)[0].value / 2
        assert abs(largest - high) < 0.1 * high
        assert abs(smallest - low) < 0.1
        assert abs(float(H.total.trace(matvecs=64)) / 2 / n - 1) < 0.02


class TestTrapsOfOthers:
    """Mistakes found in other programs by running them."""

    def test_the_product_follows_the_weights(self):
        X, model = _gaussian(1, 8, 4), _linear(4, 3, 0)
        y, v = torch.arange(8) % 3, normal(1)(12)
        before = cv.hessian(model, cross_entropy, [(X, y)]) @ v
        with torch.no_grad():
            model.weight.mul_(3)
        assert relative(cv.hessian(model, cross_entropy, [(X, y)]) @ v, before) > 0.1

    def test_batches_weigh_by_their_targets(self):
        """Rows of equal number and unequal targets that count."""
        X, model = _gaussian(1, 6, 5, 4), _linear(4, 3, 0)
        y = torch.randint(0, 3, (6, 5), generator=torch.Generator().manual_seed(0))
        y[0, 1:] = y[4, 2:] = -100
        loss = CrossEntropy()
        whole = cv.hessian(model, loss, [(X, y)]).dense()
        parts = cv.hessian(model, loss, [(X[:3], y[:3]), (X[3:5], y[3:5]), (X[5:], y[5:])]).dense()
        assert relative(parts, whole) < 1e-14

    def test_differences_do_not_depend_on_the_length_of_the_vector(self):
        X, model = _gaussian(1, 8, 4), _linear(4, 3, 0).float()
        batch = [(X.float(), torch.arange(8) % 3)]
        exact, differences = (cv.hessian(model, cross_entropy, batch, hvp=kind) for kind in ("autodiff", "difference"))
        v = normal(1)(12).float()
        for length in (1e-6, 1.0, 1e6):
            assert relative(differences @ (length * v), exact @ (length * v)) < 1e-2
