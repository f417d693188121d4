"""Cross-entropy at the logits: gradient and Hessian in closed form, a few tokens at a time.

For token t with target y_t and probabilities p_t = softmax(f_t), with weights w_t (1/n for the n tokens that count,
0 for the others):

    G_t = w_t (p_t - e_y)            S_t u = w_t (p_t . u - p_t <p_t, u>)

Nothing of the size of the logits is kept but G: p_t is read off it. With u' = u - u_y, which S_t does not see,
the target's own entry of p_t . u' is 0, so S_t u' is made of the entries of G_t at the other words, and keeps its
digits where p_t is nearly one-hot.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

_CHUNK = 2**18  # numbers a chunk: stays in the cache, and a large vocabulary adds no memory to speak of


class CrossEntropyGradient(torch.autograd.Function):
    """G (T, V) of logits (T, V); its backward pass is the product with S."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Logits (T, V), targets (T,) inside the vocabulary, weights (T,) -> G (T, V)."""
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = torch.softmax(logits[rows], -1)
            index = targets[rows, None]
            part.scatter_(-1, index, 0.0)  # p - e_y, without 1 - p at the target
            part.scatter_(-1, index, -part.sum(-1, keepdim=True))
            torch.mul(part, weights[rows, None], out=gradient[rows])
        ctx.save_for_backward(gradient, targets, weights)
        return gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor, None, None]:
        """S u for u (T, V)."""
        gradient, targets, weights = ctx.saved_tensors
        if torch._C._functorch.is_legacy_batchedtensor(direction):  # several vectors at once: nothing in place
            product = (direction - direction.gather(-1, targets[:, None])) * gradient
            mean = product.sum(-1, keepdim=True) / _positive(weights)
            product = torch.addcmul(product, gradient, mean, value=-1)
            return product.scatter_add(-1, targets[:, None], -mean * weights[:, None]), None, None
        result = torch.empty_like(gradient)
        for rows in _chunks(gradient):
            part, index = result[rows], targets[rows, None]
            torch.sub(direction[rows], direction[rows].gather(-1, index), out=part).mul_(gradient[rows])  # w p . u'
            mean = part.sum(-1, keepdim=True) / _positive(weights[rows])
            part.addcmul_(gradient[rows], mean, value=-1)
            part.scatter_add_(-1, index, -mean * weights[rows, None])  # G_y = w (p_y - 1)
        return result, None, None


def _positive(weights: Tensor) -> Tensor:
    """Divisors (T, 1): those of ignored tokens, which stand under zeros, are not zero."""
    return weights.where(weights > 0, 1.0)[:, None]


def mean_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """sum_t w_t (logsumexp f_t - f_t[y_t]), without a copy of the logits."""
    total = logits.new_zeros(())
    for rows in _chunks(logits):
        losses = cross_entropy(logits[rows], targets[rows], reduction="none")
        total = total + torch.where(weights[rows] > 0, losses * weights[rows], 0.0).sum()
    return total


def _chunks(logits: Tensor) -> Iterator[slice]:
    tokens, vocabulary = logits.shape
    step = max(1, _CHUNK // vocabulary)
    yield from (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))
