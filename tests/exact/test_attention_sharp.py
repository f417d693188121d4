"""Attention that puts almost all of its weight on one key: small blocks with all their digits.

The reference has 400 decimal digits: the Hessian by differences of the loss, written down plainly with mpmath.
"""

import itertools

import mpmath
import pytest
import torch

import curvoscope as cv
from reference import normal

SHARPNESS = [1.0, 8.0, 30.0, 200.0, 900.0]
"""Factors on the scores: the weight beside the largest goes down to 1e-300."""


class Case:
    """One sequence of three tokens, width two, one head, squared error."""

    def __init__(self, sharpness):
        draw = normal(3)
        self.X, self.Y = draw(3, 2), draw(3, 2)
        self.weights = {"Q": sharpness * draw(2, 2), "K": draw(2, 2), "V": draw(2, 2)}
        self.layer = cv.exact.SelfAttention(*self.weights.values())
        self.H = self.layer.hessian(self.X, cv.losses.MSE(self.Y))
        flat = torch.cat([w.flatten() for w in self.weights.values()])
        self.point = [mpmath.mpf(float(x)) for x in flat]

    def loss(self, point):
        X, Y = (self._matrix(t.flatten().tolist(), 3) for t in (self.X, self.Y))
        W_Q, W_K, W_V = (self._matrix(point[4 * i : 4 * i + 4], 2) for i in range(3))
        scores = (X * W_Q) * (X * W_K).T / mpmath.sqrt(2)
        total = mpmath.mpf(0)
        for i in range(3):
            weights = [mpmath.exp(scores[i, j] - max(scores[i, k] for k in range(3))) for j in range(3)]
            for c in range(2):
                value = sum(weights[j] * (X * W_V)[j, c] for j in range(3)) / sum(weights)
                total += (value - Y[i, c]) ** 2 / 6
        return total

    def block(self, rows, columns):
        """Second differences of the loss between two of the weights, (4, 4)."""
        step = mpmath.mpf(10) ** -120
        found = torch.zeros(4, 4, dtype=torch.float64)
        for i, j in itertools.product(range(4), range(4)):
            total = mpmath.mpf(0)
            for a, b in itertools.product((1, -1), (1, -1)):
                moved = list(self.point)
                moved[4 * rows + i] += a * step
                moved[4 * columns + j] += b * step
                total += a * b * self.loss(moved)
            found[i, j] = float(total / (4 * step**2))
        return found

    @staticmethod
    def _matrix(numbers, rows):
        columns = len(numbers) // rows
        return mpmath.matrix(rows, columns) + mpmath.matrix(
            [[numbers[columns * i + j] for j in range(columns)] for i in range(rows)]
        )


@pytest.fixture(scope="module", params=SHARPNESS)
def case(request):
    with mpmath.workdps(400):
        yield Case(request.param)


@pytest.mark.parametrize("pair", ["QQ", "QK", "QV", "KK", "KV", "VV"])
def test_blocks_to_relative_precision(case, pair):
    with mpmath.workdps(400):
        truth = case.block("QKV".index(pair[0]), "QKV".index(pair[1]))
    scale = float(truth.abs().max())
    assert scale > 0
    block = case.H[pair[0], pair[1]]
    assert float((block.dense() - truth).abs().max()) < 1e-11 * scale
    products = torch.stack([block @ e for e in torch.eye(4, dtype=torch.float64)], 1)
    assert float((products - truth).abs().max()) < 1e-11 * scale
    assert abs(float(block.frobenius_norm()) - float(truth.norm())) < 1e-11 * float(truth.norm())
    if pair[0] == pair[1]:
        assert abs(float(block.trace()) - float(truth.trace())) < 1e-10 * max(abs(float(truth.trace())), scale)
        assert float((block.diagonal() - truth.diagonal()).abs().max()) < 1e-11 * scale
