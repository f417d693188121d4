"""The command line. Heavy imports are made inside the commands, so that `--help` answers at once."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from curvoscope import __version__
from curvoscope.errors import CurvoscopeError
from curvoscope.model_options import NormPlacement, Seed, of_model

if TYPE_CHECKING:
    from curvoscope.commands.request import Request

app = typer.Typer(
    name="curvoscope",
    help="Show the curvature of a Transformer: its loss Hessian, block by block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BlockPatterns = Annotated[
    list[str] | None, typer.Option(help="Shell pattern for block names, such as '*.attn.[QKV]'; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def _directory(document: str) -> Any:
    """The option for the directory of a command that writes figures, a report and a document."""
    return typer.Option(help=f"Directory for the figures, the report and {document}.")


class WithNames(TyperCommand):
    """A command whose help ends with the names of the figures, imported on demand."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the command, then the names."""
        from curvoscope.papers.catalogue import NAMES

        self.epilog = f"NAME: all, {', '.join(NAMES)}"
        super().format_help(ctx, formatter)


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"curvoscope {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@of_model()
def analyze(
    request: "Request",
    blocks: BlockPatterns = None,
    method: Annotated[
        Literal["auto", "exact", "autodiff"],
        typer.Option(help="Closed forms (exact), products (autodiff), or the better one per block (auto)."),
    ] = "auto",
    split: Annotated[
        Literal["model", "layer"],
        typer.Option(help="Split outer and functional part at the model's output or at each layer's own."),
    ] = "model",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative standard error of the norms; traces get the same products. (default: 0.05; 0.1 for a sweep)"
        ),
    ] = None,
    matvecs: Annotated[
        int | None, typer.Option(help="Matrix-vector products per estimate (replaces --tolerance).")
    ] = None,
    parts: Annotated[
        Literal["outer", "all"] | None,
        typer.Option(
            help="outer: Gauss-Newton part, by a sweep; all: every part, by products. (default: outer above 2 million "
            "parameters, otherwise all)"
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Sweep only: leave out the largest eigenvalue of the whole Hessian.")
    ] = False,
    out: Annotated[Path, _directory("table.json")] = Path("curvoscope-analyze"),
    as_json: AsJson = False,
) -> None:
    """Analyse the Hessian of MODEL block by block: norms, traces and largest eigenvalues, with error bars.

    The default, addition, is the paper's single-block GPT-2 on five-digit addition.
    """
    from curvoscope.commands import analyze as command

    options = command.AnalyzeOptions(tuple(blocks or ()), method, split, tolerance, matvecs, parts, fast or None)
    command.run(request, options, out, as_json)


@app.command()
@of_model()
def spectrum(
    request: "Request",
    blocks: BlockPatterns = None,
    matvecs: Annotated[int, typer.Option(help="Products per density (64 Lanczos steps per probe).")] = 256,
    out: Annotated[Path, _directory("spectrum.json")] = Path("curvoscope-spectrum"),
    as_json: AsJson = False,
) -> None:
    """Estimate the spectral density of every block of MODEL's Hessian, with confidence bands.

    The default, addition, is the paper's single-block GPT-2 on five-digit addition.
    """
    from curvoscope.commands import spectrum as command

    command.run(request, command.SpectrumOptions(tuple(blocks or ()), matvecs), out, as_json)


@app.command()
@of_model()
def audit(
    request: "Request",
    blocks: BlockPatterns = None,
    approximations: Annotated[
        list[str] | None,
        typer.Option(help="Name such as kfac, kronecker:4, shampoo:1/4 or kfac/heads; repeatable."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples of a sweep. (default: 128; no sweep but exact numbers for small models)"),
    ] = None,
    out: Annotated[Path, _directory("audit.json")] = Path("curvoscope-audit"),
    as_json: AsJson = False,
) -> None:
    """Measure approximations of MODEL's curvature (KFAC, Shampoo, the diagonal, ...) against the curvature itself.

    The default, addition, is the paper's single-block GPT-2 on five-digit addition.
    """
    from curvoscope.commands import audit as command

    command.run(request, command.AuditOptions(tuple(blocks or ()), tuple(approximations or ()), samples), out, as_json)


@app.command()
@of_model(required=True)
def sensitivity(
    request: "Request",
    changed: Annotated[
        str | None, typer.Argument(help="A local Hugging Face folder with the changed weights.", metavar="CHANGED")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Instead of CHANGED: int8, int4, int3, nf4, fp8 (rounding), prune_2_4 or low_rank."),
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Inputs that share a scale. (default: one scale per channel; 64 for --budget)")
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int formats only: levels from the minimum to the maximum.")
    ] = False,
    prune: Annotated[float | None, typer.Option(help="Instead of CHANGED: share of the weights to set to 0.")] = None,
    drop_heads: Annotated[
        bool, typer.Option("--drop-heads", help="Instead of CHANGED: remove all attention heads; one row per head.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Also choose int3, int4 or int8 per tensor to meet this average number of bits per weight."),
    ] = None,
    no_pairs: Annotated[
        bool, typer.Option("--no-pairs", help="Leave out interactions and blocks changed alone: two products in all.")
    ] = False,
    blocks: BlockPatterns = None,
    out: Annotated[Path, _directory("sensitivity.json")] = Path("curvoscope-sensitivity"),
    as_json: AsJson = False,
) -> None:
    """Predict and measure what a change of MODEL's weights costs, by block and by pair of blocks."""
    from curvoscope.commands import sensitivity as command

    options = command.SensitivityOptions(
        changed, recipe, group, asymmetric, prune, drop_heads, tuple(blocks or ()), no_pairs, budget
    )
    command.run(request, options, out, as_json)


@app.command()
def watch(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    seed: Seed = 0,
    task: Annotated[
        str, typer.Option(help="addition, or text (predict the next byte of the package's corpus).")
    ] = "addition",
    d: Annotated[int, typer.Option(help="Width of the model.")] = 16,
    norm: Annotated[NormPlacement, typer.Option(help="LayerNorm: none, or before each branch.")] = "pre",
    optimizer: Annotated[str, typer.Option(help="sgd, adam or gauss-newton.")] = "adam",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    sequences: Annotated[int | None, typer.Option(help="Additions or texts per batch.")] = None,
    every: Annotated[
        int | None,
        typer.Option(help="Minimum number of steps between measurements. (default: a 20th of all steps)"),
    ] = None,
    budget: Annotated[float, typer.Option(help="Largest share of the run time for measurements (1: no limit).")] = 1.0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in OUT.")] = False,
    logger: Annotated[
        str | None, typer.Option(help="Also log to wandb, trackio, mlflow or tensorboard (OUT/tensorboard).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("curvoscope-watch"),
    as_json: AsJson = False,
) -> None:
    """Train a small GPT-2 on additions or on text, with the curvature monitor on."""
    from curvoscope.commands import watch as command

    options = command.WatchOptions(steps, seed, task, d, norm, optimizer, lr, sequences, every, budget)
    raise typer.Exit(command.run(options, out, resume, as_json, logger))


@app.command(cls=WithNames)
def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help='Figure names (e.g. fig3a), or "all".')],
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds; takes minutes.")] = False,
    jobs: Annotated[int, typer.Option(help="Number of processes, one thread each.")] = 2,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Reuse the measurements in the store.")] = True,
    out: Annotated[Path, typer.Option(help="Directory for the figures and the store.")] = Path("curvoscope-reproduce"),
    store: Annotated[Path | None, typer.Option(help="Store file. (default: OUT/store.sqlite)")] = None,
    dask: Annotated[str | None, typer.Option(help='Address of a Dask scheduler, or "local".')] = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce the papers' figures: run or resume, draw, compare with the prediction."""
    from curvoscope.commands import reproduce as command

    command.run(names, quick, jobs, resume, out, store, dask, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory or store file of a run of watch or reproduce.")],
    format_: Annotated[str, typer.Option("--format", help="csv or parquet.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="Output file; without it CSV goes to stdout.")] = None,
) -> None:
    """Export the measured values of a run as one table."""
    from curvoscope.commands import export as command

    command.run(run, format_, out)


@app.command()
def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Directory of a run of any of these commands, or its JSON file."),
    ],
) -> None:
    """Write report.html and report.md of a run again, from its JSON file and figures."""
    from curvoscope.commands import report as command

    command.run(run)


@app.command()
def explore(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]", help="Directories of runs to open side by side (default: an attention layer)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Write the page of the runs to this file.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port; falls back to a free one if taken.")] = 8050,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; access needs a token. (default: loopback)", show_default=False),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the interactive page: finished runs side by side, or the Hessian of a layer as you move its sizes."""
    from curvoscope.commands import explore as command

    command.run(runs or [], output, host, port, open_browser)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Benchmarks to run (default: all).")
    ] = None,
) -> None:
    """Run the benchmarks (in a checkout) and print one JSON document with ratios against other packages."""
    from curvoscope.commands import bench as command

    raise typer.Exit(command.run(names or []))


@app.command()
def verify(seed: Seed = 0, as_json: AsJson = False) -> None:
    """Check every theorem against automatic differentiation; exit code 1 if one does not hold."""
    from curvoscope.commands import verify as command

    raise typer.Exit(command.run(seed, as_json))


def main() -> None:
    """Run the command line; errors of the package become one line on stderr and exit code 2."""
    # Read when torch is first imported: on a busy machine, threads that spin while they wait cost most of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except CurvoscopeError as error:
        from rich.console import Console
        from rich.text import Text

        from curvoscope import commands

        commands.remove_empty()
        message = Text.assemble(("error: ", "red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
