"""Tables for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from curvoscope.analysis import BlockRow


def off_diagonal_table(rows: Sequence[BlockRow]) -> Table:
    """The blocks above the diagonal, of weight matrices only: norm and median |entry|."""
    table = empty_table("Off-diagonal blocks of weight matrices", ("blocks", "part"), ("‖H‖F", "median"))
    chosen = [row for row in rows if not row.diagonal and is_matrix(row.row) and is_matrix(row.column)]
    for i, row in enumerate(chosen):
        table.add_row(
            f"{short(row.row)}, {short(row.column)}" if _first(chosen, i) else "",
            row.part,
            _number(row.frobenius_norm),
            _number(row.median_absolute),
            end_section=i + 1 == len(chosen) or _first(chosen, i + 1),
        )
    return table


def short(name: str) -> str:
    """A block's name in a table of 80 columns: "Q" for "h.0.attn.Q", "norm1 γ" for "h.0.norm1.gamma"."""
    name = name.removeprefix("h.0.").removeprefix("attn.").removeprefix("mlp.").replace("final_norm", "norm")
    return name.replace(".gamma", " γ").replace(".beta", " β")


def is_matrix(name: str) -> bool:
    """Whether a block is a weight matrix, neither a bias nor a norm."""
    role = name.rpartition(".")[2]
    return not role.startswith("b_") and role not in ("gamma", "beta")


def empty_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with columns of words on the left and columns of numbers on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)  # 80 columns hold the widest table
    for word in words:
        table.add_column(word, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _number(value: float, tolerance: float = 0.0) -> str:
    """Three digits; 0 for what is exactly zero, ~0 for what is zero to within the tolerance."""
    if value == 0:
        return "0"
    return "~0" if abs(value) <= tolerance else f"{value:.2e}"


def _first(rows: Sequence[BlockRow], i: int) -> bool:
    return i == 0 or (rows[i].row, rows[i].column) != (rows[i - 1].row, rows[i - 1].column)
