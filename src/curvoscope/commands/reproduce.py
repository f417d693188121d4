"""`curvoscope reproduce`: the papers' figures, run, resumed, drawn, and compared with what the theory predicts."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from curvoscope import checks, commands
from curvoscope.commands import reproduce_report
from curvoscope.commands.document import REPORTS
from curvoscope.commands.progress import counted, duration
from curvoscope.papers import experiments
from curvoscope.papers.experiments import Figure, Row, Store, Task, Verdict, panel_figures, panel_pages
from curvoscope.report.reproduction_sections import VERDICTS
from curvoscope.versions import versions

STORE = "store.sqlite"
_LONG = 600.0  # seconds beyond which a run is announced


def run(
    names: list[str],
    quick: bool,
    jobs: int,
    resume: bool,
    out: Path,
    store_path: Path | None,
    dask: str | None,
    as_json: bool,
) -> None:
    """Measure what is missing, then write PNG, PDF and HTML into `out` and show the verdicts of each figure.

    The store is `out`/store.sqlite unless `store_path` names another. With `as_json` one JSON document goes to stdout
    and nothing else does.
    """
    figures = experiments.find(names)
    checks.at_least(1, jobs=jobs)
    if "all" in names and experiments.left_out():
        absent = ", ".join(experiments.left_out())
        Console(stderr=True, highlight=False).print(
            Text(
                f"skipping {absent}: scikit-learn, Muon or SOAP is missing; pip install 'curvoscope[digits]' or "
                "'curvoscope[optimizers]'"
            ),
            soft_wrap=True,
        )
    commands.make_directory(out)
    with Store(store_path or out / STORE) as store:
        if not resume:
            for figure in figures:
                store.forget(figure)
        _measure(figures, store, quick, jobs, dask)
        found = {figure.name: store.rows(figure, quick) for figure in figures}
    document: dict[str, Any] = {}
    for figure in figures:
        rows = found[figure.name]
        verdicts = figure.verdicts(rows)
        written = _write(figure, rows, out)
        document[figure.name] = _document(rows, verdicts)
        if not as_json:
            _show(figure, verdicts, written)
    reproduce_report.write_report(out, found, figures, quick, names)
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        for name in REPORTS:
            print(f"wrote {out / name}")


def _measure(figures: Sequence[Figure], store: Store, quick: bool, jobs: int, dask: str | None) -> None:
    tasks = experiments.missing(figures, store, quick)
    seconds = sum(task.figure.seconds(task.point) for task in tasks) / jobs
    if seconds > _LONG:
        Console(stderr=True, highlight=False).print(
            f"{len(tasks)} points to measure, about {duration(seconds)} with {jobs} jobs. Measurements are kept: "
            "stop at any time and run the same command again to continue."
        )
    with counted(left=True) as bar:
        whole = bar.add_task("measuring", total=len(tasks))

        def advance(task: Task) -> None:
            bar.update(whole, advance=1, description=str(task))

        experiments.run(tasks, store, jobs, dask, advance)


def _write(figure: Figure, rows: Sequence[Row], out: Path) -> list[Path]:
    panels = figure.panels(rows)
    drawn = panel_figures.draw(figure.title, panels, figure.columns)
    contents = {kind: panel_figures.encode(drawn, kind) for kind in ("png", "pdf")}
    seeds = ", ".join(map(str, reproduce_report.seeds_of(rows)))
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items())
    notes = (figure.question, figure.remarks, f"Seeds: {seeds}. Versions: {made_by}.")
    page = panel_pages.page(figure.title, panels, figure.columns, *filter(None, notes))
    contents["html"] = page.encode()
    paths = []
    for kind, content in contents.items():
        paths.append(out / f"{figure.name}.{kind}")
        commands.write(paths[-1], content)
    return paths


def _document(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    points = [{**row.point, "seed": row.seed, **dataclasses.asdict(row.found)} for row in rows]
    fits = [reproduce_report.verdict_facts(verdict) for verdict in verdicts]
    return {"points": points, "fits": fits, "seeds": reproduce_report.seeds_of(rows), "versions": versions()}


def _show(figure: Figure, verdicts: Sequence[Verdict], written: Sequence[Path]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=130)
    table = Table(title=Text(f"{figure.name}: {figure.title}"), title_justify="left")
    for heading in ("claim", "predicted", "found", "95 % interval", "verdict"):
        table.add_column(heading, justify="left" if heading in ("claim", "verdict") else "right")
    for verdict in verdicts:
        interval = "" if verdict.low is None else f"{verdict.low:.3f} to {verdict.high:.3f}"
        numbers = (_number(verdict.predicted), _number(verdict.fitted), interval)
        cells = (verdict.statement, *numbers, VERDICTS[verdict.agrees])
        table.add_row(*map(Text, cells), style="bold red" if verdict.agrees is False else "")
    console.print(table)
    if figure.remarks:
        console.print(Text(figure.remarks))
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    console.print()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
