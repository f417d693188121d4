"""Attention written down once more, plainly, and its Hessian by nested automatic differentiation in float64.

Nothing here calls the package: it is what the closed forms are compared with. `jacfwd(grad)` is used throughout,
because other nestings are silently wrong through some native functions.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev

Parameters = dict[str, Tensor]


@dataclass
class Dense:
    """The Hessian over all parameters, in the order of the dict, and its two parts."""

    total: Tensor
    outer: Tensor
    functional: Tensor


def dense_hessian(function, parameters: Parameters, loss) -> Dense:
    """H, J^T S J, and the Hessian of <G, F> at fixed G."""
    names = list(parameters)
    F = function(parameters)
    n = F.numel()

    def matrix(blocks):
        return torch.cat(
            [
                torch.cat([blocks[a][b].reshape(parameters[a].numel(), parameters[b].numel()) for b in names], 1)
                for a in names
            ]
        )

    jacobian = jacrev(function)(parameters)
    J = torch.cat([jacobian[name].reshape(n, -1) for name in names], 1)
    S = jacfwd(grad(loss))(F).reshape(n, n)
    G = grad(loss)(F).detach()
    return Dense(
        matrix(jacfwd(grad(lambda p: loss(function(p))))(parameters)),
        J.T @ S @ J,
        matrix(jacfwd(grad(lambda p: (G * function(p)).sum()))(parameters)),
    )


def attention(
    parameters: Parameters,
    X: Tensor,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    scale: float,
    visible: Tensor,
    logit_bias: Tensor | float = 0.0,
    activation: str = "softmax",
    combine: str = "concat",
    rotary: float | None = None,
) -> Tensor:
    """F (N, L, m), head by head. "X" among the parameters replaces the input; biases have one row."""
    p = parameters
    N, L, d = X.shape
    x = p["X"].reshape(N, L, d) if "X" in p else X
    q, k, v = (x @ p[name] + p.get(f"b_{name}", 0.0) for name in "QKV")
    d_k, d_v = q.shape[-1] // heads, v.shape[-1] // kv_heads
    outputs = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        query, key = q[..., h * d_k : (h + 1) * d_k], k[..., g * d_k : (g + 1) * d_k]
        if rotary is not None:
            R = rotations(L, d_k, rotary)
            query, key = torch.einsum("lpq,nlq->nlp", R, query), torch.einsum("lpq,nlq->nlp", R, key)
        scores = scale * query @ key.mT + logit_bias
        if activation == "softmax":
            A = scores.masked_fill(~visible, -math.inf).softmax(-1)
        else:
            A = scores.masked_fill(~visible, 0.0)
        outputs.append(A @ v[..., g * d_v : (g + 1) * d_v])
    F = sum(outputs) if combine == "sum" else torch.cat(outputs, -1)
    if "O" in p:
        F = F @ p["O"]
    return F + p.get("b_O", 0.0)


def rotations(length: int, width: int, base: float) -> Tensor:
    """The rotation matrices R_i (L, k, k): features p and p + k/2 turn together."""
    half = width // 2
    angles = torch.arange(length, dtype=torch.float64)[:, None] * base ** (
        -2 * torch.arange(half, dtype=torch.float64) / width
    )
    R = torch.zeros(length, width, width, dtype=torch.float64)
    i = torch.arange(half)
    R[:, i, i] = R[:, i + half, i + half] = angles.cos()
    R[:, i, i + half] = -angles.sin()
    R[:, i + half, i] = angles.sin()
    return R


def relative(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Largest deviation over the largest entry (of `scale`, when given). NaN counts as infinite."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    size = (expected if scale is None else scale).abs().max().clamp_min(1e-300)
    error = float(((found - expected).abs().max() / size).detach())
    return math.inf if math.isnan(error) else error


def normal(seed: int, dtype: torch.dtype = torch.float64):
    """A function of sizes that draws normal tensors from its own generator."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=dtype)
