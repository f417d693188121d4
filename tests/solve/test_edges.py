"""Solves at the edge of what can be solved: zero right-hand sides, damping near rounding, unusable preconditioners."""

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.errors import DtypeError, NonFiniteError, RangeError, ShapeError, SingularError
from curvoscope.estimate.products import Products
from curvoscope.solve.choice import PreconditionerChoice
from curvoscope.solve.iterations import KrylovIterations
from reference import normal
from solve_cases import conditioned, positive, product


def low_rank(n, rank, dtype):
    """A positive semidefinite matrix with n - rank zero eigenvalues."""
    r = normal(30)
    factor = r(n, rank).to(dtype)
    return factor @ factor.T


class TestZeroRightHandSide:
    @pytest.mark.parametrize("method", ["direct", "cg", "minres"])
    def test_a_start_is_not_kept(self, method):
        matrix, b = conditioned(21, 50.0, n=30)
        alone = positive(matrix).solve(0 * b, 0.1, method=method, start=b)
        assert alone.converged and alone.iterations == 0 and not bool(alone.value.any())
        both = positive(matrix).solve(torch.stack([b, 0 * b], 1), 0.1, method=method, start=torch.stack([b, b], 1))
        truth = torch.linalg.solve(matrix + 0.1 * torch.eye(30).double(), b)
        assert both.converged and not bool(both.value[:, 1].any())
        assert float((both.value[:, 0] - truth).norm()) <= both.error_bound


class TestDampingNearRounding:
    @pytest.mark.parametrize("method", ["direct", "minres"])
    def test_a_positive_definite_system_in_single_precision_is_not_called_singular(self, method):
        """Its damping is 16 units of rounding of the largest eigenvalue or less, but it bounds the error."""
        matrix = low_rank(40, 10, torch.float32)
        damping = 4e-7 * float(torch.linalg.eigvalsh(matrix).max())
        b = normal(31)(40).float()
        found = positive(matrix).solve(b, damping, 1e-4, method=method)
        exact = matrix.double() + damping * torch.eye(40).double()
        error = float((found.value.double() - torch.linalg.solve(exact, b.double())).norm())
        assert found.certificate == "lower bound" and error <= found.error_bound < float("inf")

    def test_the_cure_is_a_larger_damping_if_no_negative_eigenvalue_is_cancelled(self):
        matrix = low_rank(40, 10, torch.float64)
        for method in ("direct", "minres"):
            with pytest.raises(SingularError, match=r"give a damping above [1-9]e-1\d$"):
                product(matrix).solve(normal(32)(40), 1e-16, method=method)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_the_direction_of_a_large_singular_matrix(self, dtype, seed):
        """Of a Gauss-Newton matrix with fewer loss terms than rows, whose other eigenvalues are small too."""
        r = normal(100 + seed)
        values = torch.cat([torch.logspace(0, -3.5, 60, dtype=torch.float64), torch.zeros(140).double()])
        Q = torch.linalg.qr(r(200, 200)).Q
        matrix, b = ((Q * values) @ Q.T).to(dtype), r(200).to(dtype)
        with pytest.raises(SingularError, match="singular to rounding") as caught:
            product((matrix + matrix.T) / 2).solve(b, 0.0, method="minres", preconditioner=None)
        direction = caught.value.direction.double()
        assert float((Q[:, 60:].T @ direction).norm()) >= 1 - 1e-3

    def test_a_run_ends_when_a_step_along_a_null_direction_is_all_that_is_left(self):
        """It went on to the last product, and in single precision came back with 0."""
        r = normal(103)
        values = torch.cat([torch.logspace(0, -2, 100, dtype=torch.float64), torch.full((300,), 1e-12).double()])
        Q = torch.linalg.qr(r(400, 400)).Q
        matrix, b = ((Q * values) @ Q.T).float(), r(400).float()
        run = KrylovIterations(Products(product(matrix), "solve"), 0.0, "minres", PreconditionerChoice(), 1e-6, 4000)
        x = run.solve(b[:, None], None)
        least = float((Q[:, 100:].T @ b.double()).norm())
        assert run.ended and run.steps < 300
        assert float((b - matrix @ x[:, 0]).norm()) <= 1.02 * least

    @pytest.mark.parametrize("question", ["logdet", "effective_dimension"])
    @pytest.mark.parametrize("options", [{}, {"matvecs": 64}])
    def test_traces_of_a_singular_matrix(self, question, options):
        matrix = low_rank(40, 39, torch.float64)
        with pytest.raises((SingularError, RangeError), match=r"damping: .*(singular|0) to rounding"):
            getattr(positive(matrix), question)(0.0, **options)

    def test_a_bound_is_a_number(self):
        matrix, b = conditioned(22, 50.0, n=30)
        found = positive(matrix).solve(b, 1e300, method="cg")
        assert found.error_bound >= float((found.value - b / 1e300).norm())


@pytest.mark.parametrize("given", [None, "much", torch.ones(2), [1.0]])
def test_a_damping_is_one_number(given):
    matrix, b = conditioned(24, 50.0, n=8)
    operator = positive(matrix)
    A = cv.approximations.kfac(cv.hessian(nn.Linear(2, 2), nn.MSELoss(), [(torch.eye(2), torch.eye(2))]), "weight")
    for ask in (
        lambda: operator.solve(b, given),
        lambda: operator.inverse(given),
        lambda: operator.logdet(given),
        lambda: operator.effective_dimension(given),
        lambda: operator.inverse_diagonal(given),
        lambda: A.damped_solve(torch.ones(4), given),
    ):
        with pytest.raises(DtypeError, match=r"damping: got \w+, expected one number"):
            ask()


class TestUnusablePreconditioners:
    @pytest.mark.parametrize("method", ["cg", "minres"])
    @pytest.mark.parametrize(
        ("solve", "error", "message"),
        [
            (lambda b: b[:3], ShapeError, r"preconditioner: gave shape \(3, 1\), expected \(30, 1\)"),
            (lambda b: b * float("nan"), NonFiniteError, "preconditioner: gave NaN or infinity"),
            (lambda b: 0 * b, RangeError, "preconditioner: is not positive definite"),
        ],
    )
    def test_it_is_said(self, method, solve, error, message):
        matrix, b = conditioned(23, 50.0, n=30)

        class Given:
            def damped_solve(self, b, damping):
                return solve(b)

        with pytest.raises(error, match=message):
            positive(matrix).solve(b, 0.1, method=method, preconditioner=Given())


def test_an_indefinite_approximation_is_solved_all_the_same():
    """A nearest sum of Kronecker products can have negative eigenvalues: no Cholesky factor, but eigenvectors."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    H = cv.hessian(model, nn.CrossEntropyLoss(), [(normal(33)(6, 9), torch.arange(6) % 5)])
    A = cv.approximations.kronecker(H, "0.weight", rank=3)
    dense, b = A.dense(), normal(34)(72, 2)
    damping = -float(torch.linalg.eigvalsh(dense).min()) / 3
    assert damping > 1e-6
    truth = torch.linalg.solve(dense + damping * torch.eye(72).double(), b)
    for method in ("auto", "minres"):
        found = A.solve(b, damping, 1e-9, method=method)
        assert found.converged and bool(((found.value - truth).norm(dim=0) <= found.error_bounds).all())
        assert (found.value - truth).norm() <= 1e-6 * truth.norm()


def test_the_bound_holds_if_the_preconditioner_leaves_one_step():
    """Rounding is that of the whole matrix; the one vector of such a run sees its smallest eigenvalue alone."""
    factor = normal(43)(4, 3)
    matrix, null = factor @ factor.T, torch.linalg.svd(factor).U[:, 3]

    class Inverse:
        def damped_solve(self, v, damping):
            return torch.linalg.solve(matrix + damping * torch.eye(4).double(), v)

    found = positive(matrix).solve(null, 1e-6, 1e-8, method="cg", preconditioner=Inverse())
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert found.iterations < 3
    rounding = torch.finfo(torch.float64).eps * norm * float(found.value.norm())  # of one product, at the least
    assert found.error_bound >= rounding / found.margin


@pytest.mark.parametrize("rows", [60, 6])
@pytest.mark.parametrize("kind", ["kfac", "ekfac", "kronecker:1", "diagonal", "input"])
def test_traces_of_large_kronecker_products_are_exact(kind, rows):
    """More rows than a dense eigendecomposition is made of; with few tokens, most eigenvalues are 0."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Tanh(), nn.Linear(30, 4)).double()
    H = cv.hessian(model, nn.CrossEntropyLoss(), [(normal(44)(rows, 40), torch.arange(rows) % 4)])
    A = cv.approximations.approximation(H, kind, "0.weight")
    damped = A.dense() + 0.01 * torch.eye(1200).double()
    inverse = torch.linalg.inv(damped)
    logdet, dimension, diagonal = A.logdet(0.01), A.effective_dimension(0.01), A.inverse_diagonal(0.01)
    assert logdet.exact and dimension.exact and diagonal.exact
    assert logdet == pytest.approx(float(torch.logdet(damped)), rel=1e-10)
    assert dimension == pytest.approx(1200 - 0.01 * float(inverse.trace()), rel=1e-8)
    assert torch.allclose(diagonal.value, inverse.diagonal(), rtol=1e-9)
    assert torch.allclose(A.inverse(0.01).dense(), inverse, atol=1e-9)
