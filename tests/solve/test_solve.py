"""Damped solves and what follows from them, against dense float64 and against 60 digits."""

import pytest
import torch

import curvoscope as cv
from curvoscope.errors import ConvergenceError, NonFiniteError, RangeError, ShapeError, SingularError
from curvoscope.solve import Solver
from curvoscope.solve.preconditioning import Diagonal
from reference import normal
from solve_cases import KINDS, conditioned, distance, exact_solution, positive, product

DAMPING = 0.7


def damped(matrix):
    return matrix + DAMPING * torch.eye(len(matrix), dtype=matrix.dtype)


@pytest.mark.parametrize("method", ["auto", "minres"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_operator(kind, method):
    operator, truth = KINDS[kind]()
    b = normal(1)(len(truth), 2)
    found = operator.solve(b, DAMPING, 1e-12, method=method)
    expected = torch.linalg.solve(damped(truth), b)
    assert found.converged and found.method == ("direct" if method == "auto" else method)
    assert (found.value - expected).norm() <= 1e-8 * expected.norm()
    assert bool(((found.value - expected).norm(dim=0) <= found.error_bounds).all())
    residual = (b - damped(truth) @ found.value).norm(dim=0)
    rounding = 1e-14 * torch.linalg.matrix_norm(damped(truth), 2) * found.value.norm(dim=0)
    assert bool(((residual - found.residuals).abs() <= rounding).all())


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_every_kind(kind):
    operator, truth = KINDS[kind]()
    values, unit = torch.linalg.eigvalsh(truth), torch.eye(len(truth), dtype=torch.float64)
    damping = max(DAMPING, -1.5 * float(values.min()))
    inverse = torch.linalg.inv(truth + damping * unit)
    logdet, dimension = operator.logdet(damping), operator.effective_dimension(damping)
    assert logdet.exact and dimension.exact
    assert logdet == pytest.approx(float((values + damping).log().sum()), rel=1e-8, abs=1e-8)
    assert dimension == pytest.approx(float((truth @ inverse).trace()), rel=1e-8, abs=1e-8)
    assert torch.allclose(operator.inverse_diagonal(damping).value, inverse.diagonal(), rtol=1e-8, atol=1e-10)
    assert torch.allclose(operator.inverse(damping).dense(), inverse, rtol=1e-7, atol=1e-10)


def certified(seed, method):
    """The true error is below the bound; the residual and the bound are not loose without a reason."""
    condition = 10.0 ** (seed % 11)
    known = seed // 11 % 2 == 0
    matrix, b = conditioned(seed, condition, signs=not known)
    damping = 1 / condition if known else 0.0
    operator = positive(matrix) if known else product(matrix)
    found = operator.solve(b, damping, 1e-10, method=method, preconditioner=None)
    error = distance(found.value, exact_solution(matrix, damping, b))
    assert error <= found.error_bound, (seed, found)
    if method == "direct" or known:
        assert found.error_bound < float("inf"), (seed, found)
    if found.converged:
        assert found.relative_residual <= 1e-10


@pytest.mark.parametrize("method", ["direct", "cg", "minres"])
@pytest.mark.parametrize("seed", range(0, 44, 5))
def test_certificates(seed, method):
    certified(seed if method != "cg" else seed % 11, method)


@pytest.mark.slow
def test_certificates_of_many():
    for seed in range(200):
        certified(seed, "direct")
        certified(seed, "minres")
    for seed in range(100):
        certified(seed % 11 + 22 * (seed // 11), "cg")


class TestCertificate:
    def test_where_it_comes_from(self):
        matrix, b = conditioned(0, 100.0, n=60)
        known = positive(matrix).solve(b, 0.1, method="cg")
        assert (known.certificate, known.margin) == ("lower bound", pytest.approx(0.1))
        found = product(matrix).solve(b, 0.1, method="minres")
        smallest = float(torch.linalg.eigvalsh(matrix).min()) + 0.1
        assert found.certificate == "lanczos" and 0 < found.margin <= smallest
        direct = product(matrix).solve(b, 0.1)
        assert direct.certificate == "eigenvalues" and direct.margin == pytest.approx(smallest)

    def test_inside_an_indefinite_spectrum(self):
        """The smallest eigenvalue of (B + damping)² bounds the margin; without products for it, there is no bound."""
        matrix, b = conditioned(1, 20.0, signs=True, n=40)
        found = product(matrix).solve(b, 0.0, 1e-8, method="minres")
        assert found.certificate == "lanczos" and 0 < found.margin <= 0.05 + 1e-12
        truth = torch.linalg.solve(matrix, b)
        assert (found.value - truth).norm() <= found.error_bound < 1e-3 * truth.norm()

    def test_no_honest_bound(self):
        """A margin far below what the products resolve."""
        values = torch.cat([torch.linspace(-1, 1, 999), torch.tensor([1e-9])]).double()
        matrix = values.diag()
        found = product(matrix).solve(torch.ones(1000).double(), 0.0, method="minres", preconditioner=None, matvecs=20)
        assert found.certificate == "none" and found.error_bound == float("inf") and not found.converged

    def test_float32(self):
        matrix, b = conditioned(2, 1e3, n=30)
        found = positive(matrix.float()).solve(b.float(), 0.01, 1e-5, method="cg")
        truth = torch.linalg.solve(matrix + 0.01 * torch.eye(30).double(), b)
        assert found.converged and found.value.dtype == torch.float32
        assert (found.value - truth).norm() <= found.error_bound


class TestIterations:
    def test_start_continues_an_earlier_solve(self):
        matrix, b = conditioned(3, 1e4, n=60)
        first = positive(matrix).solve(b, 1e-3, method="cg", matvecs=20)
        second = positive(matrix).solve(b, 1e-3, method="cg", start=first.value)
        again = positive(matrix).solve(b, 1e-3, method="cg", start=second.value)
        assert not first.converged and "NOT CONVERGED" in str(first)
        assert second.converged and again.converged and again.iterations == 0

    def test_columns_of_different_difficulty(self):
        matrix, b = conditioned(4, 1e3, n=40)
        vector = torch.linalg.eigh(matrix)[1][:, -1]
        columns = torch.stack([b, vector, torch.zeros_like(b)], 1)
        found = positive(matrix).solve(columns, 0.01, 1e-10, method="cg")
        truth = torch.linalg.solve(matrix + 0.01 * torch.eye(40).double(), columns)
        assert found.converged and torch.allclose(found.value, truth, rtol=1e-7, atol=1e-9)
        assert found.value[:, 2].abs().max() == 0

    @pytest.mark.parametrize("scale", [1e-150, 1e-20, 1e20, 1e150])
    def test_scales(self, scale):
        matrix, b = conditioned(5, 50.0, n=30)
        found = positive(scale * matrix).solve(b / scale, scale * 0.1, 1e-9, method="cg")
        truth = torch.linalg.solve(matrix + 0.1 * torch.eye(30).double(), b)
        assert found.converged and torch.allclose(found.value * scale * scale, truth, rtol=1e-6, atol=1e-8)

    def test_interrupt_returns_the_best_so_far(self):
        matrix, b = conditioned(6, 1e4, n=60)
        count = 0

        def times(v):
            nonlocal count
            count += 1
            if count == 30:
                raise KeyboardInterrupt
            return matrix @ v

        operator = positive(matrix)
        operator._products = times, times
        found = operator.solve(b, 1e-3, method="cg")
        assert found.interrupted and not found.converged and "interrupted" in str(found)
        assert found.residual == pytest.approx(float((b - matrix @ found.value - 1e-3 * found.value).norm()))
        system = matrix + 1e-3 * torch.eye(60).double()
        truth = torch.linalg.solve(system, b)
        error = found.value - truth
        assert error @ system @ error < truth @ system @ truth and found.error_bound > error.norm()

    def test_a_diagonal_preconditioner_saves_products(self):
        r = normal(7)
        scales = torch.logspace(0, 4, 80, dtype=torch.float64)
        matrix = torch.eye(80).double() + 0.1 * (r(80, 80) + 0 * scales) / 80**0.5
        matrix = scales[:, None].sqrt() * (matrix @ matrix.T) * scales.sqrt()
        b = r(80)
        plain = positive(matrix).solve(b, 0.1, method="cg", preconditioner=None)
        named = positive(matrix).solve(b, 0.1, method="cg", preconditioner="diagonal")
        given = positive(matrix).solve(b, 0.1, method="minres", preconditioner=Diagonal(matrix.diagonal()))
        auto = positive(matrix).solve(b, 0.1, method="cg")
        truth = torch.linalg.solve(matrix + 0.1 * torch.eye(80).double(), b)
        for found in (plain, named, given, auto):
            assert found.converged and (found.value - truth).norm() <= found.error_bound
        assert named.iterations < plain.iterations / 2 and auto.iterations < plain.iterations


class TestLeastResidual:
    @pytest.mark.parametrize("steps", [2, 5, 12])
    def test_no_vector_of_the_space_has_a_smaller_one(self, steps):
        """Against least squares over the Krylov space of b, from its orthonormal basis."""
        matrix, b = conditioned(13, 1e3, n=50)
        system = matrix + 1e-3 * torch.eye(50).double()
        basis = b[:, None] / b.norm()
        for _ in range(steps - 1):
            basis = torch.linalg.qr(torch.cat([basis, system @ basis[:, -1:]], 1)).Q
        coefficients = torch.linalg.lstsq(system @ basis, b[:, None]).solution
        least = float((b - (system @ basis @ coefficients)[:, 0]).norm())
        found = positive(matrix).solve(b, 1e-3, method="cg", preconditioner=None, matvecs=steps)
        assert not found.converged and found.iterations == steps
        assert found.residual == pytest.approx(least, rel=1e-8)
        assert float((b - system @ found.value).norm()) == pytest.approx(least, rel=1e-8)

    def test_it_falls_with_every_step_of_a_preconditioned_run(self):
        matrix, b = conditioned(14, 1e4, n=60)
        system = matrix + 1e-3 * torch.eye(60).double()
        before = float(b.norm())
        for steps in range(2, 20):
            found = positive(matrix).solve(
                b, 1e-3, 1e-12, method="cg", preconditioner=Diagonal(matrix.diagonal()), matvecs=steps
            )
            residual = float((b - system @ found.value).norm())
            assert found.residual == pytest.approx(residual, rel=1e-9) and residual <= before * (1 + 1e-12)
            before = residual

    @pytest.mark.parametrize(
        ("dtype", "condition", "tolerance", "saved"),
        [
            (torch.float64, 1e2, 1e-3, True),
            (torch.float32, 1e2, 1e-3, True),
            (torch.float64, 1e4, 1e-6, False),  # a model may compute in single precision inside
            (torch.float32, 1e3, 1e-5, False),
            (torch.float64, 1e9, 1e-7, False),
        ],
    )
    @pytest.mark.parametrize("kind", [None, "diagonal"])
    def test_the_last_check_costs_a_product_only_if_rounding_matters(self, dtype, condition, tolerance, saved, kind):
        matrix, b = (part.to(dtype) for part in conditioned(15, condition, n=80))
        operator, damping = positive(matrix), 1 / condition
        plain = operator.solve(b, damping, tolerance, method="cg", preconditioner=kind)
        operator.exact_products = True
        found = operator.solve(b, damping, tolerance, method="cg", preconditioner=kind)
        exact = matrix.double() + damping * torch.eye(80).double()
        residual = float((b.double() - exact @ found.value.double()).norm())
        assert plain.matvecs > plain.iterations and (found.matvecs == found.iterations) == saved
        if saved:
            assert found.converged and residual <= tolerance * float(b.norm())
            assert abs(found.residual - residual) <= 0.1 * tolerance * float(b.norm())
        assert float((found.value.double() - torch.linalg.solve(exact, b.double())).norm()) <= found.error_bound

    @pytest.mark.parametrize("scale", [1e-150, 1e-20, 1e20, 1e150])
    def test_scales_with_a_preconditioner(self, scale):
        matrix, b = conditioned(16, 50.0, n=30)
        given = Diagonal(scale * matrix.diagonal())
        found = positive(scale * matrix).solve(b / scale, scale * 0.1, 1e-9, method="cg", preconditioner=given)
        truth = torch.linalg.solve(matrix + 0.1 * torch.eye(30).double(), b)
        assert found.converged and torch.allclose(found.value * scale * scale, truth, rtol=1e-6, atol=1e-8)

    def test_products_from_differences_are_checked(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
        X, y = normal(17)(40, 30), torch.arange(40) % 3
        for hvp, saved in (("autodiff", True), ("difference", False)):
            H = cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, y)], method="autodiff", hvp=hvp)
            found = H.outer["0.weight"].solve(normal(18)(600), 0.1, 1e-3, preconditioner=None)
            assert found.converged and found.method == "cg" and (found.matvecs == found.iterations) == saved

    @pytest.mark.parametrize("inside", ["float32", "bfloat16", "autocast"])
    @pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
    def test_the_residual_of_a_model_that_rounds_coarsely_inside_is_the_true_one(self, inside, tolerance):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(20, 24), torch.nn.Linear(24, 10)

        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = first, second

            def forward(self, x):
                if inside == "autocast":
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        return self.second(torch.tanh(self.first(x))).float()
                kind = getattr(torch, inside)
                for layer, act in ((self.first, torch.tanh), (self.second, torch.Tensor.float)):
                    x = act(torch.nn.functional.linear(x.to(kind), layer.weight.to(kind), layer.bias.to(kind)))
                return x

        X, labels = torch.randn(64, 20), torch.arange(64) % 10
        outer = cv.hessian(Mixed(), torch.nn.CrossEntropyLoss(), [(X, labels)], method="autodiff").outer
        b = torch.randn(outer.shape[0])
        found = outer.solve(b, 1e-2, tolerance, preconditioner=None)
        true = float((b - (outer @ found.value + 1e-2 * found.value)).norm())
        assert found.residual == pytest.approx(true, rel=1e-2)
        assert found.converged == (true <= tolerance * float(b.norm()))
        assert (found.matvecs == found.iterations) == (inside == "float32")

    @pytest.mark.parametrize("size", [1e-30, 1e-24, 1e18, 1e30])
    def test_right_hand_sides_whose_squares_leave_single_precision(self, size):
        matrix, b = (part.float() for part in conditioned(19, 10.0, n=60))
        found = positive(matrix).solve(size * b, 0.1, 1e-4, preconditioner=None)
        rest = (size * b).double() - (matrix.double() + 0.1 * torch.eye(60).double()) @ found.value.double()
        assert found.converged and float(rest.norm()) <= 1.01e-4 * float((size * b).double().norm())

    def test_a_right_hand_side_without_a_length_is_refused(self):
        matrix, b = conditioned(20, 10.0, n=30)
        with pytest.raises(RangeError, match=r"b: its norm, inf, is out of range"):
            positive(matrix).solve(1e300 * b, 0.1)


class TestFunctions:
    @pytest.mark.parametrize("seed", range(3))
    def test_stochastic_quadrature_covers(self, seed):
        values = torch.logspace(0, -3, 600, dtype=torch.float64)
        matrix = values.diag()
        logdet = positive(matrix).logdet(1e-2, matvecs=256, seed=seed)
        dimension = positive(matrix).effective_dimension(1e-2, matvecs=256, seed=seed)
        assert not logdet.exact and logdet.matvecs == 256
        assert abs(logdet - float((values + 1e-2).log().sum())) <= 4 * logdet.stderr
        assert abs(dimension - float((values / (values + 1e-2)).sum())) <= 4 * dimension.stderr

    def test_the_bracket_says_what_few_steps_miss(self):
        """With four steps the quadrature is off by far more than the spread over the probes: the error bar says so."""
        values = torch.logspace(0, -8, 500, dtype=torch.float64)
        found = cv.solve.logdet(positive(values.diag()), 1e-8, matvecs=64, steps=4)
        truth = float((values + 1e-8).log().sum())
        assert abs(found - truth) <= 2 * found.stderr

    def test_inverse_diagonal_by_solves(self):
        matrix, _ = conditioned(8, 10.0, n=60)
        found = positive(matrix).inverse_diagonal(0.5, matvecs=40)
        truth = torch.linalg.inv(matrix + 0.5 * torch.eye(60).double()).diagonal()
        assert ((found.value - truth).abs() <= 6 * found.stderr + 1e-6).all() and found.matvecs > 0


class TestBadInput:
    def test_singular_without_damping(self):
        """The direction is said, direct or by iterations."""
        matrix, b = conditioned(9, 10.0, n=20)
        null = torch.linalg.eigh(matrix)[1][:, 0]
        matrix = matrix - float(torch.linalg.eigvalsh(matrix)[0]) * torch.outer(null, null)
        for method in ("direct", "minres"):
            with pytest.raises(SingularError, match="singular to rounding") as caught:
                product(matrix).solve(b, 0.0, method=method)
            assert abs(float(caught.value.direction @ null)) == pytest.approx(1, abs=1e-4)

    def test_damping_that_cancels_an_eigenvalue(self):
        matrix = torch.diag(torch.tensor([-0.1, 1.0, 2.0], dtype=torch.float64))
        with pytest.raises(SingularError, match=r"other than 0\.1, which cancels the eigenvalue -0\.1"):
            product(matrix).solve(torch.ones(3).double(), 0.1)
        with pytest.raises(RangeError, match=r"smallest eigenvalue is -0\.1; give more than 0\.1"):
            product(matrix).logdet(0.05)

    def test_indefinite_given_to_cg(self):
        matrix, b = conditioned(10, 10.0, signs=True)
        with pytest.raises(RangeError, match=r"not positive definite.*use method='minres'"):
            product(matrix).solve(b, 0.0, method="cg")

    def test_indefinite_logdet_by_products(self):
        matrix = torch.linspace(-1, 1, 700).double().diag()
        with pytest.raises(RangeError, match="eigenvalues may be as low as"):
            cv.solve.logdet(product(matrix), 0.5, matvecs=64)

    def test_arguments(self):
        operator = product(torch.eye(4).double())
        b = torch.ones(4).double()
        for error, arguments, options in (
            (ShapeError, (torch.ones(3).double(), 1.0), {}),
            (ShapeError, (b, 1.0), {"start": torch.ones(4, 2).double()}),
            (NonFiniteError, (b * float("nan"), 1.0), {}),
            (RangeError, (b, -1.0), {}),
            (RangeError, (b, float("inf")), {}),
            (RangeError, (b, 1.0, 0.0), {}),
            (RangeError, (b, 1.0), {"method": "lu"}),
            (RangeError, (b, 1.0), {"preconditioner": "magic"}),
            (RangeError, (b, 1.0), {"matvecs": 1}),
        ):
            with pytest.raises(error):
                operator.solve(*arguments, **options)
        with pytest.raises(RangeError, match="no eigendecomposition of this operator is cheap"):
            Solver(torch.eye(4).double(), 1.0, method="direct")(b)

    def test_a_preconditioner_that_is_not_positive(self):
        matrix, b = conditioned(11, 10.0)

        class Negative:
            def damped_solve(self, b, damping):
                return -b

        with pytest.raises(RangeError, match="not positive definite"):
            positive(matrix).solve(b, 1.0, method="cg", preconditioner=Negative())

    def test_an_inverse_that_does_not_converge(self):
        matrix, b = conditioned(12, 1e6, n=40)
        with pytest.raises(ConvergenceError, match="NOT CONVERGED") as caught:
            _ = positive(matrix).inverse(1e-6, method="cg", matvecs=5) @ b
        assert not caught.value.solution.converged
