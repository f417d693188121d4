"""What a report says, read from the JSON document of a run: the same for HTML, Markdown, notebooks and terminals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from curvoscope.analysis.advice import Advice
from curvoscope.errors import CurvoscopeError
from curvoscope.estimate import Estimate
from curvoscope.report.documents import Blocks, Pairs, Spectra, Whole
from curvoscope.report.model_tables import with_error
from curvoscope.report.tables import empty_table


class ReportError(CurvoscopeError, ValueError):
    """A run that cannot be read: missing, truncated, or of another kind."""


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
class Figure:
    """A PNG file of the run, what it shows, and the same for those who do not see it."""

    file: str
    png: bytes
    caption: str
    alt: str


@dataclass(frozen=True)
class Report:
    """A run in words, tables and figures, with the command that repeats it."""

    title: str
    question: str
    answer: str
    about: list[str]
    tables: list[Table]
    figures: list[Figure]
    advice: list[Advice]
    command: str
    versions: dict[str, str]

    def html(self) -> str:
        """One page that needs no other file."""
        from curvoscope.report.html import page

        return page(self)

    def markdown(self) -> str:
        """The same as text; the figures are the files beside it."""
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


def report_of(document: str | bytes, figures: Mapping[str, bytes]) -> Report:
    """The report of a run, from its JSON and its PNG files by name."""
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Pairs | Blocks | Spectra] = TypeAdapter(Pairs | Blocks | Spectra)
    try:
        found = adapter.validate_json(document)
    except ValidationError as error:
        raise ReportError("RUN", _reason(error.errors(include_url=False))) from None
    tables = next(make(found) for kind, make in _TABLES.items() if isinstance(found, kind))
    shown = [Figure(name, figures[name], *words) for name, words in _FIGURES.items() if name in figures]
    return Report(
        found.title,
        found.question,
        found.answer,
        found.about,
        tables,
        shown,
        found.advice,
        found.command,
        found.versions,
    )


def _reason(errors: Sequence[Any]) -> str:
    if errors[0]["type"] == "json_invalid":
        return f"is no whole JSON document ({errors[0]['ctx']['error']}); run its command again"
    return "is of another kind than the documents of analyze and spectrum; run one of these commands again"


# ---- tables


def _pairs(found: Pairs) -> list[Table]:
    diagonal = [
        (
            Cell(row.row),
            Cell(row.part),
            _plain(row.frobenius_norm),
            _plain(row.trace),
            _plain(row.largest_eigenvalue, row.eigenvalue_tolerance),
            _plain(row.smallest_eigenvalue, row.eigenvalue_tolerance),
            _share(row.negative_share),
            _plain(row.median_absolute),
        )
        for row in found.rows
        if row.diagonal
    ]
    others = [
        (Cell(row.row), Cell(row.column), Cell(row.part), _plain(row.frobenius_norm), _plain(row.median_absolute))
        for row in found.rows
        if not row.diagonal
    ]
    numbers = ("‖H‖F", "trace", "λ max", "λ min", "λ < 0", "median |entry|")
    note = "exact to rounding; ~0 within the error of the eigenvalue solver"
    return [
        Table(f"Diagonal blocks: {note}", ("block", "part", *numbers), 2, diagonal),
        Table(
            "Off-diagonal blocks: exact to rounding",
            ("block", "with", "part", "‖H‖F", "median |entry|"),
            3,
            others,
            folded=True,
        ),
    ]


def _blocks(found: Blocks) -> list[Table]:
    rows = [
        (
            Cell(row.block),
            Cell(row.part),
            Cell(row.method),
            *(_number(one, found.rounding) for one in (row.frobenius_norm, row.trace, row.largest_eigenvalue)),
        )
        for row in found.rows
    ]
    caption = "Blocks of the Hessian: ± standard error in percent (of λ max: residual), ~0 up to rounding"
    return [Table(caption, ("block", "part", "by", "‖H‖F", "trace", "λ max"), 3, rows), _whole(found.hessian)]


def _spectra(found: Spectra) -> list[Table]:
    rows = [
        (
            Cell(one.block),
            Cell(f"{one.size:,}", float(one.size)),
            _number(one.smallest_eigenvalue, one.near_zero),
            *(_quantile(one.quantiles.get(share)) for share in ("0.05", "0.5", "0.95")),
            _number(one.largest_eigenvalue, one.near_zero),
            _share(one.negative_share.value, one.negative_share.stderr),
            _share(one.near_zero_share.value, one.near_zero_share.stderr),
            _plain(one.near_zero),
        )
        for one in found.blocks
    ]
    columns = ("block", "size", "λ min", "5 %", "median", "95 %", "λ max", "λ < 0", "near 0", "|λ| ≤")
    known = found.jensen_shannon
    pairs = [
        (
            Cell(known.names[i]),
            Cell(known.names[j]),
            *(_plain(table[i][j]) for table in (known.distance, known.threshold)),
        )
        for i in range(len(known.names))
        for j in range(i)
    ]
    return [
        Table("Eigenvalues of the blocks: ± residual in percent; ~0 where too small to be resolved", columns, 1, rows),
        _whole(found.hessian),
        Table(
            "Jensen-Shannon distances between spectra, at least, of eigenvalues larger than the threshold",
            ("block", "with", "distance", "threshold"),
            2,
            pairs,
            folded=True,
        ),
    ]


def _whole(whole: Whole) -> Table:
    rate = whole.critical_learning_rate
    rows = [
        (Cell("λ max"), _number(whole.largest_eigenvalue)),
        (Cell("λ min"), _number(whole.smallest_eigenvalue)),
        (Cell("2/λ max, the critical learning rate"), Cell("none: λ max ≤ 0") if rate is None else _number(rate)),
    ]
    caption = f"The whole Hessian, {whole.parameters:,} parameters: by Lanczos, ± residual in percent"
    return Table(caption, ("quantity", "value"), 1, rows)


def _number(estimate: Estimate, zero: float = 0.0) -> Cell:
    text = "~0" if 0 < abs(estimate.value) <= zero else with_error(estimate)
    return Cell(text, estimate.value, estimate.stderr)


def _plain(value: float | None, tolerance: float | None = None) -> Cell:
    if value is None:
        return Cell("")
    zero = tolerance is not None and 0 < abs(value) <= tolerance
    return Cell("~0" if zero else f"{value:.2e}" if value else "0", value, tolerance)


def _quantile(value: float | None) -> Cell:
    """None: among the eigenvalues too small to be resolved."""
    return Cell("~0") if value is None else _plain(value)


def _share(value: float | None, stderr: float | None = None) -> Cell:
    if value is None:
        return Cell("")
    return Cell(f"{value:.1%} ±{stderr:.1%}" if stderr else f"{value:.1%}", value, stderr)


_TABLES: dict[type, Callable[[Any], list[Table]]] = {Pairs: _pairs, Blocks: _blocks, Spectra: _spectra}

_FIGURES = {
    "norms.png": (
        "Frobenius norm of every block, outer part, functional part and their sum, with 95 % intervals.",
        "Dot plot of the norms on one logarithmic axis, a panel a layer; all numbers are in the table of blocks.",
    ),
    "densities.png": (
        "Spectral density of every block: share of eigenvalues a decade, negative ones on the left, with 95 % bands.",
        "Curves of the densities in small panels, a row a layer; their quantiles are in the table of eigenvalues.",
    ),
    "distances.png": (
        "Jensen-Shannon distances between the spectra of all pairs of blocks.",
        "Heat map of the distances from 0 to 1; all numbers are in the table of distances.",
    ),
    "heat_map.png": (
        "Frobenius norms of the blocks as a heat map: outer part, functional part and their sum on one scale.",
        "Heat map with a panel for each part; all numbers are in the tables of blocks.",
    ),
    "hessian.png": (
        "The Hessian entry by entry, log10 of the size, with the borders of the blocks; exact zeros are grey.",
        "Picture of the matrix; the norm and the median entry of each block are in the tables of blocks.",
    ),
    "histograms.png": (
        "Histograms of the entries of the query block and of the value block, by part.",
        "Two histograms of log10 of the size of the entries; the medians are in the table of diagonal blocks.",
    ),
}
