"""The sections of a report on what a change of the weights costs."""

from collections.abc import Callable, Iterator

from curvoscope.report import cells
from curvoscope.report.contents import Cell, ReportFigure, Section, Table
from curvoscope.report.documents import Sensitivity

_MOST_PAIRS = 300  # rows of a table, for the size of the page


def sensitivity(found: Sensitivity, figures: Callable[..., list[ReportFigure]]) -> Iterator[Section]:
    """The whole change, the blocks, the pairs, the scores that rank them, the formats for a budget."""
    whole = [
        (Cell(f"{one.scale:g} δ"), *map(cells.measured, (one.predicted, one.measured, one.remainder)))
        for one in found.scaled
    ]
    caption = "Change of the loss: ± standard error over sequences in percent; the remainder is of third order"
    table = Table(caption, ("change", "predicted", "measured", "remainder"), 1, whole)
    yield Section("The whole change", tables=[table])
    with_pairs = any(row.alone is not None for row in found.rows)
    rows = [
        (
            Cell(row.block),
            cells.short(row.relative),
            *map(cells.measured, (row.first, row.outer, row.functional, row.second)),
            cells.share(row.share),
            *map(cells.measured, (row.alone, row.measured) if with_pairs else ()),
        )
        for row in found.rows
    ]
    columns = (
        *("block", "|d|/|w|", "first order", "second, outer", "second, functional", "second order", "share"),
        *(("alone, predicted", "alone, measured") if with_pairs else ()),
    )
    caption = "What each block contributes, interactions included"
    if with_pairs:
        caption += ", and the cost of changing it alone"
    table = Table(caption, columns, 1, rows)
    yield Section("Blocks", tables=[table], figures=figures("ranking", "prediction"), explored=True)
    largest = sorted(found.pairs, key=lambda one: -abs(one.second.value))[:_MOST_PAIRS]
    pairs = [(Cell(one.row), Cell(one.column), cells.measured(one.second)) for one in largest]
    caption = "Interactions of two blocks, ½ d·H d'; each counts in the rows of both blocks"
    if len(found.pairs) > _MOST_PAIRS:
        caption += f"; the {_MOST_PAIRS} largest of {len(found.pairs):,} (all are in sensitivity.json)"
    folded = Table(caption, ("block", "with", "interaction"), 2, pairs, folded=True)
    yield Section("Interactions", tables=[folded] if pairs else [], figures=figures("interactions"))
    ranks = [(Cell(one.score), cells.measured(one.correlation)) for one in found.ranks]
    caption = "Rank correlation of a score with the measured change of each block alone"
    yield Section(
        "Which score ranks the blocks?", tables=[Table(caption, ("score", "Spearman"), 1, ranks)] if ranks else []
    )
    options = [
        (Cell(one.by), cells.short(one.bits), cells.plain(one.predicted), cells.measured(one.measured))
        for one in found.allocations
    ]
    caption = f"Formats for {found.budget:g} bits per weight" if found.budget else "Formats"
    chosen = Table(caption, ("chosen by", "bits", "predicted", "measured change"), 1, options)
    formats = [(Cell(one.block), Cell(one.format)) for one in found.formats]
    listed = Table("Formats chosen by ½ d·Hd with interactions", ("block", "format"), 2, formats, folded=True)
    yield Section("Formats for a budget", tables=[chosen, listed] if options else [])
