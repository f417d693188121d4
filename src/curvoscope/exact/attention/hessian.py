"""The Hessian of attention: its blocks as operators, and its split at the scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError
from curvoscope.exact.assembly import ColumnProducts, Directions, assembled, tiled
from curvoscope.exact.attention.blocks import AttentionBlocks, HeadWeight, TermsOf, weights_of
from curvoscope.exact.attention.joint import JointEntries, joint_weights
from curvoscope.exact.attention.layer import AttentionLayer, Pass
from curvoscope.exact.attention.product import AttentionProduct
from curvoscope.losses import LossAt
from curvoscope.magnitudes import in_single
from curvoscope.operators.base import LinearOperator, ProductPair, Shape
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix, Slot, Tiles
from curvoscope.operators.compositions import Product
from curvoscope.operators.kronecker import KroneckerSum


@dataclass(frozen=True)
class _Block:
    """A named block: the weight it belongs to, its place there (None: all of it), its shape and its heads' parts."""

    weight: str
    slot: Slot | None
    shape: Shape
    parts: list[HeadWeight]


class AttentionHessian(BlockHessian):
    """Attention's Hessian, exact; beyond a `BlockHessian`, its split at the scores T and what follows from it.

    Made by `SelfAttention.hessian`.

    Args:
        layer: the attention layer.
        passed: its forward pass on X.
        loss: the loss at its output.
        biases: whether biases are blocks.
        per_head: whether each head is a block.
        wrt_input: whether the input is a block.

    Example:
        >>> import torch, curvoscope as cv
        >>> X, W = torch.eye(3).double(), torch.eye(3).double()
        >>> H = cv.exact.SelfAttention(W, W, W).hessian(X, cv.losses.MSE(torch.zeros(3, 3).double()))
        >>> difference = H.t_outer.dense() + H.t_functional.dense() - H.total.select(["Q", "K"]).dense()
        >>> bool(difference.norm() < 1e-12)
        True
    """

    def __init__(
        self,
        layer: AttentionLayer,
        passed: Pass,
        loss: LossAt,
        biases: bool,
        per_head: bool,
        wrt_input: bool,
    ) -> None:
        checks.commensurate({**layer.matrices, "X": passed.X})
        self._layer, self._passed, self._loss = layer, passed, loss
        self._terms = AttentionBlocks(layer, passed, loss)
        self._whole = layer.shapes(biases)
        self._blocks: dict[str, _Block] = {}
        for name, shape in self._whole.items():
            parts = weights_of(layer, name, shape)
            if per_head and len(parts) > 1:
                for i, part in enumerate(parts):
                    self._blocks[f"{name}.{i}"] = _Block(name, part.slot, part.shape, [part])
            else:
                self._blocks[name] = _Block(name, None, shape, parts)
        if wrt_input:
            self._whole["X"] = (passed.X.shape[0] * passed.X.shape[1], layer.d)
            self._blocks["X"] = _Block("X", None, self._whole["X"], [])
        shapes = {name: block.shape for name, block in self._blocks.items()}

        joint: JointEntries | None = None
        if set(shapes) <= {"Q", "K", "V", "O"} and (through := joint_weights(layer, passed)):
            weights = {name: block.parts[0] for name, block in self._blocks.items()}
            joint = JointEntries(layer, self._terms, weights, through, passed.X)

        columns = ColumnProducts(shapes, self._multiplied, passed.workspace)
        super().__init__(*assembled(columns, passed.X, self._block, None if joint is None else joint.of))

    @cached_property
    def _product(self) -> AttentionProduct:
        return AttentionProduct(self._layer, self._passed, self._loss)

    # ---- the split at the scores

    @property
    def t_functional(self) -> "TFunctional":
        """The part of the query-key Hessian that comes from T being bilinear: [[0, s B (x) I], [s B^T (x) I, 0]]."""
        queries, keys = self._query_key()
        gradients = [
            torch.cat(
                [
                    torch.cat([self._terms.score_gradient(h, _bias(row), _bias(column)) for column in keys], 1)
                    for h in part.heads
                    for row in queries
                ]
            )
            for part in self._blocks["K"].parts
        ]
        shapes = {name: self.shapes[name] for name in (*queries, *keys)}
        return TFunctional(
            shapes,
            lambda row, column: self._tiled(row, column, self._terms.t_functional),
            gradients,
            self._layer.d_k,
        )

    @property
    def t_outer(self) -> BlockMatrix:
        """The rest of the query-key Hessian, (dT/dW)^T (d^2 loss/dT^2) (dT/dW)."""
        queries, keys = self._query_key()
        shapes = {name: self.shapes[name] for name in (*queries, *keys)}
        return BlockMatrix(
            shapes,
            lambda row, column: self.outer[row, column] + self._tiled(row, column, self._terms.functional_at_scores),
            self._passed.X,
        )

    def bulk(self) -> tuple[Tensor, int]:
        """Eigenvalues +-s sigma_j(B) of the complete Hessian, and the multiplicity that each has at least.

        With n queries per key head and inputs of width d (one more with biases), that is d_k + 1 - (1 + n) d; if it is
        not positive, nothing is guaranteed and nothing is returned.
        """
        gradients = self.t_functional.gradients
        multiplicity = self._layer.d_k + 1 - sum(gradients[0].shape)
        if multiplicity <= 0:
            return self._passed.X.new_empty(0), 0
        values = torch.cat([torch.linalg.svdvals(in_single(gradient)).to(gradient.dtype) for gradient in gradients])
        return torch.cat([-values, values]).sort().values, multiplicity

    def rank_bounds(self) -> dict[str, tuple[int, int]]:
        """Upper bounds on ranks: (as in Lemma D.2, sharpened by the number of keys that each query sees).

        A row of softmax over n keys moves in n - 1 dimensions, so token i adds at most min(width, n_i - 1).
        """
        layer, (queries, keys) = self._layer, self._query_key()
        d, k = sum(self.shapes[name][0] for name in keys), layer.d_k
        e = sum(self.shapes[name][0] for name in queries)
        sums_to_one = self._passed.open_keys is None and layer.sinks is None
        moving = self._passed.visible.expand_as(self._passed.A).sum(-1) - int(sums_to_one)
        by_width = {width: int(moving.clamp(max=width).sum()) for width in (d, k)}
        pairs = ((d + e) * k - k * k if k < min(d, e) else d * e) * layer.heads
        query, key = e * k * layer.heads, d * k * layer.kv_heads
        return {
            "t_outer": (pairs, min(pairs, by_width[d])),
            "Q": (query, min(query, by_width[k])),
            "K": (key, min(key, by_width[d])),
        }

    def _query_key(self) -> tuple[list[str], list[str]]:
        """The names of query and of key blocks, biases after weights."""
        if not self._layer.is_bilinear:
            named = ("rotary", "q_norm", "k_norm", "softcap", "key_rotary")
            between = next(name for name in named if getattr(self._layer, name) is not None)
            raise RangeError(between, "the split at the scores needs scores bilinear in W_Q and W_K alone")
        if self._layer.merged:
            raise RangeError("W_QK", "scores are linear in one query-key matrix: there is no split")
        if "K" not in self._blocks:
            raise RangeError("per_head", "ask for the split at the scores without per_head")
        by_role = {
            role: [name for name, block in self._blocks.items() if block.parts and block.parts[0].role == role]
            for role in ("Q", "K")
        }
        return by_role["Q"], by_role["K"]

    # ---- blocks

    def _block(self, row: str, column: str, outer: bool, products: ProductPair) -> LinearOperator:
        roles = {part.role for name in (row, column) for part in self._blocks[name].parts}
        weight = self._blocks[row].weight
        if row == column and weight == "K" and not outer and self._layer.turns_keys:
            return self._turned_keys(self._blocks[row], products)
        if "X" in (row, column) or not all(map(self._layer.has_cores, roles)):  # no Kronecker form
            shapes = self._blocks[row].shape, self._blocks[column].shape
            return Product(products, *shapes, self._passed.X, symmetric=row == column)
        return self._tiled(row, column, self._terms.outer if outer else self._terms.functional, products)

    def _turned_keys(self, block: _Block, products: ProductPair) -> LinearOperator:
        """The functional part of a key weight behind positions: no two of its heads meet."""
        heads = [self._terms.turned_keys(part) for part in block.parts]
        if len(heads) == 1:
            return heads[0]
        slots, like = [part.slot for part in block.parts], self._passed.X
        entries: dict[tuple[int, int], LinearOperator] = {
            (i, j): head if i == j else KroneckerSum(head.row_shape, other.row_shape, [], like)
            for i, head in enumerate(heads)
            for j, other in enumerate(heads)
        }
        return Tiles(block.shape, block.shape, slots, slots, entries, like, True, products)

    def _tiled(self, row: str, column: str, terms: TermsOf, products: ProductPair | None = None) -> LinearOperator:
        """The block of two weights from the terms of their heads."""
        rows, columns = self._blocks[row], self._blocks[column]
        shapes = rows.shape, columns.shape
        return tiled(shapes, rows.parts, columns.parts, terms, self._passed.X, row == column, products)

    def _multiplied(self, directions: Directions, wanted: Sequence[str], outer: bool, functional: bool) -> Directions:
        """The parts asked for, of the Hessian times directions of blocks: they may be those of single heads."""
        whole: Directions = {}
        for name, values in directions.items():
            block = self._blocks[name]
            if block.slot is None:
                whole[block.weight] = values
            else:
                zeros = values.new_zeros(len(values), *self._whole[block.weight])
                block.slot.of(whole.setdefault(block.weight, zeros), 1).copy_(values)
        blocks = {name: self._blocks[name] for name in wanted}
        weights = list(dict.fromkeys(block.weight for block in blocks.values()))
        answers = self._product(whole, weights, outer, functional)
        return {
            name: answers[block.weight] if block.slot is None else block.slot.of(answers[block.weight], 1)
            for name, block in blocks.items()
        }


class TFunctional(BlockMatrix):
    """The T-functional part. `gradients` are s B, for each key head the B of its queries one below the other."""

    def __init__(
        self,
        shapes: dict[str, Shape],
        entry: Callable[[str, str], LinearOperator],
        gradients: list[Tensor],
        d_k: int,
    ) -> None:
        super().__init__(shapes, entry, gradients[0])
        self.gradients, self._d_k = gradients, d_k

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        """+-s sigma_j(B), each d_k times, and zeros."""
        values = torch.cat(
            [torch.linalg.svdvals(in_single(gradient)).to(gradient.dtype) for gradient in self.gradients]
        )
        values = torch.cat([values, -values]).repeat_interleave(self._d_k)
        return torch.cat([values, values.new_zeros(self.shape[0] - len(values))]).sort().values


def _bias(name: str) -> bool:
    return name.startswith("b_")
