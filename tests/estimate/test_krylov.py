import errno
import math
import os

import pytest
import torch

from curvoscope.errors import MemoryLimitError, NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import lanczos
from curvoscope.settings import settings
from matrices import SPECTRA, Dense, decaying, flat, outliers, rotated, within
from reference import normal

WHICH = ("LM", "LA", "SA")


def _wanted(eigenvalues, k, which):
    key = {"LM": -eigenvalues.abs(), "LA": -eigenvalues, "SA": eigenvalues}[which]
    return eigenvalues[key.argsort(stable=True)[:k]].sort().values


def _spectrum(*parts):
    return torch.cat([torch.as_tensor(part, dtype=torch.float64) for part in parts])


class TestValues:
    @pytest.mark.parametrize("which", WHICH)
    @pytest.mark.parametrize("k", [1, 3, 12])
    @pytest.mark.parametrize("spectrum", SPECTRA)
    def test_within_their_error_bars(self, spectrum, k, which):
        eigenvalues = SPECTRA[spectrum](150)
        operator = Dense(rotated(eigenvalues))
        found = lanczos(operator, k, which)
        assert found.matvecs == operator.products
        assert all(found.converged) and len(found) == k
        for value, truth in zip(found, _wanted(eigenvalues, k, which), strict=True):
            assert abs(value.value - float(truth)) <= value.stderr <= 1.01e-6 * float(eigenvalues.abs().max())
            assert (value.matvecs, value.method) == (found.matvecs, "lanczos")
        assert torch.equal(found.value, found.value.sort().values)

    def test_vectors(self):
        matrix = rotated(outliers(80))
        found = lanczos(Dense(matrix), 3, vectors=True)
        V = found.vectors
        assert torch.allclose(V.T @ V, torch.eye(3).double(), atol=1e-12)
        residuals = (matrix @ V - V * found.value).norm(dim=0)
        for residual, said, value in zip(residuals, found.residuals, found, strict=True):
            assert math.isclose(float(residual), said, rel_tol=1e-3)
            assert said <= value.stderr
        assert lanczos(Dense(matrix)).vectors is None

    def test_unconverged_values_say_so(self):
        eigenvalues = flat(400)
        found = lanczos(Dense(rotated(eigenvalues)), 2, "LA", matvecs=8)
        assert not any(found.converged)
        for value in found:  # some eigenvalue is within the residual: all are less than 1/399 apart
            assert value.stderr > 0.01
            assert float((eigenvalues - value.value).abs().min()) <= value.stderr

    def test_a_budget_is_not_spent_in_vain(self):
        assert lanczos(Dense(rotated(decaying(200, 3.0))), matvecs=200).matvecs < 40

    @pytest.mark.parametrize("k", [1, 4])
    def test_whole_space(self, k):
        matrix = rotated(outliers(12))
        found = lanczos(Dense(matrix), k, matvecs=100)
        assert found.matvecs <= 12
        assert torch.allclose(found.value, _wanted(outliers(12), k, "LM"), atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_low_precision(self, dtype):
        matrix = rotated(outliers(80)).to(dtype)
        found = lanczos(Dense(matrix), 2, tolerance=0.02, vectors=True)
        truth = _wanted(torch.linalg.eigvalsh(matrix.double()), 2, "LM")
        assert found.vectors.dtype == dtype
        for value, expected in zip(found, truth, strict=True):
            assert abs(value.value - float(expected)) <= value.stderr + 4 * torch.finfo(dtype).eps * 20


class TestOrthogonality:
    def test_hundred_steps_on_an_ill_conditioned_matrix(self):
        """Eighteen orders of magnitude: without re-orthogonalisation all is lost when the first has converged."""
        operator = Dense(rotated(10.0 ** torch.linspace(-16, 2, 300).double()))
        found = lanczos(operator, 1, "SA", matvecs=100, block=1)
        assert found.matvecs == 100
        assert found.orthogonality < 1e-13

    def test_no_ghosts(self):
        """Simple eigenvalues come once, however long the run goes on after they have converged."""
        eigenvalues = _spectrum([100.0, 50.0, 20.0], torch.linspace(0, 1, 197))
        found = lanczos(Dense(rotated(eigenvalues)), 6, "LA", matvecs=150, block=1)
        assert torch.allclose(found.value[-3:], torch.tensor([20.0, 50.0, 100.0]).double(), atol=1e-9)
        assert float(found.value[:3].max()) <= 1 + 1e-12

    def test_single_precision_basis(self):
        operator = Dense(rotated(outliers(500)).float())
        found = within(500 * 4 * 30, lanczos, operator, 1)
        assert found.orthogonality < 1e-5
        assert abs(found[0].value - 20) < 1e-3


class TestMultiplicity:
    @pytest.mark.parametrize("which", WHICH)
    def test_repeated_eigenvalues(self, which):
        eigenvalues = _spectrum([5.0] * 4, [4.0] * 3, [-6.0] * 2, torch.linspace(-1, 1, 91))
        found = lanczos(Dense(rotated(eigenvalues)), 5, which)
        assert torch.allclose(found.value, _wanted(eigenvalues, 5, which), atol=1e-5)

    def test_more_copies_than_a_block_in_an_invariant_subspace(self):
        eigenvalues = _spectrum(torch.ones(20), torch.zeros(80))
        found = lanczos(Dense(rotated(eigenvalues)), 20, "LA")
        assert torch.allclose(found.value, torch.ones(20).double(), atol=1e-12)
        assert found.matvecs < 100

    @pytest.mark.parametrize("k", [1, 3, 10])
    def test_zero_matrix(self, k):
        found = lanczos(Dense(torch.zeros(50, 50).double()), k, vectors=True)
        assert not found.value.any()
        assert all(value.stderr == 0 for value in found) and all(found.converged)
        assert torch.allclose(found.vectors.T @ found.vectors, torch.eye(k).double(), atol=1e-12)

    def test_identity(self):
        found = lanczos(Dense(torch.eye(30).double()), 3)
        assert torch.allclose(found.value, torch.ones(3).double(), atol=1e-13)

    @pytest.mark.parametrize("k", [1, 4])
    def test_rank_one(self, k):
        u = normal(0)(60)
        found = lanczos(Dense(torch.outer(u, u)), k, "LA")
        truth = _spectrum([0.0] * (k - 1), [float(u @ u)])
        assert torch.allclose(found.value, truth, atol=1e-12)
        assert found.matvecs <= 4 * k

    def test_one_by_one(self):
        found = lanczos(Dense(torch.full((1, 1), -3.0).double()))
        assert (found[0].value, found.matvecs) == (-3, 1)


class TestRestarts:
    @pytest.mark.parametrize("which", WHICH)
    @pytest.mark.parametrize("k", [1, 3])
    def test_little_memory(self, k, which):
        eigenvalues = torch.linspace(-1, 2, 300).double()
        operator = Dense(rotated(eigenvalues))
        found = within(8 * 300 * (12 * k + 12), lanczos, operator, k, which)
        assert all(found.converged)
        assert torch.allclose(found.value, _wanted(eigenvalues, k, which), atol=1e-5)
        assert found.orthogonality < 1e-12
        assert found.matvecs == operator.products

    def test_budget_that_ends_in_a_restart(self):
        eigenvalues = flat(300)
        for matvecs in range(20, 40):
            found = within(8 * 300 * 24, lanczos, Dense(rotated(eigenvalues)), 1, "LA", matvecs=matvecs)
            assert float((eigenvalues - found[0].value).abs().min()) <= found[0].stderr + 1e-12

    def test_too_little_memory(self):
        with pytest.raises(MemoryLimitError, match=r"memory_limit: a basis of 5 vectors of length 300 needs"):
            within(8 * 300 * 7, lanczos, Dense(rotated(flat(300))))


class TestWarmStart:
    @pytest.mark.parametrize("k", [1, 3])
    def test_is_nearer_with_the_same_products(self, k):
        """That nothing is further out takes the products of a cold start, and the residual is small long before."""
        matrix, noise = rotated(flat(400)), normal(1)(400, 400)
        moved = matrix + 1e-4 * (noise + noise.T) / 400**0.5
        start = lanczos(Dense(matrix), k, "LA", vectors=True).vectors
        truth = torch.linalg.eigvalsh(moved)[-k:]
        cold, warm = (lanczos(Dense(moved), k, "LA", matvecs=10 * k, start=one) for one in (None, start))
        assert max(warm.residuals) < 0.2 * max(cold.residuals)
        assert float((warm.value - truth).abs().max()) < 1e-3
        cold, warm = (lanczos(Dense(moved), k, "LA", tolerance=1e-3, start=one) for one in (None, start))
        assert all(warm.converged) and warm.matvecs <= 1.3 * cold.matvecs
        assert torch.allclose(warm.value, truth, atol=4e-3)

    def test_finds_what_has_overtaken(self):
        """Started on the second eigenvector exactly, it must not take it for the first."""
        matrix = rotated(outliers(100))
        vectors = torch.linalg.eigh(matrix).eigenvectors
        for second in (vectors[:, -2], vectors[:, -2:-1]):
            found = lanczos(Dense(matrix), 1, "LA", tolerance=1e-3, start=second)
            assert abs(found[0].value - 20) < 0.02

    def test_zero_and_dependent_vectors(self):
        start = torch.zeros(60, 3).double()
        start[:, 1:] = normal(3)(60, 1)
        found = lanczos(Dense(rotated(outliers(60))), 3, start=start)
        assert torch.allclose(found.value, _wanted(outliers(60), 3, "LM"), atol=1e-4)

    def test_bad_start(self):
        operator = Dense(rotated(flat(20)))
        for bad in (torch.ones(19), torch.ones(19, 2), torch.ones(20, 1, 1), torch.ones(20, 21)):
            with pytest.raises(ShapeError, match="start"):
                lanczos(operator, start=bad.double())
        with pytest.raises(NonFiniteError, match="start"):
            lanczos(operator, start=torch.full((20,), math.nan))


def test_seeds():
    operator = Dense(rotated(flat(100)))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = lanczos(operator, 2, matvecs=20, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert lanczos(operator, 2, matvecs=20, seed=7).tolist() == first.tolist()
    assert lanczos(operator, 2, matvecs=20, seed=8).tolist() != first.tolist()


def test_bad_input():
    operator = Dense(rotated(flat(20)))
    for bad in (0, 21):
        with pytest.raises(RangeError, match="k: got"):
            lanczos(operator, bad)
    with pytest.raises(RangeError, match="which: got 'LR'"):
        lanczos(operator, which="LR")
    with pytest.raises(RangeError, match="matvecs: got 1"):
        lanczos(operator, matvecs=1)
    with pytest.raises(RangeError, match="matvecs: got 10, expected at least 16"):
        lanczos(operator, 12, matvecs=10)
    with pytest.raises(RangeError, match="tolerance: got both"):
        lanczos(operator, matvecs=10, tolerance=0.1)
    with pytest.raises(RangeError, match="tolerance"):
        lanczos(operator, tolerance=0.0)
    with pytest.raises(RangeError, match="block"):
        lanczos(operator, block=0)
    with pytest.raises(ShapeError, match="operator: an eigenvalue needs a symmetric operator"):
        lanczos(Dense(normal(0)(9, 9), False))
    with pytest.raises(ShapeError, match="operator"):
        lanczos(Dense(normal(0)(9, 8), False))
    with pytest.raises(NonFiniteError, match="operator"):
        lanczos(Dense(torch.full((70, 70), math.inf).double()))


class TestVectorsInAFile:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_the_same_to_the_bit(self, tmp_path, dtype):
        matrix = Dense(rotated(decaying(150)).to(dtype))
        expected = lanczos(matrix, 3, vectors=True)
        with settings(scratch=tmp_path):
            found = lanczos(matrix, 3, vectors=True)
        assert torch.equal(found.value, expected.value) and torch.equal(found.stderr, expected.stderr)
        assert torch.equal(found.vectors, expected.vectors)
        assert not list(tmp_path.iterdir())

    def test_the_memory_limit_does_not_count_them(self, tmp_path):
        matrix = Dense(rotated(decaying(1000)))
        limit = 8 * 1000 * 20  # a basis of this length would have to be restarted all the time
        with settings(memory_limit=limit, scratch=tmp_path):
            found = lanczos(matrix, 1, matvecs=100)
        assert torch.equal(found.value, lanczos(matrix, 1, matvecs=100).value)

    @pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the disk is not asked here")
    def test_a_full_disk_is_an_error(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with settings(scratch=tmp_path), pytest.raises(RangeError, match=r"scratch: .* has no room for .* \(No space"):
            lanczos(Dense(rotated(decaying(50))), 1)
        assert not list(tmp_path.iterdir())
