"""Cross-attention in closed form: queries from one sequence, keys and values from another, the memory.

It is self-attention on the two sequences one after the other, [X; M] (L + L', d), with a mask that lets a query of X
see the keys of M alone, for a loss that does not see the outputs at M: there G and S are zero, and so is what they add
to any block. So the closed forms of self-attention are those of cross-attention, for any weight and either part.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from curvoscope.losses import Curvature, LossAt, PairCurvature, TokenCurvature


def joined(X: Tensor, memory: Tensor) -> Tensor:
    """[X; M], (N, L + L', d)."""
    return torch.cat([X, memory.expand(len(X), -1, -1)], 1)


def cross_mask(X: Tensor, memory: Tensor, given: Tensor | None) -> Tensor:
    """What is added to the scores of [X; M]: queries see M, with what was `given` (N, heads, L, L') or True where they
    may look; a token of M sees itself, which nothing depends on."""
    L, M = X.shape[1], memory.shape[1]
    shape = (1, 1) if given is None else given.shape[:2]
    mask = X.new_full((*shape, L + M, L + M), -math.inf)
    mask[..., :L, L:] = 0
    if given is not None:
        seen = given if given.dtype != torch.bool else X.new_zeros(given.shape).masked_fill(~given, -math.inf)
        mask[..., :L, L:] = seen.expand(*shape, L, M)
    mask[..., L:, L:].diagonal(dim1=-2, dim2=-1).zero_()
    return mask


def mask_of(arguments: Mapping[str, Any], X: Tensor, memory: Tensor) -> Tensor | None:
    """The mask of a call, (N or 1, heads or 1, L or 1, L'), if it has one of that form."""
    fits = (given for name in ("attention_mask", "mask") if isinstance(given := arguments.get(name), Tensor))
    lengths = (1, X.shape[1]), (memory.shape[1],)
    return next((m for m in fits if m.ndim == 4 and m.shape[2] in lengths[0] and m.shape[3] in lengths[1]), None)


def with_memory(loss: LossAt, extra: int) -> LossAt:
    """The loss as one of the outputs at X and at M."""
    return LossAt(loss.value, pad(loss.gradient, (0, 0, 0, extra)), _padded(loss, extra))


def _padded(loss: LossAt, extra: int) -> Curvature:
    curvature, (L, m) = loss.curvature, loss.gradient.shape[1:]
    if isinstance(curvature, TokenCurvature):
        return TokenCurvature(pad(curvature.blocks, (0, 0, 0, 0, 0, extra)))
    if isinstance(curvature, PairCurvature):
        groups, size = curvature.blocks.shape[:2]
        whole = curvature.blocks.view(groups, size // L, L, m, size // L, L, m)
        whole = pad(whole, (0, 0, 0, extra, 0, 0, 0, 0, 0, extra))
        return PairCurvature(whole.flatten(1, 2).flatten(3, 4))
    return curvature  # none at all
