"""Low-rank adapters inside a layer in closed form: the blocks of A and B from those of the weight that they make.

Let W (a, p) be a weight of a layer with a closed form, and W = W_0 + s A B with A (a, r) and B (r, p). Along dA and dB
the weight moves by dW = s dA B + s A dB, and twice by s dA dB. With H_WW the layer's block of W, (ap, ap), and
G_W = dl/dW (a, p), in row-major order,

    H_AA = s² (I_a (x) B) H_WW (I_a (x) B^T)                   (ar, ar): H_WW = Σ_t l_t l_t^T (x) C_t gives B C_t B^T
    H_BB = s² (A^T (x) I_p) H_WW (A (x) I_p)                   (rp, rp): A^T l_t in place of l_t
    H_AB = s² (I_a (x) B) H_WW (A (x) I_p) + s E               E[aρ, σp] = δ_ρσ G_W[a, p]
    H_AY = s (I_a (x) B) H_WY                                  with any other weight Y of the layer, and alike for B

The outer part is the same with that of H_WW; E, which holds the gradient and no curvature, belongs to the functional
part. On a fused weight, A moves Q, K and V at once, and its blocks are sums over these.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.blocks import Block
from curvoscope.families.adapters import Adapter
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockMatrix
from curvoscope.operators.contractions import Contraction, Side, added, contracted
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single


@dataclass(frozen=True)
class LayerAdapter:
    """s A B on weights of a layer: A (a, r), and B (r, p) by the role of the weight that it makes."""

    A: Block
    B: Mapping[str, Block]
    scale: float

    @classmethod
    def of(cls, adapter: Adapter, weights: Mapping[str, Block], blocks: Mapping[str, Block]) -> "LayerAdapter | None":
        """That of an adapter on the weights of some roles, among all blocks; None if they are not ranges of columns."""
        A = next(block for block in blocks.values() if block.pieces == (adapter.parts["A"],))
        B = {role: blocks.get(f"{weight.name}.{adapter.label('B')}") for role, weight in weights.items()}
        found = {role: block for role, block in B.items() if block is not None}
        return cls(A, found, adapter.scale) if len(found) == len(weights) else None

    @property
    def factors(self) -> list[tuple[str | None, Block]]:
        """Its blocks: A, which has no role, and B with the role of its weight."""
        return [(None, self.A), *self.B.items()]

    def change(self, role: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """s A B, (a, p)."""
        return self.scale * self.A.matrix(tensors) @ self.B[role].matrix(tensors)

    def moves(self, role: str | None, tensors: Mapping[str, Tensor]) -> dict[str, Side]:
        """How B of a role moves the weights of the layer, or A, if there is no role: by the roles of these."""
        if role is not None:
            return {role: Contraction(0, self.scale * self.A.matrix(tensors))}
        return {role: Contraction(1, self.scale * B.matrix(tensors).T) for role, B in self.B.items()}

    def bilinear(self, gradient: Tensor) -> LinearOperator:
        """s E, the part of H_AB from the gradient G_W (a, p)."""
        rank = self.A.shape[1]
        identity = torch.eye(rank, dtype=gradient.dtype, device=gradient.device)
        shapes = (gradient.shape[0], rank), (rank, gradient.shape[1])
        return KroneckerSum(*shapes, [Single(self.scale * gradient, identity, (0, 1))], gradient, symmetric=False)


def moved_block(
    matrix: BlockMatrix, rows: Mapping[str, Side], columns: Mapping[str, Side], symmetric: bool
) -> LinearOperator:
    """The block of two parameters that move weights of a layer, from the blocks of these, all by name."""
    parts = [
        contracted(matrix[row, column], left, right, symmetric and row == column)
        for row, left in rows.items()
        for column, right in columns.items()
    ]
    return added(parts, symmetric)
