"""The sections of the report of reproduced figures: a question, a figure and its verdicts each."""

from collections.abc import Callable, Iterator

from curvoscope.report.contents import Cell, ReportFigure, Section, Table
from curvoscope.report.documents import Reproduced, Reproduction, Verdict

VERDICTS = {True: "agrees", False: "DISAGREES", None: "no prediction"}


def reproduction(found: Reproduction, figures: Callable[..., list[ReportFigure]]) -> Iterator[Section]:
    """Yield one section per figure."""
    for one in found.figures:
        rows = [_row(verdict) for verdict in one.verdicts]
        caption = f"{one.name}: predictions and measured values"
        table = Table(caption, ("claim", "verdict", "predicted", "found", "from", "to"), 2, rows)
        text = " ".join(part for part in (one.question, one.remarks) if part)
        yield Section(f"{one.name}: {one.title}", text, [table] if rows else [], figures(one.name, told=_told(one)))


def _told(one: Reproduced) -> tuple[str, str]:
    caption = f"{one.title}: {one.points} points, {one.seeds} {'seed' if one.seeds == 1 else 'seeds'} each."
    return caption, f"Panels of {one.name}, {one.title}; the numbers are in the table of predictions."


def _row(verdict: Verdict) -> tuple[Cell, ...]:
    numbers = (verdict.predicted, verdict.fitted, verdict.low, verdict.high)
    known = (Cell("") if number is None else Cell(f"{number:.4g}", number) for number in numbers)
    return Cell(verdict.statement), Cell(VERDICTS[verdict.agrees]), *known
