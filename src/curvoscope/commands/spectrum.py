"""`curvoscope spectrum [MODEL]`: the spectral densities of the blocks of a model's Hessian, and of the whole."""

import dataclasses
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from curvoscope import commands
from curvoscope.analysis.attention_heads import head_moments
from curvoscope.analysis.measurements import Effort, extremes
from curvoscope.analysis.spectra import distances, spectra, whole_spectrum
from curvoscope.blocks import Blocks
from curvoscope.commands import sweep_run
from curvoscope.commands.document import (
    common_facts,
    extremes_facts,
    heads_facts,
    pictures,
    show_extremes,
    show_files,
    spectrum_facts,
    write_run,
)
from curvoscope.commands.progress import work
from curvoscope.commands.subject import Request, is_bias, is_in_layer, select, subject_of
from curvoscope.curvature import hessian
from curvoscope.errors import RangeError
from curvoscope.report import answers, head_figures, model_tables
from curvoscope.report.density_figures import density_figure, distance_figure, headline_of

_LEAST_MATVECS = 8
_TOLERANCE = 0.25  # of the first numbers of a large model


@dataclasses.dataclass(frozen=True)
class SpectrumOptions:
    """How to measure. The names are those of the options."""

    blocks: tuple[str, ...] = ()
    matvecs: int = 256


def run(request: Request, options: SpectrumOptions, out: Path, as_json: bool) -> None:
    """Find the densities, print the table; write two figures, reports and spectrum.json into `out`."""
    if options.matvecs < _LEAST_MATVECS:
        raise RangeError("matvecs", f"got {options.matvecs}, expected at least {_LEAST_MATVECS}")
    subject = subject_of(request)
    chosen = _projections(subject.blocks) if not options.blocks else select(subject.blocks, options.blocks)
    commands.make_directory(out)
    console = Console(quiet=True) if as_json else commands.console()
    for line in subject.about:
        console.print(Text(line), soft_wrap=True)
    first = None
    if subject.facts["parameters"] > sweep_run.SWEPT:  # densities of a large model take long: the cheap numbers first
        console.print("The Gauss-Newton part by sampled backward passes first, then the spectra one by one.")
        first = sweep_run.shown_sweep(subject, chosen, _TOLERANCE, request.seed, console)
        console.print(first.table(largest_first=True))
    data, found = [subject.batch], []
    with work(len(chosen) + 3) as step:
        step(next(iter(chosen)))
        H = hessian(subject.model, subject.loss, data, chosen)
        following = [*list(chosen)[1:], "the whole Hessian"]
        for label, spectrum in zip(following, spectra(H, options.matvecs, request.seed), strict=True):
            found.append(spectrum)
            if first is not None and not as_json:
                print(model_tables.spectrum_line(spectrum))  # a rich console would write into the bar
            step(label)
        loss = H.loss
        del H  # its graphs and copies of the weights make room for those of the whole
        whole = hessian(subject.model, subject.loss, data, method="autodiff")
        ends = extremes(whole, Effort(), request.seed)
        step("its density")
        density = whole_spectrum(whole, options.matvecs, request.seed)
        step("the figures")
        apart = distances(found)
        everything = [*found, density] if density is not None else found
        heads = head_moments(subject.model, subject.batch)
        figures = pictures("densities", density_figure(everything, headline_of(found)))
        figures |= pictures("distances", distance_figure(apart))
        if len(heads) > 1:
            figures |= pictures("heads", head_figures.head_figure(heads, head_figures.headline_of(heads)))
    facts = common_facts("spectrum", subject, request, options, loss) | {
        **answers.of_spectra(request.name, found, apart, ends),
        "title": f"Spectra of {request.name}",
        "blocks": [spectrum_facts(one) for one in found],
        "jensen_shannon": {
            "names": list(apart.names),
            "distance": apart.values.tolist(),
            "threshold": apart.threshold.tolist(),
        },
        "hessian": extremes_facts(ends) | {"spectrum": None if density is None else spectrum_facts(density)},
        "attention": heads_facts(heads),
        "gauss_newton": None if first is None else {"samples": first.samples, "rows": sweep_run.row_facts(first)},
        "missing": _missing(request.model, density is None, not heads),
    }
    document = write_run(out, "spectrum.json", facts, figures)
    if as_json:
        print(document, end="")
        return
    console.print(f"Loss {loss:.4g}.\n")
    console.print(model_tables.spectrum_table(everything))
    show_extremes(console, ends)
    if density is None:
        console.print("The density of the whole Hessian is omitted: its Lanczos vectors do not fit in memory.\n")
    show_files(out, figures, "spectrum.json")


def _missing(model: str, no_density: bool, no_heads: bool) -> list[str]:
    """What was not measured, and why."""
    command = f"curvoscope analyze {shlex.quote(model)}"
    lines = [f"Norms of the blocks' parts, histograms of entries, curvature through depth: measured by {command}."]
    if no_density:
        lines.append("The density of the whole Hessian: its Lanczos vectors do not fit in memory.")
    if no_heads:
        lines.append("Attention moments by head: no attention layer of a known form was found.")
    return lines


def _projections(blocks: Blocks) -> Blocks:
    """The weights of attention and MLP in all layers; all weights of a model that has no known layers."""
    names = [name for name in blocks if is_in_layer(name) and not is_bias(name) and ".norm" not in name]
    return Blocks(blocks[name] for name in names) if names else select(blocks, ())
