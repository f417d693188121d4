"""`curvoscope analyze`: the exact Hessian of the paper's single-block GPT-2, all of its layers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from curvoscope import checks, commands
from curvoscope.analysis import PARTS, BlockRow, block_rows, headline, verdict
from curvoscope.analysis.attention_heads import HeadMoments, head_moments
from curvoscope.analysis.propagation import Propagation, propagation
from curvoscope.analysis.spectra import BlockSpectrum
from curvoscope.commands.document import REPORTS, depth_facts, heads_facts, pictures, shown_files, write_run
from curvoscope.commands.subject import DTYPES
from curvoscope.estimate import Density
from curvoscope.operators import BlockHessian
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from curvoscope.report import answers, depth_figures, figures, head_figures, tables
from curvoscope.report.density_figures import density_figure
from curvoscope.report.density_figures import headline_of as densities_headline
from curvoscope.report.heat_figures import pair_map
from curvoscope.versions import versions

_LINEAR = "Attention moments by head: without softmax the rows of attention are no distributions."


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What decides the numbers. The names are those of the options."""

    seed: int
    d: int
    sequences: int
    norm: str
    attention: str
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What was measured."""

    H: BlockHessian
    rows: list[BlockRow]
    spectra: list[BlockSpectrum]
    heads: list[HeadMoments]
    depth: Propagation


_FIGURES: dict[str, Callable[[Found], Any]] = {
    "heat_map": lambda found: pair_map(found.rows, "Norms of the Hessian's blocks"),
    "densities": lambda found: density_figure(found.spectra, densities_headline(found.spectra)),
    "histograms": lambda found: figures.histogram_figure(found.H, headline(found.rows)),
    "hessian": lambda found: figures.hessian_figure(found.H, headline(found.rows)),
    "heads": lambda found: head_figures.head_figure(found.heads, head_figures.headline_of(found.heads)),
    "depth": lambda found: depth_figures.propagation_figure({"this model": found.depth}, "Curvature through depth"),
}


def run(configuration: Configuration, out: Path, as_json: bool) -> None:
    """Measure every block, print the table and what it shows; write figures, reports and table.json into `out`."""
    size = 12 * configuration.d**2
    # The picture of the Hessian and what Matplotlib makes of it; the rest is done a block at a time.
    checks.fits(16 * size**2, None, f"the picture of a {size} x {size} Hessian", "take a smaller --d")
    commands.make_directory(out)
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("the exact Hessian", total=None)
        found = _measure(configuration, progress, task)
        shown = [name for name in _FIGURES if name != "heads" or len(found.heads) > 1]
        progress.update(task, description="the figures", completed=0, total=len(shown))
        drawn: dict[str, bytes] = {}
        for name in shown:
            drawn |= pictures(name, _FIGURES[name](found))
            progress.advance(task)
    document = write_run(out, "table.json", _facts(found, configuration), drawn)
    if as_json:
        print(document, end="")
    else:
        _show(found.rows, configuration)
        for name in (*shown_files(drawn), *REPORTS, "table.json"):
            print(f"wrote {out / name}")


def _measure(configuration: Configuration, progress: Progress, task: TaskID) -> Found:
    """The exact Hessian of the loss on one batch of additions, over the block's weights (attention's biases apart) and
    the final norm; the spectra of its blocks; moments and curvature layer by layer."""
    tokens = tasks.addition(configuration.sequences, seed=configuration.seed)
    inputs, targets = tokens[:, :-1], tasks.answer_targets(tokens)
    model = GPT2(
        configuration.d,
        norm=configuration.norm,
        activation=configuration.attention,
        seed=configuration.seed,
        dtype=DTYPES[configuration.dtype],
    )
    with torch.no_grad():
        X = model.residual_stream(inputs, 0)
    stack, loss = model.stack(), model.exact_loss(targets)
    H = stack.hessian(X, loss)
    blocks = len(H.names)
    progress.update(task, description="its blocks", total=len(PARTS) * blocks * (blocks + 1) // 2)
    rows, spectra = [], []
    for row in block_rows(H):
        rows.append(row)
        progress.advance(task)
    for name in filter(tables.is_matrix, H.names):
        density = Density.exact(torch.linalg.eigvalsh(H.total[name].dense()))
        spectra.append(BlockSpectrum(name, H.total[name].shape[0], "exact", density, density.log_spectrum()))
    progress.update(task, description="its layers", total=None)
    heads = head_moments(model, (inputs, targets))
    return Found(H, rows, spectra, heads, propagation(stack, (X, loss), seed=configuration.seed))


def _facts(found: Found, configuration: Configuration) -> dict[str, Any]:
    """table.json: what was measured, on what, what it shows, and how to measure it again."""
    rows = found.rows
    options = dataclasses.asdict(configuration)
    return {
        "kind": "analyze",
        "title": "Curvature of a GPT-2 of one block",
        "about": [_about(configuration)],
        "configuration": options,
        "command": " ".join(["curvoscope analyze", *(f"--{name} {value}" for name, value in options.items())]),
        "versions": versions(),
        "seed": configuration.seed,
        "verdict": verdict(rows),
        **answers.of_pairs(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "attention": heads_facts(found.heads),
        "depth": depth_facts(found.depth),
        "missing": [] if found.heads else [_LINEAR],
    }


def _about(configuration: Configuration) -> str:
    return (
        f"Exact Hessian of the Transformer block in a GPT-2 of one block: d = {configuration.d}, norm "
        f"{configuration.norm}, {configuration.attention} attention, {configuration.sequences} five-digit "
        f"additions, seed {configuration.seed}, {configuration.dtype}. Outer and functional part are split "
        "at the model's output."
    )


def _show(rows: list[BlockRow], configuration: Configuration) -> None:
    console = Console(highlight=False)
    console.print(_about(configuration) + "\n")
    console.print(tables.diagonal_table(rows))
    console.print(tables.off_diagonal_table(rows))
    console.print(verdict(rows) + "\n")
