import math

import pytest
import torch

from curvoscope import estimate
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate.deflation import Sketch, leave_one_out
from curvoscope.estimate.products import Probes, Products
from curvoscope.estimate.quadratic import METHODS
from curvoscope.estimate.sampling import norm_form, trace_form
from matrices import SPECTRA, Dense, decaying, flat, rotated
from reference import normal

FUNCTIONS = {
    "trace": (estimate.trace, torch.trace),
    "norm": (estimate.frobenius_norm, torch.linalg.matrix_norm),
    "squared norm": (estimate.squared_frobenius_norm, lambda m: m.square().sum()),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


def _difference(e, matrix, truth):
    return abs(e.value - float(truth(matrix)))


class TestExactness:
    @pytest.mark.parametrize("method", METHODS)
    def test_trace_with_as_many_products_as_columns(self, method):
        matrix = normal(0)(30, 30)
        for matvecs in (30, 31, 64):
            e = estimate.trace(Dense(matrix, False), matvecs=matvecs, method=method)
            assert (e.stderr, e.matvecs, e.method) == (0, 30, "exact")
            assert abs(e.value - float(matrix.trace())) < 1e-12

    @pytest.mark.parametrize("method", ["auto", "hutch++", "xtrace"])
    def test_norm_with_as_many_products_as_columns(self, method):
        matrix = rotated(decaying(30))
        e = estimate.frobenius_norm(Dense(matrix), matvecs=30, method=method)
        assert (e.stderr, e.matvecs, e.method) == (0, 30, "exact")
        assert abs(e.value - float(matrix.norm())) < 1e-12

    def test_literal_probes_for_the_norm(self):
        e = estimate.frobenius_norm(Dense(normal(0)(12, 12), False), matvecs=40, method="hutchinson")
        assert (e.matvecs, e.method) == (40, "hutchinson")

    @pytest.mark.parametrize("method", METHODS)
    def test_multiple_of_the_identity(self, function, method):
        matrix = 2.5 * torch.eye(40).double()
        e = function[0](Dense(matrix), matvecs=16, method=method)
        assert _difference(e, matrix, function[1]) < 1e-10 * e.value
        assert e.stderr < 1e-6 * e.value

    def test_diagonal_matrix_and_random_signs(self):
        matrix = flat(40).diag()
        e = estimate.trace(Dense(matrix), matvecs=16, method="hutchinson")
        assert abs(e.value - 40) < 1e-12
        assert e.stderr < 1e-12

    @pytest.mark.parametrize("method", ["auto", "hutch++", "xtrace"])
    @pytest.mark.parametrize("rank", [1, 5])
    def test_low_rank(self, function, method, rank):
        """A sketch that holds the whole range leaves nothing to sample."""
        half = normal(rank)(200, rank)
        matrix = half @ half.T
        e = function[0](Dense(matrix), matvecs=32, method=method)
        low, high = e.interval()
        assert low <= float(function[1](matrix)) <= high
        assert e.stderr < 1e-12 * e.value

    @pytest.mark.parametrize("method", METHODS)
    def test_low_rank_and_not_symmetric(self, method):
        """The range of u v^T is known from one product, its trace from two, its norm is not."""
        u, v = normal(3)(2, 100)
        matrix = torch.outer(u, v)
        e = estimate.trace(Dense(matrix, False), matvecs=32, method=method)
        low, high = e.interval(0.999)
        assert low <= float(u @ v) <= high
        if method in ("auto", "hutchinson"):
            low, high = estimate.frobenius_norm(Dense(matrix, False), matvecs=32, method=method).interval(0.999)
            assert low <= float(matrix.norm()) <= high

    @pytest.mark.parametrize("method", METHODS)
    def test_zero_matrix(self, function, method):
        e = function[0](Dense(torch.zeros(50, 50).double()), matvecs=16, method=method)
        assert (e.value, e.stderr, e.interval()) == (0, 0, (0, 0))

    @pytest.mark.parametrize("method", METHODS)
    def test_one_by_one(self, function, method):
        e = function[0](Dense(torch.full((1, 1), 3.0).double()), matvecs=8, method=method)
        assert abs(e.value - (9 if function[0] is estimate.squared_frobenius_norm else 3)) < 1e-12


class TestLeaveOneOut:
    """The closed form against sketches that are really made without one and without two columns."""

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("kind", ["trace", "norm"])
    def test_against_explicit_sketches(self, kind, symmetric):
        n, k = 20, 6
        matrix = rotated(decaying(n)) if symmetric else normal(3)(n, n)
        A = matrix if kind == "trace" else matrix.T @ matrix
        A = (A + A.T) / 2
        products = Products(Dense(matrix, symmetric), "test")
        sketch = Sketch(products, Probes(products, 5).normal)
        sketch.grow(k)
        sketch.solve()
        found = leave_one_out(sketch, trace_form if kind == "trace" else norm_form)

        W, Y = sketch.W, sketch.Y

        def without(*columns):
            Q = torch.linalg.qr(Y[:, [c for c in range(k) if c not in columns]]).Q
            return Q, torch.eye(n).double() - Q @ Q.T

        def single(i, *others):
            Q, P = without(i, *others)
            v = P @ W[:, i]
            return (Q.T @ A @ Q).trace() + (n - Q.shape[1]) * (v @ A @ v) / (v @ v), v

        t = torch.stack([single(i)[0] for i in range(k)])
        assert abs(found.value - float(t.mean())) < 1e-10 * float(A.norm())

        sampled = torch.stack([(n - k + 1) * (v @ A @ v) / (v @ v) for v in (single(i)[1] for i in range(k))])
        C = A - sampled.mean() / (n - k + 1) * torch.eye(n).double()
        covariance = square = 0.0
        for i in range(k):
            for j in range(k):
                if i != j:
                    (t_i, v_i), (t_j, v_j) = single(i, j), single(j, i)
                    covariance += (t[i] - t_i) * (t[j] - t_j) / (k * (k - 1))
                    scale = (n - k + 2) / (v_i.norm() * v_j.norm())
                    square += (v_i @ C @ v_j * scale) ** 2 / (k * (k - 1))
        variance = 2 * (n - k + 1) / (n - k + 3) * square
        expected = max(variance + (k - 1) * covariance, (0.15 + 1.5 / k) * variance) / k
        assert abs(found.variance - float(expected)) < 1e-9 * float(expected)

    def test_growing_sketch_makes_no_product_twice(self):
        operator = Dense(rotated(decaying(60)))
        products = Products(operator, "test")
        sketch = Sketch(products, Probes(products, 0).normal)
        for columns in (4, 9, 16):
            sketch.grow(columns)
            sketch.solve()
            assert operator.products == products.matvecs == 2 * columns
            assert torch.allclose(sketch.Q.T @ sketch.Q, torch.eye(columns).double(), atol=1e-13)
            assert torch.allclose(sketch.Q @ (sketch.Q.T @ sketch.Y), sketch.Y, atol=1e-12)
            assert torch.allclose(rotated(decaying(60)) @ sketch.Q, sketch.Z, atol=1e-13)


class TestTolerance:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("spectrum", SPECTRA)
    def test_stops_early(self, spectrum, method, function):
        eigenvalues = SPECTRA[spectrum](500)
        operator = Dense(rotated(eigenvalues))
        e = function[0](operator, tolerance=0.05, method=method)
        assert e.stderr <= 0.05 * abs(e.value)
        assert e.matvecs == operator.products
        if spectrum == "flat":
            assert 16 <= e.matvecs <= 64

    def test_a_sketch_saves_products(self):
        operator = Dense(rotated(decaying(500, 2.0)))
        plain = estimate.trace(operator, tolerance=0.02, method="hutchinson")
        clever = estimate.trace(operator, tolerance=0.02)
        assert clever.method == "xtrace"
        assert 4 * clever.matvecs < plain.matvecs

    @pytest.mark.parametrize("method", METHODS)
    def test_exact_where_that_is_cheaper(self, method):
        noise = normal(1)(80, 80)
        e = estimate.trace(Dense(noise + noise.T), tolerance=1e-3, method=method)
        assert e.method == "exact"
        assert abs(e.value - 2 * float(noise.trace())) < 1e-10
        assert e.matvecs <= 2.5 * 80

    def test_the_work_ends_when_it_cannot_be_done(self, monkeypatch):
        """A trace of zero has no relative error: the estimate says what it knows, after so many products."""
        for module in ("quadratic", "diagonals"):
            monkeypatch.setattr(f"curvoscope.estimate.{module}.MOST", 64)
        noise = normal(1)(200, 200)
        operator = Dense(noise - noise.T, False)
        for method in METHODS:
            e = estimate.trace(operator, tolerance=0.01, method=method)
            assert e.matvecs <= 4 * 64 and e.method != "exact"
            assert abs(e.value) < 5 * e.stderr + 1e-9
        assert estimate.diagonal(operator, tolerance=0.01).matvecs == 64

    def test_small_matrices_are_never_sampled(self):
        e = estimate.trace(Dense(rotated(flat(16))), tolerance=0.5)
        assert (e.method, e.matvecs) == ("exact", 16)


class TestChoice:
    def test_deflates_where_it_pays(self, function):
        assert function[0](Dense(rotated(decaying(200))), matvecs=48).method == "xtrace"
        assert function[0](Dense(rotated(flat(200))), matvecs=48).method == "hutchinson"

    def test_norm_of_what_is_not_symmetric(self):
        for shape in ((80, 80), (40, 120), (120, 40)):
            matrix = normal(2)(*shape)
            e = estimate.frobenius_norm(Dense(matrix, False), matvecs=32)
            assert e.method == "hutchinson"
            assert abs(e.value - float(matrix.norm())) < 5 * e.stderr

    def test_without_memory_for_a_sketch(self, monkeypatch):
        operator = Dense(rotated(decaying(200)))
        monkeypatch.setattr("curvoscope.checks.memory_budget", lambda: 200 * 8 * 20)
        assert estimate.trace(operator, matvecs=48).method == "hutchinson"
        e = estimate.trace(operator, tolerance=0.2)
        assert e.method == "hutchinson" and e.stderr <= 0.2 * e.value
        with pytest.raises(MemoryError, match="sketch of 24 columns"):
            estimate.trace(operator, matvecs=48, method="xtrace")

    @pytest.mark.parametrize("matvecs", [2, 3, 5, 7, 9, 17, 33])
    @pytest.mark.parametrize("method", METHODS)
    def test_any_budget(self, function, matvecs, method):
        operator = Dense(rotated(decaying(60)))
        if method in ("hutch++", "xtrace") and matvecs < 6:
            with pytest.raises(RangeError, match="matvecs"):
                function[0](operator, matvecs=matvecs, method=method)
            return
        e = function[0](operator, matvecs=matvecs, method=method)
        assert matvecs - 1 <= e.matvecs == operator.products <= matvecs
        assert math.isfinite(e.stderr) and e.stderr > 0
        assert all(math.isfinite(end) for end in e.interval())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_low_precision(self, function, dtype):
        matrix = rotated(decaying(80)).to(dtype)
        e = function[0](Dense(matrix), matvecs=40)
        assert _difference(e, matrix.double(), function[1]) < 5 * e.stderr + 0.01 * e.value


class TestSeeds:
    @pytest.mark.parametrize("method", METHODS)
    def test_reproducible(self, function, method):
        operator = Dense(rotated(decaying(80)))
        first = function[0](operator, matvecs=32, seed=7, method=method)
        torch.manual_seed(3)
        assert function[0](operator, matvecs=32, seed=7, method=method) == first
        assert function[0](operator, matvecs=32, seed=8, method=method).value != first.value

    @pytest.mark.parametrize("method", METHODS)
    def test_the_global_generator_is_left_alone(self, function, method):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        function[0](Dense(rotated(decaying(80))), matvecs=32, seed=7, method=method)
        assert torch.equal(torch.get_rng_state(), before)

    def test_seeds_beyond_32_bits_differ(self):
        operator = Dense(rotated(flat(80)))
        values = {estimate.trace(operator, matvecs=16, seed=seed).value for seed in (0, 2**32, 2**33, -1)}
        assert len(values) == 4


class TestBadInput:
    def test_arguments(self, function):
        operator = Dense(rotated(flat(20)))
        for bad in (1, 0, -5):
            with pytest.raises(RangeError, match="matvecs: got"):
                function[0](operator, matvecs=bad)
        for bad in (0.0, 1.0, -0.1, math.nan):
            with pytest.raises(RangeError, match="tolerance: got"):
                function[0](operator, tolerance=bad)
        with pytest.raises(RangeError, match="tolerance: got both"):
            function[0](operator, matvecs=8, tolerance=0.1)
        with pytest.raises(RangeError, match="method: got 'lanczos'"):
            function[0](operator, method="lanczos")

    def test_not_square(self):
        operator = Dense(normal(0)(6, 9), False)
        with pytest.raises(ShapeError, match="operator: a trace needs a square one"):
            estimate.trace(operator)
        for method in ("hutch++", "xtrace"):
            with pytest.raises(ShapeError, match=r"method: .* symmetric"):
                estimate.frobenius_norm(operator, method=method)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_products_that_are_not_finite(self, function, bad):
        matrix = rotated(flat(100))
        matrix[3, 4] = bad
        with pytest.raises(NonFiniteError, match=r"operator: .* NaN or infinite"):
            function[0](Dense(matrix), matvecs=16)

    def test_products_of_the_wrong_shape(self, function):
        class Wrong(Dense):
            def __matmul__(self, other):
                return super().__matmul__(other)[:-1]

        with pytest.raises(ShapeError, match="operator: gave shape"):
            function[0](Wrong(rotated(flat(100))), matvecs=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_range_of_fewer_dimensions_than_columns(dtype):
    """What the sketch holds beyond the range is rounding, and may be exactly zero."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        columns = torch.randn(64, 1 + seed % 4, generator=generator, dtype=dtype)
        B = columns @ columns.T
        for found, truth in (
            (estimate.trace(B, matvecs=16, seed=seed), B.trace()),
            (estimate.frobenius_norm(B, matvecs=16, seed=seed), B.norm()),
        ):
            assert abs(found - float(truth)) <= 6 * found.stderr + 100 * torch.finfo(dtype).eps * float(truth)
