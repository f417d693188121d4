"""The norm bounds of the block paper: Theorem 1 as printed and corrected, and what Theorem 6 is made of.

One attention layer F = softmax(X W_Q W_Kᵀ Xᵀ/√k) X W_V under the square loss ‖F − Y‖²/(L d); X, Y (L, d), W_Q and W_K
(d, k), W_V (d, d). Norms are spectral unless they are marked.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.attention import softmax_entry_hessian

BoundValues = dict[tuple[str, str], float]

SOFTMAX_SLOPE = 1 / 2
"""sup ‖∂A/∂T‖: two equal keys. The paper has 1/L."""
SOFTMAX_BEND = math.sqrt(6) / 9
"""sup ‖⟨g, ∂²a/∂t²⟩‖ over unit g for one row a: two keys with probabilities (3 ± √3)/6."""


def norm(matrix: Tensor) -> float:
    """The spectral norm."""
    return float(torch.linalg.matrix_norm(matrix, 2))


def theorem_1_as_printed(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, Y: Tensor) -> tuple[float, list[float]]:
    """M = 3 max of four terms (VV, QQ, VQ, QK) of the main text, and the terms. KK and VK are not among them."""
    (L, d), k = X.shape, W_Q.shape[1]
    x, q, key, v = norm(X), norm(W_Q), norm(W_K), norm(W_V)
    residual, root = L * x * v + norm(Y), math.sqrt(min(L, d))
    terms = [
        2 * L / d * x**2,
        8 / (L**3 * d * k) * key**2 * v**2 * x**6 + 12 / (d * k) * root * residual * v * key**2 * x**5,
        4 / (L * d * math.sqrt(k)) * v * key * x**4 + 4 * root / (L**2 * math.sqrt(k)) * residual * key * x**3,
        8 / (L**3 * d * k) * key * q * v**2 * x**6
        + 4 * root * residual / (L * d * math.sqrt(k)) * v * (3 * L * key * q * x**5 + d / L * x**3),
    ]
    return 3 * max(terms), terms


def theorem_1_corrected(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, Y: Tensor) -> BoundValues:
    """Bounds on all six blocks, with ½ for ‖∂A/∂T‖, √L for ‖A‖ and √6/9 for the contracted ‖∂²A/∂T²‖."""
    (L, d), k = X.shape, W_Q.shape[1]
    x, q, key, v = norm(X), norm(W_Q), norm(W_K), norm(W_V)
    c, s, m = 2 / (L * d), 1 / math.sqrt(k), math.sqrt(L) * x
    residual = m * v * math.sqrt(min(L, d)) + float(Y.norm())
    Z1, Z2 = SOFTMAX_SLOPE * x**3, SOFTMAX_BEND * x**5
    middle = Z1**2 * v**2 + residual * v * Z2
    return {
        ("V", "V"): c * m**2,
        ("Q", "Q"): c * s**2 * key**2 * middle,
        ("K", "K"): c * s**2 * q**2 * middle,
        ("V", "Q"): c * s * key * Z1 * (m * v + residual),
        ("V", "K"): c * s * q * Z1 * (m * v + residual),
        ("Q", "K"): c * s**2 * key * q * middle + c * s * residual * v * Z1,
    }


def combined(blocks: BoundValues, names: tuple[str, ...]) -> float:
    """The spectral norm of the matrix of block bounds, at most (number of names) · max."""
    rows = [[blocks.get((i, j), blocks.get((j, i), 0.0)) for j in names] for i in names]
    return norm(torch.tensor(rows, dtype=torch.float64))


def two_dominating_keys(L: int, target: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X, W_Q, W_K, W_V, Y: all queries but two split their attention evenly between the first two of L keys."""
    X = torch.zeros(L, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    X[2:, 1] = -1 / math.sqrt(L)
    W_Q = torch.zeros(2, 2, dtype=torch.float64)
    W_Q[1, 1] = -12 * math.sqrt(L)
    Y = torch.zeros(L, 2, dtype=torch.float64)
    Y[:, 0] = target
    return X, W_Q, torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64), Y


def stacked_bend(row: Float[Tensor, "L"]) -> tuple[float, float]:
    """‖∂²a/∂t²‖ for one row with the second derivatives of its entries stacked, and the largest of their norms."""
    blocks = [softmax_entry_hessian(row, j) for j in range(len(row))]
    return norm(torch.cat(blocks)), max(norm(block) for block in blocks)
