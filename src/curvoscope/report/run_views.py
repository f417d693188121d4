"""From the document of a run to what the interactive part of its page draws."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from curvoscope.blocks import layer_and_role
from curvoscope.estimate import Estimate
from curvoscope.operators.block_matrix import PARTS
from curvoscope.report.block_figures import OUTSIDE
from curvoscope.report.documents import (
    AuditDocument,
    Document,
    ModelAnalysis,
    Sensitivity,
    SpectrumDocument,
    SpectrumRow,
    SweepDocument,
    Training,
)
from curvoscope.report.training_figures import ROUNDING
from curvoscope.report.training_sections import records_of
from curvoscope.report.views import BlockView, CurveView, MapView, Number, RowView, RunView

NORM = "‖H‖F"
_MOST_CELLS = 45_000  # of heat maps with all digits, for the size of the page
_DIGITS = 5  # of cells beyond that


def view_of(found: Document) -> RunView | None:
    """The view of a run; None if it has no blocks of a model."""
    make = next((make for kind, make in _KINDS.items() if isinstance(found, kind)), None)
    view = None if make is None else make(found)
    return view if view is not None and view.rows else None


# ---- the kinds of runs


def _analyzed(found: ModelAnalysis) -> RunView:
    labels = {NORM: "frobenius_norm", "trace": "trace", "λ max": "largest_eigenvalue"}
    rows = [RowView(row.block, row.part, row.method, _numbers(row, labels)) for row in found.rows]
    blocks, maps = _blocks(rows), []
    for part in PARTS if found.pairs else ():
        norms = {(one.block, one.block): one.frobenius_norm for one in found.rows if one.part == part}
        for one in found.pairs:
            if one.part == part:
                norms[one.row, one.column] = norms[one.column, one.row] = one.frobenius_norm
        maps.append(_pairs(NORM, part, blocks, norms))
    return RunView(blocks, rows, _shortened(maps), _spectra(found.spectra), found.rounding)


def _swept(found: SweepDocument) -> RunView:
    labels = {NORM: "frobenius_norm", "trace": "trace", "effective rank": "effective_rank"}
    ends = {"λ max, lower bound": "lower", "λ max, upper bound": "upper"}
    rows = [
        RowView(one.block, "outer", "sweep", _numbers(one, labels) | _numbers(one.largest_eigenvalue, ends))
        for one in found.rows
    ]
    blocks, known, maps = _blocks(rows), found.pairs, []
    if known is not None:
        norms = {
            (row, column): Estimate(known.frobenius_norm[i][j], known.stderr[i][j], method="sweep")
            for i, row in enumerate(known.names)
            for j, column in enumerate(known.names)
        }
        maps.append(_pairs(NORM, "outer", blocks, norms))
    return RunView(blocks, rows, _shortened(maps))


def _audited(found: AuditDocument) -> RunView:
    labels = {"error": "error", "at best scale": "best_scale_error", "cosine": "cosine", "trace error": "trace_error"}
    rows = [RowView(row.block, row.approximation, "", _numbers(row, labels)) for row in found.rows]
    errors = {(row.block, row.approximation): row.best_scale_error for row in found.rows}
    names, blocks = list(dict.fromkeys(row.part for row in rows)), _blocks(rows)
    grid = _grid("error at best scale", "", "part", blocks, names, errors, logarithmic=False)
    return RunView(blocks, rows, [grid], zero=found.rounding, exponent=False)


def _with_spectra(found: SpectrumDocument) -> RunView:
    labels = {"λ max": "largest_eigenvalue", "λ min": "smallest_eigenvalue"}
    rows = [RowView(one.block, "", "", _numbers(one, labels)) for one in found.blocks]
    blocks, known = _blocks(rows), found.jensen_shannon
    apart = {
        (row, column): Estimate(known.distance[i][j])
        for i, row in enumerate(known.names)
        for j, column in enumerate(known.names)
    }
    maps = [_pairs("Jensen-Shannon distance", "", blocks, apart, logarithmic=False)]
    return RunView(blocks, rows, _shortened(maps), _spectra(found.blocks))


def _changed(found: Sensitivity) -> RunView:
    labels = {
        "first order": "first",
        "second order": "second",
        "alone, predicted": "alone",
        "alone, measured": "measured",
    }
    rows = [RowView(row.block, "", "", _numbers(row, labels)) for row in found.rows]
    return RunView(_blocks(rows), rows, exponent=False)


def _trained(found: Training) -> RunView:
    """The norms of the last measurement, and of all of them as maps and curves."""
    norms: dict[tuple[str, str], dict[int, Estimate]] = {}
    for record in records_of(found.records):
        for name, both in (record.details.blocks if record.details is not None else {}).items():
            for part in ("outer", "functional"):
                norms.setdefault((name, part), {})[record.step] = getattr(both, part)
    rows = [RowView(name, part, "", {NORM: _number(list(at.values())[-1])}) for (name, part), at in norms.items()]
    blocks, steps = _blocks(rows), sorted({step for at in norms.values() for step in at})
    maps = [
        _grid(
            *(NORM, part, "step", blocks, [str(step) for step in steps]),
            {(name, str(step)): one for (name, of), at in norms.items() if of == part for step, one in at.items()},
        )
        for part in dict.fromkeys(part for _, part in norms)
    ]
    curves = []
    for (name, part), at in norms.items():
        low, high = zip(*(one.interval() for one in at.values()), strict=True)
        values = [one.value for one in at.values()]
        curve = CurveView(name, part, f"{NORM} during training", "step", list(map(float, at)), values, [*low], [*high])
        curves.append(curve)
    largest = max((row.numbers[NORM][0] for row in rows), default=0.0)
    return RunView(blocks, rows, maps, curves, ROUNDING * largest, exponent=False)


_KINDS: dict[type, Callable[[Any], RunView]] = {
    ModelAnalysis: _analyzed,
    SweepDocument: _swept,
    AuditDocument: _audited,
    SpectrumDocument: _with_spectra,
    Sensitivity: _changed,
    Training: _trained,
}


# ---- their parts

Cells = Mapping[tuple[str, str], Estimate]


def _blocks(rows: Sequence[RowView]) -> list[BlockView]:
    names = dict.fromkeys(row.block for row in rows)
    return [BlockView(name, *(layer_and_role(name) or (OUTSIDE, name))) for name in names]


def _number(estimate: Estimate) -> Number:
    return estimate.value, estimate.stderr


def _numbers(row: object, labels: Mapping[str, str]) -> dict[str, Number]:
    """The attributes of a row that were measured, by their labels."""
    found = {label: getattr(row, name) for label, name in labels.items()}
    return {label: _number(one) for label, one in found.items() if one is not None}


def _pairs(title: str, part: str, blocks: Sequence[BlockView], cells: Cells, logarithmic: bool = True) -> MapView:
    """A symmetric map of all pairs of blocks."""
    places = [(row.name, column.name) for i, row in enumerate(blocks) for column in blocks[: i + 1]]
    return _map(title, part, "block", [], places, cells, logarithmic)


def _grid(
    title: str,
    part: str,
    axis: str,
    blocks: Sequence[BlockView],
    columns: list[str],
    cells: Cells,
    logarithmic: bool = True,
) -> MapView:
    places = [(row.name, column) for row in blocks for column in columns]
    return _map(title, part, axis, columns, places, cells, logarithmic)


def _map(
    title: str, part: str, axis: str, columns: list[str], places: Sequence[tuple[str, str]], cells: Cells, log: bool
) -> MapView:
    found = [cells.get(place) for place in places]
    values = [None if one is None else one.value for one in found]
    errors = [None if one is None else one.stderr for one in found]
    return MapView(title, part, axis, columns, values, errors, log)


def _shortened(maps: list[MapView]) -> list[MapView]:
    """With fewer digits if there are many cells."""
    if sum(len(one.values) for one in maps) <= _MOST_CELLS:
        return maps

    def short(numbers: list[float | None]) -> list[float | None]:
        return [None if number is None else float(f"{number:.{_DIGITS}g}") for number in numbers]

    return [dataclasses.replace(one, values=short(one.values), errors=short(one.errors)) for one in maps]


def _spectra(rows: Sequence[SpectrumRow]) -> list[CurveView]:
    """The shares of eigenvalues below λ."""
    return [
        CurveView(one.block, "total", "Share of eigenvalues below λ", "λ", found.x, found.value, found.low, found.high)
        for one in rows
        if (found := one.cumulative) is not None
    ]
