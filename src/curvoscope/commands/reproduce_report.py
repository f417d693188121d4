"""The report of reproduced figures: reproduce.json, report.html and report.md."""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curvoscope.commands.document import write_run
from curvoscope.papers.experiments import Figure, Row, Verdict, panel_figures
from curvoscope.report import answers
from curvoscope.report.vector import svg
from curvoscope.versions import versions

DOCUMENT = "reproduce.json"


def write_report(
    out: Path, found: Mapping[str, Sequence[Row]], figures: Sequence[Figure], quick: bool, names: Sequence[str]
) -> str:
    """Write reproduce.json, the figures as SVG, report.html and report.md into `out`, where their PNG files are; the
    text of reproduce.json.

    Args:
        out: the directory of the run.
        found: the measured rows of each figure.
        figures: in their order.
        quick, names: as they were asked for.
    """
    drawn: dict[str, bytes] = {}
    shown = []
    for figure in figures:
        rows = found[figure.name]
        picture = panel_figures.draw(figure.title, figure.panels(rows), figure.columns)
        drawn[f"{figure.name}.svg"] = svg(picture)
        shown.append(
            {
                "name": figure.name,
                "title": figure.title,
                "question": figure.question,
                "remarks": figure.remarks,
                "points": len({tuple(sorted(row.point.items())) for row in rows}),
                "seeds": len(seeds_of(rows)),
                "verdicts": [verdict_facts(one) for one in figure.verdicts(rows)],
            }
        )
    facts = {
        "kind": "reproduce",
        "title": "The papers' figures, reproduced",
        **answers.of_figures(shown),
        "about": [
            f"{len(figures)} {'figure' if len(figures) == 1 else 'figures'} with "
            f"{sum(len(rows) for rows in found.values()):,} measured values"
            + (", with the few seeds of --quick." if quick else "."),
            "All measured values are in the store of the run; curvoscope export writes them as a table.",
            "; ".join(f"{figure.name}: seeds {', '.join(map(str, seeds_of(found[figure.name])))}" for figure in figures)
            + ".",
        ],
        "command": shlex.join(["curvoscope", "reproduce", *names, *(["--quick"] if quick else [])]),
        "versions": versions(),
        "seed": None,  # every point has its own, from 0 on
        "figures": shown,
    }
    return write_run(out, DOCUMENT, facts, drawn)


def seeds_of(rows: Sequence[Row]) -> list[int]:
    """In ascending order."""
    return sorted({row.seed for row in rows})


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON, which knows no infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(verdict).items()
    }
