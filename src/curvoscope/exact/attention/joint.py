"""All entries of a head's Hessian from the scores' matrix M = W_Q W_K^T, for many tokens.

The scores T = s X M X^T move with dM = dW_Q W_K^T + W_Q dW_K^T, so (Remark D.1) the query-key part is V^T U V plus the
bilinear term, with U the Hessian in M and V = [I (x) W_K, (W_Q (x) I) K]; values and outputs likewise. The sum over
tokens is then taken for U alone, and its blocks follow by small products that no longer know of tokens.
"""

import torch
from torch import Tensor

from curvoscope.exact.attention.blocks import AttentionBlocks, HeadWeight, TermsOf
from curvoscope.exact.attention.layer import AttentionLayer, Pass
from curvoscope.operators.block_matrix import Entries, Slot
from curvoscope.operators.kronecker import KroneckerSum


def joint_is_cheaper(layer: AttentionLayer, passed: Pass) -> bool:
    """Whether there is an M, and the entries cost fewer multiplications through it than block by block."""
    biased = layer.b_Q is not None or layer.b_K is not None  # scores are then no function of M alone
    if layer.heads > 1 or layer.merged or biased or not layer.is_bilinear:
        return False
    d, k, e = layer.d, layer.d_k, layer.d_v
    tokens, out = passed.X.shape[0] * passed.X.shape[1], 0 if layer.W_O is None else e * layer.d_out
    block_by_block = tokens * (1.5 * d * d * k * k + 2 * d * k * (d * e + out))
    jointly = tokens * (0.25 * d**4 + d * d * (d * e + out)) + 6 * d**4 * k + 2 * d * d * k * (d * e + out)
    return jointly < 0.7 * block_by_block


class JointEntries:
    """The entries of all blocks of weights of one head."""

    def __init__(
        self, layer: AttentionLayer, blocks: AttentionBlocks, parts: dict[str, HeadWeight], like: Tensor
    ) -> None:
        self._layer, self._blocks, self._parts, self._like = layer, blocks, parts, like
        self._scores = HeadWeight((layer.d, layer.d), Slot(0, 0, layer.d), "M", False, (0,))

    def of(self, outer: bool) -> Entries:
        """The blocks on and above the diagonal, (a, p, b, q) each, but for those that are zero."""
        W_Q, W_K = self._layer.W_Q, self._layer.W_K
        d, k = W_Q.shape
        terms = self._blocks.outer if outer else self._blocks.functional
        U = self._dense(self._scores, self._scores, terms)  # (a, b, a', b')
        from_queries = W_K.T @ U.view(d, d, d * d)  # dM along W_Q on the left: (a, p, a' b')
        QQ = (from_queries.reshape(d * k * d, d) @ W_K).view(d, k, d, k)
        QK = (from_queries.view(d * k, d, d).mT @ W_Q).view(d, k, d, k)
        KK = W_Q.T @ (U.view(d * d, d, d).mT @ W_Q).view(d, d * d * k)
        KK = KK.view(k, d, d, k).transpose(0, 1)
        entries: Entries = {("Q", "Q"): _symmetrised(QQ), ("Q", "K"): QK, ("K", "K"): _symmetrised(KK)}
        if not outer:
            entries["Q", "K"] += self._dense(self._parts["Q"], self._parts["K"], self._blocks.t_functional)
        linear = [name for name in self._parts if name in ("V", "O")]
        for name in linear:
            b, q = self._parts[name].shape
            along = self._dense(self._scores, self._parts[name], terms)  # (a, b, b', q)
            entries["Q", name] = (W_K.T @ along.view(d, d, b * q)).view(d, k, b, q)
            entries["K", name] = (W_Q.T @ along.view(d, d * b * q)).view(k, d, b, q).transpose(0, 1)
        for i, first in enumerate(linear):
            for second in linear[i:]:
                if terms(self._parts[first], self._parts[second]):  # the functional part has none on the diagonal
                    entries[first, second] = self._dense(self._parts[first], self._parts[second], terms)
        return entries

    def _dense(self, left: HeadWeight, right: HeadWeight, terms: TermsOf) -> Tensor:
        operator = KroneckerSum(left.shape, right.shape, terms(left, right), self._like, left is right)
        values = torch.empty(*left.shape, *right.shape, dtype=self._like.dtype, device=self._like.device)
        operator._write(values)
        return values


def _symmetrised(block: Tensor) -> Tensor:
    return (block + block.permute(2, 3, 0, 1)).mul_(0.5)
