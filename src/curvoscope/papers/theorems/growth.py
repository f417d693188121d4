"""How fast the blocks grow: equation (5), the weight table of the slides, the temperature of Section 4.3.

With the attention matrix A and the loss gradient G held fixed every block is a monomial in the scales of X, of
the weights and of the logit factor s = 1/(t √k). `DEGREES` holds the exponents. The real softmax moves A with
them, so that the exponents are slopes in the limit of small inputs only.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GrowthKey = tuple[str, str, str]
"""A part of the Hessian ("outer", "functional", "logit") and a pair of blocks."""


class Degrees(NamedTuple):
    """Exponents of the input X, of W_Q, W_K, W_V and of the logit factor s."""

    X: int
    Q: int
    K: int
    V: int
    s: int


DEGREES: Mapping[GrowthKey, Degrees] = {
    ("outer", "Q", "Q"): Degrees(X=6, Q=0, K=2, V=2, s=2),
    ("outer", "K", "K"): Degrees(X=6, Q=2, K=0, V=2, s=2),
    ("outer", "Q", "K"): Degrees(X=6, Q=1, K=1, V=2, s=2),
    ("outer", "V", "Q"): Degrees(X=4, Q=0, K=1, V=1, s=1),
    ("outer", "V", "K"): Degrees(X=4, Q=1, K=0, V=1, s=1),
    ("outer", "V", "V"): Degrees(X=2, Q=0, K=0, V=0, s=0),
    ("functional", "Q", "Q"): Degrees(X=5, Q=0, K=2, V=1, s=2),
    ("functional", "K", "K"): Degrees(X=5, Q=2, K=0, V=1, s=2),
    ("functional", "Q", "K"): Degrees(X=5, Q=1, K=1, V=1, s=2),
    ("logit", "Q", "K"): Degrees(X=3, Q=0, K=0, V=1, s=1),
    ("functional", "V", "Q"): Degrees(X=3, Q=0, K=1, V=0, s=1),
    ("functional", "V", "K"): Degrees(X=3, Q=1, K=0, V=0, s=1),
}
"""Equation (5) and the weight table. "logit" is the T-functional part, the second summand of H_f(Q, K);
"functional", "Q", "K" is the first summand alone. H_f(V, V) is zero, and has no degree."""


class Scales(NamedTuple):
    """Factors on X, W_Q, W_K, W_V. A stays fixed when s is divided by X² Q K."""

    X: float = 1.0
    Q: float = 1.0
    K: float = 1.0
    V: float = 1.0

    @property
    def s(self) -> float:
        """The factor on s that keeps A fixed."""
        return 1 / (self.X**2 * self.Q * self.K)

    def growth(self, degrees: Degrees) -> float:
        """What multiplies a block of these degrees."""
        factors = (self.X, self.Q, self.K, self.V, self.s)
        return math.prod(factor**degree for factor, degree in zip(factors, degrees, strict=True))


def slope(scales: Sequence[float], sizes: Sequence[float]) -> float:
    """The exponent p of the least-squares fit log size = p log scale + constant."""
    x = torch.tensor(scales, dtype=torch.float64).log()
    y = torch.tensor(sizes, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def norm(block: Tensor) -> float:
    """The Frobenius norm."""
    return float(torch.linalg.norm(block))
