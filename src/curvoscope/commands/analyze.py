"""`curvoscope analyze [MODEL]`: the blocks of a model's Hessian, part by part, and the ends of its spectrum."""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvoscope import checks, commands
from curvoscope.analysis.attention_heads import HeadMoments, head_moments
from curvoscope.analysis.entries import EntryHistogram, entry_histograms
from curvoscope.analysis.heterogeneity import BlockRow, block_table, headline, verdict
from curvoscope.analysis.measurements import (
    Effort,
    Extremes,
    Measurement,
    extremes,
    headline_of,
    measured_columns,
    rounding_of,
)
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.analysis.propagation import Propagation, propagation
from curvoscope.analysis.scales import input_scales
from curvoscope.analysis.spectra import BlockSpectrum
from curvoscope.blocks import layer_and_role
from curvoscope.closed.layers import layers_of
from curvoscope.commands import sweep_run
from curvoscope.commands.document import (
    as_estimate,
    common_facts,
    depth_facts,
    extremes_facts,
    heads_facts,
    pictures,
    show_extremes,
    show_files,
    show_subject,
    spectrum_facts,
    write_run,
)
from curvoscope.commands.progress import work
from curvoscope.commands.subject import Request, Subject, select, subject_of
from curvoscope.curvature import ModelHessian, blocks_of, hessian
from curvoscope.estimate import Density
from curvoscope.operators import BlockHessian
from curvoscope.operators.block_matrix import PARTS
from curvoscope.operators.eigenvalues import symmetric_eigenvalues
from curvoscope.report import answers, density_figures, depth_figures, entry_figures, head_figures, model_tables, tables
from curvoscope.report.block_figures import norm_figure
from curvoscope.report.figures import hessian_figure
from curvoscope.report.heat_figures import layer_map, pair_map

if TYPE_CHECKING:
    import matplotlib.figure

_DEPTH_TOLERANCE = 0.1
_DEPTH_LIMIT = 2_000_000  # parameters, above which curvature through depth takes longer than all the rest
_DENSE_LIMIT = 2_000_000  # columns times parameters, up to which all entries are computed by products
_SAMPLED = 16  # columns of a block for the histogram of its entries


@dataclasses.dataclass(frozen=True)
class AnalyzeOptions:
    """How to measure. The names are those of the options."""

    blocks: tuple[str, ...] = ()
    method: str = "auto"
    split: str = "model"
    tolerance: float | None = None
    matvecs: int | None = None
    parts: str | None = None
    fast: bool | None = None


@dataclasses.dataclass
class DenseBlocks:
    """What all entries of the Hessian show, and the figures of them; `verdict` compares query and value."""

    rows: list[BlockRow] = dataclasses.field(default_factory=list)
    verdict: str | None = None
    spectra: list[BlockSpectrum] = dataclasses.field(default_factory=list)
    figures: dict[str, "matplotlib.figure.Figure"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Found:
    """What was measured; `missing` lists what was not, with the reasons."""

    rows: list[Measurement]
    rounding: float
    loss: float
    ends: Extremes
    dense: DenseBlocks
    pairs: list[PairNorm] = dataclasses.field(default_factory=list)
    histograms: list[EntryHistogram] = dataclasses.field(default_factory=list)
    heads: list[HeadMoments] = dataclasses.field(default_factory=list)
    depth: Propagation | None = None
    scales: dict[str, float] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)


def run(request: Request, options: AnalyzeOptions, out: Path, as_json: bool) -> None:
    """Measure, print the table and what it shows; write figures, reports and table.json into `out`."""
    effort = Effort(options.tolerance, options.matvecs)
    if request.d is not None and _is_whole(options):
        size = 12 * request.d**2
        # The picture of the Hessian and what Matplotlib makes of it; the rest is done a block at a time.
        checks.fits(16 * size**2, None, f"the picture of a {size} x {size} Hessian", "take a smaller --d")
    subject = subject_of(request)
    if _is_swept(subject, options):
        sweep_run.run(subject, request, options, out, as_json)
        return
    chosen = select(subject.blocks, options.blocks, layers_only=options.split == "layer")
    commands.make_directory(out)
    with work(len(chosen) * len(PARTS) + 5) as step:
        H = hessian(subject.model, subject.loss, [subject.batch], chosen, options.method, options.split)
        labels = (f"{name}, {part}" for name in chosen for part in PARTS)
        step(next(labels))
        rows, pairs = [], []
        for several, found_pairs in measured_columns(H, effort, request.seed, pairs=options.split == "model"):
            rows += several
            pairs += found_pairs
            for _ in several:
                step(next(labels, "entries"))
        loss, rounding = H.loss, rounding_of(rows, H.total.dtype)
        histograms, missing = _whole_products(H, options, request.seed)
        step("all entries")
        dense = _dense_blocks(_small_hessian(subject, H, options))
        step("the whole Hessian")
        del H  # its graphs and copies of the weights make room for those of the whole
        whole = hessian(subject.model, subject.loss, [subject.batch], method="autodiff")
        ends = extremes(whole, effort, request.seed)
        del whole
        step("its layers")
        found = Found(rows, rounding, loss, ends, dense, pairs, histograms, missing=missing)
        _layers(found, subject, options, request)
        step("the figures")
        figures = _draw(found)
    facts = common_facts("analyze", subject, request, options, loss) | _facts(request.name, found)
    document = write_run(out, "table.json", facts, figures)
    if as_json:
        print(document, end="")
        return
    console = commands.console()
    show_subject(console, subject, loss)
    console.print(model_tables.block_table(rows, rounding))
    if dense.rows:
        console.print(tables.off_diagonal_table(dense.rows))
    if dense.verdict is not None:
        console.print(dense.verdict + "\n")
    show_extremes(console, ends)
    show_files(out, figures, "table.json")


def _is_swept(subject: Subject, options: AnalyzeOptions) -> bool:
    """Whether only the Gauss-Newton part is wanted: if asked for, and by default of a large model."""
    by_products = options.method != "auto" or options.split != "model" or options.matvecs is not None
    if options.parts is None:
        return subject.facts["parameters"] > sweep_run.SWEPT and not by_products
    return options.parts == "outer"


def _whole_products(H: ModelHessian, options: AnalyzeOptions, seed: int) -> tuple[list[EntryHistogram], list[str]]:
    """Histograms of entries, from products with the matrix of all chosen blocks, and what is missing."""
    if options.split == "layer":
        return [], ["Off-diagonal blocks and entries: with --split layer the parts exist only within a layer."]
    missing = []
    if len(H.names) == 1:
        missing.append("Off-diagonal blocks: only one block was asked for.")
    roles = {name: found[1] for name in H.names if (found := layer_and_role(name)) is not None}
    sampled = [next((name for name in roles if roles[name] == role), None) for role in ("attn.Q", "attn.V")]
    histograms = entry_histograms(H, [name for name in sampled if name is not None], _SAMPLED, seed)
    if not histograms:
        missing.append("Histograms of the entries: no query or value block was asked for.")
    return histograms, missing


def _is_whole(options: AnalyzeOptions) -> bool:
    """Whether the options leave room for a closed form of all layers at once."""
    return not options.blocks and options.method != "autodiff" and options.split == "model"


def _small_hessian(subject: Subject, H: ModelHessian, options: AnalyzeOptions) -> BlockHessian | None:
    """The matrix to compute all entries of: in closed form if there is one, else `H` if it takes few products."""
    exact = subject.exact_hessian() if _is_whole(options) else None
    if exact is not None or options.split == "layer":
        return exact
    return H if H.shape[0] * subject.facts["parameters"] <= _DENSE_LIMIT else None


def _dense_blocks(H: BlockHessian | None) -> DenseBlocks:
    if H is None:
        return DenseBlocks()
    rows, spectra = block_table(H), []
    for name in filter(tables.is_matrix, H.names):
        density = Density.exact(symmetric_eigenvalues(H.total[name].dense()))
        spectra.append(BlockSpectrum(name, H.total[name].shape[0], "exact", density, density.log_spectrum()))
    comparable = {"Q", "V"} <= {name.rpartition(".")[2] for name in H.names}
    title = headline(rows) if comparable else "The Hessian, block by block"
    figures = {"hessian": hessian_figure(H, title)}
    if spectra:
        figures["densities"] = density_figures.density_figure(spectra, density_figures.headline_of(spectra))
    return DenseBlocks(rows, verdict(rows) if comparable else None, spectra, figures)


def _layers(found: Found, subject: Subject, options: AnalyzeOptions, request: Request) -> None:
    """Attention by head, the scale of the layers' inputs, and curvature through depth unless it would take long."""
    data = [subject.batch]
    size = sum(parameter.numel() for parameter in subject.model.parameters())
    found.heads = head_moments(subject.model, subject.batch)
    found.scales = input_scales(subject.model, data)
    if not found.heads:
        found.missing.append("Attention moments by head: no softmax attention layer of a known form was found.")
    depth = "Curvature through depth"
    if not layers_of(subject.model, blocks_of(subject.model)):
        found.missing.append(f"{depth}: the model has no layers of a known form.")
    elif options.blocks:
        found.missing.append(f"{depth}: measured for a whole model only, without --blocks.")
    elif size > _DEPTH_LIMIT:
        found.missing.append(
            f"{depth}: left out above {_DEPTH_LIMIT:,} parameters, because it takes long; "
            "curvoscope.analysis.propagation measures it."
        )
    else:
        found.depth = propagation(
            subject.model, subject.batch, subject.loss, tolerance=_DEPTH_TOLERANCE, seed=request.seed
        )
    if not found.dense.rows:
        name = shlex.quote(request.model)
        found.missing.append(f"Spectra by block: measured by curvoscope spectrum {name}.")
        found.missing.append("The Hessian entry by entry: for models with few parameters only, because it takes long.")


def _draw(found: Found) -> dict[str, bytes]:
    """Draw what was measured; return the files."""
    title, rounding = headline_of(found.rows, found.rounding), found.rounding
    figures: dict[str, Any] = {"norms": norm_figure(found.rows, title, rounding)}
    if found.pairs:
        figures["pairs"] = pair_map(found.rows, found.pairs, title, rounding)
    else:
        figures["heat_map"] = layer_map(found.rows, title, rounding)
    if found.histograms:
        figures["histograms"] = entry_figures.entry_figure(found.histograms, "Entries of a query and a value block")
    figures |= found.dense.figures
    if len(found.heads) > 1:
        figures["heads"] = head_figures.head_figure(found.heads, head_figures.headline_of(found.heads))
    if found.depth is not None:
        growth = f"From the last layer to the first |S| grows by a factor of {found.depth.growth():.3g}"
        figures["depth"] = depth_figures.propagation_figure({"this model": found.depth}, growth)
    return {name: content for key, figure in figures.items() for name, content in pictures(key, figure).items()}


def _facts(name: str, found: Found) -> dict[str, Any]:
    """table.json: what was measured, and what it shows."""
    rows = [
        {
            "block": row.block,
            "part": row.part,
            "shape": list(row.shape),
            "method": row.method,
            "frobenius_norm": as_estimate(row.frobenius_norm),
            "trace": as_estimate(row.trace),
            "largest_eigenvalue": as_estimate(row.largest_eigenvalue),
        }
        for row in found.rows
    ]
    pairs = [
        {"row": one.row, "column": one.column, "part": one.part, "frobenius_norm": as_estimate(one.frobenius_norm)}
        for one in found.pairs
    ]
    return {
        "rounding": found.rounding,
        **answers.of_blocks(name, found.rows, found.rounding, found.ends, found.scales),
        "rows": rows,
        "hessian": extremes_facts(found.ends),
        "pairs": pairs,
        "dense": [dataclasses.asdict(row) for row in found.dense.rows],
        "spectra": [spectrum_facts(one) for one in found.dense.spectra],
        "verdict": found.dense.verdict,
        "histograms": [dataclasses.asdict(one) for one in found.histograms],
        "attention": heads_facts(found.heads),
        "depth": [] if found.depth is None else depth_facts(found.depth),
        "missing": found.missing,
    }
