"""What a report says, read from the JSON document of a run: the same for HTML, Markdown, notebooks and terminals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from curvoscope.analysis.advice import Advice
from curvoscope.errors import CurvoscopeError
from curvoscope.report.tables import empty_table
from curvoscope.report.views import RunView


class ReportError(CurvoscopeError, ValueError):
    """A run that cannot be read: missing, truncated, failed, or of another kind."""


# ---- what a reader sees


@dataclass(frozen=True)
class Cell:
    """A word, or a number in short form with the value and standard error behind it."""

    text: str
    value: float | None = None
    stderr: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first `words` columns are words, and the first one names the row. `folded`: long, and seldom
    read."""

    caption: str
    columns: tuple[str, ...]
    words: int
    rows: Sequence[tuple[Cell, ...]]
    folded: bool = False


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the run: the name of its PNG file, its caption, and a text for screen readers."""

    file: str
    png: bytes | None
    svg: bytes | None
    caption: str
    alt: str


@dataclass(frozen=True)
class Section:
    """A subject: a paragraph or none, tables and figures. `explored`: its first table is the one that the interactive
    part of a page filters, beside its heat map."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[ReportFigure] = ()
    explored: bool = False


@dataclass(frozen=True)
class Report:
    """A run in words, tables and figures, with the command that repeats it.

    `missing`: what was not measured, and why, one sentence each. `command` is None if the run does not tell it.
    `views`: what the interactive part of a page draws, one for each run that has blocks.
    """

    title: str
    question: str
    answer: str
    about: list[str]
    sections: list[Section]
    advice: list[Advice]
    command: str | None
    versions: dict[str, str]
    seed: int | None = None
    missing: list[str] = field(default_factory=list)
    views: list[RunView] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        """Those of all sections."""
        return [table for section in self.sections for table in section.tables]

    def html(self) -> str:
        """One page that needs no other file."""
        from curvoscope.report.html import page

        return page(self)

    def markdown(self) -> str:
        """The same as text; the figures are the files next to it."""
        from curvoscope.report.markdown import page

        return page(self)

    def _repr_html_(self) -> str:
        from curvoscope.report.html import fragment

        return fragment(self)

    def __rich__(self) -> Group:
        tables = [table for table in self.tables if not table.folded]
        return Group(Text(self.question, style="bold"), Text(self.answer + "\n"), *map(_rich_table, tables))


def _rich_table(table: Table) -> Any:
    shown = empty_table(table.caption, table.columns[: table.words], table.columns[table.words :])
    for row in table.rows:
        shown.add_row(*(Text(cell.text) for cell in row))
    return shown


# ---- from the document to the report


def report_of(document: str | bytes, files: Mapping[str, bytes]) -> Report:
    """The report of a run, from its JSON and its figures by name: PNG, and SVG if there is one."""
    from pydantic import TypeAdapter, ValidationError

    from curvoscope.report.documents import Document
    from curvoscope.report.run_views import view_of
    from curvoscope.report.sections import sections_of

    adapter: TypeAdapter[Any] = TypeAdapter(Document)
    try:
        found = adapter.validate_json(document)
    except ValidationError as error:
        raise ReportError("RUN", _reason(error.errors(include_url=False))) from None
    sections = [section for section in sections_of(found, files) if section.tables or section.figures]
    view = view_of(found)
    return Report(
        found.title,
        found.question,
        found.answer,
        found.about,
        sections,
        found.advice,
        found.command,
        found.versions,
        found.seed,
        found.missing,
        [] if view is None else [view],
    )


def _reason(errors: Sequence[Any]) -> str:
    if errors[0]["type"] == "json_invalid":
        return f"is not a complete JSON document ({errors[0]['ctx']['error']}); run its command again"
    return "is not a document of analyze, audit, spectrum, sensitivity, watch or reproduce; run one of these again"
