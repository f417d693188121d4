"""`curvoscope analyze MODEL`: the blocks of any model's Hessian, part by part, and the ends of its spectrum."""

import dataclasses
import json
from pathlib import Path

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
from curvoscope.commands.document import as_estimate, common_facts, extremes_facts, show_extremes, show_subject
from curvoscope.commands.progress import work
from curvoscope.commands.subject import Request, Subject, select, subject_of
from curvoscope.curvature import hessian
from curvoscope.report import model_tables
from curvoscope.report.block_figures import norm_figure

FIGURE = "norms.png"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure. The names are those of the options."""

    blocks: tuple[str, ...] = ()
    method: str = "auto"
    split: str = "model"
    tolerance: float | None = None
    matvecs: int | None = None


def run(request: Request, options: Options, out: Path, as_json: bool) -> None:
    """Measure, print the table and what it shows; write a figure and table.json into `out`."""
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
        step("the figure")
        commands.write(out / FIGURE, commands.png(norm_figure(rows, headline_of(rows, rounding), rounding)))
    document = _document(rows, ends, {"loss": loss, "rounding": rounding}, subject, request, options)
    commands.write(out / "table.json", document.encode())
    if as_json:
        print(document, end="")
        return
    console = commands.console()
    show_subject(console, subject, loss)
    console.print(model_tables.block_table(rows, rounding))
    show_extremes(console, ends)
    for name in (FIGURE, "table.json"):
        print(f"wrote {out / name}")


def _document(
    rows: list[Measurement],
    ends: Extremes,
    numbers: dict[str, float],
    subject: Subject,
    request: Request,
    options: Options,
) -> str:
    """table.json: what was measured, on what, and how to measure it again."""
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
    document = common_facts("analyze", subject, request, options) | {
        **numbers,
        "rows": found,
        "hessian": extremes_facts(ends),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
