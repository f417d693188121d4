"""The Gram matrices of the rows of a sweep, as the parameters that they are made of become known."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from curvoscope.approximations.factors import moment
from curvoscope.autodiff.uses import Factors
from curvoscope.blocks import Blocks, Piece
from curvoscope.sweep.grams import add_crossed, add_gram, tiling


class RowGrams:
    """K (c, c) of each row over all samples of a chunk; `tell` is called with a row's name and K when K is complete.

    Args:
        rows: what Gram matrices are wanted of: blocks, or heads of them.
        pieces: the rows in each parameter, with the part of it that they take.
        count: c.
        tell: called with the name of a row and its K.
    """

    def __init__(
        self,
        rows: Blocks,
        pieces: Mapping[str, Sequence[tuple[str, Piece]]],
        count: int,
        tell: Callable[[str, Tensor], None],
    ) -> None:
        self._grams = {name: torch.zeros(count, count, dtype=torch.float64) for name in rows}
        self._waiting = {name: {piece.parameter for piece in block.pieces} for name, block in rows.items()}
        self._pieces, self._count, self._tell = pieces, count, tell

    def add(self, row: str, factors: Sequence[Factors]) -> None:
        """Add the K of some columns of a parameter that is one row."""
        add_gram(self._grams[row], factors)

    def finish(
        self, name: str, factors: Sequence[Factors], beside: Sequence[Factors], read: Tensor, gradients: Tensor | None
    ) -> None:
        """Add what is found in a parameter, all of whose uses are known: its products, those of a last product beside
        them, which has only the rows `read`, and its gradients."""
        grams: dict[Piece, Tensor] = {}
        for row, piece in sorted(self._pieces[name], key=lambda one: one[1].size):
            if row in self._waiting and name in self._waiting[row]:
                known = [grams[tile] for tile in tiling(piece, grams)]
                grams[piece] = torch.stack(known or [self._of_piece(piece, factors, beside, read, gradients)]).sum(0)
                self._grams[row] += grams[piece]
        for row in dict.fromkeys(row for row, _ in self._pieces[name]):
            if row in self._waiting:
                self._waiting[row].discard(name)
                if not self._waiting[row]:
                    del self._waiting[row]
                    self._tell(row, self._grams.pop(row))

    def _of_piece(
        self,
        piece: Piece,
        factors: Sequence[Factors],
        beside: Sequence[Factors],
        read: Tensor,
        gradients: Tensor | None,
    ) -> Tensor:
        """K of a part of a parameter."""
        gram = torch.zeros(self._count, self._count, dtype=torch.float64)
        if factors:
            inside = [one.within((piece.index[0], piece.index[1])) for one in factors]
            add_gram(gram, [one for one in inside if one is not None])
        for head in beside:
            for one in factors:
                add_crossed(gram, one.among(read), head)
        if gradients is not None:
            flat = gradients[(slice(None), *piece.index)].reshape(self._count, -1)
            gram += moment(flat.mT).double()
        return gram
