"""Latent attention in closed form: queries from latent vectors u_t, keys and values from others, c_t, as in DeepSeek's.

Of each head, q_i = R_i W_Q^T u_i, k_j = E W_K^T c_j + b_j and v_j = W_V^T c_j: R_i turns the queries, E (k, n) places
the features of a key, and b_j, the same for all heads, holds the others, which have positions. That is self-attention
on the vectors z_t = [u_t; c_t; b_t] with the weights

    W_Q' = [W_Q; 0; 0]        W_K' = [0; W_K E^T; I]        W_V' = [0; W_V; 0]

so that the blocks of W_Q, W_K and W_V are those of self-attention, contracted with constants. The weights that make
u, c and b stand before norms; they are not part of this layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.blocks import Block
from curvoscope.closed.attention_facts import AttentionFacts, UnknownAttentionError, attention_facts, placed_keys
from curvoscope.closed.layers import ModelLayer
from curvoscope.closed.passes import LayerRecord
from curvoscope.closed.rebuilding import Rebuilt
from curvoscope.exact.attention.rotary import PositionMatrices
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.families.attention_calls import AttentionCall
from curvoscope.families.data_flow import DataFlow
from curvoscope.losses import LossAt
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.operators.contractions import Contraction, contracted


@dataclass(frozen=True)
class LatentFacts:
    """How latent attention was computed on one batch: its scores, and E (k, n) and b (N, L, k) of the keys."""

    scores: AttentionFacts
    placed: Tensor
    shared: Tensor


def latent_facts(
    flow: DataFlow, call: AttentionCall, layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecord
) -> LatentFacts:
    """The facts of one call, at weights by role and at the latent vectors of the record."""
    blocks: Mapping[str, Block] = layer.blocks
    if layer.adapters or {"b_Q", "b_K", "b_V"} & set(weights) or blocks["K"].heads != blocks["Q"].heads:
        raise UnknownAttentionError("its latent vectors are combined with adapters, biases or head groups")
    if record.memory is None:
        raise UnknownAttentionError("its keys do not come from latent vectors of a module")
    scores = attention_facts(flow, call, blocks, {"Q": record.X @ weights["Q"]})
    if scores.query.norm is not None or scores.softcap is not None or scores.sinks is not None:
        raise UnknownAttentionError("its latent attention normalises queries, or caps scores, or has sinks")
    return LatentFacts(scores, *placed_keys(flow, call, blocks["K"], record.memory @ weights["K"]))


@dataclass(frozen=True)
class LatentRebuilt(Rebuilt):
    """Self-attention on z. `moves`: how the weights of latent attention stand in its weights, by name."""

    moves: Mapping[str, tuple[Contraction, ...]] | None = None

    def hessian(self, loss: LossAt, per_head: bool) -> BlockHessian:
        """For a loss known by its G and S at F, over the weights of latent attention."""
        whole = super().hessian(loss, per_head)
        return BlockHessian(self._moved(whole.outer), self._moved(whole.functional))

    def gradients(self, names: Sequence[str], cotangent: Tensor) -> list[Tensor]:
        """Those of <cotangent, F> in the weights of latent attention."""
        found = super().gradients(names, cotangent)
        for i, name in enumerate(names):
            for side in (self.moves or {}).get(name, ()):
                found[i] = found[i] @ side.matrix if side.axis else side.matrix.T @ found[i]
        return found

    def _moved(self, matrix: BlockMatrix) -> BlockMatrix:
        sides = {name: self._sides(name) for name in matrix.names}
        shapes = dict(matrix.shapes)
        for name, several in sides.items():
            for side in several:
                shapes[name] = side.shape(shapes[name])

        def entry(row: str, column: str) -> LinearOperator:
            block = matrix[row, column]
            for step in range(2):
                left, right = (sides[name][step] if step < len(sides[name]) else None for name in (row, column))
                block = contracted(block, left, right, row == column)
            return block

        return BlockMatrix(shapes, entry, matrix.like)

    def _sides(self, name: str) -> tuple[Contraction, ...]:
        """Those of a weight, or of one of its heads."""
        role, _, head = name.partition(".")
        moves = (self.moves or {}).get(role, ())
        if not head or role != "K":
            return moves
        placed = moves[1].matrix  # of all heads, one block each
        k, n = (length // self._heads for length in placed.shape)
        return moves[0], Contraction(1, placed[:k, :n])

    @property
    def _heads(self) -> int:
        assert isinstance(self.layer, SelfAttention)
        return self.layer.heads


def rebuild_latent(
    layer: ModelLayer, weights: Mapping[str, Tensor], record: LayerRecord, facts: LatentFacts
) -> LatentRebuilt:
    """Latent attention in closed form, at weights by role and at the latent vectors of the record."""
    assert record.memory is not None
    latents = record.X, record.memory, facts.shared
    z = torch.cat(latents, -1)
    r, c, k = (one.shape[-1] for one in latents)
    heads, n = layer.blocks["Q"].heads or 1, facts.placed.shape[1]
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    at_query, at_key, shared = identity[:, :r], identity[:, r : r + c], identity[:, r + c :]
    placed = torch.block_diag(*[facts.placed] * heads)  # (H k, H n)
    W_Q, W_V = at_query @ weights["Q"], at_key @ weights["V"]
    W_K = at_key @ weights["K"] @ placed.T + shared @ torch.eye(k, dtype=z.dtype, device=z.device).repeat(1, heads)
    scores = facts.scores
    unmoved = PositionMatrices(torch.eye(k, dtype=z.dtype, device=z.device).expand(1, 1, z.shape[1], -1, -1))
    attention = SelfAttention(
        *(W_Q, W_K, W_V, weights["O"]),
        b_O=weights.get("b_O"),
        heads=heads,
        temperature=1 / (scores.scale * k**0.5),
        rotary=scores.query.positions,
        key_rotary=None if scores.query.positions is None else unmoved,
    )
    assert weights["K"].shape[1] == heads * n
    keys = Contraction(0, at_key)
    moves = {"Q": (Contraction(0, at_query),), "K": (keys, Contraction(1, placed)), "V": (keys,)}
    return LatentRebuilt(attention, z, scores.mask, moves=moves)
