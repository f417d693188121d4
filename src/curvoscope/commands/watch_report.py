"""The report of a watched training run: watch.json, figures, report.html and report.md."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curvoscope.commands.document import pictures, write_run
from curvoscope.commands.watch_run import MOMENTUM
from curvoscope.report import answers
from curvoscope.report.contents import ReportError
from curvoscope.report.training_figures import training_figure
from curvoscope.report.training_sections import records_of
from curvoscope.report.watch_figures import block_map, detailed, trace_figure
from curvoscope.training import Record, RunStore

DOCUMENT = "watch.json"


def write_report(out: Path, facts: Mapping[str, Any]) -> str:
    """Write watch.json, the figures, report.html and report.md into `out`; the text of watch.json.

    `facts` are those of the run: kind, title, about, configuration, command, versions, seed, steps, records and
    incidents; question, answer, advice and what is missing are added to them.
    """
    records = records_of(facts["records"])
    # the steps of another optimizer than SGD are not -η g: 2/λ_max is no cap of their rate
    momentum = MOMENTUM if facts["configuration"].get("optimizer") == "sgd" else None
    added = {**answers.of_training(records, momentum), "missing": _missing(records)}
    return write_run(out, DOCUMENT, {**facts, **added}, _draw(records))


def read_store(path: Path) -> None:
    """The report of a run that did not come to its end, beside its store: of the last run in it."""
    with RunStore(path) as store:
        if not store.names:
            raise ReportError("RUN", f"{path} contains no run; start one with curvoscope watch")
        run = store.run(store.names[-1])
        facts, records, incidents = run.facts, run.records(), run.incidents()
    options = {name: value for name, value in facts["configuration"].items() if value is not None}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    steps = max([0, *(one.step for one in records), *(one.step for one in incidents)])
    document = {
        "kind": "watch",
        "title": "Curvature during training",
        "about": [f"The run did not finish: these are the {len(records)} measurements up to step {steps}."],
        "run": run.name,
        "configuration": options,
        "command": shlex.join(["curvoscope", "watch", *words]),
        "versions": facts["versions"],
        "seed": options.get("seed"),
        "steps": steps,
        "records": [one.facts() for one in records],
        "incidents": [one.facts() for one in incidents],
    }
    write_report(path.parent, document)


def _draw(records: Sequence[Record]) -> dict[str, bytes]:
    figures = pictures("watch", training_figure(records))
    known = detailed(records)
    if known:
        figures |= pictures("trace", trace_figure(records))
        if all(details.blocks for _, details in known):
            figures |= pictures("blocks", block_map(records))
    return figures


def _missing(records: Sequence[Record]) -> list[str]:
    lines = []
    if not detailed(records):
        lines.append("Trace, smallest eigenvalue and norms of the blocks: the time budget did not allow them.")
    if not records[0].attention:
        lines.append("Attention by layer: the model has no attention layer of a known form.")
    return [*lines, "Spectra, entries and curvature through depth: see curvoscope spectrum and curvoscope analyze."]
