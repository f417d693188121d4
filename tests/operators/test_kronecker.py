"""Kronecker sums against their definition, entry by entry: every kind of term, pair of terms and form of core."""

from itertools import combinations_with_replacement, product

import pytest
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.operators import strips
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.cores import Core, DenseCore, SumCore, TokenForm
from curvoscope.operators.kronecker import KroneckerSum, merged
from curvoscope.operators.terms import Single, Term
from curvoscope.settings import current
from matrices import within
from operator_cases import term_truth
from reference import normal

AXES = list(product((0, 1), (0, 1)))
ROWS, COLUMNS, TOKENS = (3, 4), (2, 5), 6


def dense(term: Term | Single, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """B[r0 r1, c0 c1] = sum_t l_t r_t C_t, from the definition."""
    i, j = term.axes
    on, off = "ap"[i] + "bq"[j], "ap"[1 - i] + "bq"[1 - j]
    if isinstance(term, Single):
        found = torch.einsum(f"{on},{off}->apbq", term.outer, term.core)
    else:
        cores = term.core.dense(0, term.tokens)
        found = torch.einsum(f"t{on[0]},t{on[1]},t{off}->apbq", term.left, term.right, cores)
    return found.reshape(rows[0] * rows[1], columns[0] * columns[1])


def term(seed: int, axes: tuple[int, int], tokens: int = TOKENS, rows=ROWS, columns=COLUMNS) -> Term:
    r, (i, j) = normal(seed), axes
    return Term(r(tokens, rows[i]), r(tokens, columns[j]), DenseCore(r(tokens, rows[1 - i], columns[1 - j])), (i, j))


def single(seed: int, axes: tuple[int, int], rows=ROWS, columns=COLUMNS) -> Single:
    r, (i, j) = normal(seed), axes
    return Single(r(rows[i], columns[j]), r(rows[1 - i], columns[1 - j]), (i, j))


def integers(one: Term | Single) -> Term | Single:
    """The same with small integers for its numbers: all sums and products of them are exact, in whatever order."""
    if isinstance(one, Single):
        return Single((8 * one.outer).round(), (8 * one.core).round(), one.axes)
    core = DenseCore((8 * one.core.dense(0, one.tokens)).round())
    return Term((8 * one.left).round(), (8 * one.right).round(), core, one.axes)


def symmetric_term(seed: int, axis: int) -> Term:
    r = normal(seed)
    left, cores = r(TOKENS, ROWS[axis]), r(TOKENS, ROWS[1 - axis], ROWS[1 - axis])
    return Term(left, left, DenseCore(cores + cores.mT, symmetric=True), (axis, axis))


class Features(Core):
    """C_ni = f_n^T E_ni g_n, with both forms: `groups` sequences of `tokens`."""

    def __init__(self, left: Tensor, right: Tensor, inner: Tensor, tokens: int) -> None:
        super().__init__((left.shape[2], right.shape[2]), tokens, 0)
        self._parts, self._tokens = (left, right, inner), tokens

    def dense(self, start: int, stop: int) -> Tensor:
        left, right, inner = self._parts
        groups = torch.arange(start, stop) // self._tokens
        return left[groups].mT @ inner[start:stop] @ right[groups]

    def token_form(self) -> TokenForm:
        left, right, inner = self._parts
        return TokenForm(left, right, lambda start, stop: inner[start:stop], self._tokens)


def features(seed: int, groups: int, tokens: int, width: int, shared: bool) -> Features:
    r = normal(seed)
    left = r(groups, width, 4)
    right = left if shared else r(groups, width, 5)
    return Features(left, right, r(groups * tokens, width, width), tokens)


def close(found: float, expected: Tensor) -> bool:
    return abs(found - float(expected)) <= 1e-11 * (1 + abs(float(expected)))


TERMS = [kind(10 * n, axes) for n, (kind, axes) in enumerate(product((term, single), AXES))]


class TestInnerProducts:
    """|x + y|^2 holds <x, y>, whatever the kinds and the axes of the two and however little memory there is."""

    @pytest.mark.parametrize("memory_limit", [1000, 1900, None])  # the entries need 1920 bytes, twice over
    def test_any_two(self, memory_limit):
        for x, y in combinations_with_replacement([*TERMS, term(99, (0, 1), tokens=4)], 2):
            for terms in ([x, y], [y, x]):
                block = KroneckerSum(ROWS, COLUMNS, terms, torch.zeros(1, dtype=torch.float64))
                truth = (dense(x, ROWS, COLUMNS) + dense(y, ROWS, COLUMNS)).norm()
                assert close(within(memory_limit, block.frobenius_norm), truth)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("tokens", [2, 40])
    def test_in_the_space_of_tokens(self, tokens, shared):
        """Cores with features: one term, two with other vectors, two with other features, and all transposed."""
        r = normal(5)
        cores = [
            features(1, 2, tokens, 2, shared),
            features(2, 2, tokens, 2, shared),
            features(3, tokens, 2, 3, shared),
        ]
        left, right = r(2 * tokens, 30), r(2 * tokens, 40)
        columns = (40, 4 if shared else 5)
        terms = [Term(left, right, cores[0]), Term(right[:, :30], left.repeat(1, 2)[:, :40], cores[1])]
        other = features(4, tokens, 2, 3, shared)
        terms += [Term(left, right, cores[2]), Term(r(2 * tokens, 30), r(2 * tokens, 40), other)]
        for some in (terms[:1], terms[:2], terms[:3], terms[1:], terms[3:]):
            truth = sum(dense(each, (30, 4), columns) for each in some).norm()
            block = KroneckerSum((30, 4), columns, some, left)
            assert close(block.frobenius_norm(), truth) and close(block.T.frobenius_norm(), truth)

    @pytest.mark.parametrize("tokens", [2, 40])
    def test_two_terms_that_share_their_cores(self, tokens):
        r, core = normal(6), features(1, 3, tokens, 2, shared=False)
        terms = [Term(r(3 * tokens, 30), r(3 * tokens, 40), core) for _ in range(2)]
        truth = sum(dense(each, (30, 4), (40, 5)) for each in terms).norm()
        assert close(KroneckerSum((30, 4), (40, 5), terms, terms[0].left).frobenius_norm(), truth)

    def test_terms_that_cancel(self):
        """|x - y|² from |x|², <x, y> and |y|² has lost its digits if x and y are nearly the same."""
        r = normal(8)
        vectors, cores, change = r(4, 3).float(), r(4, 60, 60).float(), 1e-4 * r(4, 60, 60).float()
        terms = [Term(vectors, vectors, DenseCore(values)) for values in (cores, change - cores)]
        terms[1] = Term(vectors.clone(), vectors.clone(), terms[1].core)  # so that the two are not merged
        operator = KroneckerSum((3, 60), (3, 60), terms, vectors)
        truth = sum(
            term_truth(*(v.double() for v in (t.left, t.right, t.core.dense(0, 4))), t.axes) for t in terms
        ).norm()
        assert operator.frobenius_norm() == pytest.approx(float(truth), rel=1e-2)


class TestTerms:
    def test_those_with_the_same_vectors_become_one(self):
        one = term(1, (0, 1))
        other = Term(one.left, one.right, DenseCore(normal(2)(*one.core.dense(0, TOKENS).shape)), one.axes)
        crossed = Term(one.left, one.right, one.core, (0, 1))
        apart, alone = term(3, (0, 1)), single(4, (1, 1))
        found = merged([one, alone, other, apart, crossed])
        assert [type(each) for each in found] == [Term, Term, Single] and found[1] is apart and found[2] is alone
        truth = sum(dense(each, ROWS, COLUMNS) for each in (one, other, crossed))
        assert torch.allclose(dense(found[0], ROWS, COLUMNS), truth, rtol=0, atol=1e-12)
        assert merged([one]) == [one]

    def test_over_pairs_of_tokens(self):
        r, groups, size = normal(6), 2, 3
        left, right, blocks = r(groups * size, 3), r(groups * size, 2), r(groups, size, 4, size, 5)
        found = Term.over_pairs(left, right, blocks)
        truth = torch.einsum(
            "nta,nub,ntpuq->apbq", left.view(groups, size, 3), right.view(groups, size, 2), blocks
        ).reshape(12, 10)
        assert found.tokens == groups * size * size and found.axes == (0, 0)
        assert torch.allclose(dense(found, ROWS, COLUMNS), truth, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("axes", AXES)
    @pytest.mark.parametrize("kind", [term, single])
    def test_transposed(self, kind, axes):
        one = integers(kind(7, axes))
        assert torch.equal(dense(one.T, COLUMNS, ROWS), dense(one, ROWS, COLUMNS).T)

    def test_symmetry(self):
        one = symmetric_term(8, 0)
        assert one.symmetric and one.T.symmetric
        assert not Term(one.left, one.left.clone(), one.core, (0, 0)).symmetric
        assert not Term(one.left, one.left, DenseCore(one.core.dense(0, TOKENS)), (0, 0)).symmetric
        assert not single(9, (0, 0)).symmetric and Single(torch.eye(3), torch.eye(4), symmetric=True).T.symmetric


class TestCores:
    def test_sums_and_transposes(self):
        left = normal(1)(2, 3, 4)
        right, r = normal(2)(2, 3, 5), normal(3)
        parts = [Features(left, right, r(8, 3, 3), 4) for _ in range(2)]
        truth = parts[0].dense(0, 8) + parts[1].dense(0, 8)
        total = SumCore(parts)
        for core, expected in ((total, truth), (total.T, truth.mT)):
            diagonals = expected.diagonal(dim1=1, dim2=2)
            assert core.shape == tuple(expected.shape[1:]) and core.size == 20 and core.period == 4
            assert torch.allclose(core.dense(2, 7), expected[2:7]) and torch.allclose(
                core.diagonal(2, 7), diagonals[2:7]
            )
            assert torch.allclose(core.trace(2, 7), diagonals[2:7].sum(1))
            form = core.token_form()
            groups = torch.arange(8) // form.tokens
            assert torch.allclose(form.left[groups].mT @ form.inner(0, 8) @ form.right[groups], expected)
        assert total.T.T is total and total.workspace == 40

    def test_a_sum_has_no_form_unless_all_share_their_features(self):
        left, right, r = normal(1)(2, 3, 4), normal(2)(2, 3, 5), normal(3)
        one = Features(left, right, r(8, 3, 3), 4)
        for other in (
            Features(left.clone(), right, r(8, 3, 3), 4),
            Features(left, right.clone(), r(8, 3, 3), 4),
            DenseCore(r(8, 4, 5)),
        ):
            assert SumCore([one, other]).token_form() is None and SumCore([other, one]).token_form() is None

    def test_a_sum_is_symmetric_when_all_are(self):
        values = normal(4)(2, 3, 3)
        cores = [DenseCore(values + values.mT, symmetric=True), DenseCore(values)]
        assert SumCore(cores[:1] * 2).symmetric and not SumCore(cores).symmetric
        assert SumCore(cores[:1]).T.symmetric and cores[0].T is cores[0] and not cores[1].T.symmetric


def assert_all_answers(block: LinearOperator, truth: Tensor) -> None:
    """Entries, products, trace, diagonal and norms are those of the truth."""
    size = 1e-11 * (1 + float(truth.norm()))
    v, w = normal(1)(truth.shape[1], 2), normal(2)(truth.shape[0], 2)
    assert torch.allclose(block.dense(), truth, rtol=0, atol=size)
    assert torch.allclose(block @ v, truth @ v, rtol=0, atol=size)
    assert torch.allclose(block.T @ w, truth.T @ w, rtol=0, atol=size)
    assert torch.allclose(block.T.dense(), truth.T, rtol=0, atol=size)
    assert abs(block.frobenius_norm() - float(truth.norm())) < size
    assert block.norm_bound() >= float(torch.linalg.matrix_norm(truth, 2)) - size
    if truth.shape[0] == truth.shape[1]:
        assert abs(block.trace() - float(truth.trace())) < size
        assert torch.allclose(block.diagonal(), truth.diagonal(), rtol=0, atol=size)
    if block.symmetric:
        assert torch.equal(block.dense(), block.dense().T)
        assert torch.allclose(block.eigenvalues(), torch.linalg.eigvalsh(truth), rtol=0, atol=size)


PARTS = {
    "term": lambda: [term(1, (0, 1))],
    "two terms": lambda: [term(2, (1, 0)), term(3, (0, 0))],
    "single": lambda: [single(4, (0, 1))],
    "zero single": lambda: [Single(normal(5)(4, 5), torch.zeros(3, 2).double(), (1, 1))],
    "single and term": lambda: [single(6, (1, 1)), term(7, (1, 1))],
    "nothing": lambda: [],
}

SYMMETRIC = {
    "term 0": lambda: [symmetric_term(1, 0)],
    "term 1": lambda: [symmetric_term(2, 1)],
    "other term 0": lambda: [symmetric_term(3, 0)],
    "two terms": lambda: [symmetric_term(4, 0), symmetric_term(5, 1)],
    "identity": lambda: [Single((m := normal(6)(3, 3)) + m.T, torch.eye(4).double(), symmetric=True)],
    "a term and its transpose": lambda: [(one := term(7, (0, 1), 6, ROWS, ROWS)), one.T],
    "one of both": lambda: [symmetric_term(8, 1), (one := term(9, (1, 0), 6, ROWS, ROWS)), one.T],
}


class TestSums:
    """Sums of blocks are the sums of their entries, whatever the parts are made of."""

    @pytest.mark.parametrize("first", PARTS)
    @pytest.mark.parametrize("second", PARTS)
    def test_rectangular(self, first, second):
        like = torch.zeros(1, dtype=torch.float64)
        parts = [PARTS[name]() for name in (first, second)]
        blocks = [KroneckerSum(ROWS, COLUMNS, part, like) for part in parts]
        truths = [sum((dense(each, ROWS, COLUMNS) for each in part), torch.zeros(12, 10).double()) for part in parts]
        assert_all_answers(blocks[0] + blocks[1], truths[0] + truths[1])

    @pytest.mark.parametrize("first", SYMMETRIC)
    @pytest.mark.parametrize("second", SYMMETRIC)
    def test_symmetric(self, first, second):
        like = torch.zeros(1, dtype=torch.float64)
        parts = [SYMMETRIC[name]() for name in (first, second)]
        blocks = [KroneckerSum(ROWS, ROWS, part, like, symmetric=True) for part in parts]
        truths = [sum(dense(each, ROWS, ROWS) for each in part) for part in parts]
        total = blocks[0] + blocks[1]
        assert total.symmetric
        assert_all_answers(total, truths[0] + truths[1])
        assert_all_answers(total + blocks[0], 2 * truths[0] + truths[1])

    @pytest.mark.parametrize("axes", AXES)
    def test_square_blocks_that_are_not_symmetric(self, axes):
        like = torch.zeros(1, dtype=torch.float64)
        for each in (term(1, axes, 5, ROWS, ROWS), single(2, axes, ROWS, ROWS)):
            assert_all_answers(KroneckerSum(ROWS, ROWS, [each], like), dense(each, ROWS, ROWS))

    def test_with_a_symmetric_one_is_not_symmetric(self):
        like = torch.zeros(1, dtype=torch.float64)
        even = KroneckerSum(ROWS, ROWS, [symmetric_term(1, 0)], like)
        odd = KroneckerSum(ROWS, ROWS, [term(2, (0, 0), 5, ROWS, ROWS)], like)
        assert even.symmetric and not odd.symmetric
        for block in (even + odd, odd + even):
            assert not block.symmetric
            assert_all_answers(block, even.dense() + odd.dense())


@pytest.mark.parametrize("numbers", [1, 40, 10**6])
class TestStrips:
    """Entries are written one row, a few rows or all rows at a time, together with their transpose."""

    @pytest.fixture(autouse=True)
    def of_so_many(self, numbers, monkeypatch):
        monkeypatch.setattr(strips, "_STRIP", numbers)

    @pytest.mark.parametrize("name", PARTS)
    def test_rectangular(self, name):
        block = KroneckerSum(ROWS, COLUMNS, PARTS[name](), torch.zeros(1, dtype=torch.float64))
        out, mirror = torch.empty(*ROWS, *COLUMNS).double(), torch.empty(*COLUMNS, *ROWS).double()
        block._write_both(out, mirror)
        truth = sum((dense(each, ROWS, COLUMNS) for each in block.terms), torch.zeros(12, 10).double())
        assert torch.allclose(out.view(12, 10), truth, rtol=0, atol=1e-13)
        assert torch.equal(mirror, out.permute(2, 3, 0, 1))

    @pytest.mark.parametrize("axes", AXES)
    def test_symmetric_cores_between_two_vectors(self, axes):
        r, shape = normal(1), (4, 4)
        left, right, cores = r(TOKENS, 4), r(TOKENS, 4), r(TOKENS, 4, 4)
        one = Term(left, right, DenseCore(cores + cores.mT, symmetric=True), axes)
        found = KroneckerSum(shape, shape, [one], left).dense()
        assert torch.allclose(found, dense(one, shape, shape), rtol=0, atol=1e-13)

    @pytest.mark.parametrize("name", SYMMETRIC)
    def test_symmetric(self, name):
        block = KroneckerSum(ROWS, ROWS, SYMMETRIC[name](), torch.zeros(1, dtype=torch.float64), symmetric=True)
        found = block.dense()
        assert torch.allclose(found, sum(dense(each, ROWS, ROWS) for each in block.terms), rtol=0, atol=1e-13)
        assert torch.equal(found, found.T)


@pytest.mark.parametrize("budget", [6000, 12000, 60000])
def test_in_little_memory(budget, monkeypatch):
    """Entries, products and contractions a few tokens at a time: one, two and many ranges of the 40."""
    cases = [[term(3 * n, axes, 40, ROWS, ROWS)] for n, axes in enumerate(AXES)]
    left, cores = normal(1)(40, 4), normal(2)(40, 3, 3)
    cases.append([Term(left, left, DenseCore(cores + cores.mT, symmetric=True), (1, 1))])
    truths = [sum(dense(each, ROWS, ROWS) for each in terms) for terms in cases]
    monkeypatch.setattr(checks, "memory_budget", lambda: current().memory_limit or budget)
    for terms, truth in zip(cases, truths, strict=True):
        assert_all_answers(KroneckerSum(ROWS, ROWS, terms, left), truth)


class TestSpectra:
    @pytest.mark.parametrize("axis", [0, 1])
    def test_fewer_tokens_than_entries_of_a_vector(self, axis):
        """The thin QR route: T = 2 < 5, vectors on either axis, one core and two."""
        r, shape = normal(3), (5, 3) if axis == 0 else (3, 5)
        left, cores = r(2, 5), r(2, 2, 3, 3)
        terms = [Term(left, left, DenseCore(core + core.mT, symmetric=True), (axis, axis)) for core in cores]
        for some in (terms[:1], terms):
            assert_all_answers(KroneckerSum(shape, shape, some, left), sum(dense(each, shape, shape) for each in some))

    def test_symmetric_sums_of_terms_that_are_not(self):
        """Their factors are no symmetric matrices on straight axes: the eigenvalues are not those of the factors."""
        eye, odd, left = torch.eye(5, dtype=torch.float64), normal(4)(5, 5), normal(5)(2, 5)
        cores = torch.einsum("tu,ua,ub->tab", torch.tensor([[0.0, 1.0], [1.0, 2.0]], dtype=torch.float64), left, left)
        for one in (
            Single(eye, eye, (0, 1)),  # the commutation matrix
            Single(odd - odd.T, odd - odd.T),
            Term(left, left, DenseCore(cores, symmetric=True), (0, 1)),
        ):
            assert_all_answers(KroneckerSum((5, 5), (5, 5), [one], left, symmetric=True), dense(one, (5, 5), (5, 5)))

    def test_bound_of_one_product_is_its_norm(self):
        one = single(1, (0, 1))
        block = KroneckerSum(ROWS, COLUMNS, [one], one.outer)
        assert block.norm_bound() == pytest.approx(float(torch.linalg.matrix_norm(dense(one, ROWS, COLUMNS), 2)))

    def test_bound_of_a_term_is_the_product_of_its_factors(self):
        one = term(2, (1, 0))
        expected = torch.linalg.matrix_norm(one.left, 2) * torch.linalg.matrix_norm(one.right, 2)
        expected = expected * torch.linalg.matrix_norm(one.core.dense(0, TOKENS), 2).max()
        assert KroneckerSum(ROWS, COLUMNS, [one], one.left).norm_bound() == pytest.approx(float(expected))
