"""Named parameter blocks: which slice of which parameter is the weight Q of layer 0, in which layout.

A block is a matrix W (a, p) as in `X @ W`, flattened row by row, whatever the model stores: nn.Linear keeps W^T,
GPT-2 keeps Q, K and V in one tensor, TransformerLens one tensor per head. `Block.gather` takes the entries of a block
out of tensors shaped like the parameters (the parameters, their gradients), `Block.scatter` writes them back; both
take a leading axis of several vectors too, and are differentiable.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.errors import BlockNameError, DtypeError, EmptyError, ModelError, RangeError, ShapeError
from curvoscope.text_table import ShownAsTable, TextTable


def _attention_roles(kind: str) -> tuple[str, ...]:
    """Roles of self-attention ("attn") or cross-attention ("cross"): weights, biases, then what else acts inside."""
    weights = ("Q", "K", "V", "O")
    around = ("q_norm", "k_norm", "v_norm", "o_norm", "positions", "temperature", "sinks", "scale")
    latent = ("Q_latent", "q_latent_norm", "KV_latent", "kv_latent_norm", "reduction", "b_reduction", "reduction_norm")
    positions = ("Q_positions", "K_positions", "b_Q_positions", "b_K_positions")
    names = (
        *weights,
        *(f"b_{name}" for name in weights),
        *latent,
        *around,
        *positions,
        *("gate", "b_gate", "rest", "b_rest", "inner", "b_inner"),
    )
    return tuple(f"{kind}.{name}" for name in names)


_MIXER_ROLES = (  # of layers that mix tokens by a recurrence: Mamba's, RWKV's, then those of gated linear recurrences
    *("in", "b_in", "gate", "b_gate", "conv", "b_conv", "delta_in", "B", "b_B", "C", "b_C", "delta", "b_delta"),
    *("A", "D", "delta_norm", "B_norm", "C_norm", "norm"),
    *("R", "K", "V", "shift_R", "shift_K", "shift_V", "decay", "bonus"),
    *("input_gate", "b_input_gate", "recurrent_gate", "b_recurrent_gate", "out", "b_out"),
)
_FEEDFORWARD_ROLES = ("gate", "up", "gate_up", "down", "b_gate", "b_up", "b_gate_up", "b_down")
LAYER_ROLES = (  # blocks of a layer, in the order in which they are used
    *("norm1", *_attention_roles("attn"), *(f"mixer.{name}" for name in _MIXER_ROLES), "norm1_post"),
    *("norm_cross", *_attention_roles("cross"), "norm_cross_post"),
    *(
        "norm2",
        *(f"mlp.{name}" for name in (*_FEEDFORWARD_ROLES, "inner", "b_inner", "norm", "scale", "router", "b_router")),
        *(f"channel.{name}" for name in ("R", "up", "down", "shift_R", "shift_K")),  # RWKV's
    ),
    *(f"mlp.shared.{name}" for name in (*_FEEDFORWARD_ROLES, "router", "b_router")),
    "norm2_post",
)
_ROLE = "|".join([*map(re.escape, LAYER_ROLES), rf"mlp\.experts\.\d+\.(?:{'|'.join(_FEEDFORWARD_ROLES)})"])
_ADAPTED = rf"(?:{_ROLE}|(?:attn|cross)\.[QKV]+)\.(?:[AB]\d*|magnitude|ia3)"  # of a weight, or of a fused one
_IN_LAYER = re.compile(rf"((?:.+\.)?h\.\d+)\.({_ROLE}|{_ADAPTED})(?:\.\d+)?")
_LONG_TABLE = 40


def layer_and_role(name: str) -> tuple[str, str] | None:
    """The layer that a block is in and its role there: ("h.0", "attn.Q") for "h.0.attn.Q", or for "h.0.attn.Q.2", its
    third head. None for a block outside of the layers and for one that has the name of its parameter, also if that is
    "transformer.h.0.attn.q_proj.weight".

    Example:
        >>> layer_and_role("encoder.h.1.mlp.b_up")
        ('encoder.h.1', 'mlp.b_up')
        >>> layer_and_role("h.1.mlp.fc_in.weight") is None
        True
    """
    found = _IN_LAYER.fullmatch(name)
    return None if found is None else (found[1], found[2])


class Layout(NamedTuple):
    """Axes of the stored tensor that make up the rows and the columns of the matrix, slowest first."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "one row"
        if self in (STORED, TRANSPOSED):
            return "as stored" if self == STORED else "transposed"
        return f"axes {','.join(map(str, self.rows))} x {','.join(map(str, self.columns))}"


STORED = Layout((0,), (1,))
TRANSPOSED = Layout((1,), (0,))
ROW = Layout((), (0,))


def flat(dimensions: int) -> Layout:
    """A tensor of any number of axes as it is stored: a vector is one row, more axes are (first, rest)."""
    first = 1 if dimensions > 1 else 0
    return Layout(tuple(range(first)), tuple(range(first, dimensions)))


@dataclass(frozen=True)
class Piece:
    """Part of one parameter, `parameter[index]`, read as a matrix through `layout`. `stored`: the parameter's shape."""

    parameter: str
    stored: tuple[int, ...]
    index: tuple[slice, ...] = field(hash=False)
    layout: Layout

    def __post_init__(self) -> None:
        axes = list(range(len(self.stored)))
        if len(self.index) != len(axes) or sorted(self.layout.rows + self.layout.columns) != axes:
            raise ShapeError(self.parameter, f"{self.index} and {self.layout!r} do not fit its shape {self.stored}")
        ranges = [part.indices(length) for part, length in zip(self.index, self.stored, strict=True)]
        if any(step != 1 or start >= stop for start, stop, step in ranges):
            raise RangeError(self.parameter, f"{self.index} is not a part of its shape {self.stored}")
        object.__setattr__(self, "index", tuple(slice(start, stop) for start, stop, _ in ranges))

    @classmethod
    def whole(cls, parameter: str, stored: Iterable[int], layout: Layout) -> "Piece":
        """All entries of a parameter."""
        lengths = tuple(stored)
        return cls(parameter, lengths, (slice(None),) * len(lengths), layout)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        lengths = [part.stop - part.start for part in self.index]
        return math.prod(lengths[i] for i in self.layout.rows), math.prod(lengths[i] for i in self.layout.columns)

    @cached_property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def part(self, side: int, number: int, of: int) -> "Piece":
        """Part `number` of `of` equal ones, of the rows (side 0) or of the columns (side 1)."""
        length = self.shape[side]
        if length % of:
            raise RangeError(self.parameter, f"{length} entries cannot be divided among {of} parts")
        width = length // of
        return self.between(side, number * width, (number + 1) * width)

    def between(self, side: int, start: int, stop: int) -> "Piece":
        """Rows (side 0) or columns (side 1) `start` to `stop`."""
        lengths = {axis: self.index[axis].stop - self.index[axis].start for axis in self.layout[side]}
        long = [axis for axis, length in lengths.items() if length > 1] or list(self.layout[side])
        within = math.prod(lengths[axis] for axis in long[1:])
        if start % within or stop % within:
            raise RangeError(self.parameter, f"{start}:{stop} cuts through its axes {long}")
        first, index = self.index[long[0]].start, list(self.index)
        index[long[0]] = slice(first + start // within, first + stop // within)
        return replace(self, index=tuple(index))

    def of(self, tensor: Tensor) -> Tensor:
        """The view of this piece in (n, *stored) or (*stored), axes in the order of the layout."""
        batch = tensor.ndim - len(self.stored)
        if batch not in (0, 1) or tuple(tensor.shape[batch:]) != self.stored:
            raise ShapeError(self.parameter, f"expected {self.stored}, or n of them, got {tuple(tensor.shape)}")
        order = self.layout.rows + self.layout.columns
        region = tensor[(slice(None),) * batch + self.index]
        return region.permute((*range(batch), *(batch + axis for axis in order)))

    def overlaps(self, other: "Piece") -> bool:
        """Whether the two share entries."""
        return self.parameter == other.parameter and all(
            a.start < b.stop and b.start < a.stop for a, b in zip(self.index, other.index, strict=True)
        )

    def __str__(self) -> str:
        ranges = (
            ":" if (part.start, part.stop) == (0, length) else f"{part.start}:{part.stop}"
            for part, length in zip(self.index, self.stored, strict=True)
        )
        return f"[{', '.join(ranges)}]"


@dataclass(frozen=True)
class Block:
    """A named weight W (a, p) as in `X @ W`, row-major: its pieces, one below the other, or `side_by_side`.

    A bias is (1, p); a norm (2, d), gamma above beta. `tied`: other names under which the model uses the same
    numbers. A weight of several heads says how many (`heads`: of the keys and values for K and V) and along which
    `axis` they follow each other: 1 (columns) for Q, K, V and their biases, 0 (rows) for O. `note`: why the block has
    the name of its parameter, if that is known.
    """

    name: str
    pieces: tuple[Piece, ...]
    tied: tuple[str, ...] = ()
    heads: int | None = None
    axis: int | None = None
    side_by_side: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if len({piece.shape[0 if self.side_by_side else 1] for piece in self.pieces}) != 1:
            raise ShapeError(self.name, f"pieces of shapes {[piece.shape for piece in self.pieces]} do not fit")
        if (self.heads is None) != (self.axis is None):
            raise RangeError(self.name, f"heads = {self.heads} and axis = {self.axis}: give both or none")
        if self.heads is not None and self.axis is not None and (self.heads < 1 or self.shape[self.axis] % self.heads):
            raise RangeError(self.name, f"{self.shape} cannot be divided among {self.heads} heads")

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(a, p)."""
        rows, columns = zip(*(piece.shape for piece in self.pieces), strict=True)
        return (rows[0], sum(columns)) if self.side_by_side else (sum(rows), columns[0])

    @cached_property
    def size(self) -> int:
        """a p."""
        return math.prod(self.shape)

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This block's entries of tensors shaped like the parameters: (size,), or (n, size) from (n, *shape).

        The result may share memory with the tensors.
        """
        parts = []
        for piece in self.pieces:
            region = piece.of(_tensor(tensors, piece))
            shape = piece.shape if self.side_by_side else (piece.size,)
            parts.append(region.reshape(*region.shape[: region.ndim - len(piece.stored)], *shape))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined.flatten(-2) if self.side_by_side else joined

    def gather_into(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write this block's entries of the tensors into (size,) or (n, size): `gather`, with one copy."""
        if self.side_by_side:
            vector.copy_(self.gather(tensors))
            return
        for piece, part in self.parts(vector):
            region = piece.of(_tensor(tensors, piece))
            own = region.shape[vector.ndim - 1 :]
            part.unflatten(-1, own or (1,)).copy_(region if own else region[..., None])

    def parts(self, vector: Tensor) -> list[tuple[Piece, Tensor]]:
        """Each piece with its entries of (size,) or (n, size), row by row."""
        if self.side_by_side:
            columns = vector.unflatten(-1, self.shape).split([piece.shape[1] for piece in self.pieces], -1)
            return [(piece, part.flatten(-2)) for piece, part in zip(self.pieces, columns, strict=True)]
        return list(zip(self.pieces, vector.split([piece.size for piece in self.pieces], -1), strict=True))

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """`gather`, as the matrix W: (a, p) or (n, a, p)."""
        return self.gather(tensors).unflatten(-1, self.shape)

    def scatter(self, vector: Tensor, into: Mapping[str, Tensor]) -> None:
        """Write (size,), or (n, size), into tensors shaped like the parameters, (n, *shape) with n vectors."""
        if vector.ndim not in (1, 2) or vector.shape[-1] != self.size:
            raise ShapeError("vector", f"expected ({self.size},) or (n, {self.size}), got {tuple(vector.shape)}")
        for piece, part in self.parts(vector):
            region = piece.of(_tensor(into, piece))
            if region.shape[: region.ndim - len(piece.stored)] != vector.shape[:-1]:
                shapes = f"{tuple(into[piece.parameter].shape)} cannot take vectors {tuple(vector.shape)}"
                raise ShapeError("into", f"{piece.parameter!r} with {shapes}")
            region.copy_(part.reshape(region.shape))

    def head(self, number: int) -> "Block":
        """Head `number` alone, named "h.0.attn.Q.2" for head 2."""
        if self.heads is None or self.axis is None:
            raise RangeError(self.name, "has no heads")
        if number not in range(self.heads):
            raise RangeError(self.name, f"got head {number}, expected 0 to {self.heads - 1}")
        name = f"{self.name}.{number}"
        if len(self.pieces) == 1 or self.axis != int(self.side_by_side):
            pieces = tuple(piece.part(self.axis, number, self.heads) for piece in self.pieces)
            return Block(name, pieces, self.tied, side_by_side=self.side_by_side)
        width, found, passed = self.shape[self.axis] // self.heads, [], 0
        for piece in self.pieces:
            length = piece.shape[self.axis]
            start, stop = (min(max(edge * width - passed, 0), length) for edge in (number, number + 1))
            if start < stop:
                found.append(piece.between(self.axis, start, stop))
            passed += length
        return Block(name, tuple(found), self.tied, side_by_side=self.side_by_side and len(found) > 1)


class Blocks(ShownAsTable, Mapping[str, Block]):
    """Blocks by name, in the order of the model. Made by `cv.blocks_of(model)`; print `table()` to check it.

    Args:
        blocks: with different names.
        whole: the blocks that these are chosen from; None: these are all.

    Example:
        >>> import torch, curvoscope as cv
        >>> blocks = cv.blocks_of(torch.nn.TransformerEncoderLayer(4, 2, 8))
        >>> blocks.select("*.attn.Q", "*.mlp.up").shapes
        {'h.0.attn.Q': (4, 4), 'h.0.mlp.up': (4, 8)}
        >>> blocks.select("*.attn.Q").per_head().names
        ['h.0.attn.Q.0', 'h.0.attn.Q.1']
        >>> print(blocks.select("*.attn.V").table())
        block       shape  parameter                 slice      layout      heads  tied to
        h.0.attn.V  4 x 4  self_attn.in_proj_weight  [8:12, :]  transposed  2
    """

    def __init__(self, blocks: Iterable[Block], whole: "Blocks | None" = None) -> None:
        self._blocks: dict[str, Block] = {}
        for block in blocks:
            if block.name in self._blocks:
                raise BlockNameError("blocks", f"{block.name!r} occurs twice")
            self._blocks[block.name] = block
        if not self._blocks:
            raise EmptyError("blocks", "there are none")
        self._whole = whole

    @property
    def whole(self) -> "Blocks":
        """The blocks that these were chosen from by `select` and `per_head`: closed forms need all of a layer."""
        return self if self._whole is None else self._whole

    def __getitem__(self, name: str) -> Block:
        checks.block_named("blocks", name, self._blocks)
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> list[str]:
        """Names, in the order of the model."""
        return list(self._blocks)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(a, p) of each block."""
        return {name: block.shape for name, block in self.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of each block."""
        return {name: block.size for name, block in self.items()}

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that the blocks are parts of."""
        return set(parameters_of(self.values()))

    def select(self, *patterns: str) -> "Blocks":
        """The blocks whose names match one of the shell patterns, in the order of the model.

        Args:
            *patterns: such as "*.attn.[QKV]"; each must match a block.

        Returns:
            The blocks chosen.
        """
        if not patterns:
            raise EmptyError("patterns", 'give at least one, such as "*.attn.Q"')
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise BlockNameError("patterns", f"got {pattern!r}, expected strings: select(*patterns) for a list")
            if not any(fnmatchcase(name, pattern) for name in self):
                near = checks.nearest(pattern, self.names)
                raise BlockNameError("patterns", f"{pattern!r} matches none of {len(self)} blocks; nearest: {near}")
        chosen = [block for name, block in self.items() if any(fnmatchcase(name, p) for p in patterns)]
        return Blocks(chosen, self.whole)

    def per_head(self) -> "Blocks":
        """One block per head, "h.0.attn.Q.2" for head 2; K and V by their own heads. Blocks without heads stay."""
        parts = [
            part
            for block in self.values()
            for part in ([block] if block.heads is None else [block.head(i) for i in range(block.heads)])
        ]
        return Blocks(parts, self.whole)

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """All blocks' entries of the tensors {parameter name: tensor}, one block after the other: (total,), or
        (n, total) from tensors (n, *shape). See `Block.gather`.
        """
        return torch.cat([block.gather(tensors) for block in self.values()], -1)

    def scatter(self, vector: Tensor, into: Mapping[str, Tensor]) -> None:
        """Write a vector (total,) or (n, total), in the order of `gather`, into tensors {parameter name: tensor} shaped
        like the parameters, (n, *shape) with n vectors. Their other entries stay. See `Block.scatter`.
        """
        total = sum(self.sizes.values())
        if vector.ndim not in (1, 2) or vector.shape[-1] != total:
            raise ShapeError("vector", f"expected ({total},) or (n, {total}), got {tuple(vector.shape)}")
        for block, part in zip(self.values(), vector.split(list(self.sizes.values()), -1), strict=True):
            block.scatter(part, into)

    def covers(self, model: nn.Module) -> bool:
        """Whether every entry of every parameter lies in exactly one block. Tied parameters count once."""
        pieces, tied = self._pieces(), {name for block in self.values() for name in block.tied}
        for name, parameter in model.named_parameters():
            found = pieces.pop(name, [])
            if not found and name in tied:
                continue
            if any(a.overlaps(b) for (_, a), (_, b) in combinations(found, 2)):
                return False
            if sum(piece.size for _, piece in found) != parameter.numel():
                return False
        return not pieces

    def check(self, model: nn.Module) -> None:
        """Raise if the blocks do not fit the model: a parameter missing, reshaped, frozen, not floating point, or
        entries that are in two blocks."""
        parameters = dict(model.named_parameters())
        for block, piece in [(owner, piece) for owner in self.values() for piece in owner.pieces]:
            name, parameter = piece.parameter, parameters.get(piece.parameter)
            if parameter is None:
                raise ModelError("model", f"has no parameter {name!r}, part of block {block.name!r}")
            if not parameter.is_floating_point():
                cure = f"load the model without quantisation, or leave block {block.name!r} out with `select`"
                raise DtypeError(name, f"is {parameter.dtype}, expected floating point: {cure}")
            if tuple(parameter.shape) != piece.stored:
                cure = "call blocks_of again"
                raise ShapeError(name, f"is {tuple(parameter.shape)}, was {piece.stored} in the blocks: {cure}")
            if not parameter.requires_grad:
                cure = f"call requires_grad_(True), or leave block {block.name!r} out with `select`"
                raise ModelError(name, f"is frozen: {cure}")
        for name, found in self._pieces().items():
            for (one, first), (other, second) in combinations(found, 2):
                if first.overlaps(second):
                    cure = "products over all blocks would be wrong; make one Hessian of weights, one of their heads"
                    raise RangeError("blocks", f"{one!r} and {other!r} share entries of {name!r}: {cure}")

    def table(self) -> str:
        """The map as text, one line per piece: block, shape, parameter, slice, layout, heads, what it is tied to and,
        if a reason is known, why a parameter has no role."""
        return "\n".join(self._shown().lines())

    def __repr__(self) -> str:
        shown = self._shown()
        lines = shown.lines()
        if len(lines) > _LONG_TABLE:
            left_out = f"... {len(lines) - _LONG_TABLE} lines more; print table() for all"
            lines = [*lines[: _LONG_TABLE - 8], left_out, *lines[-8:]]
        return "\n".join([shown.title, *lines])

    def _pieces(self) -> dict[str, list[tuple[str, Piece]]]:
        """The pieces of each parameter, with the names of their blocks."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for name, block in self.items():
            for piece in block.pieces:
                found.setdefault(piece.parameter, []).append((name, piece))
        return found

    def _shown(self) -> TextTable:
        noted = any(block.note for block in self.values())
        header = ("block", "shape", "parameter", "slice", "layout", "heads", "tied to", *(["note"] if noted else []))
        rows = []
        for name, block in self.items():
            for i, piece in enumerate(block.pieces):
                first = (name, f"{block.shape[0]} x {block.shape[1]}") if i == 0 else ("", "")
                heads = "" if block.heads is None else str(block.heads)
                note = [block.note if i == 0 else ""] if noted else []
                about = (piece.parameter, str(piece), str(piece.layout), heads, ", ".join(block.tied))
                rows.append((*first, *about, *note))
        return TextTable(header, rows, f"{len(self)} blocks, {sum(self.sizes.values()):,} entries")


def parameters_of(blocks: Iterable[Block]) -> list[str]:
    """Names of the parameters that hold the blocks, each once, in the order of the blocks."""
    return list(dict.fromkeys(piece.parameter for block in blocks for piece in block.pieces))


def _tensor(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
    if piece.parameter not in tensors:
        raise ModelError("tensors", f"has no {piece.parameter!r}")
    return tensors[piece.parameter]
