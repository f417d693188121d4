"""The blocks that recognition finds, by name: parts of parameters, each in one block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from curvoscope.blocks import ROW, Block, Layout, Piece
from curvoscope.families.data_flow import DataFlow, WeightProduct
from curvoscope.families.norm_places import NormUse
from curvoscope.families.operands import operand
from curvoscope.families.stacks import StackLayer

_MANY_PIECES = 256


@dataclass(frozen=True)
class Role:
    """A block that was found: its pieces, side by side or one below the other, and its heads."""

    pieces: tuple[Piece, ...]
    heads: int | None = None
    axis: int | None = None
    side_by_side: bool = False

    def block(self, name: str, tied: tuple[str, ...]) -> Block:
        """The block of that name."""
        return Block(name, self.pieces, tied, self.heads, self.axis, self.side_by_side)


class RoleTable:
    """The blocks that are found in the graph of a forward pass, and the parts of parameters that they take.

    `roles`: by the names of their blocks, `homes`: the layers that these stand in, `fronts`: the names of stacks before
    those outside of layers, `notes`: why a parameter has no role.
    """

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.roles: dict[str, Role] = {}
        self.homes: dict[str, str] = {}
        self.fronts: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.taken: dict[str, list[Piece]] = {}

    @property
    def layer_parameters(self) -> dict[str, set[str]]:
        """The parameters of each layer, by its name."""
        found: dict[str, set[str]] = {}
        for name, home in self.homes.items():
            found.setdefault(home, set()).update(piece.parameter for piece in self.roles[name].pieces)
        return found

    def add(self, layer: StackLayer | None, name: str, role: Role, front: str = "") -> bool:
        """Take the pieces for a block, unless they are in one already."""
        full = f"{layer.name}.{name}" if layer is not None else f"{front}{name}"
        taken = (piece.overlaps(other) for piece in role.pieces for other in self.taken.get(piece.parameter, ()))
        if full in self.roles or any(taken):
            return False
        self.roles[full] = role
        if layer is not None:
            self.homes[full] = layer.name
        else:
            self.fronts[full] = front
        for piece in role.pieces:
            self.taken.setdefault(piece.parameter, []).append(piece)
        return True

    def add_next(self, layer: StackLayer | None, name: str, role: Role, front: str = "") -> None:
        """Under the name, or with the next free number behind it."""
        before = f"{layer.name}." if layer is not None else front
        number = next(
            i for i in range(len(self.roles) + 1) if f"{before}{name}{f'.{i}' if i else ''}" not in self.roles
        )
        self.add(layer, f"{name}.{number}" if number else name, role, front)

    def row(self, parameter: str) -> Piece:
        """All entries of a parameter, as one row."""
        shape = self.flow.parameters[parameter].shape
        return Piece.whole(parameter, shape, Layout((), tuple(range(len(shape)))))

    def table(self, parameter: str) -> Piece:
        """All entries of a parameter, with its last axis as columns."""
        shape = self.flow.parameters[parameter].shape
        last = len(shape) - 1
        return Piece.whole(
            parameter, shape, Layout(tuple(range(last)), (last,)) if last > 0 else self.row(parameter).layout
        )

    def add_product(
        self,
        layer: StackLayer | None,
        name: str,
        product: WeightProduct,
        columns: Sequence[Sequence[int]] | None = None,
        heads: bool = False,
        front: str = "",
    ) -> None:
        """A weight and its bias; of some columns alone, in groups that are heads."""
        piece = operand(self.flow, product.weight)
        if piece is None:
            self.notes.setdefault(
                product.parameter, f"acts as {name}, but its entries are not in the order of a matrix"
            )
            return
        group, dot, leaf = name.rpartition(".")
        bias = None if product.bias is None else self.bias(product.bias.parameter, piece)
        for one, key in ((piece, name), (bias, f"{group}{dot}b_{leaf}")):
            if one is None:
                continue
            role = _columns(one, columns, heads)
            if role is None:
                self.notes.setdefault(product.parameter, f"holds {name} in more than {_MANY_PIECES} places")
            else:
                self.add(layer, key, role, front)

    def bias(self, name: str, piece: Piece) -> Piece | None:
        """The part of a bias that goes with a part of a weight."""
        stored = tuple(self.flow.parameters[name].shape)
        if self.flow.parameters[name].numel() == piece.shape[1]:
            return self.row(name)
        axes = [axis for axis in piece.layout.columns if piece.index[axis].stop - piece.index[axis].start > 1]
        if len(axes) != 1:
            return None
        if len(stored) == 1 and stored[0] == piece.stored[axes[0]]:  # a fused bias
            return Piece(name, stored, (piece.index[axes[0]],), ROW)
        if len(piece.stored) == 3 and stored == (piece.stored[0], piece.stored[axes[0]]):  # of experts, a row for each
            return Piece(name, stored, (piece.index[0], piece.index[axes[0]]), Layout((), (0, 1)))
        return None

    def add_norm(self, layer: StackLayer | None, name: str, norm: NormUse, front: str = "") -> None:
        """A norm, gamma above beta."""
        pieces = tuple(self.row(parameter) for parameter in norm.rows)
        if len({piece.size for piece in pieces}) == 1:
            if layer is None:
                self.add_next(None, name, Role(pieces), front)
            else:
                self.add(layer, name, Role(pieces))


def runs_of(columns: Iterable[int]) -> list[tuple[int, int]]:
    """Ranges of numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for column in columns:
        if found and found[-1][1] == column:
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _columns(piece: Piece, groups: Sequence[Sequence[int]] | None, heads: bool) -> Role | None:
    """The columns of a piece in groups, one after the other."""
    if not groups:
        return Role((piece,))
    ordered = [column for group in groups for column in group]
    runs, together = runs_of(ordered), runs_of(sorted(ordered))
    count = len(groups) if heads and len({len(group) for group in groups}) == 1 else None
    if len(runs) > len(groups) and len(together) == 1:  # heads interleave: one weight, whose heads are not told
        runs, count = together, None
    if len(runs) > _MANY_PIECES:
        return None
    whole = runs == [(0, piece.shape[1])]
    pieces = (piece,) if whole else tuple(piece.between(1, start, stop) for start, stop in runs)
    return Role(pieces, count, None if count is None else 1, len(pieces) > 1)
