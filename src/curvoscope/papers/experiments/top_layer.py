"""The query and value blocks of the last attention layer: exact norms of the outer and the functional part.

Behind the last attention layer each token goes its own way to its logits, and only T = 6 N tokens have a loss. With
D_t the Jacobian (d, v) of token t's logits in its attention output F_t, R_t R_t^T the loss Hessian at the logits and
C_t the curvature of <G, logits> in F_t (zero without a norm: the rest is piecewise linear),

    outer       sum_t z_t z_t^T (x) M_t^T (D_t R_t)(D_t R_t)^T M_t
    functional  sum_t z_t z_t^T (x) (M_t^T C_t M_t + N_t)

with z = x/√d, M = Cov[V W_O, K] and N the third attention moment for the query, z = attention mean of x, M = W_O^T and
N = 0 for the value. Query cores are K^T E_t K with a matrix E_t over the L tokens of the sequence. Of a sum of
Kronecker products |H|² = sum_tu (z_t . z_u)² <core_t, core_u>; equal vectors z are merged first.

It is kept for its speed: a point of Figure 3a takes 0.35 s of processor time here, 10 s by `SelfAttention.hessian`,
17 s by `Stack.hessian` and 21 s by `cv.hessian`; one of Figure 3b takes 2.4 s here and 25 s by `Stack.hessian`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from curvoscope.papers.experiments.setting import ANSWERS, LogitLoss, logit_loss
from curvoscope.papers.networks import GPT2, GPT2Block, exact_norm

NormsByPart = dict[tuple[str, str], float]
"""By block, "Q" or "V", and part, "outer", "functional" or "total"."""


def top_layer_norms(model: GPT2, tokens: Tensor, kind: str) -> NormsByPart:
    """Frobenius norms of W_Q's and W_V's diagonal blocks in the last layer; `kind` is the loss."""
    with torch.no_grad():
        block = model.blocks[-1]
        assert isinstance(block, GPT2Block)
        stream = model.residual_stream(tokens)
        X = block.norm1(stream)
        value, key = (X @ block.W_V + block.b_V) @ block.W_O, X @ block.W_K + block.b_K
        A, moved = _attention(block, X, key)
        F = A @ value + block.b_O
        y = stream[:, ANSWERS] + F if block.residual else F
        factors, gradient, curvature = _behind(model, block, y, tokens, kind)

        # E_t over the keys: D_t (V W_O) (D R)(D R)^T (V W_O)^T D_t, and likewise with C_t; D_t = dA_t/dT_t
        along = moved((value[:, None] @ factors).mT).mT  # (N, 6, L, v)
        outer = along @ along.mT
        functional: Tensor | None = None
        if curvature is not None:
            functional = moved(moved(value[:, None] @ curvature @ value[:, None].mT).mT)
        if block.activation == "softmax":
            p = moved((value[:, None] @ gradient[..., None]).mT)[..., 0, :]
            cross = p[..., :, None] * A[..., None, :]
            third = torch.diag_embed(p) - cross - cross.mT
            functional = third if functional is None else functional + third

        def core(E: Tensor) -> Tensor:
            return (key.mT[:, None] @ E @ key[:, None]).flatten(0, 1)

        scaled = X[:, ANSWERS].flatten(0, 1) / math.sqrt(key.shape[-1])
        norms = _norms("Q", scaled, core(outer), None if functional is None else core(functional))

        pulled = (block.W_O @ factors).flatten(0, 1)
        rest = None if curvature is None else (block.W_O @ curvature @ block.W_O.mT).flatten(0, 1)
        return norms | _norms("V", (A @ X).flatten(0, 1), pulled @ pulled.mT, rest)


def _attention(block: GPT2Block, X: Tensor, key: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The attention rows A (N, 6, L) of the answer positions, and u -> D_t u for rows u (N, 6, n, L)."""
    length = X.shape[1]
    scores = (X[:, ANSWERS] @ block.W_Q + block.b_Q) @ key.mT / math.sqrt(key.shape[-1])
    visible = torch.ones(length, length, dtype=torch.bool).tril()[ANSWERS]
    if block.activation == "linear":
        return scores.masked_fill(~visible, 0.0), lambda u: u * visible[:, None, :]
    A = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return A, lambda u: A[..., None, :] * (u - (u @ A[..., None]))


def _behind(
    model: GPT2, block: GPT2Block, y: Tensor, tokens: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """D R (N, 6, d, v), the gradient G_F = D G (N, 6, d), and C (N, 6, d, d), from the stream y behind attention."""
    hidden = block.norm2(y) @ block.W_up + block.b_up
    x = y + hidden.relu() @ block.W_down + block.b_down
    loss: LogitLoss = logit_loss(kind, model.norm(x) @ model.W_U + model.b_U, tokens)
    is_on = (hidden > 0).to(y.dtype)

    # D R and D G together, as rows pulled back one layer after the other
    rows = torch.cat([loss.root.mT, loss.gradient[..., None, :]], -2) @ model.W_U.mT  # (N, 6, v + 1, d)
    at_final = rows[..., -1, :]
    final, second = _jacobian(model.norm, x), _jacobian(block.norm2, y)
    rows = rows if final is None else rows @ final
    branch = ((rows @ block.W_down.mT) * is_on[..., None, :]) @ block.W_up.mT
    at_second = branch[..., -1, :]
    rows = rows + (branch if second is None else branch @ second)
    factors, gradient = rows[..., :-1, :].mT, rows[..., -1, :]
    if second is None:
        return factors, gradient, None

    inner = (block.W_up * is_on[..., None, :]) @ block.W_down  # (N, 6, d, d): the branch's Jacobian, transposed
    slope = torch.eye(y.shape[-1], dtype=y.dtype) + second.mT @ inner
    curvature = slope @ _second(model.norm, x, at_final) @ slope.mT + _second(block.norm2, y, at_second)
    return factors, gradient, curvature


def _jacobian(norm: nn.Module, x: Tensor) -> Tensor | None:
    """dy/dx of every token, (N, 6, d, d); None if there is no norm."""
    found = exact_norm(norm)
    return None if found is None else found.input_jacobian(x).view(*x.shape, -1)


def _second(norm: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    """The norm's second derivative contracted with a gradient at its output, (N, 6, d, d)."""
    found = exact_norm(norm)
    assert found is not None
    return found.second_derivative(x, gradient).view(*x.shape, -1)


def _norms(block: str, vectors: Tensor, outer: Tensor, functional: Tensor | None) -> NormsByPart:
    """Norms of the parts of sum_t z_t z_t^T (x) (O_t + Φ_t), for z (T, a) and cores (T, p, q); no Φ: zero."""
    if functional is None:
        norm = kronecker_norm(*merged(vectors, outer))
        return {(block, "outer"): norm, (block, "functional"): 0.0, (block, "total"): norm}
    parts = {"outer": outer, "functional": functional, "total": outer + functional}
    return {(block, part): kronecker_norm(*merged(vectors, cores)) for part, cores in parts.items()}


def merged(vectors: Tensor, cores: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t z_t z_t^T (x) C_t with equal vectors z (T, a) made one: the distinct ones and the sums of their cores."""
    distinct, member = vectors.unique(dim=0, return_inverse=True)
    if len(distinct) == len(vectors):
        return vectors, cores
    return distinct, cores.new_zeros(len(distinct), *cores.shape[1:]).index_add_(0, member, cores)


def kronecker_norm(vectors: Tensor, cores: Tensor) -> float:
    """|sum_t z_t z_t^T (x) C_t|, from sum_tu (z_t . z_u)² <C_t, C_u>."""
    flat = cores.flatten(1)
    return float(((vectors @ vectors.T).square_() * (flat @ flat.T)).sum()) ** 0.5
