"""The plan of a Hessian: how each block is computed, why, and what that takes. Nothing is computed for it."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from curvoscope import checks
from curvoscope.errors import BlockNameError

PARTS = ("outer", "functional", "total")
_HEAD = ("block", "part", "method", "products", "memory", "reason")


@dataclass(frozen=True)
class Choice:
    """Whether a part of a block is computed in closed form, why (not), and what that takes."""

    exact: bool
    reason: str
    products: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class PlannedBlock:
    """One row of a plan: a diagonal block and a part of it.

    Attributes:
        block: its name.
        part: "outer", "functional" or "total".
        method: "exact", "autodiff" or "difference".
        reason: why this method.
        products: products with the Hessian, each of them one pass over all batches. "exact": those that find the loss
            Hessian at the layer's output, once for all blocks of the layer; none if the part needs the gradient there
            alone. Otherwise: those of each estimate by default.
        bytes: memory, by sizes. "exact": of the loss Hessian at the layer's output, or of the closed form if that needs
            the gradient alone. Otherwise: of the graph of a product.

    Example:
        >>> import torch, curvoscope as cv
        >>> data = torch.ones(4, 3), torch.zeros(4, 2)
        >>> row = cv.hessian(torch.nn.Linear(3, 2), torch.nn.MSELoss(), [data]).plan["weight", "outer"]
        >>> row.method, row.reason
        ('autodiff', 'no closed form is known for it')
    """

    block: str
    part: str
    method: str
    reason: str
    products: int
    bytes: int


@dataclass(frozen=True)
class Plan(Mapping[tuple[str, str], PlannedBlock]):
    """How a Hessian computes its diagonal blocks: `plan[name, part]` is a row, `print(plan)` a table of all.

    It follows from the structure of the model and from sizes alone. Whether a closed form gives the output of its layer
    is verified when a block is first computed with, or when `H.method_of(name)` is asked; should it not, the block is
    left to autodiff, and from then on `H.plan` says so and why.

    Args:
        rows: one for each block and part.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(torch.ones(4, 3), torch.zeros(4, 2))])
        >>> print(H.plan)
        block     part   method  products   memory  reason
        0.weight   all autodiff         6 ...  B  no closed form is known for it
        0.bias     all autodiff         2 ...  B  no closed form is known for it
        >>> H.plan["0.weight", "outer"].method
        'autodiff'
    """

    rows: tuple[PlannedBlock, ...]

    def __getitem__(self, key: tuple[str, str]) -> PlannedBlock:
        for row in self.rows:
            if (row.block, row.part) == key:
                return row
        raise BlockNameError("plan", f"there is no {key!r}; expected (block, part) with a part of {', '.join(PARTS)}")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((row.block, row.part) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        """The rows as text; parts that differ in nothing stand in one row."""
        cells: list[tuple[str, ...]] = []
        for name, several in groupby(self.rows, key=lambda row: row.block):
            found: dict[tuple[str, ...], list[str]] = {}
            for row in several:
                key = row.method, f"{row.products:,}", checks.readable_size(row.bytes), row.reason
                found.setdefault(key, []).append(row.part)
            for what, parts in found.items():
                cells.append((name, "all" if len(parts) == len(PARTS) else ", ".join(parts), *what))
        return cells

    def __str__(self) -> str:
        lines = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = _HEAD.index("products"), _HEAD.index("memory")
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def __rich__(self) -> object:
        from rich.table import Table
        from rich.text import Text

        table = Table(*_HEAD)
        for cells in self._cells():
            table.add_row(*map(Text, cells))
        return table

    def _repr_html_(self) -> str:
        head = "".join(f"<th scope='col'>{word}</th>" for word in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in self._cells()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
