"""Several runs as one report: their numbers in one table with ratios, their other tables and figures side by side."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from curvoscope.estimate import Estimate
from curvoscope.report import cells
from curvoscope.report.contents import Cell, Report, Section, Table
from curvoscope.report.views import Number, RunView

_ABSENT = Cell("not in this run")
_TOTAL = "total"
_NAMED = 8  # blocks that a sentence lists


def side_by_side(reports: Mapping[str, Report]) -> Report:
    """The report of several runs, by their labels.

    Blocks are matched by name: of those that a run does not have, its cells say so. A ratio is that to the first run,
    and its standard error that of independent estimates.
    """
    views = [dataclasses.replace(view, label=label) for label, report in reports.items() for view in report.views]
    views = _in_parts(views)
    versions = {
        (name if len(found) == 1 else f"{label} {name}"): version
        for label, report in reports.items()
        for name, version in report.versions.items()
        if (found := {one.versions.get(name) for one in reports.values()})
    }
    seeds = {report.seed for report in reports.values()}
    *others, last = reports
    names = f"{', '.join(others)} and {last}" if others else last
    return Report(
        title=f"{names}, side by side",
        question=f"What differs between {names}?",
        answer=_answer(views),
        about=[f"{label}: {' '.join((f'{report.title}.', *report.about))}" for label, report in reports.items()],
        sections=[*_numbers(views), *_others(reports, views)],
        advice=[
            dataclasses.replace(one, subject=f"{label}, {one.subject}")
            for label, report in reports.items()
            for one in report.advice
        ],
        command="\n".join(report.command for report in reports.values() if report.command is not None) or None,
        versions=versions,
        seed=seeds.pop() if len(seeds) == 1 else None,
        missing=[f"{label}: {line}" for label, report in reports.items() for line in report.missing],
        views=views,
    )


def _in_parts(views: list[RunView]) -> list[RunView]:
    """With the name of the total in runs that have no other part (spectra), if another run has parts."""
    if not any(row.part == _TOTAL for view in views for row in view.rows):
        return views
    return [
        view
        if any(row.part for row in view.rows)
        else dataclasses.replace(
            view,
            rows=[dataclasses.replace(row, part=_TOTAL) for row in view.rows],
            maps=[dataclasses.replace(one, part=_TOTAL) for one in view.maps],
        )
        for view in views
    ]


def _answer(views: Sequence[RunView]) -> str:
    """How much the first quantity differs, in the blocks and parts that runs have in common."""
    sentences = []
    for view in views[1:]:
        label = next(iter(view.rows[0].numbers))
        old = {(row.block, row.part): row.numbers.get(label) for row in views[0].rows}
        new = {(row.block, row.part): row.numbers.get(label) for row in view.rows}
        pairs = [(new[key], old.get(key)) for key in new]
        ratios = [one.value for pair in pairs if (one := _ratio(*pair, max(view.zero, views[0].zero))) is not None]
        if not ratios:
            sentences.append(f"{view.label} and {views[0].label} have no {label} of the same block and part.")
            continue
        low, high = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
        if low == high == "1":
            sentences.append(f"{label} in {view.label} is that in {views[0].label} ({len(ratios)} blocks and parts).")
            continue
        sentences.append(
            f"{label} in {view.label} is {low} to {high} times that in {views[0].label} (median "
            f"{statistics.median(ratios):.3g}, of {len(ratios)} blocks and parts in both)."
        )
    return " ".join(sentences) or "The runs have no blocks of a model in common."


def _numbers(views: Sequence[RunView]) -> Iterator[Section]:
    """One table for each quantity; the first has all blocks of all runs."""
    if not views:
        return
    rows = [{(row.block, row.part): row.numbers for row in view.rows} for view in views]
    keys = list(dict.fromkeys(key for one in rows for key in one))
    tables: list[Table] = []
    for label in dict.fromkeys(label for one in rows for numbers in one.values() for label in numbers):
        chosen = [i for i, one in enumerate(rows) if any(label in numbers for numbers in one.values())]
        known = keys if not tables else [key for key in keys if any(label in rows[i].get(key, {}) for i in chosen)]
        first = views[chosen[0]].label
        columns = [views[chosen[0]].label]
        for i in chosen[1:]:
            columns += [views[i].label, f"{views[i].label} / {first}"]
        lines = [
            (Cell(block), Cell(part), *_line(label, (block, part), [(views[i], rows[i]) for i in chosen]))
            for block, part in known
        ]
        caption = f"{label}: ± standard error in percent; ratios to {first} with the error of independent estimates"
        tables.append(Table(caption, ("block", "part", *columns), 2, lines, folded=bool(tables)))
    yield Section("Blocks, side by side", _absent(views), tables, explored=True)


def _line(
    label: str, key: tuple[str, str], runs: Sequence[tuple[RunView, Mapping[tuple[str, str], dict[str, Number]]]]
) -> Iterator[Cell]:
    old, zero = runs[0][1].get(key, {}).get(label), runs[0][0].zero
    for place, (view, rows) in enumerate(runs):
        found = rows.get(key, {}).get(label)
        if found is None:
            yield Cell("") if any(block.name == key[0] for block in view.blocks) else _ABSENT
        else:
            write = cells.estimated if view.exponent else cells.measured
            yield write(Estimate(*found, method="stored" if found[1] else "exact"), view.zero)
        if place:
            yield cells.measured(_ratio(found, old, max(zero, view.zero)))


def _ratio(new: Number | None, old: Number | None, zero: float) -> Estimate | None:
    """new / old, with the standard error of independent estimates; None if one of them is zero or not known."""
    if new is None or old is None or min(abs(new[0]), abs(old[0])) <= zero:
        return None
    value = new[0] / old[0]
    return Estimate(value, abs(value) * math.hypot(new[1] / new[0], old[1] / old[0]), method="ratio")


def _absent(views: Sequence[RunView]) -> str:
    """Which blocks a run does not have."""
    names = list(dict.fromkeys(block.name for view in views for block in view.blocks))
    sentences = []
    for view in views:
        missing = [name for name in names if name not in {block.name for block in view.blocks}]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            sentences.append(f"{view.label} does not have {', '.join(missing[:_NAMED])}{more}.")
    return " ".join(sentences)


def _others(reports: Mapping[str, Report], views: Sequence[RunView]) -> Iterator[Section]:
    """Sections of the same title as one, with the tables folded, except those whose numbers are all side by side."""
    shown = {label for view in views for row in view.rows for label in row.numbers}
    for title in dict.fromkeys(section.title for report in reports.values() for section in report.sections):
        found = [(label, one) for label, report in reports.items() for one in report.sections if one.title == title]
        tables = [
            dataclasses.replace(table, caption=f"{label}: {table.caption}", folded=True)
            for label, section in found
            for table in section.tables
            if not section.explored or set(table.columns[table.words :]) - shown
        ]
        figures = [
            dataclasses.replace(one, file=f"{label}/{one.file}", caption=f"{label}: {one.caption}")
            for label, section in found
            for one in section.figures
        ]
        if tables or figures:
            yield Section(title, found[0][1].text, tables, figures)
