"""The report of a watched training run: watch.json, figures, report.html and report.md."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curvoscope.commands.document import pictures, write_run
from curvoscope.commands.watch_run import MOMENTUM
from curvoscope.report import answers
from curvoscope.report.contents import ReportError
from curvoscope.report.training_figures import (
    block_map,
    detailed,
    stepped,
    trace_figure,
    training_figure,
    updates_figure,
)
from curvoscope.report.training_sections import records_of
from curvoscope.training import Incident, Record, RunStore

DOCUMENT = "watch.json"


def write_report(out: Path, facts: Mapping[str, Any]) -> str:
    """Write watch.json, the figures, report.html and report.md into `out`; return the text of watch.json."""
    return write_run(out, DOCUMENT, *completed(facts))


def completed(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The document of a run, and its figures.

    `facts` are those of the run: kind, title, about, configuration, command, versions, seed, steps, records and
    incidents; question, answer, advice and what is missing are added to them.
    """
    records = records_of(facts["records"])
    # the steps of another optimizer than SGD are not -η g: 2/λ_max does not cap their rate
    momentum = MOMENTUM if facts["configuration"].get("optimizer") == "sgd" else None
    added = {**answers.of_training(records, momentum), "missing": _missing(records)}
    return {**facts, **added}, _draw(records)


def stored_facts(path: Path) -> dict[str, Any]:
    """The facts of an unfinished run, from its store: those of the last run in it."""
    with RunStore(path) as store:
        if not store.names:
            raise ReportError("RUN", f"{path} contains no run; start one with curvoscope watch")
        run = store.run(store.names[-1])
        facts, records, incidents = run.facts, run.records(), run.incidents()
    steps = max([0, *(one.step for one in records), *(one.step for one in incidents)])
    document = run_facts(run.name, facts["configuration"], facts["versions"], records, incidents)
    about = [f"The run did not finish: these are the {len(records)} measurements up to step {steps}."]
    return {**document, "title": "Curvature during training", "about": about, "steps": steps}


def run_facts(
    name: str,
    configuration: Mapping[str, Any],
    versions: Mapping[str, str],
    records: Sequence[Record],
    incidents: Sequence[Incident],
) -> dict[str, Any]:
    """What the document says of any run; title, about and steps are still to be added."""
    options = {key: value for key, value in configuration.items() if value is not None}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return {
        "kind": "watch",
        "run": name,
        "configuration": options,
        "command": shlex.join(["curvoscope", "watch", *words]),
        "versions": versions,
        "seed": options.get("seed"),
        "records": [one.facts() for one in records],
        "incidents": [one.facts() for one in incidents],
    }


def _draw(records: Sequence[Record]) -> dict[str, bytes]:
    figures = pictures("watch", training_figure(records))
    if stepped(records):
        figures |= pictures("updates", updates_figure(records))
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
