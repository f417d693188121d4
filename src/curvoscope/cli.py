"""The command line. Heavy imports are made inside the commands, so that `--help` answers at once."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from curvoscope import __version__
from curvoscope.errors import CurvoscopeError

app = typer.Typer(
    name="curvoscope",
    help="The curvature of a Transformer: its loss Hessian, block by block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


class NormPlacement(StrEnum):
    """Where LayerNorm stands."""

    none = "none"
    pre = "pre"


class AttentionKind(StrEnum):
    """What turns scores into attention weights."""

    softmax = "softmax"
    linear = "linear"


class Dtype(StrEnum):
    """The precision of the computation."""

    float64 = "float64"
    float32 = "float32"


class Method(StrEnum):
    """How the blocks are computed."""

    auto = "auto"
    exact = "exact"
    autodiff = "autodiff"


class Split(StrEnum):
    """Where outer and functional part are split."""

    model = "model"
    layer = "layer"


Model = Annotated[
    str,
    typer.Argument(
        help="A local Hugging Face folder (config.json and safetensors), or addition, gpt2-tiny, gpt2-small, "
        "llama-tiny, bert-tiny, vit-tiny: random weights.",
        metavar="MODEL",
    ),
]
WidthOption = Annotated[int | None, typer.Option(help="addition only: width of the model. (default: 16)")]
NormOption = Annotated[
    NormPlacement | None,
    typer.Option(help="addition only: LayerNorm: none, or before each branch. (default: none)"),
]
AttentionOption = Annotated[
    AttentionKind | None, typer.Option(help="addition only: attention weights. (default: softmax)")
]
BlockPatterns = Annotated[
    list[str] | None, typer.Option(help="Shell pattern of block names, such as '*.attn.[QKV]'; may be repeated.")
]
Text = Annotated[Path | None, typer.Option(help="Text to read, instead of the corpus of the package.")]
Sequences = Annotated[
    int | None, typer.Option(help="Sequences in the batch. (default: 64 additions, 8 of text, 32 images)")
]
Length = Annotated[int | None, typer.Option(help="Tokens a sequence of text. (default: 64)")]
Precision = Annotated[Dtype | None, typer.Option(help="Precision. (default: float64 for addition, else float32)")]


class WithNames(TyperCommand):
    """A command whose help ends with the names of the figures, read when it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of the command, and the names."""
        from curvoscope.papers.experiments import NAMES

        self.epilog = f"NAME: all, {', '.join(NAMES)}"
        super().format_help(ctx, formatter)


def _path(text: Path | None) -> str | None:
    return None if text is None else str(text)


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
def analyze(
    model: Model = "addition",
    seed: Seed = 0,
    d: WidthOption = None,
    norm: NormOption = None,
    attention: AttentionOption = None,
    blocks: BlockPatterns = None,
    text: Text = None,
    sequences: Sequences = None,
    length: Length = None,
    method: Annotated[
        Method, typer.Option(help="Closed forms (exact), products (autodiff), or what is best for each block.")
    ] = Method.auto,
    split: Annotated[
        Split,
        typer.Option(help="Where outer and functional part are split: the model's output, or each layer's own."),
    ] = Split.model,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Relative standard error of the norms; the traces cost as much. (default: 0.05)"),
    ] = None,
    matvecs: Annotated[int | None, typer.Option(help="Products a number, instead of a tolerance.")] = None,
    dtype: Precision = None,
    out: Annotated[Path, typer.Option(help="Directory for the figures, the report and table.json.")] = Path(
        "curvoscope-analyze"
    ),
    as_json: AsJson = False,
) -> None:
    """The Hessian of MODEL, block by block: norms, traces and largest eigenvalues with error bars.

    The default, addition, is the paper's single-block GPT-2 on five-digit addition.
    """
    from curvoscope.commands import analyze as command
    from curvoscope.commands.subject import Request

    request = Request(model, seed, _path(text), sequences, length, dtype, d, norm, attention)
    options = command.AnalyzeOptions(tuple(blocks or ()), method, split, tolerance, matvecs)
    command.run(request, options, out, as_json)


@app.command()
def spectrum(
    model: Model = "addition",
    seed: Seed = 0,
    d: WidthOption = None,
    norm: NormOption = None,
    attention: AttentionOption = None,
    blocks: BlockPatterns = None,
    text: Text = None,
    sequences: Sequences = None,
    length: Length = None,
    matvecs: Annotated[int, typer.Option(help="Products a density: 64 steps of Lanczos a probe.")] = 256,
    dtype: Precision = None,
    out: Annotated[Path, typer.Option(help="Directory for the figures, the report and spectrum.json.")] = Path(
        "curvoscope-spectrum"
    ),
    as_json: AsJson = False,
) -> None:
    """The spectral densities of MODEL's Hessian, block by block, with confidence bands.

    The default, addition, is the paper's single-block GPT-2 on five-digit addition.
    """
    from curvoscope.commands import spectrum as command
    from curvoscope.commands.subject import Request

    request = Request(model, seed, _path(text), sequences, length, dtype, d, norm, attention)
    command.run(request, command.SpectrumOptions(tuple(blocks or ()), matvecs), out, as_json)


@app.command()
def watch(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    seed: Seed = 0,
    task: Annotated[str, typer.Option(help="addition, or text: the next byte of the package's corpus.")] = "addition",
    d: Annotated[int, typer.Option(help="Width of the model.")] = 16,
    norm: Annotated[NormPlacement, typer.Option(help="LayerNorm: none, or before each branch.")] = NormPlacement.pre,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, block-sgd or block-adam.")] = "adam",
    lr: Annotated[float, typer.Option(help="Learning rate; a cap for block-*.")] = 3e-3,
    sequences: Annotated[int | None, typer.Option(help="Additions or texts a batch.")] = None,
    every: Annotated[int, typer.Option(help="Steps between measurements, at least.")] = 10,
    budget: Annotated[float, typer.Option(help="Share of the time for measurements.")] = 0.25,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events into OUT/tensorboard.")] = False,
    out: Annotated[Path, typer.Option(help="Directory of the run.")] = Path("curvoscope-watch"),
    as_json: AsJson = False,
) -> None:
    """Train a small GPT-2 on additions or on text, with the curvature monitor on."""
    from curvoscope.commands import watch as command

    options = command.WatchOptions(steps, seed, task, d, norm.value, optimizer, lr, sequences, every, budget)
    raise typer.Exit(command.run(options, out, resume, as_json, tensorboard))


@app.command(cls=WithNames)
def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Figures, as fig3a, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds: minutes.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Keep what is measured.")] = True,
    out: Annotated[Path, typer.Option(help="Directory for figures and store.")] = Path("curvoscope-reproduce"),
    store: Annotated[Path | None, typer.Option(help="Store file; without it, store.sqlite in OUT.")] = None,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler, or local.")] = None,
    as_json: AsJson = False,
) -> None:
    """The papers' figures: run, resume, draw, and compare with the prediction."""
    from curvoscope.commands import reproduce as command

    command.run(names, quick, jobs, resume, out, store, dask, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory or store of a run.")],
    format_: Annotated[str, typer.Option("--format", help="csv or parquet.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="File; CSV goes to stdout without it.")] = None,
) -> None:
    """The measured values of a run as one table."""
    from curvoscope.commands import export as command

    command.run(run, format_, out)


@app.command()
def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Directory of a run of analyze, spectrum, watch or reproduce, or its JSON file."
        ),
    ],
) -> None:
    """report.html and report.md of a run again, from its JSON and its figures."""
    from curvoscope.commands import report as command

    command.run(run)


@app.command()
def explore(
    port: Annotated[int, typer.Option(help="Port; a free one where it is taken.")] = 8050,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, behind a token. (default: loopback)", show_default=False),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """The interactive page: the exact Hessian of an attention layer, at once, as its sizes and scales are moved."""
    from curvoscope.commands import explore as command

    command.run(host, port, open_browser)


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Some of them; without, all.")] = None,
) -> None:
    """The benchmarks, in a checkout: one JSON document with ratios against the peers."""
    from curvoscope.commands import bench as command

    raise typer.Exit(command.run(names or []))


@app.command()
def verify(seed: Seed = 0, as_json: AsJson = False) -> None:
    """Every theorem against automatic differentiation. Exit code 1 when one does not hold."""
    from curvoscope.commands import verify as command

    raise typer.Exit(command.run(seed, as_json))


def main() -> None:
    """The entry point: errors of the package become one line on stderr and exit code 2."""
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
