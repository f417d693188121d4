"""The ends of spectra: error bars that cover what a random start may have missed."""

import itertools
import math

import pytest
import torch

from curvoscope.estimate import density, eigenvalues, krylov, lanczos
from curvoscope.estimate.missed import LEVELS, Projection, Starts
from curvoscope.estimate.products import Probes, Products
from curvoscope.operators.compositions import Product
from matrices import Dense, decaying, flat, outliers, rotated, within
from reference import normal
from spectrum_ends import KINDS, WAYS, LowRank, draw, outcome


def _coverage(outcomes):
    held = [one for outcome in outcomes for one in outcome.held]
    return sum(held) / len(held)


def _check(draws, share):
    outcomes = [(one.name, outcome(one, lanczos)) for one in draws]
    assert not [name for name, one in outcomes if any(one.confidently_wrong)]
    assert _coverage([one for _, one in outcomes]) >= share


class TestCoverage:
    """95 % intervals. Of N independent values with that coverage fewer than 0.95 - 3 sqrt(0.05·0.95/N) are held in one
    run of 700: 0.885 for N = 100, 0.93 for N = 1000. The bound is that of a worst case: above 0.99 were held."""

    def test_a_hundred_draws(self):
        _check((draw(seed, 1e4) for seed in range(100)), 0.885)

    @pytest.mark.slow
    def test_a_thousand_draws(self):
        _check((draw(seed, 1e6 if seed % 25 == 0 else 5e4) for seed in range(1000, 2000)), 0.93)

    def test_draws_are_of_all_kinds(self):
        names = [draw(seed, 1e3).name for seed in range(100)]
        words = (*KINDS, *WAYS, "LA", "SA", "LM", "k 1", "k 3", "float32", "float64")
        assert all(any(word in name for name in names) for word in words)

    @pytest.mark.slow
    def test_two_products_on_a_null_space(self):
        """A Ritz value near 0 has a small residual at once where almost all is null space; the end is far below."""
        wrong = []
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(4 + seed % 5, generator=generator, dtype=torch.float64)
            operator = LowRank(values, 200_000, torch.float64, generator)
            found = eigenvalues(operator, 1, "SA", tolerance=0.005, seed=seed)
            low, high = found[0].interval()
            truth = min(0.0, float(values.min()))
            if not low <= truth <= high or not found.converged[0]:
                wrong.append((seed, found[0], truth))
            assert operator.products == found.matvecs <= len(values) + 4
        assert not wrong

    @pytest.mark.parametrize("method", ["eigsh", "lobpcg"])
    def test_scipy(self, method):
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            values = torch.randn(6, generator=generator, dtype=torch.float64)
            matrix = LowRank(values, 5_000, torch.float64, generator)
            operator = Product((matrix.__matmul__,) * 2, (5_000, 1), (5_000, 1), torch.empty(0).double(), True)
            found = eigenvalues(operator, 1, "SA", tolerance=0.01, seed=seed, method=method)
            assert abs(found[0].value - float(values.min())) <= 2 * found[0].stderr
            assert found.matvecs == matrix.products

    @pytest.mark.parametrize("matvecs", [16, 40, 512])
    def test_ends_of_a_density(self, matvecs):
        held = []
        for seed in range(30):
            one = draw(seed, 3e3)
            found = density(one.operator, matvecs=matvecs, seed=seed)
            values = torch.cat([one.operator._values.double(), torch.zeros(1).double()])
            for end, truth in ((found.smallest, values.min()), (found.largest, values.max())):
                low, high = end.interval()
                held.append(low <= float(truth) <= high)
        assert sum(held) / len(held) >= 0.86  # 60 values, as above

    def test_an_exact_density_has_exact_ends(self):
        found = density(Dense(rotated(outliers(60))))
        assert found.method == "exact" and found.smallest.stderr == found.largest.stderr == 0
        assert math.isclose(found.smallest.value, -8) and math.isclose(found.largest.value, 20)


class TestBound:
    def test_formula(self):
        """Without a restart and from one vector: 1/g is the sum of squares of the orthonormal polynomials."""
        matrix, start = rotated(flat(50)), normal(3)(50)
        n, steps = 50, 6
        V, alpha, beta = [start / start.norm()], [], []
        for _ in range(steps):
            w = matrix @ V[-1]
            alpha.append(float(V[-1] @ w))
            for _ in range(2):
                w = w - torch.stack(V).T @ (torch.stack(V) @ w)
            beta.append(float(w.norm()))
            V.append(w / w.norm())
        beside = torch.tensor(beta[:-1], dtype=torch.float64)
        T = torch.tensor(alpha, dtype=torch.float64).diag() + beside.diag(1) + beside.diag(-1)
        values, vectors = torch.linalg.eigh(T)
        starts = Starts()
        starts.add(n**0.5 * torch.eye(1, steps + 1, dtype=torch.float64))
        projection = Projection(values, vectors, beta[-1] * vectors[-1:])
        for at in (1.55, 1.8, 3.0, 0.2):
            polynomials = [1.0, (at - alpha[0]) / beta[0]]
            for j in range(1, steps):
                polynomials.append(((at - alpha[j]) * polynomials[-1] - beta[j - 1] * polynomials[-2]) / beta[j])
            expected = (n / sum(p**2 for p in polynomials)) ** 0.5
            found = starts._overlap(projection, (1,), torch.tensor([at], dtype=torch.float64))
            assert math.isclose(float(found), expected, rel_tol=1e-9)

    @pytest.mark.parametrize("block", [1, 3])
    @pytest.mark.parametrize("which", ["LA", "LM"])
    def test_a_restart_keeps_what_is_known(self, which, block):
        """The bound holds for every eigenvector: |G u|² ≤ g(λ), also after restarts and for all of the spectrum."""
        matrix = rotated(decaying(120, 0.5))
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        with Products(Dense(matrix), "eigenvalues") as products:
            probes = Probes(products, 4)
            first, lengths = krylov._first_block(products, probes, None, block)
            run = within(8 * 120 * (16 + 6 * block), krylov._Run, products, probes, 1, which, first, lengths, None)
            run.go(60, 0.0)  # all products are made, on any CPU
            assert len(run._starts._events) > 2  # it was restarted
            overlap = run._starts._overlap(run._project(), (1,), eigenvalues)
            apart = (eigenvalues[:, None] - run._project().values).abs().amin(1) > 1e-6  # else g has a pole there
        actual = ((first * lengths[:, None]) @ vectors).norm(dim=0)
        assert int(apart.sum()) > 100
        assert bool((actual <= overlap * (1 + 1e-6))[apart].all())

    def test_more_starts_bound_more(self):
        """The quantiles of χ²: with one start a small overlap is likely, with several it is not."""
        operator = Dense(rotated(flat(300)))
        bars = {
            block: [lanczos(operator, 1, "LA", matvecs=24 * block, block=block, seed=seed)[0] for seed in range(16)]
            for block in (1, 4)
        }
        one, four = (sum(bar.stderr for bar in several) for several in bars.values())
        assert four < one  # a single run may have had luck

    def test_budget(self):
        """What a budget leaves open is in the error bar, and nothing is left open at the end."""
        eigenvalues = torch.cat([flat(399), torch.tensor([1.8], dtype=torch.float64)])
        operator = Dense(rotated(eigenvalues))
        bars = [lanczos(operator, 1, "LA", matvecs=matvecs)[0] for matvecs in (2, 4, 8, 16, 32)]
        assert all(one.stderr > two.stderr for one, two in itertools.pairwise(bars))
        assert all(abs(one.value - 1.8) <= 1.96 * one.stderr for one in bars)
        assert bars[0].stderr > 1 and bars[-1].stderr < 1e-5

    def test_opposite_end_of_the_largest_magnitude(self):
        """+1 is found at once from its eigenvector; that -1.2 is larger is seen before it counts as converged."""
        size = 2000
        values = torch.cat([torch.zeros(size - 2), torch.tensor([1.0, -1.2])]).double()
        start = torch.zeros(size).double()
        start[-2] = 1
        found = lanczos(Dense(values.diag()), 1, "LM", tolerance=0.05, start=start)
        assert found.converged[0] and abs(found[0].value + 1.2) < 0.06

    def test_levels(self):
        """The interval of 95 % is 1.96 standard errors wide on both sides."""
        assert LEVELS[0] == (0.05, 1.96)
        estimate = lanczos(Dense(rotated(flat(30))), 1, matvecs=4)[0]
        assert math.isclose(estimate.interval(0.95)[1] - estimate.value, 1.96 * estimate.stderr, rel_tol=1e-4)

    def test_records_of_restarts_are_limited(self, monkeypatch):
        """Once they would take too much memory, the last bound holds on."""
        operator = Dense(rotated(torch.linspace(-1, 2, 300, dtype=torch.float64)))
        kept = within(8 * 300 * 24, lanczos, operator, 1, "LA", matvecs=150)[0]
        monkeypatch.setattr(krylov, "_RECORDS", 10_000)
        dropped = within(8 * 300 * 24, lanczos, operator, 1, "LA", matvecs=150)[0]
        assert kept.value == dropped.value and kept.stderr < dropped.stderr
        assert abs(dropped.value - 2) <= 1.96 * dropped.stderr


def test_blocks_stay_orthogonal():
    """Rows of a block that almost vanish bring their rounding errors along: each must be made orthogonal again."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(4 + seed % 8, generator=generator, dtype=torch.float64)
        found = lanczos(LowRank(values, 3_000, torch.float64, generator), 3, "LA", seed=seed)
        assert found.orthogonality < 1e-12
        truth = torch.cat([values, torch.zeros(3).double()]).sort().values[-3:]
        assert torch.allclose(found.value, truth, atol=1e-10)
