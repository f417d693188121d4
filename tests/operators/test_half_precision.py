"""Half precision: every question has an answer near that of the same numbers in double precision, or a typed error."""

import math

import numpy as np
import pytest
import torch

import curvoscope as cv
from curvoscope import magnitudes
from reference import normal

HALF = [torch.bfloat16, torch.float16]
QUESTIONS = {
    "trace": lambda B: B.trace(),
    "frobenius_norm": lambda B: B.frobenius_norm(),
    "spectral_norm": lambda B: B.spectral_norm(),
    "largest": lambda B: B.eigenvalues(1, "LA")[0],
    "largest, by products": lambda B: B.eigenvalues(1, "LA", tolerance=0.01)[0],
    "scipy": lambda B: float(np.linalg.norm(B.to_scipy() @ np.ones(B.shape[1]))),
    "solve": lambda B: float(B.solve(torch.ones(B.shape[0], dtype=B.dtype), 20.0, 0.1).value.double().norm()),
    "logdet": lambda B: B.logdet(20.0),
}


def hessian(dtype, size=1.0):
    """Of a feed-forward layer whose weights are the same numbers in every dtype."""
    r = normal(0)
    W1, b1, W2, b2, X = (r(*shape).bfloat16().half() for shape in ((3, 4), (4,), (4, 3), (3,), (2, 3, 3)))
    layer = cv.exact.FeedForward(*(weight.to(dtype) for weight in (W1, b1, W2, b2)), activation="gelu")
    return layer.hessian(X.to(dtype), lambda F: size * F.pow(4).sum())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["W1", "W2"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_answers(dtype, name, question):
    half, double = (QUESTIONS[question](hessian(kind, 2**-6).outer[name]) for kind in (dtype, torch.float64))
    assert half == pytest.approx(double, rel=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALF)
def test_singular_values(dtype):
    half, double = (hessian(kind, 2**-6)["W1", "W2"].spectral_norm() for kind in (dtype, torch.float64))
    assert half == pytest.approx(double, rel=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("pair", [("W1", "W1"), ("W1", "b1"), ("W1", "W2")])
@pytest.mark.parametrize("part", ["functional", "total"])
def test_norms_whose_inner_products_overflow(pair, part):
    """The squares of these entries are beyond half precision, the entries are not."""
    half, double = (getattr(hessian(kind), part)[pair] for kind in (torch.float16, torch.float64))
    assert half.frobenius_norm() == pytest.approx(double.frobenius_norm(), rel=0.02)


def test_scipy_sees_no_number_that_overflows():
    operator = hessian(torch.float16).total.to_scipy()
    with pytest.raises(cv.CurvoscopeError, match="product: overflows"):
        operator @ np.full(operator.shape[1], 100.0)


@pytest.mark.parametrize("dtype", HALF)
def test_scalar_attention(dtype):
    r = normal(1)
    w, x, y = r(2, 3), r(4), r(4)
    half, double = (
        cv.exact.ScalarAttention(*w.to(dtype).to(kind), 1.0).spectrum(*(v.to(dtype).to(kind) for v in (x, y)))
        for kind in (dtype, torch.float64)
    )
    size = float(double.outliers.abs().max())
    assert float((half.outliers - double.outliers).abs().max()) < 32 * torch.finfo(dtype).eps * size


def test_the_root_of_no_number_is_none():
    assert math.isnan(magnitudes.root((math.nan, 0))) and magnitudes.root((-1e-20, 3)) == 0
