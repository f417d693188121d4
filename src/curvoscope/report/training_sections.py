"""The sections of the report of a watched training run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from curvoscope.report import cells
from curvoscope.report.contents import Cell, ReportError, ReportFigure, Section, Table
from curvoscope.report.documents import Training
from curvoscope.report.training_figures import ROUNDING, stepped
from curvoscope.training.records import Record
from curvoscope.training.updates import BlockUpdate

_SHOWN = 40  # measurements beyond which their table is folded


def training(found: Training, figures: Callable[..., list[ReportFigure]]) -> Iterator[Section]:
    """Measurements, the optimizer's step, blocks, attention, and what kept the monitor from measuring."""
    records = records_of(found.records)
    yield Section("Sharpness and the edge", tables=[_measurements(records)], figures=figures("watch", "trace"))
    yield Section("The optimizer's step", tables=_steps(records), figures=figures("updates"))
    yield Section("Blocks", tables=_blocks(records), figures=figures("blocks"), explored=True)
    attention = [
        (Cell(layer), *(cells.short(value) for value in (before.entropy, now.entropy, before.variance, now.variance)))
        for layer, before in records[0].attention.items()
        if (now := records[-1].attention.get(layer)) is not None
    ]
    caption = (
        f"Attention rows, means over heads: step {records[0].step} and step {records[-1].step}; entropy "
        "in nats, spread tr M2/x²"
    )
    columns = ("layer", "entropy, first", "entropy, last", "spread, first", "spread, last")
    yield Section("Attention by layer", tables=[Table(caption, columns, 1, attention)] if attention else [])
    incidents = [(Cell(str(one.step)), Cell(one.kind), Cell(one.message)) for one in found.incidents]
    table = Table("Measurements that failed or were skipped", ("step", "incident", "message"), 3, incidents)
    yield Section("Incidents", tables=[table] if incidents else [])


def records_of(facts: Sequence[Mapping[str, Any]]) -> list[Record]:
    """The records of a document, at least one."""
    try:
        records = [Record.from_facts(one) for one in facts]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError("RUN", f"contains a record that cannot be read ({error}); run its command again") from None
    if not records:
        raise ReportError("RUN", "contains no records: nothing was measured; run it again with a larger --budget")
    return records


def _measurements(records: Sequence[Record]) -> Table:
    rows = [
        (
            Cell(str(one.step)),
            cells.short(one.probe_loss),
            cells.measured(one.largest_eigenvalue),
            cells.short(one.edge),
            cells.short(one.edge_ratio),
            cells.measured(one.critical_sharpness),
            cells.short(one.gradient_norm),
            cells.measured(None if one.details is None else one.details.smallest_eigenvalue),
            cells.measured(None if one.details is None else one.details.trace),
            cells.share(None if one.details is None else one.details.functional_share),
        )
        for one in records
    ]
    columns = ("step", "loss", "λ max", "2/lr", "λ max·lr/2", "critical", "|g|", "λ min", "trace", "functional")
    caption = "Measurements on the probe: ± error in percent; above 1, λ max·lr/2 is beyond the edge"
    return Table(caption, columns, 1, rows, folded=len(rows) > _SHOWN)


def _steps(records: Sequence[Record]) -> list[Table]:
    """The last step that was recorded, by block and by head: one whose blocks were also measured alone, if there is."""
    known = stepped(records)
    if not known:
        return []
    alone = [(step, update) for step, update in known if all(one.change is not None for one in update.blocks.values())]
    step, update = (alone or known)[-1]
    rows = [(Cell(name), *_contribution(one), cells.short(one.change)) for name, one in update.blocks.items()]
    whole = (update.length, update.slope, update.curvature, update.functional, update.sharpness, update.predicted)
    rows.append((Cell("whole step"), *(cells.short(value) for value in (*whole, None, update.change))))
    columns = ("length", "slope", "curvature", "functional", "sharpness", "second order")
    caption = (
        f"The optimizer's step δ number {step}: slope g·δ, curvature δ·Hδ and its functional part at the weights after "
        "it; second order: the change of the loss, g·δ - δ·Hδ/2; alone: if only this block had moved"
    )
    tables = [Table(caption, ("block", *columns, "alone, second order", "measured"), 1, rows)]
    heads = [(Cell(name), *_contribution(one)[:-1]) for name, one in update.heads.items()]
    if heads:
        tables.append(Table("The same by head", ("head", *columns), 1, heads, folded=len(heads) > _SHOWN))
    return tables


def _contribution(one: BlockUpdate) -> tuple[Cell, ...]:
    numbers = (one.length, one.slope, one.curvature, one.functional, one.sharpness, one.predicted, one.predicted_alone)
    return tuple(cells.short(number) for number in numbers)


def _blocks(records: Sequence[Record]) -> list[Table]:
    known = [(one.step, one.details) for one in records if one.details is not None and one.details.blocks]
    if not known:
        return []
    step, details = known[-1]
    zero = ROUNDING * max(max(norms.outer.value, norms.functional.value) for norms in details.blocks.values())
    rows = [
        (Cell(name), cells.measured(norms.outer, zero), cells.measured(norms.functional, zero))
        for name, norms in details.blocks.items()
    ]
    caption = f"Diagonal blocks at step {step}: ‖H‖F of the two parts, ± standard error in percent; ~0 up to rounding"
    return [Table(caption, ("block", "outer", "functional"), 1, rows)]
