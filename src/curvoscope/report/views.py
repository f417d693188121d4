"""What the interactive part of a page draws: the blocks of a run with their numbers, heat maps and curves."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

Number = tuple[float, float]  # the value, and its standard error


@dataclass(frozen=True)
class BlockView:
    """A block, the layer that it is in and its role there."""

    name: str
    layer: str
    role: str


@dataclass(frozen=True)
class RowView:
    """The numbers of one part of a block, by their labels; of an audit, a part is an approximation."""

    block: str
    part: str
    method: str
    numbers: dict[str, Number]


@dataclass(frozen=True)
class MapView:
    """A heat map with one row per block.

    Args:
        title: the quantity.
        part: of which part; "" if there is one only.
        axis: what the columns are: "block", "part" or "step".
        columns: their names; of blocks none, as the map is symmetric and has the lower triangle alone.
        values, errors: row by row; None if not measured.
        logarithmic: whether the colours follow the logarithm.
    """

    title: str
    part: str
    axis: str
    columns: list[str]
    values: list[float | None]
    errors: list[float | None]
    logarithmic: bool = True


@dataclass(frozen=True)
class CurveView:
    """A curve of a block with the ends of its bars or band, over eigenvalues (`axis` "λ") or steps ("step")."""

    block: str
    part: str
    title: str
    axis: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class RunView:
    """A run for the interactive part of a page.

    Args:
        blocks: in the order of the model.
        rows: their numbers.
        maps, curves: what is drawn of them.
        zero: the size up to which a number counts as zero.
        exponent: whether numbers are written with an exponent.
        label: names the run among several.
    """

    blocks: list[BlockView]
    rows: list[RowView]
    maps: list[MapView] = field(default_factory=list)
    curves: list[CurveView] = field(default_factory=list)
    zero: float = 0.0
    exponent: bool = True
    label: str = ""


def as_json(views: Sequence[RunView]) -> str:
    """The views for a `<script>` of a page: no text of a run can end the element."""
    facts = {"runs": [dataclasses.asdict(view) for view in views]}
    return json.dumps(facts, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
