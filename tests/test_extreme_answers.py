"""Operators, estimators and analyses of matrices from 1e-300 to 1e300: answers scale with them, or are refused."""

import math

import mpmath
import pytest
import torch

import curvoscope as cv
from curvoscope import analysis, estimate
from curvoscope.analysis.advice import Findings, advice
from curvoscope.analysis.measurements import Extremes
from curvoscope.errors import NonFiniteError, RangeError
from curvoscope.estimate import Density, Estimate
from curvoscope.magnitudes import norm
from curvoscope.operators import eigenvalues
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import DenseCore
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term
from reference import normal

SCALES = [
    (torch.float64, 2.0**-900),
    (torch.float64, 2.0**-100),
    (torch.float64, 2.0**50),
    (torch.float64, 2.0**900),
    (torch.float32, 2.0**-100),
    (torch.float32, 2.0**50),
    (torch.float32, 2.0**100),
]
SIZE = 60


def _product(matrix, scale, dtype, symmetric=True):
    scaled = scale * matrix.to(dtype)
    rows, columns = matrix.shape
    products = (lambda v: scaled @ v, lambda v: scaled.T @ v)
    return Product(products, (rows, 1), (columns, 1), scaled, symmetric)


def _matrix(rank=SIZE):
    factor = normal(0)(SIZE, rank)
    return factor @ torch.diag(torch.linspace(-1, 9, rank, dtype=torch.float64)) @ factor.T


QUESTIONS = {
    "trace": lambda B: estimate.trace(B, matvecs=24),
    "trace, hutch++": lambda B: estimate.trace(B, matvecs=24, method="hutch++"),
    "trace, xtrace": lambda B: estimate.trace(B, matvecs=24, method="xtrace"),
    "trace to a tolerance": lambda B: estimate.trace(B, tolerance=0.3),
    "norm": lambda B: estimate.frobenius_norm(B, matvecs=24),
    "norm, hutchinson": lambda B: estimate.frobenius_norm(B, matvecs=24, method="hutchinson"),
    "norm, xtrace": lambda B: estimate.frobenius_norm(B, matvecs=24, method="xtrace"),
    "norm, exact": lambda B: estimate.frobenius_norm(B, matvecs=400),
    "interval of the norm": lambda B: estimate.frobenius_norm(B, matvecs=24).interval()[0],
    "error of the trace": lambda B: estimate.trace(B, matvecs=24).stderr,
    "diagonal": lambda B: estimate.diagonal(B, matvecs=24).value[3],
    "error of the diagonal": lambda B: estimate.diagonal(B, matvecs=24).stderr[3],
    "eigenvalue, lanczos": lambda B: estimate.eigenvalues(B, 1, "LA")[0],
    "eigenvalue, eigsh": lambda B: estimate.eigenvalues(B, 1, "LA", method="eigsh")[0],
    "eigenvalue, lobpcg": lambda B: estimate.eigenvalues(B, 1, "LA", method="lobpcg")[0],
    "density": lambda B: estimate.density(B, matvecs=24, steps=8).support[1],
    "density, exact": lambda B: estimate.density(B, matvecs=400).support[1],
    "moment": lambda B: estimate.density(B, matvecs=24, steps=8).moment(1),
    "spectral norm": lambda B: B.spectral_norm(matvecs=24),
}


@pytest.mark.parametrize("rank", [SIZE, 4])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_estimators_scale_with_the_matrix(rank, dtype):
    matrix = _matrix(rank)
    plain = {name: float(ask(_product(matrix, 1.0, dtype))) for name, ask in QUESTIONS.items()}
    rel = 1e-7 if dtype == torch.float64 else 1e-3
    for scale in (scale for kind, scale in SCALES if kind == dtype):
        for name, ask in QUESTIONS.items():
            found = float(ask(_product(matrix, scale, dtype)))
            assert found / scale == pytest.approx(plain[name], rel=rel, abs=rel * 1e-3 * float(matrix.norm())), name


@pytest.mark.parametrize("dtype, scale", SCALES)
def test_norms_of_kronecker_sums_by_every_route(dtype, scale):
    """|B|_F from the entries, from Gram matrices and from contractions, the scale being on the vectors or the cores."""
    for T, a, p in ((2, 3, 2), (3, 12, 9)):

        def built(vector, matrix, T=T, a=a, p=p):
            """Terms of one degree in `vector` and in `matrix`."""
            draw = normal(1, dtype)
            left = draw(T, a)
            terms = [
                Term(vector * left, left, DenseCore(matrix * draw(T, p, p))),
                Term(vector * left, draw(T, p), DenseCore(matrix * draw(T, p, a)), (0, 1)),
                Single(vector * draw(a, a), matrix * draw(p, p)),
            ]
            return KroneckerSum((a, p), (a, p), terms, left)

        truth = norm(built(1.0, 1.0).dense())
        for operator in (built(scale**0.5, scale**0.5), built(scale, 1.0), built(1.0, scale)):
            rel = 1e-10 if dtype == torch.float64 else 1e-4
            assert operator.frobenius_norm() / scale == pytest.approx(truth, rel=rel)
            assert operator.spectral_norm() / scale == pytest.approx(built(1.0, 1.0).spectral_norm(), rel=rel)
            assert operator.trace() / scale == pytest.approx(built(1.0, 1.0).trace(), rel=rel, abs=rel * truth)


@pytest.mark.parametrize("dtype, scale", SCALES)
def test_large_matrices_by_krylov_methods(dtype, scale, monkeypatch):
    """What is too large for LAPACK: eigsh on the matrix, or on M^T M where there is no symmetry."""
    monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 8)
    matrix, rel = _matrix(6), 1e-8 if dtype == torch.float64 else 1e-3
    top = torch.linalg.eigvalsh(matrix)[-1:]
    assert float(_product(matrix, scale, dtype).eigenvalues(1, "LA")[0]) / scale == pytest.approx(float(top), rel=rel)
    wide = matrix[:20]
    found = _product(wide, scale, dtype, symmetric=False)
    truth = float(torch.linalg.matrix_norm(wide, 2))
    assert found.spectral_norm() / scale == pytest.approx(truth, rel=rel)
    assert float(found.spectral_norm(matvecs=20)) / scale == pytest.approx(truth, rel=rel)


def test_the_norm_of_numbers_whose_squares_are_none():
    assert norm(torch.full((3, 3), 1e-200, dtype=torch.float64)) == pytest.approx(3e-200)
    assert norm(torch.full((3, 3), 1e200, dtype=torch.float64)) == pytest.approx(3e200)
    assert norm(torch.full((4,), 1e-30)) == pytest.approx(2e-30)
    assert norm(torch.full((4,), 1e38)) == pytest.approx(2e38)
    assert norm(torch.zeros(5)) == 0.0
    assert norm(torch.tensor([5e-324], dtype=torch.float64)) == 5e-324
    assert norm(torch.full((9,), 1.7e308, dtype=torch.float64)) == math.inf


@pytest.mark.parametrize("question", ["trace", "diagonal", "frobenius_norm", "spectral_norm", "eigenvalues", "dense"])
def test_what_overflows_is_refused(question):
    """Finite factors, infinite products: each question says its own name."""
    left = torch.full((2, 3), 1e30)
    operator = KroneckerSum((3, 3), (3, 3), [Term(left, left, DenseCore(torch.eye(3).repeat(2, 1, 1), True))], left)
    if question == "frobenius_norm":  # 6e60 is a float, though not a float32
        operator = operator * 1e300
    with pytest.raises(NonFiniteError, match=f"{question}: .*overflow"):
        getattr(operator, question)()
    with pytest.raises(NonFiniteError, match="product"):
        operator @ torch.ones(9)


@pytest.mark.parametrize("gap", [1e-6, 1e-12, 0.0])
def test_nearly_degenerate_eigenvalues(gap):
    """Three eigenvalues closer than any residual, and a double zero: each is found as often as it is there."""
    values = torch.tensor([0.0, 0.0, 1.0, 2.0, 5.0, 5.0 + gap, 5.0 - gap], dtype=torch.float64)
    Q = torch.linalg.qr(normal(2)(7, 7)).Q
    operator = _product(Q @ values.diag() @ Q.T, 1.0, torch.float64)
    for found in (operator.eigenvalues(3, "LA"), estimate.lanczos(operator, 3, "LA").value):
        assert torch.allclose(found, values.sort().values[-3:], rtol=0, atol=1e-12)
    assert torch.allclose(operator.eigenvalues(), values.sort().values, rtol=0, atol=1e-13)
    assert operator.density().wasserstein(values) < 1e-13


@pytest.mark.parametrize(
    "scales",
    [{}, {"x": 1e-30}, {"w_Q": 1e-30, "w_K": 1e30}, {"w_V": 1e30}, {"x": 1e30, "w_Q": 1e-60}, {"w_K": 1e-8, "y": 1e20}],
)
def test_the_scalar_model_to_all_digits(scales):
    draw = normal(5)
    q, k, v, x, y = (scales.get(n, 1.0) * draw(m) for n, m in (("w_Q", 2), ("w_K", 2), ("w_V", 1), ("x", 3), ("y", 3)))
    found = cv.exact.ScalarAttention(q, k, v[0]).spectrum(x, y)
    with mpmath.workdps(500):
        H = _scalar_hessian([*q, *k, *v], x, y)
        # by exact scaling of each weight, the matrix is graded: compare through its characteristic sums
        expected = sorted(mpmath.eigsy(H, eigvals_only=True), key=float)
        trace = mpmath.fsum(H[i, i] for i in range(5))
    size = max(abs(float(value)) for value in expected)
    assert found.trace == pytest.approx(float(trace), rel=1e-9, abs=1e-11 * size)
    for one, other in zip(found.eigenvalues.tolist(), expected, strict=True):
        assert one == pytest.approx(float(other), rel=0, abs=1e-11 * size)


def _scalar_hessian(point, x, y):
    """Second differences of the mean squared error of f_i = w_V sum_j A_ij x_j."""
    p, x, y = ([mpmath.mpf(float(number)) for number in numbers] for numbers in (point, x, y))
    steps = [abs(weight) * mpmath.mpf(10) ** -100 for weight in p]

    def loss(w):
        s, total = (w[0] * w[2] + w[1] * w[3]) / mpmath.sqrt(2), mpmath.mpf(0)
        for xi, yi in zip(x, y, strict=True):
            top = max(s * xi * xj for xj in x)
            weights = [mpmath.exp(s * xi * xj - top) for xj in x]
            mean = mpmath.fsum(a * xj for a, xj in zip(weights, x, strict=True)) / mpmath.fsum(weights)
            total += (w[4] * mean - yi) ** 2 / 3
        return total

    H = mpmath.matrix(5, 5)
    for i in range(5):
        for j in range(i, 5):
            total = mpmath.mpf(0)
            for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                moved = list(p)
                moved[i] += a * steps[i]
                moved[j] += b * steps[j]
                total += a * b * loss(moved)
            H[i, j] = H[j, i] = total / (4 * steps[i] * steps[j])
    return H


@pytest.mark.parametrize("scale, dtype", [(1e-9, torch.float32), (1e-60, torch.float64), (1e40, torch.float64)])
def test_tables_of_blocks(scale, dtype):
    """A block of norm 1e-36, or 1e-180, is not exactly zero."""
    draw = normal(6)
    weights, X, Y = [draw(3, 3) for _ in range(3)], draw(5, 3), draw(5, 3)
    weights[2] = scale * weights[2]
    layer = cv.exact.SelfAttention(*(w.to(dtype) for w in weights))
    rows = analysis.block_table(layer.hessian(X.to(dtype), cv.losses.MSE((scale * Y).to(dtype))))
    plain = cv.exact.SelfAttention(*weights[:2], weights[2] / scale).hessian(X, cv.losses.MSE(Y))
    for row in rows:
        if row.part == "total" and row.row == row.column == "Q":  # of degree two in values and targets together
            assert row.frobenius_norm / scale / scale == pytest.approx(plain["Q"].frobenius_norm(), rel=1e-4)
    assert "Exactly zero" not in analysis.verdict(rows) and "inf" not in analysis.verdict(rows)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e290])
def test_power_laws(scale):
    law = analysis.power_law({size: [scale * size**0.5] for size in (1e2, 1e4, 1e6, 1e8)})
    assert law.exponent == pytest.approx(0.5) and law.prefactor / scale == pytest.approx(1.0)
    assert law(1e5).value / scale == pytest.approx(1e5**0.5)
    assert law.required(scale * 100).value == pytest.approx(1e4)


def test_a_power_law_beyond_floating_point():
    with pytest.raises(RangeError, match="measurements"):
        analysis.power_law({10: [1e-300], 100: [1e-240], 1000: [1e-180]})


@pytest.mark.parametrize("top", [1e-200, 1e-30, 1e30, 1e200])
def test_learning_rates(top):
    found = Extremes(4, Estimate(top, 0.1 * top, 8, "lanczos"), Estimate(-top, 0.0, 8, "lanczos"))
    rate = found.critical_learning_rate
    assert rate.value == pytest.approx(2 / top) and rate.stderr == pytest.approx(0.2 / top)
    (cap,) = advice(Findings(extremes=found))
    assert cap.settings["learning rate"] == pytest.approx(2 / top)


def test_a_learning_rate_beyond_floating_point():
    nearly_flat = Extremes(4, Estimate(5e-324, 0.0, 8, "lanczos"), Estimate(0.0, 0.0, 8, "lanczos"))
    with pytest.raises(NonFiniteError, match="critical_learning_rate"):
        _ = nearly_flat.critical_learning_rate
    with pytest.raises(NonFiniteError, match="moment"):
        Density.exact(torch.tensor([1e200, 2e200], dtype=torch.float64)).moment(2)
