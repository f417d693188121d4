"""Tables of text, which show themselves in print, in a terminal with rich and in a notebook."""

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """Rows of words under a header; the first word of a row names it. `right`: columns whose words end at the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: Collection[str] = ()

    def lines(self) -> list[str]:
        """The header and the rows, in columns of equal width."""
        all_rows = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
        aligned = [str.rjust if name in self.right else str.ljust for name in self.header]
        return [
            "  ".join(align(cell, n) for align, cell, n in zip(aligned, row, widths, strict=True)).rstrip()
            for row in all_rows
        ]

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lines()] if self.title else self.lines())

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for name in self.header:  # what is too long for a narrow terminal is broken, not cut off
            table.add_column(name, justify="right" if name in self.right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(Text(self.title), table) if self.title else table

    def _repr_html_(self) -> str:
        def line(first: str, more: Sequence[str]) -> str:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in more)
            return f"<tr><th scope='row'>{html.escape(first)}</th>{cells}</tr>"

        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in self.header)
        body = "".join(line(first, more) for first, *more in self.rows)
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class ShownAsTable:
    """What a terminal with rich and a notebook show as a table."""

    def _shown(self) -> TextTable:
        raise NotImplementedError

    def __rich__(self) -> object:
        return self._shown().__rich__()

    def _repr_html_(self) -> str:
        return self._shown()._repr_html_()
