"""What is looked at: the model that MODEL names, its loss and a batch, and in words where they come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvoscope import data
from curvoscope.blocks import Blocks, layer_and_role
from curvoscope.curvature import CrossEntropy, blocks_of
from curvoscope.data import text
from curvoscope.errors import BlockNameError, RangeError
from curvoscope.models import configs, loading
from curvoscope.models.tokenizer import tokenizer
from curvoscope.versions import versions

DTYPES = {"float64": torch.float64, "float32": torch.float32}
_SEQUENCES = {"addition": 64, "causal": 8, "masked": 8, "image": 32}
_LENGTH = 64


@dataclass(frozen=True)
class Request:
    """What decides the model and its batch. The names are those of the options; None: what suits the model."""

    model: str
    seed: int
    text: str | None = None
    sequences: int | None = None
    length: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its loss, one batch; `about` describes them to a reader, `facts` to a program."""

    model: nn.Module
    loss: CrossEntropy
    batch: Any
    blocks: Blocks
    about: list[str]
    facts: dict[str, Any]
    versions: dict[str, str]


def subject_of(request: Request) -> Subject:
    """Load or make the model and give it data. A name of the package is never taken for a folder."""
    folder = None if request.model in configs.NAMES else Path(request.model)
    is_path = folder is not None and (folder.exists() or len(folder.parts) > 1 or folder.is_absolute())
    dtype = request.dtype or ("float64" if request.model == configs.ADDITION else "float32")
    if folder is not None and is_path:
        loaded = loading.load(folder, DTYPES[dtype])
    else:
        folder, loaded = None, configs.make(request.model, request.seed, DTYPES[dtype])
    batch, about, facts = _batch(request, loaded, folder)
    model = loaded.model
    size = sum(parameter.numel() for parameter in model.parameters())
    weights = f"random weights, seed {request.seed}" if folder is None else f"weights of {folder}"
    lines = [f"{type(model).__name__}, {size:,} parameters in {dtype}, {weights}.", about]
    if loaded.unused:
        lines.append(f"Not used: {len(loaded.unused)} tensors of the folder, {', '.join(loaded.unused[:3])}, ...")
    facts = {
        "name": request.model,
        "class": type(model).__name__,
        "kind": loaded.kind,
        "parameters": size,
        "dtype": dtype,
        "weights": "random" if folder is None else "loaded",
        "unused": list(loaded.unused),
        "data": facts,
    }
    used = versions()
    if request.model != configs.ADDITION:
        used["transformers"] = loading.transformers().__version__
    return Subject(model, CrossEntropy(shift=loaded.kind == "causal"), batch, blocks_of(model), lines, facts, used)


def select(blocks: Blocks, patterns: tuple[str, ...], layers_only: bool = False) -> Blocks:
    """The blocks of the patterns; without any, all weights, embeddings and norms, that is all but the biases.

    Outside of the layers a tied embedding acts at both ends of the model, where no layer's output can split it.
    """
    if patterns:
        try:
            return blocks.select(*patterns)
        except BlockNameError as error:
            raise BlockNameError("blocks", str(error).removeprefix("patterns: ")) from error
    names = [name for name in blocks if not is_bias(name) and (not layers_only or is_in_layer(name))]
    return Blocks(blocks[name] for name in names or blocks)


def is_bias(name: str) -> bool:
    """Whether a block is a bias, by its name."""
    leaf = name.rpartition(".")[2]
    return leaf.startswith("b_") or leaf == "bias"


def is_in_layer(name: str) -> bool:
    """Whether a block belongs to a numbered layer of a known family."""
    return layer_and_role(name) is not None


def _batch(request: Request, loaded: loading.Loaded, folder: Path | None) -> tuple[Any, str, dict[str, Any]]:
    """A batch for the model's kind, and what it is, in words and as facts."""
    sequences = request.sequences if request.sequences is not None else _SEQUENCES[loaded.kind]
    if loaded.kind in ("addition", "image"):
        for option in ("text", "length"):
            if getattr(request, option) is not None:
                raise RangeError(option, f"is for language models; {request.model} reads none, leave it out")
    if sequences < 1:
        raise RangeError("sequences", f"got {sequences}, expected at least 1")
    if loaded.kind == "addition":
        tokens = data.addition(sequences, seed=request.seed)
        about = f"Cross-entropy of the answers to {sequences} five-digit additions."
        return (tokens[:, :-1], data.answer_targets(tokens)), about, {"additions": sequences}
    config: Any = loaded.model.config
    if loaded.kind == "image":
        return _noise(request, config, sequences)
    return _text(request, loaded, folder, config, sequences)


def _noise(request: Request, config: Any, sequences: int) -> tuple[Any, str, dict[str, Any]]:
    """The package ships no images: pixels are standard normal, labels uniform."""
    generator = torch.Generator().manual_seed(request.seed)
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(sequences, config.num_channels, height, width, generator=generator)
    labels = torch.randint(0, config.num_labels, (sequences,), generator=generator)
    about = (
        f"Noise images: cross-entropy of {sequences} images of random pixels, {height} x {width}, with random labels. "
        "There is nothing in them to learn."
    )
    facts = {"noise images": sequences, "height": height, "width": width, "labels": "random"}
    return {"pixel_values": pixels, "labels": labels}, about, facts


def _text(
    request: Request, loaded: loading.Loaded, folder: Path | None, config: Any, sequences: int
) -> tuple[Any, str, dict[str, Any]]:
    context = getattr(config, "max_position_embeddings", None)
    length = request.length if request.length is not None else min(_LENGTH, context or _LENGTH)
    if context is not None and length > context:
        raise RangeError("length", f"got {length}, the model reads at most {context} tokens")
    masked = loaded.kind == "masked"
    source = text.corpus() if request.text is None else text.read(Path(request.text))
    encoded = text.encode(source, config.vocab_size, None if folder is None else tokenizer(folder), masked)
    tokens = text.cut(encoded.tokens, sequences, length)
    name = "the package's corpus" if request.text is None else request.text
    task = "15 % hidden tokens" if masked else "the next token"
    about = f"Cross-entropy of {task} on {sequences} sequences of {length} tokens from {name}; tokens: {encoded.about}."
    facts = {"text": name, "sequences": sequences, "length": length, "tokens": encoded.about}
    if masked:
        assert encoded.mask is not None
        inputs, labels = text.hide(tokens, encoded.mask, request.seed)
        return {"input_ids": inputs, "labels": labels}, about, facts | {"hidden": int((labels >= 0).sum())}
    return {"input_ids": tokens, "labels": tokens}, about, facts
