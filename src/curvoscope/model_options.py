"""MODEL and the options that say how to make it and its batch: the same for every command that looks at a model."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from curvoscope.families.tasks import ModelTask

if TYPE_CHECKING:
    from curvoscope.commands.request import Request

Seed = Annotated[int, typer.Option(help="Seed for all random numbers.")]
NormPlacement = Literal["none", "pre"]


def _request(
    model: Annotated[
        str,
        typer.Argument(
            help="A local Hugging Face folder (config.json and safetensors), a GGUF file, or addition, gpt2-tiny, "
            "gpt2-small, llama-tiny, bert-tiny or vit-tiny (random weights).",
            metavar="MODEL",
        ),
    ] = "addition",
    seed: Seed = 0,
    d: Annotated[int | None, typer.Option(help="addition only: width of the model. (default: 16)")] = None,
    norm: Annotated[
        NormPlacement | None,
        typer.Option(help="addition only: LayerNorm: none, or before each branch. (default: none)"),
    ] = None,
    attention: Annotated[
        Literal["softmax", "linear"] | None,
        typer.Option(help="addition only: attention weights. (default: softmax)"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file to use instead of the package's own corpus.")] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences in the batch. (default: 64 additions, 8 of text, 32 images)")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence of text, or samples of a waveform. (default: 64 tokens, 16000 samples)"),
    ] = None,
    task: Annotated[
        ModelTask | None,
        typer.Option(help="What the model in a folder predicts. (default: what its class is made for)"),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help='"random", "sampled" from the model\'s own predictions, or a file: one line of class numbers per '
            "sequence, or the text that an encoder-decoder is to write. (default: from the text; random for classes)"
        ),
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32"] | None,
        typer.Option(help="Precision. (default: float64 for addition, float32 otherwise)"),
    ] = None,
) -> "Request":
    from curvoscope.commands.request import Request

    file = None if text is None else str(text)
    return Request(model, seed, file, sequences, length, dtype, d, norm, attention, task and str(task), targets)


def of_model(required: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command MODEL and the options of its batch in place of its first parameter, the request.

    Args:
        required: whether MODEL must be given; if not, it is "addition".

    Returns:
        A decorator of the command.
    """
    shared = dict(inspect.signature(_request).parameters)
    if required:
        shared["model"] = shared["model"].replace(default=inspect.Parameter.empty)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(_request(**{name: given.pop(name) for name in shared}), **given)

        _, *own = inspect.signature(command).parameters.values()
        everything = [*shared.values(), *own]
        run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in everything}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate
