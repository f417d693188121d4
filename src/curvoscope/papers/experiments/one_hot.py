"""What one-hot attention does to the query block: rows, the bound through their moments, and sharpened softmaxes.

The theory: every term of a Hessian block that touches W_Q or W_K has a second or third central moment of an attention
row as a factor, M2_i or M3_i, and both vanish where the row is one-hot. The value block has the row's mean instead.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvoscope import losses
from curvoscope.analysis.propagation import AttentionSummary
from curvoscope.exact.attention.moments import Moments
from curvoscope.papers.experiments.setting import ANSWERS
from curvoscope.papers.networks import GPT2, GPT2Block


def row_moments(model: GPT2, inputs: Tensor) -> Moments:
    """Of the rows that have a loss: attention (N, 6, L) of the last block, inputs (N, L, d)."""
    X = model.attention_input(inputs)
    return Moments(X, model.attention().moments(X).attention[:, ANSWERS])


def row_numbers(moments: Moments) -> dict[str, float]:
    """Means over the rows: the entropy in nats; tr M2 and |M3|_F over the mean |x|², to the power 3/2 for M3."""
    summary, square = AttentionSummary.of(moments), float(moments.X.square().sum(-1).mean())
    assert summary.entropy is not None
    third = float(torch.linalg.vector_norm(moments.M3, dim=(-2, -1)).mean())
    return {"entropy": summary.entropy, "M2": summary.variance, "M3": third / square**1.5}


def query_bound(model: GPT2, inputs: Tensor, targets: Tensor, moments: Moments) -> float:
    """A bound on the Frobenius norm of the whole query block, H(Q,Q) = s² Σ_i x_i x_i^T ⊗ (Γ_i^T S_i Γ_i + N_i):

        s² |W_K|² Σ_i |x_i|² (|W_V W_O|² |S_i|_F |M2_i|² + |M3_i| |W_V W_O G_i|)

    with spectral norms if nothing is said, M3_i as (d², d), and G and S the derivatives of the loss at the layer's
    output. It is the triangle inequality, Γ_i = (W_V W_O)^T M2_i W_K and N_i = W_K^T (M3_i contracted with W_V W_O G_i)
    W_K: zero for one-hot rows, of second order in M2 and of first in M3.
    """
    layer, X = model.attention(), moments.X
    assert layer.W_V is not None and layer.W_O is not None
    F = layer(X)
    found = losses.at(model.tail(inputs, targets), F, False)
    assert isinstance(found.curvature, losses.PerToken)
    S = found.curvature.between(None, None, 0, F[..., 0].numel()).view(*F.shape, -1)[:, ANSWERS]
    out = layer.W_V @ layer.W_O
    second = torch.linalg.matrix_norm(S) * torch.linalg.matrix_norm(moments.M2, 2).square()
    third = torch.linalg.matrix_norm(moments.M3, 2) * (found.gradient[:, ANSWERS] @ out.T).norm(dim=-1)
    rows = X[:, ANSWERS].square().sum(-1) * (_spectral(out) ** 2 * second + third)
    return _spectral(layer.W_K) ** 2 / layer.W_K.shape[1] * float(rows.sum())


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def smallest_gap(model: GPT2, inputs: Tensor) -> float:
    """The smallest difference between the best and the second score of a row that has a loss: δ.

    With the scores times β a row is e^(-βδ_i) away from one-hot; as β grows the row of the smallest δ_i is the last.
    """
    layer, X = model.attention(), model.attention_input(inputs)
    assert layer.b_Q is not None and layer.b_K is not None
    query, key = X @ layer.W_Q + layer.b_Q, X @ layer.W_K + layer.b_K
    visible = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool).tril()
    scores = (query @ key.mT / math.sqrt(key.shape[-1])).masked_fill(~visible, -math.inf)[:, ANSWERS]
    best = scores.topk(2, -1).values
    return float((best[..., 0] - best[..., 1]).min())


@contextlib.contextmanager
def sharpened(model: GPT2, factor: float) -> Iterator[None]:
    """W_Q and b_Q, and with them all scores, times `factor`."""
    block = model.blocks[-1]
    assert isinstance(block, GPT2Block)
    kept = [parameter.detach().clone() for parameter in (block.W_Q, block.b_Q)]
    with torch.no_grad():
        for parameter, value in zip((block.W_Q, block.b_Q), kept, strict=True):
            parameter.copy_(factor * value)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip((block.W_Q, block.b_Q), kept, strict=True):
                parameter.copy_(value)
