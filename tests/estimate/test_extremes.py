import math

import pytest
import torch

from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import eigenvalues, lanczos
from curvoscope.operators.compositions import Product
from matrices import Dense, outliers, rotated
from reference import normal


def _operator(matrix, symmetric=True):
    products = (lambda v: matrix @ v, lambda v: matrix.T @ v)
    return Product(products, (matrix.shape[0], 1), (matrix.shape[1], 1), matrix, symmetric)


@pytest.mark.parametrize("method", ["eigsh", "lobpcg"])
class TestScipy:
    @pytest.mark.parametrize("which", ["LM", "LA", "SA"])
    @pytest.mark.parametrize("k", [1, 3])
    def test_agrees_with_lanczos(self, method, which, k):
        operator = _operator(rotated(outliers(80)))
        found = eigenvalues(operator, k, which, method=method, tolerance=1e-6)
        ours = eigenvalues(operator, k, which)
        assert found.method == method
        for mine, theirs in zip(ours, found, strict=True):
            assert abs(mine.value - theirs.value) <= mine.stderr + theirs.stderr
        assert torch.allclose(found.value, ours.value, atol=1e-4)
        assert found.orthogonality < 1e-12

    def test_vectors_and_residuals(self, method):
        matrix = rotated(outliers(80)).float()
        found = eigenvalues(_operator(matrix), 2, method=method, tolerance=1e-4, vectors=True)
        residuals = (matrix @ found.vectors - found.vectors * found.value.float()).norm(dim=0)
        assert found.vectors.dtype == torch.float32
        for residual, said, value in zip(residuals, found.residuals, found, strict=True):
            assert abs(float(residual) - said) < 1e-4
            assert said <= value.stderr

    def test_warm_start(self, method):
        matrix = rotated(outliers(120))
        start = eigenvalues(_operator(matrix), 2, "LA", vectors=True).vectors
        warm = eigenvalues(_operator(matrix), 2, "LA", start=start, method=method)
        cold = eigenvalues(_operator(matrix), 2, "LA", method=method)
        assert torch.allclose(warm.value, cold.value, atol=1e-6)
        assert warm.matvecs <= cold.matvecs

    def test_zero_matrix(self, method):
        found = eigenvalues(_operator(torch.zeros(30, 30).double()), 2, method=method)
        assert not found.value.any() and all(value.stderr == 0 for value in found)

    def test_budget(self, method):
        operator = _operator(rotated(outliers(200)))
        found = eigenvalues(operator, 1, "LA", matvecs=60, method=method)
        assert found.matvecs <= 60
        assert abs(found[0].value - 20) < 1e-3

    def test_bad_input(self, method):
        matrix = rotated(outliers(40))
        with pytest.raises(RangeError, match="k: got 40"):
            eigenvalues(_operator(matrix), 40, method=method)
        with pytest.raises(RangeError, match="which"):
            eigenvalues(_operator(matrix), 2, "LR", method=method)
        with pytest.raises(RangeError, match=r"method: .* to_scipy"):
            eigenvalues(Dense(matrix), 2, method=method)
        with pytest.raises(RangeError, match="start"):
            eigenvalues(_operator(matrix), 2, method=method, start=torch.ones(39).double())
        with pytest.raises(ShapeError, match="operator"):
            eigenvalues(_operator(normal(0)(40, 40), False), 2, method=method)
        with pytest.raises(NonFiniteError, match="product"):
            eigenvalues(_operator(torch.full((40, 40), math.nan).double()), 2, method=method)


def test_too_small_a_budget_for_eigsh():
    flat = torch.linspace(0, 1, 300).double()
    with pytest.raises(RangeError, match="matvecs: eigsh found 0 of 3"):
        eigenvalues(_operator(rotated(flat)), 3, "LA", matvecs=12, method="eigsh")


def test_lanczos_is_the_default():
    operator = Dense(rotated(outliers(60)))
    first, second = (solve(operator, 2, seed=4, tolerance=1e-3) for solve in (eigenvalues, lanczos))
    assert list(first) == list(second)
    with pytest.raises(RangeError, match="method: got 'power'"):
        eigenvalues(operator, method="power")
