"""Entries of a head's Hessian from the scores' matrix M = W_Q W_K^T, for many tokens.

The scores T = s X M X^T move with dM = dW_Q W_K^T + W_Q dW_K^T, so (Remark D.1) the query-key part is V^T U V plus the
bilinear term, with U the Hessian in M and V = [I (x) W_K, (W_Q (x) I) K]; values and outputs likewise. The sum over
tokens is then taken for the blocks of M alone, and those of W_Q and W_K follow by small products that no longer know
of tokens.
"""

import torch
from torch import Tensor

from curvoscope.exact.attention.blocks import AttentionBlocks, HeadWeight, TermsOf
from curvoscope.exact.attention.layer import AttentionLayer, Pass
from curvoscope.exact.factor import TermList
from curvoscope.operators.block_matrix import Entries, Slot
from curvoscope.operators.kronecker import KroneckerSum

_GAIN = 0.7  # of the multiplications block by block: small products take longer for each


def joint_weights(layer: AttentionLayer, passed: Pass) -> set[str]:
    """Those of Q, V and O whose blocks with Q and K cost fewer multiplications through M than block by block."""
    biased = layer.b_Q is not None or layer.b_K is not None  # scores are then no function of M alone
    if layer.heads > 1 or layer.merged or biased or not layer.is_bilinear:
        return set()
    d, k, tokens = layer.d, layer.d_k, passed.X.shape[0] * passed.X.shape[1]
    costs = {"Q": (1.5 * tokens * d * d * k * k, 0.25 * tokens * d**4 + 6 * d**4 * k)}
    for name, (b, q) in layer.shapes(biases=False).items():
        if name in "VO":
            costs[name] = 3.5 * tokens * d * k * b * q, (1.5 * tokens + 2 * k) * d * d * b * q
    return {name for name, (block_by_block, jointly) in costs.items() if jointly < _GAIN * block_by_block}


class JointEntries:
    """The entries of the blocks of Q and K with `weights`, some of Q (which stands for K too), V and O, of one head."""

    def __init__(
        self,
        layer: AttentionLayer,
        blocks: AttentionBlocks,
        parts: dict[str, HeadWeight],
        weights: set[str],
        like: Tensor,
    ) -> None:
        self._layer, self._blocks, self._parts, self._weights, self._like = layer, blocks, parts, weights, like
        self._scores = HeadWeight((layer.d, layer.d), Slot(0, 0, layer.d), "M", False, (0,))

    def of(self, outer: bool, functional: bool) -> Entries:
        """Blocks (a, p, b, q) above the diagonal, and of Q and K those on it, of the parts asked for."""
        W_Q, W_K = self._layer.W_Q, self._layer.W_K
        d, k = W_Q.shape
        chosen = [self._blocks.outer] * outer + [self._blocks.functional] * functional

        def terms(left: HeadWeight, right: HeadWeight) -> TermList:
            return [term for part in chosen for term in part(left, right)]

        entries: Entries = {}
        if "Q" in self._weights:
            U = self._dense(self._scores, self._scores, terms)  # (a, b, a', b')
            from_queries = W_K.T @ U.view(d, d, d * d)  # dM along W_Q on the left: (a, p, a' b')
            QQ = (from_queries.reshape(d * k * d, d) @ W_K).view(d, k, d, k)
            QK = (from_queries.view(d * k, d, d).mT @ W_Q).view(d, k, d, k)
            KK = W_Q.T @ (U.view(d * d, d, d).mT @ W_Q).view(d, d * d * k)
            KK = KK.view(k, d, d, k).transpose(0, 1)
            entries |= {("Q", "Q"): _symmetrised(QQ), ("Q", "K"): QK, ("K", "K"): _symmetrised(KK)}
            if functional:
                for term in self._blocks.t_functional(self._parts["Q"], self._parts["K"]):
                    term.write(QK, add=True)
        for name in self._weights - {"Q"}:
            b, q = self._parts[name].shape
            along = self._dense(self._scores, self._parts[name], terms)  # (a, b, b', q)
            entries["Q", name] = (W_K.T @ along.view(d, d, b * q)).view(d, k, b, q)
            entries["K", name] = (W_Q.T @ along.view(d, d * b * q)).view(k, d, b, q).transpose(0, 1)
        return entries

    def _dense(self, left: HeadWeight, right: HeadWeight, terms: TermsOf) -> Tensor:
        operator = KroneckerSum(left.shape, right.shape, terms(left, right), self._like, left is right)
        values = torch.empty(*left.shape, *right.shape, dtype=self._like.dtype, device=self._like.device)
        operator._write(values)
        return values


def _symmetrised(block: Tensor) -> Tensor:
    return (block + block.permute(2, 3, 0, 1)).mul_(0.5)
