"""The sections of a report: which tables and which figures a document has, by subject."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from curvoscope.analysis.audit_table import AuditRow, named
from curvoscope.report import cells
from curvoscope.report.captions import CAPTIONS
from curvoscope.report.contents import Cell, ReportFigure, Section, Table
from curvoscope.report.documents import (
    AuditDocument,
    Document,
    ModelAnalysis,
    PerLayer,
    Reproduction,
    Sensitivity,
    SpectrumDocument,
    SweepDocument,
    SweptBlock,
    Training,
    Whole,
)
from curvoscope.report.reproduction_sections import reproduction
from curvoscope.report.sensitivity_sections import sensitivity
from curvoscope.report.training_sections import training

Files = Mapping[str, bytes]
_MOST_PAIRS = 600  # rows of a table, for the size of the page


def sections_of(found: Document, files: Files) -> Iterator[Section]:
    """Subject by subject; one that has neither tables nor figures was not measured."""
    make = next(make for kind, make in _KINDS.items() if isinstance(found, kind))
    return make(found, lambda *names, told=None: _figures(files, names, told))


def _figures(files: Files, names: Sequence[str], told: tuple[str, str] | None) -> list[ReportFigure]:
    """The figures that exist, with captions and texts for screen readers."""
    return [
        ReportFigure(f"{name}.png", files.get(f"{name}.png"), files.get(f"{name}.svg"), *(told or CAPTIONS[name]))
        for name in names
        if f"{name}.png" in files or f"{name}.svg" in files
    ]


FigureSource = Callable[..., list[ReportFigure]]


# ---- analyze


def _dense(found: ModelAnalysis, figures: FigureSource) -> Section:
    diagonal = [
        (
            Cell(row.row),
            Cell(row.part),
            cells.plain(row.frobenius_norm),
            cells.plain(row.trace),
            cells.plain(row.largest_eigenvalue, row.eigenvalue_tolerance),
            cells.plain(row.smallest_eigenvalue, row.eigenvalue_tolerance),
            cells.share(row.negative_share),
            cells.plain(row.median_absolute),
        )
        for row in found.dense
        if row.diagonal
    ]
    others = [
        (Cell(row.row), Cell(row.column), Cell(row.part), *map(cells.plain, (row.frobenius_norm, row.median_absolute)))
        for row in found.dense
        if not row.diagonal
    ]
    numbers = ("‖H‖F", "trace", "λ max", "λ min", "λ < 0", "median |entry|")
    note = "exact to rounding; ~0 within the error of the eigenvalue solver"
    columns = ("block", "with", "part", "‖H‖F", "median |entry|")
    tables = [
        Table(f"Diagonal blocks: {note}", ("block", "part", *numbers), 2, diagonal),
        Table("Pairs of blocks: exact to rounding", columns, 3, others, folded=True),
    ]
    shown = [table for table in tables if table.rows]
    return Section("All entries of the Hessian", found.verdict or "", shown, figures("hessian", "densities"))


def _blocks(found: ModelAnalysis, figures: FigureSource) -> Iterator[Section]:
    rows = [
        (
            Cell(row.block),
            Cell(row.part),
            Cell(row.method),
            *(cells.estimated(one, found.rounding) for one in (row.frobenius_norm, row.trace, row.largest_eigenvalue)),
        )
        for row in found.rows
    ]
    caption = "Blocks of the Hessian: ± standard error in percent, ~0 up to rounding"
    table = Table(caption, ("block", "part", "by", "‖H‖F", "trace", "λ max"), 3, rows)
    yield Section("Blocks of the Hessian", tables=[table], figures=figures("norms"), explored=True)
    yield Section("The whole Hessian", tables=[_whole(found.hessian)])
    shown = sorted(found.pairs, key=lambda one: -one.frobenius_norm.value)[:_MOST_PAIRS]
    pairs = [
        (Cell(one.row), Cell(one.column), Cell(one.part), cells.estimated(one.frobenius_norm, found.rounding))
        for one in (found.pairs if len(found.pairs) <= _MOST_PAIRS else shown)
    ]
    caption = "Off-diagonal blocks: by random vectors, ± standard error in percent"
    if len(found.pairs) > _MOST_PAIRS:
        caption += f"; the {_MOST_PAIRS} largest of {len(found.pairs):,} (all are in table.json)"
    folded = Table(caption, ("block", "with", "part", "‖H‖F"), 3, pairs, folded=True)
    yield Section("Heat map of the norms", tables=[folded] if pairs else [], figures=figures("pairs", "heat_map"))
    entries = [
        (
            Cell(one.block),
            Cell(one.part),
            cells.plain(one.median),
            cells.count(one.zeros),
            cells.count(one.entries),
            cells.count(one.columns),
            cells.count(one.size),
        )
        for one in found.histograms
    ]
    columns = ("block", "part", "median |entry|", "exact zeros", "entries", "in columns", "of columns")
    table = Table("Entries counted by the histograms", columns, 2, entries)
    yield Section("Histograms of the entries", tables=[table] if entries else [], figures=figures("histograms"))
    yield _dense(found, figures)
    yield from _layers(found, figures)


def _swept(found: SweepDocument, figures: FigureSource) -> Iterator[Section]:
    def line(one: SweptBlock) -> tuple[Cell, ...]:
        numbers = (one.frobenius_norm, one.trace, one.effective_rank)
        bounds = (one.largest_eigenvalue.lower, one.largest_eigenvalue.upper)
        return (Cell(one.head or one.block), *(cells.estimated(number, 0.0) for number in (*numbers, *bounds)))

    columns = ("block", "‖H‖F", "trace", "effective rank", "λ max, lower bound", "λ max, upper bound")
    caption = f"Gauss-Newton part of the blocks, from {found.samples} samples: ± standard error in percent"
    table = Table(caption, columns, 1, [line(one) for one in found.rows])
    yield Section("Blocks", tables=[table], figures=figures("sweep_pairs", "sweep_depth"), explored=True)
    heads = Table(
        "Gauss-Newton part of the heads", ("head", *columns[1:]), 1, list(map(line, found.heads)), folded=True
    )
    yield Section("Heads", tables=[heads] if found.heads else [], figures=figures("sweep_heads"))
    if found.hessian is not None:
        row = (Cell("λ max"), cells.estimated(found.hessian.largest_eigenvalue, 0.0))
        yield Section(
            "The whole Hessian",
            tables=[Table("By Lanczos: ± standard error in percent", ("number", "value"), 1, [row])],
        )


# ---- audit


_AUDITED = {
    "error": "error",
    "at best scale": "best_scale_error",
    "cosine": "cosine",
    "trace error": "trace_error",
    "λ max error": "eigenvalue_error",
    "step": "step_error",
    "decrease": "decrease",
}


def _approximated(caption: str, rows: Sequence[AuditRow], rounding: float) -> Table:
    """One row per block and approximation, without columns that no row has."""
    known = {title: field for title, field in _AUDITED.items() if any(getattr(one, field) is not None for one in rows)}

    def line(one: AuditRow) -> tuple[Cell, ...]:
        numbers = (cells.measured(getattr(one, field), rounding) for field in known.values())
        return Cell(named(one.block)), Cell(one.approximation), *numbers, cells.count(one.floats)

    return Table(caption, ("block", "approximation", *known, "floats"), 2, list(map(line, rows)))


def _audited(found: AuditDocument, figures: FigureSource) -> Iterator[Section]:
    sampled = f"from {found.samples} samples, ± standard error in percent"
    how = "exact, ~0 up to rounding" if found.samples is None else sampled
    text = "The error is |H - A| / |H| in the Frobenius norm, at best scale |H - sA| / |H| for the best number s. "
    if found.samples is None:
        text += (
            "The errors of the trace and of λ max are relative. The step is the relative error of (A + d)⁻¹g against "
            "(H + d)⁻¹g for gradients g with covariance H. The decrease is that of the quadratic model with this step, "
            "as a share of the largest possible one."
        )
    else:
        text += "The error of the trace is relative."
    table = _approximated(f"Approximations A of the blocks H, {how}", found.rows, found.rounding)
    yield Section("Approximations", text, [table], figures("audit_errors", "audit_depth"), explored=True)
    text = (
        "Q, K and V of a layer as one weight, with one block H. kfac and kronecker:1 are one product for all three, "
        "kfac/layers and kronecker:1/layers one for each. layers keeps the three diagonal blocks exactly and drops the "
        "blocks between them."
    )
    table = _approximated(f"Approximations of groups of weights, {how}", found.groups, found.rounding)
    yield Section("Q, K and V as one weight", text, [table] if found.groups else [])
    if found.outside_diagonal_blocks is not None:
        row = (Cell("|H - blockdiag(H)| / |H|"), cells.measured(found.outside_diagonal_blocks))
        table = Table("What all diagonal blocks together miss", ("number", "value"), 1, [row])
        yield Section("Outside of the diagonal blocks", tables=[table])


# ---- spectrum


def _spectra(found: SpectrumDocument, figures: FigureSource) -> Iterator[Section]:
    rows = [
        (
            Cell(one.block),
            cells.count(one.size),
            cells.estimated(one.smallest_eigenvalue, one.near_zero),
            *(cells.resolved(one.quantiles.get(share)) for share in ("0.05", "0.5", "0.95")),
            cells.estimated(one.largest_eigenvalue, one.near_zero),
            cells.share(one.negative_share.value, one.negative_share.stderr),
            cells.share(one.near_zero_share.value, one.near_zero_share.stderr),
            cells.plain(one.near_zero),
        )
        for one in found.blocks
    ]
    columns = ("block", "size", "λ min", "5 %", "median", "95 %", "λ max", "λ < 0", "near 0", "|λ| ≤")
    caption = "Eigenvalues of the blocks: ± standard error in percent; ~0 if too small to be resolved"
    table = Table(caption, columns, 1, rows)
    yield Section("Spectra by block", tables=[table], figures=figures("densities"), explored=True)
    yield Section("The whole Hessian", tables=[_whole(found.hessian)])
    known = found.jensen_shannon
    pairs = [
        (
            Cell(known.names[i]),
            Cell(known.names[j]),
            *(cells.plain(table[i][j]) for table in (known.distance, known.threshold)),
        )
        for i in range(len(known.names))
        for j in range(i)
    ]
    caption = "Lower bounds on Jensen-Shannon distances between spectra, of eigenvalues above the threshold"
    folded = Table(caption, ("block", "with", "distance", "threshold"), 2, pairs, folded=True)
    yield Section("Distances between the spectra", tables=[folded] if pairs else [], figures=figures("distances"))
    yield from _layers(found, figures)


# ---- what several commands measure


def _layers(found: PerLayer, figures: FigureSource) -> Iterator[Section]:
    heads = [
        (
            Cell(one.layer),
            Cell(str(one.head)),
            *map(cells.measured, (one.entropy, one.first, one.second, one.third)),
        )
        for one in found.attention
    ]
    columns = ("layer", "head", "entropy", "|M1|²/x²", "tr M2/x²", "|M3|F/x³")
    caption = "Attention moments by head: means over rows, ± standard error over sequences in percent"
    text = (
        "M1, M2 and M3 are the mean, the covariance and the third central moment of a layer's inputs under an "
        "attention row, x² the mean square of the inputs. The value block depends on M1, the query and key blocks on "
        "M2 and M3. The entropy is in nats, and zero if a row attends to one token only."
    )
    table = Table(caption, columns, 2, heads)
    yield Section("Attention moments by head", text, [table] if heads else [], figures("heads"))
    depth = [
        (
            Cell(one.layer),
            *map(cells.estimated, (one.spectral, one.functional_spectral, one.jacobian, one.largest_block)),
        )
        for one in found.depth
    ]
    numbers = ("‖S‖₂", "‖S functional‖₂", "‖∂F/∂X‖₂", "largest block ‖H‖F")
    caption = "Curvature at the output of each layer, from input to output: ± error in percent"
    text = (
        "S is the Hessian of the loss with respect to the output of a layer. A layer with the Jacobian J = ∂F/∂X "
        "passes JᵀSJ to its input and adds its own curvature, the functional part."
    )
    table = Table(caption, ("layer", *numbers), 1, depth)
    yield Section("Curvature through depth", text, [table] if depth else [], figures("depth"))


def _whole(whole: Whole) -> Table:
    rate = whole.critical_learning_rate
    rows = [
        (Cell("λ max"), cells.estimated(whole.largest_eigenvalue)),
        (Cell("λ min"), cells.estimated(whole.smallest_eigenvalue)),
        (
            Cell("2/λ max, the critical learning rate"),
            Cell("none: λ max ≤ 0") if rate is None else cells.estimated(rate),
        ),
    ]
    caption = f"The whole Hessian, {whole.parameters:,} parameters: by Lanczos, ± standard error in percent"
    return Table(caption, ("quantity", "value"), 1, rows)


_KINDS: dict[type, Callable[[Any, FigureSource], Iterator[Section]]] = {
    ModelAnalysis: _blocks,
    SweepDocument: _swept,
    AuditDocument: _audited,
    SpectrumDocument: _spectra,
    Training: training,
    Reproduction: reproduction,
    Sensitivity: sensitivity,
}
