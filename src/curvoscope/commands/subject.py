"""What is looked at: the model that MODEL names, its loss and a batch, and in words where they come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.blocks import Blocks, layer_and_role
from curvoscope.curvature import CrossEntropy, blocks_of, trainable
from curvoscope.errors import BlockNameError, RangeError
from curvoscope.families import configs, loading, text
from curvoscope.families.tokenizer import tokenizer
from curvoscope.operators import BlockHessian
from curvoscope.papers import tasks
from curvoscope.papers.networks import GPT2
from curvoscope.versions import versions

DTYPES = {"float64": torch.float64, "float32": torch.float32}
ADDITION = "addition"
NAMES = (ADDITION, *configs.NAMES)
_SEQUENCES = {"image": 32}
_OF_ADDITION = {"sequences": 64, "dtype": "float64", "d": 16, "norm": "none", "attention": "softmax"}
_TEXTS = 8
_LENGTH = 64
_CLASSES = ("image", "text class", "token class")


@dataclass(frozen=True)
class Request:
    """What decides the model and its batch. The names are those of the options; None: what suits the model.

    `d`, `norm` and `attention` are of the model "addition", which has defaults for them.
    """

    model: str
    seed: int
    text: str | None = None
    sequences: int | None = None
    length: int | None = None
    dtype: str | None = None
    d: int | None = None
    norm: str | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        for name, value in _OF_ADDITION.items():
            if self.model == ADDITION and getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("d", "norm", "attention"):
            if self.model != ADDITION and getattr(self, name) is not None:
                raise RangeError(name, f"has a meaning only for {ADDITION}; leave --{name} out")


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

    def exact_hessian(self) -> BlockHessian | None:
        """The closed form of all layers at once, attention's biases apart: the paper's network alone has one."""
        if not isinstance(self.model, GPT2):
            return None
        inputs, targets = self.batch
        with torch.no_grad():
            X = self.model.residual_stream(inputs, 0)
        return self.model.stack().hessian(X, self.model.exact_loss(targets))


def subject_of(request: Request) -> Subject:
    """Load or make the model and give it data. A name of the package is never taken for a folder."""
    folder = None if request.model in NAMES else Path(request.model)
    is_path = folder is not None and (folder.exists() or len(folder.parts) > 1 or folder.is_absolute())
    dtype = request.dtype or "float32"
    if folder is not None and is_path:
        loaded = loading.load(folder, DTYPES[dtype])
    else:
        folder, loaded = None, _made(request, DTYPES[dtype])
    batch, about, facts = _batch(request, loaded, folder)
    model = loaded.model
    size = sum(parameter.numel() for parameter in model.parameters())
    weights = f"random weights, seed {request.seed}" if folder is None else f"weights of {folder}"
    lines = [f"{type(model).__name__}, {size:,} parameters in {dtype}, {weights}.", about]
    if request.d is not None:
        lines.append(f"One block, d = {request.d}, norm {request.norm}, {request.attention} attention.")
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
    blocks = blocks_of(model)
    if not any(map(is_in_layer, blocks)):  # a family without a table of paths
        blocks = blocks_of(model, batch)
    blocks = trainable(model, blocks)
    used = versions()
    if request.model != ADDITION:
        used["transformers"] = loading.transformers().__version__
    return Subject(model, CrossEntropy(shift=loaded.kind == "causal"), batch, blocks, lines, facts, used)


def _made(request: Request, dtype: torch.dtype) -> loading.Loaded:
    """The model of that name with random weights, in evaluation mode; those of "addition" are drawn in float64."""
    if request.d is None or request.norm is None or request.attention is None:
        return configs.make(request.model, request.seed, dtype, others=(ADDITION,))
    model = GPT2(request.d, norm=request.norm, activation=request.attention, seed=request.seed, dtype=dtype)
    return loading.Loaded(model.eval(), ADDITION)


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
    sequences = request.sequences if request.sequences is not None else _SEQUENCES.get(loaded.kind, _TEXTS)
    if loaded.kind in ("addition", "image"):
        for option in ("text", "length"):
            if getattr(request, option) is not None:
                raise RangeError(option, f"is for language models; {request.model} reads no text, leave it out")
    if sequences < 1:
        raise RangeError("sequences", f"got {sequences}, expected at least 1")
    if loaded.kind == "addition":
        tokens = tasks.addition(sequences, seed=request.seed)
        about = f"Cross-entropy of the answers to {sequences} five-digit additions."
        return (tokens[:, :-1], tasks.answer_targets(tokens)), about, {"additions": sequences}
    config: Any = loaded.model.config
    if loaded.kind in _CLASSES:
        _check_classes(loaded.model, config)
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
        "They contain nothing to learn."
    )
    facts = {"noise images": sequences, "height": height, "width": width, "labels": "random"}
    return {"pixel_values": pixels, "labels": labels}, about, facts


def _check_classes(model: nn.Module, config: Any) -> None:
    """Raise unless the loss is the cross-entropy of one class out of several."""
    problem = getattr(config, "problem_type", None)
    if config.num_labels < 2 or problem not in (None, "single_label_classification"):
        seen = f"predicts {config.num_labels} labels as {problem or 'regression'}"
        raise loading.UnknownArchitectureError(
            "model", f"{type(model).__name__} {seen}, expected one class out of several; {loading.CURE}"
        )


def _text(
    request: Request, loaded: loading.Loaded, folder: Path | None, config: Any, sequences: int
) -> tuple[Any, str, dict[str, Any]]:
    kind, model = loaded.kind, loaded.model
    inner = config.get_text_config(decoder=True)
    contexts = (getattr(inner, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    context = next((found for found in contexts if found is not None), None)
    length = request.length if request.length is not None else min(_LENGTH, context or _LENGTH)
    if context is not None and length > context:
        raise RangeError("length", f"got {length}, the model reads at most {context} tokens")
    source = text.corpus() if request.text is None else text.read(Path(request.text))
    encoded = text.encode(source, inner.vocab_size, None if folder is None else tokenizer(folder), kind == "masked")
    tokens = text.cut(encoded.tokens, sequences, length * (2 if kind == "text to text" else 1))
    name = "the package's corpus" if request.text is None else request.text
    facts = {"text": name, "sequences": sequences, "length": length, "tokens": encoded.about}
    of_text = f"{sequences} sequences of {length} tokens from {name}; tokens: {encoded.about}."
    if kind == "masked":
        assert encoded.mask is not None
        inputs, labels = text.hide(tokens, encoded.mask, request.seed)
        about = f"Cross-entropy of 15 % hidden tokens on {of_text}"
        return {"input_ids": inputs, "labels": labels}, about, facts | {"hidden": int((labels >= 0).sum())}
    if kind == "text to text":
        batch = dict(zip(("input_ids", "labels"), _halves(tokens), strict=True))
        _try(model, batch)
        return batch, f"Cross-entropy of the {length} tokens that follow {of_text}", facts
    if kind == "sound to text":
        features = _noise_features(model, config, sequences, request.seed)
        batch = {"input_features": features, "labels": tokens}
        _try(model, batch)
        about = f"Noise as sound, unrelated to the text: cross-entropy of {of_text}"
        return batch, about, facts | {"noise features": list(features.shape)}
    if kind in _CLASSES:
        generator = torch.Generator().manual_seed(request.seed)
        shape = (sequences,) if kind == "text class" else (sequences, length)
        labels = torch.randint(0, config.num_labels, shape, generator=generator)
        _try(model, {"input_ids": tokens})
        about = f"Random labels, which contain nothing to learn: cross-entropy of {config.num_labels} classes"
        about += f"{'' if kind == 'text class' else ' per token'} on {of_text}"
        return {"input_ids": tokens, "labels": labels}, about, facts | {"labels": "random"}
    about = f"Cross-entropy of the next token on {of_text}"
    return {"input_ids": tokens, "labels": tokens}, about, facts


def _halves(tokens: Tensor) -> list[Tensor]:
    return [half.contiguous() for half in tokens.chunk(2, 1)]


def _noise_features(model: nn.Module, config: Any, sequences: int, seed: int) -> Tensor:
    """The package ships no sound: features as Whisper takes them, standard normal."""
    bands, frames = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if getattr(model, "main_input_name", None) != "input_features" or bands is None or frames is None:
        raise loading.UnknownArchitectureError(
            "model", f"{type(model).__name__} reads sound in a different form from Whisper; {loading.CURE}"
        )
    return torch.randn(sequences, bands, 2 * frames, generator=torch.Generator().manual_seed(seed))


def _try(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Run the model once, on data that it may not be made for."""
    dtype = next(parameter.dtype for parameter in model.parameters())
    moved = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    try:
        with torch.no_grad():
            model(**moved)
    except Exception as error:  # whatever the model does not like
        reason = " ".join(str(error).split())
        raise loading.UnknownArchitectureError(
            "model", f"{type(model).__name__} does not run on the package's text ({reason}); {loading.CURE}"
        ) from error
