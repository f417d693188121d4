"""`curvoscope analyze MODEL`: the blocks of any model's Hessian, part by part, and the ends of its spectrum."""

import dataclasses
from pathlib import Path
from typing import Any

from curvoscope import commands
from curvoscope.analysis.heterogeneity import PARTS
from curvoscope.analysis.measurements import (
    Effort,
    Extremes,
    Measurement,
    extremes,
    headline_of,
    measurements,
    rounding_of,
)
from curvoscope.commands.document import (
    REPORTS,
    as_estimate,
    common_facts,
    extremes_facts,
    show_extremes,
    show_subject,
    write_run,
)
from curvoscope.commands.progress import work
from curvoscope.commands.subject import Request, select, subject_of
from curvoscope.curvature import hessian
from curvoscope.report import answers, model_tables
from curvoscope.report.block_figures import norm_figure
from curvoscope.report.heat_figures import layer_map

_FIGURES = {"norms.png": norm_figure, "heat_map.png": layer_map}


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure. The names are those of the options."""

    blocks: tuple[str, ...] = ()
    method: str = "auto"
    split: str = "model"
    tolerance: float | None = None
    matvecs: int | None = None


def run(request: Request, options: Options, out: Path, as_json: bool) -> None:
    """Measure, print the table and what it shows; write figures, reports and table.json into `out`."""
    effort = Effort(options.tolerance, options.matvecs)
    subject = subject_of(request)
    chosen = select(subject.blocks, options.blocks, layers_only=options.split == "layer")
    commands.make_directory(out)
    data = [subject.batch]
    rows = []
    with work(len(chosen) * len(PARTS) + 2) as step:
        H = hessian(subject.model, subject.loss, data, chosen, options.method, options.split)
        labels = (f"{name}, {part}" for name in chosen for part in PARTS)
        step(next(labels))
        for row in measurements(H, effort, request.seed):
            rows.append(row)
            step(next(labels, "the whole Hessian"))
        loss, rounding = H.loss, rounding_of(rows, H.total.dtype)
        del H  # its graphs and copies of the weights make room for those of the whole
        whole = hessian(subject.model, subject.loss, data, method="autodiff")
        ends = extremes(whole, effort, request.seed)
        step("the figures")
        title = headline_of(rows, rounding)
        figures = {name: commands.png(draw(rows, title, rounding)) for name, draw in _FIGURES.items()}
    facts = common_facts("analyze MODEL", subject, request, options, loss) | _facts(request.model, rows, rounding, ends)
    document = write_run(out, "table.json", facts, figures)
    if as_json:
        print(document, end="")
        return
    console = commands.console()
    show_subject(console, subject, loss)
    console.print(model_tables.block_table(rows, rounding))
    show_extremes(console, ends)
    for name in (*_FIGURES, *REPORTS, "table.json"):
        print(f"wrote {out / name}")


def _facts(name: str, rows: list[Measurement], rounding: float, ends: Extremes) -> dict[str, Any]:
    """table.json: what was measured, and what it shows."""
    found = [
        {
            "block": row.block,
            "part": row.part,
            "shape": list(row.shape),
            "method": row.method,
            "frobenius_norm": as_estimate(row.frobenius_norm),
            "trace": as_estimate(row.trace),
            "largest_eigenvalue": as_estimate(row.largest_eigenvalue),
        }
        for row in rows
    ]
    return {
        "rounding": rounding,
        **answers.of_blocks(name, rows, rounding, ends),
        "rows": found,
        "hessian": extremes_facts(ends),
    }
