"""Every number is an Estimate, exact or not; a Hessian answers for its total; eigenvectors."""

import pytest
import torch

import curvoscope as cv
from autodiff_cases import MLP, points
from curvoscope.estimate import DiagonalEstimate, Eigenvalues
from curvoscope.operators import eigenvalues
from curvoscope.operators.compositions import MatrixFree
from reference import normal


def exact():
    r = normal(0)
    layer = cv.exact.SelfAttention(r(3, 2), r(3, 2), r(3, 3))
    return layer.hessian(r(2, 4, 3), cv.losses.MSE(r(2, 4, 3)))


def matrix_free():
    return cv.hessian(MLP(), torch.nn.MSELoss(), [points()], method="autodiff")


@pytest.mark.parametrize("make", [exact, matrix_free])
def test_a_script_for_a_small_model_works_for_a_large_one(make):
    H = make()
    truth = H.dense().double()
    for asked in (H, H.total, H[H.names[0]]):
        for number in (asked.trace(), asked.frobenius_norm(), asked.spectral_norm()):
            assert isinstance(number, cv.Estimate) and number.exact == (number.stderr == 0)
        assert isinstance(asked.diagonal(), DiagonalEstimate) and isinstance(asked.eigenvalues(2), Eigenvalues)
    assert H.trace() == H.total.trace() and H.spectral_norm() == H.total.spectral_norm()
    assert H.frobenius_norm(matvecs=4) == H.total.frobenius_norm(matvecs=4)
    assert torch.equal(H.diagonal(), H.total.diagonal())
    assert torch.equal(H.density(matvecs=8, steps=4).nodes, H.total.density(matvecs=8, steps=4).nodes)
    low, high = H.spectral_norm().interval()
    assert low - 1e-6 <= float(torch.linalg.matrix_norm(truth, 2)) <= high + 1e-6
    first, last = H.eigenvalues(2, "LA")
    assert first <= last and f"{last:.2f}" and last.stderr >= 0 and isinstance(last, cv.Estimate)


class Counted(MatrixFree):
    """A symmetric operator of 300 rows that counts its products."""

    def __init__(self):
        r = normal(1)
        factor = r(300, 40)
        super().__init__((300, 1), (300, 1), factor, symmetric=True)
        self.entries, self.products = factor @ factor.T, 0

    def _matmat(self, columns):
        self.products += columns.shape[1]
        return self.entries @ columns


@pytest.mark.parametrize("question", ["trace", "diagonal", "frobenius_norm", "spectral_norm"])
@pytest.mark.parametrize("make", [lambda B: 2.0 * B, lambda B: B - 0.5 * B, lambda B: -B])
def test_sums_and_multiples_of_operators_known_by_products_are_estimated(make, question):
    operator = Counted()
    made = make(operator)
    answer = getattr(made, question)()
    assert made.estimated and not answer.exact and operator.products < 300
    exact = getattr(made, question)(matvecs=400)
    assert torch.as_tensor(answer - exact).abs().max() <= 8 * torch.as_tensor(answer.stderr).max() + 1e-6


@pytest.mark.parametrize("few", [0, 2048])  # by ARPACK, and among all
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-8}])
@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
def test_eigenvectors(which, options, few, monkeypatch):
    monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", few)
    for H in (exact(), matrix_free()):
        truth = H.dense()
        values, vectors = H.eigenvalues(3, which, vectors=True, **options)
        assert vectors.shape == (len(truth), 3) and vectors.dtype == truth.dtype
        assert torch.allclose(truth @ vectors, vectors * values.to(truth.dtype), atol=1e-4 * float(truth.norm()))
        assert torch.allclose(vectors.T @ vectors, torch.eye(3, dtype=truth.dtype), atol=1e-5)
        assert torch.allclose(values.value, H.eigenvalues(3, which, **options).value, rtol=1e-6, atol=1e-12)


def test_all_eigenvectors():
    for H in (exact(), matrix_free()):
        values, vectors = H.eigenvalues(vectors=True)
        assert values.exact and torch.allclose(vectors * values @ vectors.T, H.dense(), atol=1e-5)


def test_eigenvectors_of_a_zero_block(monkeypatch):
    monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 0)
    X = torch.ones(3, 4, dtype=torch.float64)
    H = cv.exact.LinearMLP([torch.eye(4, dtype=torch.float64)]).hessian(X, torch.sum)
    values, vectors = H.eigenvalues(2, vectors=True)
    assert not values.any() and torch.equal(vectors.T @ vectors, torch.eye(2, dtype=torch.float64))
