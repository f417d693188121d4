"""What every operator owes: one class of tests, given a builder and the dense truth."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

import curvoscope as cv
from curvoscope.errors import BlockNameError, DtypeError, MemoryLimitError, NonFiniteError, RangeError, ShapeError
from curvoscope.operators.block_matrix import Slot, Tiles
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import DenseCore
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term
from matrices import within
from operator_cases import term_truth
from reference import normal

T, A, P, B, Q = 5, 3, 4, 2, 6  # tokens, rows (3, 4), columns (2, 6)


def _rectangular(axes):
    r = normal(1)
    rows, columns = (A, P), (B, Q)
    left, right = r(T, rows[axes[0]]), r(T, columns[axes[1]])
    cores = r(T, rows[1 - axes[0]], columns[1 - axes[1]])
    outer, inner = r(rows[0], columns[1]), r(rows[1], columns[0])
    operator = KroneckerSum(
        rows, columns, [Term(left, right, DenseCore(cores), axes), Single(outer, inner, (0, 1))], left
    )
    truth = term_truth(left, right, cores, axes) + torch.einsum("aq,pb->apbq", outer, inner).reshape(A * P, B * Q)
    return operator, truth


def _symmetric(axis, tokens=T):
    r = normal(2)
    shape = (A, P)
    left, cores = r(tokens, shape[axis]), r(tokens, shape[1 - axis], shape[1 - axis])
    cores = cores + cores.mT
    outer, inner = (m + m.T for m in (r(A, A), r(P, P)))
    terms = [Term(left, left, DenseCore(cores, symmetric=True), (axis, axis)), Single(outer, inner, (0, 0), True)]
    truth = term_truth(left, left, cores, (axis, axis)) + torch.kron(outer, inner)
    return KroneckerSum(shape, shape, terms, left), truth


def _few_tokens():
    r = normal(3)
    left, cores = r(2, 6), r(2, 3, 3)
    cores = cores @ cores.mT
    return (
        KroneckerSum((6, 3), (6, 3), [Term(left, left, DenseCore(cores, symmetric=True))], left),
        term_truth(left, left, cores, (0, 0)),
    )


def _square_but_unsymmetric():
    r = normal(4)
    left, right, cores = r(T, A), r(T, P), r(T, P, A)
    operator = KroneckerSum((A, P), (A, P), [Term(left, right, DenseCore(cores), (0, 1))], left)
    return operator, term_truth(left, right, cores, (0, 1))


def _zero():
    return KroneckerSum((A, P), (A, P), [], torch.zeros(1, dtype=torch.float64)), torch.zeros(A * P, A * P).double()


def _one_product():
    r = normal(5)
    outer, inner = (m + m.T for m in (r(A, A), r(P, P)))
    return KroneckerSum((A, P), (A, P), [Single(outer, inner, symmetric=True)], outer), torch.kron(outer, inner)


def _tiles():
    """Two heads in the columns of a 3 x 8 weight: tile h is [:, 4h:4h+4]."""
    first, one = _symmetric(0)
    second, two = _symmetric(1)
    cross, mixed = _square_but_unsymmetric()
    slots = [Slot(1, 0, P), Slot(1, P, 2 * P)]
    entries = {(0, 0): first, (0, 1): cross, (1, 0): cross.T, (1, 1): second}
    like = torch.zeros(1, dtype=torch.float64)
    truth = torch.zeros(A, 2, P, A, 2, P, dtype=torch.float64)
    for (i, j), block in {(0, 0): one, (0, 1): mixed, (1, 0): mixed.T, (1, 1): two}.items():
        truth[:, i, :, :, j, :] = block.view(A, P, A, P)
    return Tiles((A, 2 * P), (A, 2 * P), slots, slots, entries, like, symmetric=True), truth.reshape(24, 24)


def _block_matrix():
    diagonal, one = _symmetric(0)
    other, two = _few_tokens()
    r = normal(6)
    left, right, cores = r(T, A), r(T, 6), r(T, P, 3)
    cross = KroneckerSum((A, P), (6, 3), [Term(left, right, DenseCore(cores))], left)
    mixed = term_truth(left, right, cores, (0, 0))
    blocks = {("a", "a"): diagonal, ("a", "b"): cross, ("b", "b"): other}
    operator = cv.BlockMatrix({"a": (A, P), "b": (6, 3)}, lambda row, column: blocks[row, column], left)
    return operator, torch.cat([torch.cat([one, mixed], 1), torch.cat([mixed.T, two], 1)])


def _product():
    matrix = normal(7)(12, 12)
    matrix = matrix + matrix.T
    return Product((lambda v: matrix @ v, lambda v: matrix.T @ v), (A, P), (A, P), matrix, symmetric=True), matrix


def _rectangular_product():
    matrix = normal(8)(12, 10)
    return Product((lambda v: matrix @ v, lambda v: matrix.T @ v), (A, P), (B, 5), matrix), matrix


def _combined():
    (first, one), (second, two) = _product(), _symmetric(1)
    return 2.0 * first - second, 2 * one - two


def _sum_of_sums():
    (first, one), (second, two) = _symmetric(0), _symmetric(1)
    return first + second, one + two


CASES = {
    "straight": lambda: _rectangular((0, 0)),
    "crossed 01": lambda: _rectangular((0, 1)),
    "crossed 10": lambda: _rectangular((1, 0)),
    "straight 11": lambda: _rectangular((1, 1)),
    "symmetric 0": lambda: _symmetric(0),
    "symmetric 1": lambda: _symmetric(1),
    "one token": lambda: _symmetric(0, tokens=1),
    "few tokens": _few_tokens,
    "square, not symmetric": _square_but_unsymmetric,
    "zero": _zero,
    "one product": _one_product,
    "tiles": _tiles,
    "block matrix": _block_matrix,
    "product": _product,
    "rectangular product": _rectangular_product,
    "scaled difference": _combined,
    "sum": _sum_of_sums,
    "transpose": lambda: (lambda pair: (pair[0].T, pair[1].T))(_rectangular((1, 0))),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


class TestContract:
    def test_entries(self, case):
        operator, truth = case
        assert operator.shape == tuple(truth.shape)
        assert torch.allclose(operator.dense(), truth, rtol=0, atol=1e-12)

    def test_symmetry_is_exact(self, case):
        operator, truth = case
        assert operator.symmetric == (truth.shape[0] == truth.shape[1] and torch.allclose(truth, truth.T, atol=1e-12))
        if operator.symmetric:
            assert torch.equal(operator.dense(), operator.dense().T)
            assert operator.T is operator

    def test_products(self, case):
        operator, truth = case
        r = normal(10)
        v, columns, w = r(truth.shape[1]), r(truth.shape[1], 3), r(truth.shape[0])
        assert torch.allclose(operator @ v, truth @ v, rtol=0, atol=1e-11)
        assert torch.allclose(operator @ columns, truth @ columns, rtol=0, atol=1e-11)
        assert torch.allclose(operator.T @ w, truth.T @ w, rtol=0, atol=1e-11)
        assert torch.allclose(operator @ (2 * v - columns[:, 0]), 2 * (operator @ v) - operator @ columns[:, 0])
        assert abs(float(w @ (operator @ v) - v @ (operator.T @ w))) < 1e-10

    def test_algebra(self, case):
        operator, truth = case
        for made, expected in (
            (operator + operator, 2 * truth),
            (operator * 3.0, 3 * truth),
            (-operator, -truth),
            (operator - 0.5 * operator, 0.5 * truth),
            (operator.T.T, truth),
        ):
            assert torch.allclose(made.dense(), expected, rtol=0, atol=1e-11)
            v = normal(11)(truth.shape[1])
            assert torch.allclose(made @ v, expected @ v, rtol=0, atol=1e-10)
            assert abs(made.frobenius_norm() - float(expected.norm())) < 1e-10 * (1 + float(expected.norm()))

    def test_norms(self, case):
        operator, truth = case
        norm = float(torch.linalg.matrix_norm(truth, 2))
        assert abs(operator.frobenius_norm() - float(truth.norm())) <= 1e-11 * float(truth.norm())
        assert abs(operator.spectral_norm() - norm) <= 1e-10 * norm
        assert operator.norm_bound() >= norm * (1 - 1e-12)

    def test_trace_diagonal_eigenvalues(self, case):
        operator, truth = case
        if truth.shape[0] != truth.shape[1]:
            for question in (operator.trace, operator.diagonal, operator.eigenvalues):
                with pytest.raises(ShapeError):
                    question()
            return
        size = 1e-11 * (1 + float(truth.norm()))
        assert abs(operator.trace() - float(truth.trace())) < size
        assert torch.allclose(operator.diagonal(), truth.diagonal(), rtol=0, atol=size)
        if not operator.symmetric:
            with pytest.raises(ShapeError):
                operator.eigenvalues()
            return
        values = torch.linalg.eigvalsh(truth)
        assert torch.allclose(operator.eigenvalues(), values, rtol=0, atol=size)
        assert torch.allclose(operator.eigenvalues(2, "LA"), values[-2:], rtol=0, atol=size)
        assert torch.allclose(operator.eigenvalues(2, "SA"), values[:2], rtol=0, atol=size)
        largest = values[values.abs().argsort(descending=True)[:2]].abs().sort().values
        assert torch.allclose(operator.eigenvalues(2).abs().sort().values, largest, rtol=0, atol=size)
        for bad in (0, truth.shape[0] + 1):
            with pytest.raises(RangeError, match="k:"):
                operator.eigenvalues(bad)
        with pytest.raises(RangeError, match="which"):
            operator.eigenvalues(1, "LR")

    def test_scipy(self, case):
        operator, truth = case
        scipy_operator = operator.to_scipy()
        v, w = np.linspace(-1, 1, truth.shape[1]), np.linspace(-1, 1, truth.shape[0])
        assert np.allclose(scipy_operator @ v, truth.numpy() @ v, atol=1e-11)
        assert np.allclose(scipy_operator.rmatvec(w), truth.numpy().T @ w, atol=1e-11)
        assert np.allclose(
            scipy_operator @ np.stack([v, 2 * v], 1), truth.numpy() @ np.stack([v, 2 * v], 1), atol=1e-11
        )
        if min(truth.shape) > 3 and truth.any():
            found = scipy.sparse.linalg.svds(scipy_operator, 2, return_singular_vectors=False)
            assert np.allclose(np.sort(found), np.sort(torch.linalg.svdvals(truth)[:2].numpy()), atol=1e-8)

    def test_estimates(self, case):
        operator, truth = case
        norm = operator.frobenius_norm(matvecs=8, seed=3)
        assert isinstance(norm, cv.Estimate) and norm.matvecs <= 8
        assert abs(norm.value - float(truth.norm())) <= 6 * norm.stderr + 1e-10
        if truth.shape[0] == truth.shape[1]:
            trace = operator.trace(matvecs=8, seed=3)
            assert abs(float(trace) - float(truth.trace())) <= 6 * trace.stderr + 1e-10
            exact = operator.trace(matvecs=400)
            assert exact.matvecs <= 400 and abs(float(exact) - float(truth.trace())) < 1e-9

    def test_small_memory_changes_nothing(self, case):
        operator, truth = case
        limit = 8 * truth.numel() + 1
        assert abs(within(limit, operator.frobenius_norm) - float(truth.norm())) <= 1e-11 * float(truth.norm())
        if truth.shape[0] == truth.shape[1]:
            assert abs(within(limit, operator.trace) - float(truth.trace())) < 1e-10 * (1 + float(truth.norm()))

    def test_bad_input(self, case):
        operator, truth = case
        n = truth.shape[1]
        with pytest.raises(ShapeError, match="vector"):
            operator @ torch.zeros(n + 1, dtype=torch.float64)
        with pytest.raises(DtypeError, match="vector"):
            operator @ torch.zeros(n)
        with pytest.raises(DtypeError, match="vector"):
            operator @ torch.zeros(n, dtype=torch.int64)
        with pytest.raises(NonFiniteError, match="vector"):
            operator @ torch.full((n,), torch.nan, dtype=torch.float64)
        with pytest.raises(MemoryLimitError, match=f"{truth.shape[0]} x {n}.*instead"):
            within(8, operator.dense)
        with pytest.raises(RangeError, match="memory_limit"):
            within(0, operator.dense)
        with pytest.raises(RangeError, match="matvecs"):
            operator.frobenius_norm(matvecs=1)
        with pytest.raises(RangeError, match="tolerance"):
            operator.frobenius_norm(tolerance=0.0)


def test_unknown_block():
    operator, _ = _block_matrix()
    with pytest.raises(BlockNameError, match="no 'A'"):
        operator["A", "b"]
    with pytest.raises(BlockNameError, match=r"no 'bee'.*; nearest: b$"):
        operator["bee"]


def test_terms_that_do_not_fit():
    r = normal(12)
    with pytest.raises(ShapeError, match="terms"):
        KroneckerSum((A, P), (B, Q), [Term(r(T, A), r(T, B), DenseCore(r(T, Q, P)))], r(1))


def test_operators_of_different_shape_cannot_be_added():
    with pytest.raises(ShapeError, match="operator"):
        _few_tokens()[0] + _symmetric(0)[0]


@pytest.mark.parametrize("names", [[], ["a", "a"], "a", "ab", ["a", "other"]])
def test_selection_of_anything_but_different_blocks(names):
    with pytest.raises(BlockNameError, match=r"names|block"):
        _block_matrix()[0].select(names)


@pytest.mark.parametrize("key", [0, slice(1), ("a",), ("a", "b", "a"), ("a", 1), ["a", "b"], None])
def test_keys_that_name_no_block(key):
    with pytest.raises(BlockNameError, match=r"^block: expected a name or two"):
        _block_matrix()[0][key]


@pytest.mark.parametrize("other", [[1.0] * 30, None, 2.0, _block_matrix()[0]])
def test_products_with_anything_but_a_tensor(other):
    with pytest.raises(DtypeError, match=r"^vector: expected a torch\.Tensor"):
        _block_matrix()[0] @ other


@pytest.mark.parametrize("k", [1.5, 2.0, "2"])
def test_a_number_of_eigenvalues_that_is_not_whole(k):
    with pytest.raises(RangeError, match=r"^k: got .*, expected a whole number"):
        _block_matrix()[0].eigenvalues(k)


def test_selection_keeps_the_blocks():
    operator, truth = _block_matrix()
    picked = operator.select(["b", "a"])
    order = torch.cat([torch.arange(12, 30), torch.arange(12)])
    assert torch.allclose(picked.dense(), truth[order][:, order], atol=1e-12)
