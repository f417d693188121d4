"""Attention with 400 decimal digits: its Hessian by differences of the loss, written down plainly with mpmath."""

import itertools

import mpmath
import torch

import curvoscope as cv
from reference import normal


class Case:
    """One sequence of three tokens, width two, one head, squared error; every tensor with a scale of its own."""

    def __init__(self, Q=1.0, K=1.0, V=1.0, X=1.0, Y=1.0):
        draw = normal(3)
        self.X, self.Y = X * draw(3, 2), Y * draw(3, 2)
        self.weights = {"Q": Q * draw(2, 2), "K": K * draw(2, 2), "V": V * draw(2, 2)}
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
        steps = [mpmath.mpf(10) ** -120 * mpmath.mpf(float(w.abs().max())) for w in self.weights.values()]
        found = torch.zeros(4, 4, dtype=torch.float64)
        for i, j in itertools.product(range(4), range(4)):
            total = mpmath.mpf(0)
            for a, b in itertools.product((1, -1), (1, -1)):
                moved = list(self.point)
                moved[4 * rows + i] += a * steps[rows]
                moved[4 * columns + j] += b * steps[columns]
                total += a * b * self.loss(moved)
            found[i, j] = float(total / (4 * steps[rows] * steps[columns]))
        return found

    @staticmethod
    def _matrix(numbers, rows):
        columns = len(numbers) // rows
        return mpmath.matrix([[numbers[columns * i + j] for j in range(columns)] for i in range(rows)])
