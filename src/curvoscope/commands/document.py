"""What the commands share to print and write: the model and its data, the spectrum's ends, files, reports."""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text

from curvoscope import commands
from curvoscope.analysis.attention_heads import HeadMoments
from curvoscope.analysis.measurements import Extremes
from curvoscope.analysis.propagation import Propagation
from curvoscope.analysis.spectra import BlockSpectrum
from curvoscope.commands.subject import Request, Subject
from curvoscope.estimate import Estimate
from curvoscope.report import model_tables
from curvoscope.report.contents import report_of
from curvoscope.report.vector import svg

if TYPE_CHECKING:
    import matplotlib.figure

REPORTS = ("report.html", "report.md")
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def pictures(name: str, figure: "matplotlib.figure.Figure") -> dict[str, bytes]:
    """The two files of a figure: PNG for people, SVG for the report.

    Matplotlib arranges a figure whenever it saves it, and moves labels over the edge the second time if the axes have a
    fixed aspect: it is arranged once, for both.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return {f"{name}.png": commands.png(figure), f"{name}.svg": svg(figure)}


def show_files(out: Path, figures: Mapping[str, bytes], document: str) -> None:
    """Print the files that were written, except the SVG files, which are for the report."""
    for name in (*(name for name in figures if not name.endswith(".svg")), *REPORTS, document):
        print(f"wrote {out / name}")


def write_run(out: Path, name: str, facts: dict[str, Any], figures: Mapping[str, bytes]) -> str:
    """Write figures, reports and the document `name` into `out`; return the document's text.

    The document is the last: a directory that has it has the others too. It names its figures: the directory may hold
    those of an earlier run as well.
    """
    facts = facts | {"pictures": sorted({Path(figure).stem for figure in figures})}
    document = json.dumps(facts, indent=2, allow_nan=False) + "\n"
    for figure, content in figures.items():
        commands.write(out / figure, content)
    write_report(out, document, figures)
    commands.write(out / name, document.encode())
    return document


def write_report(out: Path, document: str, figures: Mapping[str, bytes]) -> None:
    """Write report.html and report.md into `out`."""
    report = report_of(document, figures)
    for name, text in zip(REPORTS, (report.html(), report.markdown()), strict=True):
        commands.write(out / name, text.encode())


def show_subject(console: Console, subject: Subject, loss: float) -> None:
    """Print the model and its data, one sentence per line."""
    for line in subject.about:
        console.print(Text(line), soft_wrap=True)
    console.print(f"Loss {loss:.4g}.\n")


def show_extremes(console: Console, ends: Extremes) -> None:
    """The ends of the spectrum, and the learning rate that follows."""
    console.print(f"Whole Hessian ({ends.size:,} parameters), by Lanczos, ± standard error:")
    console.print(f"  λ max {model_tables.with_error(ends.largest)}   λ min {model_tables.with_error(ends.smallest)}")
    rate = ends.critical_learning_rate
    if rate is None:
        console.print("  λ max is not positive: no learning rate is critical.\n")
    else:
        console.print(f"  2/λ max = {model_tables.with_error(rate)}, the critical learning rate of gradient descent\n")


def as_estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    """An Estimate for JSON."""
    if estimate is None:
        return None
    return {key: getattr(estimate, key) for key in ("value", "stderr", "matvecs", "method")}


def heads_facts(heads: Iterable[HeadMoments]) -> list[dict[str, Any]]:
    """Attention moments for JSON."""
    return [
        {"layer": one.layer, "head": one.head}
        | {key: as_estimate(getattr(one, key)) for key in ("entropy", "first", "second", "third")}
        for one in heads
    ]


def depth_facts(found: Propagation) -> list[dict[str, Any]]:
    """Curvature through depth for JSON."""
    return [
        {"layer": one.name}
        | {key: as_estimate(getattr(one, key)) for key in ("spectral", "functional_spectral", "jacobian")}
        | {"largest_block": as_estimate(max(one.blocks.values(), key=lambda norm: norm.value, default=None))}
        for one in found.layers
    ]


def spectrum_facts(one: BlockSpectrum) -> dict[str, Any]:
    """One spectrum for JSON; the cumulative function on a grid that is logarithmic on both sides of zero."""
    most = max(abs(end) for end in one.density.support)
    side = most * torch.logspace(-6, 0, 25, dtype=torch.float64)
    band = one.density.cdf(torch.cat([-side.flip(0), torch.zeros(1, dtype=torch.float64), side]))
    return {
        "block": one.block,
        "size": one.size,
        "method": one.method,
        "density": {"method": one.density.method, "matvecs": one.density.matvecs, "probes": one.density.probes},
        "largest_eigenvalue": as_estimate(one.largest),
        "smallest_eigenvalue": as_estimate(one.smallest),
        "quantiles": {str(share): one.quantile(share) for share in _QUANTILES},
        "mean": as_estimate(one.density.moment(1)),
        "negative_share": as_estimate(one.negative),
        "near_zero_share": as_estimate(one.near_zero),
        "near_zero": one.log.reach,
        "cumulative": {key: getattr(band, key).tolist() for key in ("x", "value", "low", "high")},
    }


def extremes_facts(ends: Extremes) -> dict[str, Any]:
    """The ends of the spectrum for JSON."""
    return {
        "parameters": ends.size,
        "largest_eigenvalue": as_estimate(ends.largest),
        "smallest_eigenvalue": as_estimate(ends.smallest),
        "critical_learning_rate": as_estimate(ends.critical_learning_rate),
    }


def common_facts(kind: str, subject: Subject, request: Request, options: Any, loss: float) -> dict[str, Any]:
    """What was measured and how to repeat it: the part of the document that all commands share."""
    given = {key: value for key, value in _options(request, options).items() if key != "model"}
    words = ["curvoscope", kind.split()[0], request.model, *([str(given["changed"])] if "changed" in given else [])]
    for key, value in given.items():
        values, option = value if isinstance(value, tuple) else (value,), f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        elif key != "changed":
            words += [word for one in values for word in (option, str(one))]
    return {
        "kind": kind,
        "title": f"Curvature of {request.name}",
        "about": [*subject.about, f"Loss {loss:.4g}."],
        "model": subject.facts,
        "configuration": {key: list(v) if isinstance(v, tuple) else v for key, v in given.items()},
        "command": shlex.join(words),
        "versions": subject.versions,
        "seed": request.seed,
        "loss": loss,
    }


def _options(request: Request, options: Any) -> dict[str, Any]:
    """The options that were given, or have a value of their own."""
    both = dataclasses.asdict(request) | dataclasses.asdict(options)
    return {key: value for key, value in both.items() if value is not None and value != ()}
