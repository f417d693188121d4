"""Random expressions of operators (sums, multiples, transposes, blocks, selections) against their dense matrices."""

import torch
from hypothesis import strategies as st

import curvoscope as cv
from curvoscope.exact.grouped import Grouped
from curvoscope.operators.block_matrix import Slot, Tiles
from curvoscope.operators.compositions import Product
from curvoscope.operators.cores import DenseCore, SumCore
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term
from fuzz_cases import assert_answers, dtypes
from operator_cases import term_truth


class Draft:
    """Draws operators beside their dense matrices in float64; both from numbers that the operator's dtype has."""

    def __init__(self, draw, dtype):
        self.draw, self.dtype = draw, dtype
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(self, *shape):
        """In the dtype of the operator."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    @property
    def like(self):
        return torch.empty(0, dtype=self.dtype)

    def leaf(self, rows, columns, symmetric):
        kinds = [self.kronecker, self.product]
        if symmetric:
            kinds += [self.token_diagonal]
        if rows[1] % 2 == 0 and columns[1] % 2 == 0:
            kinds += [self.tiles]
        return self.draw(st.sampled_from(kinds))(rows, columns, symmetric)

    def kronecker(self, rows, columns, symmetric):
        terms, truth = [], torch.zeros(rows[0] * rows[1], columns[0] * columns[1], dtype=torch.float64)
        for _ in range(self.draw(st.integers(0, 3))):
            axis = self.draw(st.integers(0, 1))
            axes = (axis, axis if symmetric else self.draw(st.integers(0, 1)))
            if self.draw(st.booleans()):
                term, dense = self.term(rows, columns, axes, symmetric)
            else:
                term, dense = self.single(rows, columns, axes, symmetric)
            terms.append(term)
            truth = truth + dense
        return KroneckerSum(rows, columns, terms, self.like), truth

    def term(self, rows, columns, axes, symmetric):
        tokens = self.draw(st.integers(1, 5))
        left = self.normal(tokens, rows[axes[0]])
        right = left if symmetric else self.normal(tokens, columns[axes[1]])
        cores = [
            self.normal(tokens, rows[1 - axes[0]], columns[1 - axes[1]]) for _ in range(self.draw(st.integers(1, 2)))
        ]
        if symmetric:
            cores = [core + core.mT for core in cores]
        made = [DenseCore(core, symmetric) for core in cores]
        truth = term_truth(left.double(), right.double(), sum(core.double() for core in cores), axes)
        return Term(left, right, made[0] if len(made) == 1 else SumCore(made), axes), truth

    def single(self, rows, columns, axes, symmetric):
        outer = self.normal(rows[axes[0]], columns[axes[1]])
        core = self.normal(rows[1 - axes[0]], columns[1 - axes[1]])
        if symmetric:
            outer, core = outer + outer.T, core + core.T
        truth = term_truth(*_one_hot(outer.double()), core.double(), axes)
        return Single(outer, core, axes, symmetric), truth

    def product(self, rows, columns, symmetric):
        matrix = self.normal(rows[0] * rows[1], columns[0] * columns[1])
        matrix = matrix + matrix.T if symmetric else matrix
        products = (lambda v: matrix @ v, lambda v: matrix.T @ v)
        return Product(products, rows, columns, self.like, symmetric), matrix.double()

    def token_diagonal(self, rows, columns, symmetric):
        blocks = self.normal(rows[0], rows[1], rows[1])
        blocks = blocks + blocks.mT
        return Grouped(blocks, 1, symmetric=True), torch.block_diag(*blocks.double())

    def tiles(self, rows, columns, symmetric):
        """Two heads in the columns of either weight."""
        half, other = (rows[0], rows[1] // 2), (columns[0], columns[1] // 2)
        slots, others = ([Slot(1, 0, n[1]), Slot(1, n[1], 2 * n[1])] for n in (half, other))
        truth = torch.zeros(*rows, *columns, dtype=torch.float64)
        entries = {}
        for i in range(2):
            for j in range(2):
                if symmetric and i > j:
                    entries[i, j] = entries[j, i].T
                    continue
                entries[i, j], dense = self.kronecker(half, other, symmetric and i == j)
                view = others[j].of(slots[i].of(truth), 2)
                view.copy_(dense.view(*half, *other))
                if symmetric and i < j:
                    others[i].of(slots[j].of(truth), 2).copy_(view.permute(2, 3, 0, 1))
        operator = Tiles(rows, columns, slots, others, entries, self.like, symmetric)
        return operator, truth.flatten(2).flatten(0, 1)

    def block_matrix(self, shapes):
        """Blocks of any kind over the names, the diagonal ones symmetric; or a selection of them in another order."""
        names = list(shapes)
        made = {
            (row, column): self.leaf(shapes[row], shapes[column], row == column)
            for i, row in enumerate(names)
            for column in names[i:]
        }
        operator = cv.BlockMatrix(shapes, lambda row, column: made[row, column][0], self.like)
        chosen = self.draw(st.permutations(names)) if self.draw(st.booleans()) else names

        def dense(row, column):
            return made[row, column][1] if (row, column) in made else made[column, row][1].T

        truth = torch.cat([torch.cat([dense(row, column) for column in chosen], 1) for row in chosen])
        return (operator if chosen == names else operator.select(chosen)), truth

    def expression(self, rows, columns, symmetric, depth):
        if depth == 0 or self.draw(st.integers(0, 3)) == 0:
            return self.leaf(rows, columns, symmetric)
        kind = self.draw(st.sampled_from(["sum", "difference", "multiple", "negative", "transpose"]))
        if kind in ("sum", "difference"):
            (a, x), (b, y) = (self.expression(rows, columns, symmetric, depth - 1) for _ in range(2))
            return (a + b, x + y) if kind == "sum" else (a - b, x - y)
        if kind == "transpose":
            a, x = self.expression(columns, rows, symmetric, depth - 1)
            return a.T, x.T
        a, x = self.expression(rows, columns, symmetric, depth - 1)
        factor = -1.0 if kind == "negative" else self.draw(st.sampled_from([0.0, 0.5, -3.0]))
        return (-a, -x) if kind == "negative" else (factor * a, factor * x)


def _one_hot(outer):
    """Vectors of rank-one terms with a shared core: sum_t l_t r_t^T = outer."""
    return outer.T.contiguous(), torch.eye(outer.shape[1], dtype=outer.dtype)


@st.composite
def expressions(draw):
    """An operator and its dense matrix."""
    draft = Draft(draw, draw(dtypes))
    shape = st.tuples(st.integers(1, 4), st.integers(1, 4))
    if draw(st.integers(0, 3)) == 0:
        operator, truth = draft.block_matrix({name: draw(shape) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]})
    else:
        rows, symmetric = draw(shape), draw(st.booleans())
        columns = rows if symmetric else draw(shape)
        operator, truth = draft.expression(rows, columns, symmetric, draw(st.integers(0, 3)))
    return operator, truth, draft.dtype


def test_expressions(fuzz):
    def check(problem):
        operator, truth, dtype = problem
        assert_answers(operator, truth, float(truth.abs().max()) + 1, dtype, repr(operator))
        if operator.symmetric:
            assert torch.allclose(truth, truth.T)

    fuzz(check, expressions(), examples=12)


def test_estimates(fuzz):
    """Estimates of any expression lie within their error bars, and are exact where the budget reaches the size."""

    def check(problem, matvecs, seed):
        operator, truth, dtype = problem
        slack = (1e-9 if dtype == torch.float64 else 1e-3) * (1 + float(truth.norm()))
        norm = operator.frobenius_norm(matvecs=matvecs, seed=seed)
        assert norm.matvecs <= max(matvecs, truth.shape[1]) and norm.stderr >= 0
        full = operator.frobenius_norm(matvecs=200)
        assert abs(full.value - float(truth.norm())) <= slack
        if truth.shape[0] == truth.shape[1]:
            assert abs(float(operator.trace(matvecs=200)) - float(truth.trace())) <= slack
            diagonal = operator.diagonal(matvecs=200)
            assert float((diagonal.value.double() - truth.diagonal()).abs().max()) <= slack
        if operator.symmetric:
            values = torch.linalg.eigvalsh(truth)
            found = operator.eigenvalues(1, "LA", matvecs=64, seed=seed)[0]
            assert found.value <= float(values[-1]) + slack
            assert float((values - found.value).abs().min()) <= found.stderr + slack
            assert operator.density().wasserstein(values) <= slack

    fuzz(check, expressions(), st.integers(2, 20), st.integers(0, 100), examples=6)
