"""What holds of every operator's answers: the budget and the seed they come from, where they live, how they show."""

import pytest
import scipy.sparse.linalg
import torch
from rich.console import Console

import curvoscope as cv
from curvoscope.autodiff.safety import same_randomness
from curvoscope.errors import ConvergenceError
from curvoscope.operators import eigenvalues
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix, Slot, Tiles
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import DenseCore
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term
from matrices import within
from reference import normal

SIZE = 24


def symmetric(seed: int, size: int = SIZE) -> torch.Tensor:
    matrix = normal(seed)(size, size)
    return matrix + matrix.T


def operator_of(matrix: torch.Tensor, **options) -> Product:
    """Known by its products only."""
    rows, columns = matrix.shape
    return Product((lambda v: matrix @ v, lambda v: matrix.T @ v), (rows, 1), (columns, 1), matrix, **options)


def matrix_free() -> tuple[cv.LinearOperator, torch.Tensor]:
    """A block of a Hessian that answers with estimates, and the numbers of it: least squares, (X^T X) (x) I."""
    model = torch.nn.Linear(6, 4, bias=False).double()
    X, Y = normal(1)(9, 6), normal(2)(9, 4)
    H = cv.hessian(model, lambda F, Y: (F - Y).square().mean(), [(X, Y)], method="autodiff")
    return H.total, 2 / 36 * torch.kron(torch.eye(4).double(), X.T @ X)


QUESTIONS = {
    "trace": lambda operator, **options: operator.trace(**options).value,
    "diagonal": lambda operator, **options: operator.diagonal(**options).value,
    "frobenius_norm": lambda operator, **options: operator.frobenius_norm(**options).value,
    "spectral_norm": lambda operator, **options: operator.spectral_norm(**options).value,
    "eigenvalues": lambda operator, **options: operator.eigenvalues(1, **options)[0].value,
    "density": lambda operator, **options: operator.density(**options).nodes,
}


@pytest.mark.parametrize("make", [lambda: (operator_of(symmetric(3), symmetric=True), symmetric(3)), matrix_free])
class TestEstimates:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_seed_0_unless_told(self, make, question):
        operator, _ = make()
        found = [torch.as_tensor(QUESTIONS[question](operator, matvecs=5, **seed)) for seed in ({}, {"seed": 0})]
        assert torch.equal(*found)
        other = torch.as_tensor(QUESTIONS[question](operator, matvecs=5, seed=1))
        assert not torch.equal(found[0], other)

    def test_budgets_are_kept(self, make):
        operator, truth = make()
        norm = float(torch.linalg.matrix_norm(truth, 2))
        for matvecs in (3, 7, 40):
            assert operator.spectral_norm(matvecs=matvecs).matvecs <= matvecs
            assert operator.eigenvalues(1, matvecs=matvecs)[0].matvecs <= matvecs
            assert operator.trace(matvecs=matvecs).matvecs <= matvecs
            assert operator.frobenius_norm(matvecs=matvecs).matvecs <= matvecs
        assert float(operator.spectral_norm(matvecs=40)) == pytest.approx(norm)
        assert float(operator.spectral_norm(tolerance=1e-6)) == pytest.approx(norm, rel=1e-5)
        assert operator.density(matvecs=8, steps=4).nodes.shape == (2, 4)

    def test_memory_limits_reach_the_krylov_method(self, make):
        operator, _ = make()
        for question in (operator.spectral_norm, lambda **options: operator.eigenvalues(1, **options)):
            with pytest.raises(cv.CurvoscopeError, match=r"memory_limit|GB|MB|kB|byte"):
                within(8, question, matvecs=8)


@pytest.mark.parametrize("question", ["trace", "diagonal", "frobenius_norm", "spectral_norm"])
def test_a_tolerance_costs_what_it_needs(question):
    """A loose one far fewer products than the size; a tight one more."""
    matrix = normal(4)(200, 400)
    matrix = matrix @ matrix.T
    operators = [operator_of(matrix, symmetric=True)]
    if question == "diagonal":  # the others are exact at the size of this one
        operators.append(matrix_free()[0])
    for operator in operators:
        loose, tight = (getattr(operator, question)(tolerance=tolerance) for tolerance in (0.9, 1e-9))
        assert loose.matvecs < tight.matvecs


def test_entries_that_are_returned_may_be_written_to():
    matrix = symmetric(0)
    operator = operator_of(matrix, symmetric=True)
    operator.dense().zero_()
    assert (operator.dense() - matrix).norm() < 1e-14 * matrix.norm()
    assert operator.frobenius_norm() == pytest.approx(float(matrix.norm()), rel=1e-12)


class TestRectangular:
    @pytest.mark.parametrize("shape", [(6, 20), (20, 6), (13, 13)])
    def test_norms_without_all_singular_values(self, shape, monkeypatch):
        """Past a size the norm is the root of the largest eigenvalue of the smaller Gram matrix."""
        matrix = normal(5)(*shape)
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        found = operator_of(matrix).spectral_norm(matvecs=30)
        assert abs(float(found) - norm) <= 6 * found.stderr + 1e-9 * norm
        monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 2)
        assert operator_of(matrix).spectral_norm() == pytest.approx(norm, rel=1e-10)

    def test_krylov_eigenvalues(self, monkeypatch):
        matrix = symmetric(6)
        values = torch.linalg.eigvalsh(matrix)
        monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 2)
        operator = operator_of(matrix, symmetric=True)
        assert torch.allclose(operator.eigenvalues(3, "LA"), values[-3:])
        assert torch.allclose(operator.eigenvalues(3, "SA"), values[:3])
        largest = values[values.abs().argsort(descending=True)[:3]].sort().values
        assert torch.allclose(operator.eigenvalues(3), largest)
        assert operator.spectral_norm() == pytest.approx(float(values.abs().max()))
        zero = operator_of(torch.zeros(SIZE, SIZE, dtype=torch.float64), symmetric=True).eigenvalues(3)
        assert zero.dtype == torch.float64 and torch.equal(zero, torch.zeros(3).double())

    @pytest.mark.parametrize("vectors", [False, True])
    def test_eigenvalues_that_do_not_converge(self, vectors, monkeypatch):
        """At an end of the spectrum where many eigenvalues lie close together, all of them cost less than a few."""
        matrix = torch.linalg.qr(normal(8)(SIZE, SIZE)).Q
        matrix = (matrix * torch.logspace(-18, 0, SIZE).double()) @ matrix.T
        operator = operator_of((matrix + matrix.T) / 2, symmetric=True)
        monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 2)
        eigsh, tried = scipy.sparse.linalg.eigsh, []

        def impatient(*arguments, maxiter, **options):
            tried.append(maxiter)
            return eigsh(*arguments, maxiter=1, **options, ncv=4)

        monkeypatch.setattr(scipy.sparse.linalg, "eigsh", impatient)
        found = operator.eigenvalues(2, "SA", vectors=vectors)
        assert len(tried) == 1 and tried[0] < 1000
        assert torch.allclose(found[0] if vectors else found, torch.zeros(2).double(), atol=1e-14)
        with pytest.raises(ConvergenceError, match=r"eigenvalues: 2 did not converge.*tolerance="):
            within(SIZE * SIZE * 8 + 2**13, operator.eigenvalues, 2, "SA", vectors=vectors)

    def test_a_few_tokens_have_few_eigenvalues(self, monkeypatch):
        """They are found in the space of the tokens, also the zeros at the end of the spectrum."""
        monkeypatch.setattr(eigenvalues, "_DENSE_EIGENVALUES", 8)
        monkeypatch.setattr(scipy.sparse.linalg, "eigsh", None)
        left, cores = normal(9)(2, 9), normal(10)(2, 4, 4)
        term = Term(left, left, DenseCore(cores @ cores.mT, symmetric=True))
        operator = KroneckerSum((9, 4), (9, 4), [term], left)
        assert torch.allclose(operator.eigenvalues(3, "SA"), torch.zeros(3).double(), atol=1e-13)
        assert torch.allclose(operator.eigenvalues(3, "LA"), torch.linalg.eigvalsh(operator.dense())[-3:])

    def test_eigenvalues_in_single_precision_are_computed_in_double(self, monkeypatch):
        """As on CPUs on which LAPACK returns NaN in single precision for some matrices of tiny entries."""
        eigvalsh, eigh = torch.linalg.eigvalsh, torch.linalg.eigh

        def broken(matrix):
            return eigvalsh(matrix) * (float("nan") if matrix.dtype == torch.float32 else 1.0)

        def broken_pairs(matrix):
            return tuple(part * (float("nan") if matrix.dtype == torch.float32 else 1.0) for part in eigh(matrix))

        monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
        monkeypatch.setattr(torch.linalg, "eigh", broken_pairs)
        matrix = 1e-20 * symmetric(9).float()
        expected = eigvalsh(matrix.double()).float()
        operator = operator_of(matrix, symmetric=True)
        values, vectors = operator.eigenvalues(vectors=True)
        for found in (operator.eigenvalues(), values):
            assert found.dtype == torch.float32 and torch.allclose(found.value, expected, rtol=1e-6, atol=1e-26)
        assert torch.allclose(matrix @ vectors, vectors * expected, rtol=0, atol=1e-24)
        assert operator.spectral_norm() == pytest.approx(float(expected.abs().max()), rel=1e-6)
        factors = KroneckerSum((2, 2), (2, 2), [Single(matrix[:2, :2], matrix[:2, :2])], matrix, True)
        assert bool(factors.eigenvalues().value.isfinite().all())

    def test_a_wide_matrix_is_written_from_the_fewer_products_of_its_transpose(self):
        matrix, asked = normal(7)(3, 50), []

        def count(columns):
            asked.append(columns.shape[1])
            return matrix.T @ columns

        operator = Product((lambda v: matrix @ v, count), (3, 1), (5, 10), matrix)
        assert torch.allclose(operator.dense(), matrix) and sum(asked) == 3


def made() -> dict[str, tuple[cv.LinearOperator, torch.Tensor]]:
    """Operators of every class, with their entries."""
    r = normal(8)
    left, cores = r(5, 3), r(5, 4, 4)
    even = Term(left, left, DenseCore(cores + cores.mT, symmetric=True))
    odd = Term(r(5, 3), r(5, 4), DenseCore(r(5, 4, 3)), (0, 1))
    one, two = (KroneckerSum((3, 4), (3, 4), [each, Single(r(3, 3), r(4, 4))], left) for each in (even, odd))
    three = KroneckerSum((3, 4), (3, 4), [even], left)
    slots = [Slot(1, 0, 4), Slot(1, 4, 8)]
    tiles = {(0, 0): three, (0, 1): two, (1, 0): two.T, (1, 1): three}
    vectors = r(2, 6)
    few = Term(vectors, vectors, DenseCore(torch.eye(4).double().expand(2, 4, 4), symmetric=True))
    operators = {
        "Kronecker sum": one,
        "scaled": three * 2.0,
        "sum": one + three * 2.0,
        "transpose": one.T,
        "few tokens": KroneckerSum((6, 4), (6, 4), [few], vectors),
        "zero": KroneckerSum((3, 4), (3, 4), [], left),
        "tiles": Tiles((3, 8), (3, 8), slots, slots, tiles, left, symmetric=True),
        "blocks": BlockMatrix({"a": (3, 4), "b": (3, 4)}, lambda row, column: three if row == column else two, left),
    }
    return {name: (operator, operator.dense()) for name, operator in operators.items()}


@pytest.mark.parametrize("name", made())
def test_answers_stay_on_the_device_of_the_operator(name):
    """Whatever the device on which torch makes new tensors: here one that has no numbers at all."""
    operator, truth = made()[name]
    v = torch.linspace(-1, 1, len(truth), dtype=torch.float64)
    with torch.device("meta"):
        found = [operator @ v, operator.T @ v, operator.diagonal(), operator.dense()]
        trace, norm = operator.trace(), operator.frobenius_norm()
        if operator.symmetric:
            found.append(operator.eigenvalues())
    expected = [truth @ v, truth.T @ v, truth.diagonal(), truth]
    if operator.symmetric:
        expected.append(torch.linalg.eigvalsh(truth))
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu" and torch.allclose(one, other, rtol=0, atol=1e-10)
    assert trace == pytest.approx(float(truth.trace())) and norm == pytest.approx(float(truth.norm()))


class TestTiles:
    """Heads in the rows of one weight and in the columns of the other."""

    def blocks(self, seed: int) -> tuple[Tiles, torch.Tensor]:
        r = normal(seed)
        rows, columns = [Slot(0, 0, 2), Slot(0, 2, 5)], [Slot(1, 0, 1), Slot(1, 1, 4)]
        entries, truth = {}, torch.zeros(5, 3, 2, 4, dtype=torch.float64)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                a, q = row.stop - row.start, column.stop - column.start
                outer, inner = r(a, 2), r(3, q)
                entries[i, j] = KroneckerSum((a, 3), (2, q), [Single(outer, inner)], outer)
                truth[row.start : row.stop, :, :, column.start : column.stop] = torch.einsum(
                    "ab,pq->apbq", outer, inner
                )
        return Tiles((5, 3), (2, 4), rows, columns, entries, truth), truth.reshape(15, 8)

    def test_all_answers(self):
        (one, truth), (two, other) = self.blocks(1), self.blocks(2)
        for operator, expected in (
            (one, truth),
            (one + two, truth + other),
            (one.T, truth.T),
            ((one + two).T.T, truth + other),
        ):
            v = torch.linspace(-1, 1, expected.shape[1], dtype=torch.float64)
            assert operator.shape == expected.shape and not operator.symmetric
            assert torch.allclose(operator.dense(), expected) and torch.allclose(operator @ v, expected @ v)
            assert operator.frobenius_norm() == pytest.approx(float(expected.norm()))
            assert operator.norm_bound() >= float(torch.linalg.matrix_norm(expected, 2)) * (1 - 1e-12)

    def test_with_tiles_cut_otherwise(self):
        one, truth = self.blocks(1)
        whole = Tiles((5, 3), (2, 4), [Slot(0, 0, 5)], [Slot(1, 0, 4)], {(0, 0): one}, truth)
        assert torch.allclose((one + whole).dense(), 2 * truth)

    def test_square_weights_cut_in_two_ways(self):
        """Trace and diagonal, when the tiles of rows and of columns are not the same."""
        r = normal(3)
        entries, truth = {}, torch.zeros(4, 4, 4, 4, dtype=torch.float64)
        rows, columns = [Slot(0, 0, 1), Slot(0, 1, 4)], [Slot(1, 0, 2), Slot(1, 2, 4)]
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                a = row.stop - row.start
                outer, inner = r(a, 4), r(4, 2)
                entries[i, j] = KroneckerSum((a, 4), (4, 2), [Single(outer, inner)], outer)
                truth[row.start : row.stop, :, :, column.start : column.stop] = torch.einsum(
                    "ab,pq->apbq", outer, inner
                )
        operator, truth = Tiles((4, 4), (4, 4), rows, columns, entries, truth), truth.reshape(16, 16)
        assert operator.trace() == pytest.approx(float(truth.trace()))
        assert torch.allclose(operator.diagonal(), truth.diagonal())


class TestBlockHessian:
    def made(self, entries: bool) -> tuple[BlockHessian, dict[str, torch.Tensor]]:
        """Three blocks of different shapes; `entries` makes those of some pairs at once."""
        shapes = {"a": (2, 3), "b": (1, 4), "c": (2, 2)}
        truths, parts, made = {}, [], []
        for seed, part in enumerate(("outer", "functional")):
            whole = symmetric(seed, 14)
            starts = {"a": 0, "b": 6, "c": 10}
            cuts = {
                (i, j): whole[starts[i] : starts[i] + a * p, starts[j] : starts[j] + b * q].reshape(a, p, b, q)
                for i, (a, p) in shapes.items()
                for j, (b, q) in shapes.items()
                if starts[i] <= starts[j]
            }

            def entry(row, column, cuts=cuts):
                if row != column and entries:
                    raise AssertionError("made at once")
                matrix = cuts[row, column].flatten(2).flatten(0, 1)
                products = (lambda v: matrix @ v, lambda v: matrix.T @ v)
                return Product(products, shapes[row], shapes[column], matrix, symmetric=row == column)

            def at_once(cuts=cuts):
                return {pair: values.clone() for pair, values in cuts.items() if pair[0] != pair[1]}

            made.append(at_once)
            parts.append(BlockMatrix(shapes, entry, whole, entries=at_once if entries else None))
            truths[part] = whole
        truths["total"] = truths["outer"] + truths["functional"]

        def both():
            first, second = (one() for one in made)
            return {pair: values + second[pair] for pair, values in first.items()}

        return BlockHessian(*parts, entries=both if entries else None), truths

    @pytest.mark.parametrize("entries", [False, True])
    def test_entries_of_all_parts(self, entries):
        H, truths = self.made(entries)
        for part, truth in truths.items():
            assert torch.allclose(getattr(H, part).dense(), truth), part

    def test_how_it_shows(self):
        H, _ = self.made(False)
        console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(H)
        lines = [line.strip(" │┃") for line in console.export_text().splitlines()]
        assert lines[0] == "BlockHessian, 14 × 14, float64: total = outer + functional"
        rows = [line.split("│") for line in lines if "│" in line]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["a", "2 × 3", "6"],
            ["b", "1 × 4", "4"],
            ["c", "2 × 2", "4"],
        ]
        assert repr(H) == "BlockHessian(14 x 14: a 2x3, b 1x4, c 2x2)"

    def test_names_that_are_near(self):
        H, _ = self.made(False)
        like = H.total
        named = BlockMatrix({"h.0.attn.Q": (1, 1), "h.1.mlp.up": (1, 1)}, like._entry, torch.zeros(1).double())
        with pytest.raises(cv.CurvoscopeError, match=r"nearest: h\.0\.attn\.Q"):
            named["h.0.attn.q"]


def test_random_states_of_all_devices_are_put_back(monkeypatch):
    states, put_back = ["first", "second"], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    with same_randomness():
        states.reverse()
    assert put_back == [["first", "second"]]


def test_estimators_of_other_packages_ask_for_the_adjoint():
    matrix, v = normal(5)(6, 4), normal(6)(6)
    assert torch.equal(operator_of(matrix).adjoint() @ v, matrix.T @ v)


def test_a_subclass_that_is_not_symmetric_must_give_its_transpose():
    class Wide(cv.LinearOperator):
        def _matmat(self, columns):
            return columns[:2]

    with pytest.raises(NotImplementedError, match="Wide has no transpose"):
        _ = Wide((2, 1), (3, 1), torch.zeros(1)).T
