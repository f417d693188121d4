"""Matrices of known spectrum, in a random orthogonal basis, that show an estimator no more than it may see."""

import torch
from torch import Tensor

import curvoscope as cv
from reference import normal


def within(memory_limit, question, *arguments, **options):
    """What a call answers under a memory limit."""
    with cv.settings(memory_limit=memory_limit):
        return question(*arguments, **options)


class Dense:
    """A matrix with shape, dtype, device and @, which counts its products."""

    def __init__(self, matrix: Tensor, symmetric: bool = True) -> None:
        self._matrix = matrix
        self.shape = tuple(matrix.shape)
        self.dtype, self.device = matrix.dtype, matrix.device
        self.symmetric = symmetric
        self.products = 0

    def __matmul__(self, other: Tensor) -> Tensor:
        assert other.dtype == self.dtype
        self.products += other.shape[1]
        return self._matrix @ other


def rotated(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    Q = torch.linalg.qr(normal(seed)(len(eigenvalues), len(eigenvalues))).Q
    matrix = (Q * eigenvalues) @ Q.T
    return (matrix + matrix.T) / 2


def flat(n: int) -> Tensor:
    """Between 1/2 and 3/2."""
    return torch.linspace(0.5, 1.5, n, dtype=torch.float64)


def decaying(n: int, power: float = 1.0) -> Tensor:
    """1, 1/2, 1/3, ..., to a power."""
    return torch.arange(1, n + 1, dtype=torch.float64) ** -power


def outliers(n: int) -> Tensor:
    """Both signs, and four far from the rest."""
    return torch.cat([torch.linspace(-1, 1, n - 4, dtype=torch.float64), torch.tensor([-8.0, 6.0, 10.0, 20.0])])


SPECTRA = {"flat": flat, "decaying": decaying, "indefinite with outliers": outliers}
