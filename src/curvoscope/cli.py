"""The command line. Heavy imports are made inside the commands, so that `--help` answers at once."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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


class Norm(StrEnum):
    """Where LayerNorm stands."""

    none = "none"
    pre = "pre"


class Attention(StrEnum):
    """What turns scores into attention weights."""

    softmax = "softmax"
    linear = "linear"


class Dtype(StrEnum):
    """The precision of the computation."""

    float64 = "float64"
    float32 = "float32"


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
    seed: Seed = 0,
    d: Annotated[int, typer.Option(help="Width of the model.")] = 16,
    sequences: Annotated[int, typer.Option(help="Number of additions in the batch.")] = 64,
    norm: Annotated[Norm, typer.Option(help="LayerNorm: none, or before each branch.")] = Norm.none,
    attention: Annotated[Attention, typer.Option(help="Attention weights.")] = Attention.softmax,
    dtype: Annotated[Dtype, typer.Option(help="Precision.")] = Dtype.float64,
    out: Annotated[Path, typer.Option(help="Directory for the figures and table.json.")] = Path("curvoscope-analyze"),
    as_json: AsJson = False,
) -> None:
    """The exact attention Hessian of the paper's single-block GPT-2 on five-digit addition."""
    from curvoscope.commands import analyze as command

    configuration = command.Configuration(seed, d, sequences, norm.value, attention.value, dtype.value)
    command.run(configuration, out, as_json)


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

        message = Text.assemble(("error: ", "red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
