"""Data for each task: the function to differentiate, its loss, a batch, and a description of their origin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.commands.request import ADDITION, Request
from curvoscope.commands.targets import RANDOM, SAMPLED, Bits, Classes, Numbers, Spans, TargetForm
from curvoscope.errors import RangeError
from curvoscope.families import loading, text
from curvoscope.families.loading import Loaded, UnknownArchitectureError
from curvoscope.families.readouts import MEAN, EmbeddingScores, SpanScores, embedded, pooling_of
from curvoscope.families.tasks import BOTH_SIDES, ModelTask
from curvoscope.families.text import IGNORED
from curvoscope.families.tokenizer import tokenizer
from curvoscope.losses import CrossEntropy, Objective
from curvoscope.losses.objectives import logits_of
from curvoscope.papers import tasks

_TEXTS, _IMAGES = 8, 32
_TOKENS, _WAVE = 64, 16_000  # of a text; of a waveform: a second of sound
_OF_THE_TEXT = (ModelTask.CAUSAL, ModelTask.MASKED, *BOTH_SIDES)


@dataclass(frozen=True, eq=False)
class Data:
    """What is differentiated (the model, or the model and a readout), its loss and one batch; `about` describes them to
    a reader, one sentence per line, `facts` to a program."""

    model: nn.Module
    loss: Objective
    batch: Any
    about: list[str]
    facts: dict[str, Any]


@dataclass(eq=False)
class Draft:
    """Data without targets: `of` says in words what the inputs are. `labels`: targets that the data have themselves;
    `read`: how a file becomes targets."""

    model: nn.Module
    inputs: dict[str, Any]
    form: TargetForm
    of: str
    facts: dict[str, Any]
    labels: Tensor | None = None
    read: Callable[[Path], Tensor] | None = None


def data_for(request: Request, loaded: Loaded, folder: Path | None) -> Data:
    """A batch for the task of a model, by the options of a request."""
    _check(request, loaded)
    if loaded.task == ADDITION:
        return _additions(request, loaded)
    task = ModelTask(loaded.task)
    with torch.no_grad():
        if task is ModelTask.IMAGE_CLASSIFICATION:
            draft = _images(request, loaded)
        elif task is ModelTask.AUDIO_CLASSIFICATION:
            draft = _sounds(request, loaded)
        elif task is ModelTask.EMBEDDING:
            return _embeddings(request, loaded, folder)
        else:
            draft = _texts(request, loaded, task, folder)
        return _with_targets(draft, request, task)


def _check(request: Request, loaded: Loaded) -> None:
    """Raise for options that the task has no use for."""
    task = loaded.task
    unread = {
        "text": task in (ADDITION, ModelTask.IMAGE_CLASSIFICATION, ModelTask.AUDIO_CLASSIFICATION),
        "length": task in (ADDITION, ModelTask.IMAGE_CLASSIFICATION),
    }
    for option, is_unread in unread.items():
        if is_unread and getattr(request, option) is not None:
            raise RangeError(option, f"is for language models; {request.model} reads no text, leave it out")
    if request.targets is not None and task in (ADDITION, ModelTask.EMBEDDING):
        raise RangeError("targets", f"got {request.targets}, but {task} has targets of its own; leave it out")
    if request.sequences is not None and request.sequences < 1:
        raise RangeError("sequences", f"got {request.sequences}, expected at least 1")


def _additions(request: Request, loaded: Loaded) -> Data:
    assert request.sequences is not None
    tokens = tasks.addition(request.sequences, seed=request.seed)
    additions = "addition" if request.sequences == 1 else "additions"
    about = f"Cross-entropy of the answers to {request.sequences} five-digit {additions}."
    batch = (tokens[:, :-1], tasks.answer_targets(tokens))
    return Data(loaded.model, CrossEntropy(), batch, [about], {"additions": request.sequences})


# ---- targets


def _with_targets(draft: Draft, request: Request, task: ModelTask) -> Data:
    """The draft with the targets that are asked for; without a wish its own ones, or random ones."""
    asked, generator, own = request.targets, torch.Generator().manual_seed(request.seed), draft.labels
    if task in BOTH_SIDES and asked in (RANDOM, SAMPLED) and own is not None:  # the decoder reads the text all the same
        draft.inputs["decoder_input_ids"] = _shifted(draft.model, own)
    if task not in (ModelTask.CAUSAL, ModelTask.MASKED) or asked == SAMPLED:
        outputs = _outputs(draft)
    if asked is None and own is not None:
        labels, line, fact = own, "", "text"
    elif asked in (None, RANDOM):
        labels, line, fact = draft.form.random(generator), "Targets are random and contain nothing to learn.", RANDOM
    elif asked == SAMPLED:
        labels = draft.form.sampled(outputs, generator)
        line, fact = "Targets are drawn from the model's own predictions.", SAMPLED
    else:
        labels, line, fact = _read(draft, Path(asked), task), f"Targets are those of {asked}.", asked
    if own is not None:
        labels = torch.where(own == IGNORED, own, labels)
    about = [f"{draft.form.noun} on {draft.of}.", *([line] if line else [])]
    batch: Any = {**draft.inputs, "labels": labels}
    if isinstance(draft.model, SpanScores):  # which takes no labels
        batch = (draft.inputs, labels)
    return Data(draft.model, draft.form.loss, batch, about, draft.facts | {"targets": fact})


def _read(draft: Draft, path: Path, task: ModelTask) -> Tensor:
    if draft.read is not None:
        return draft.read(path)
    if task in _OF_THE_TEXT:
        raise RangeError(
            "targets", f"got {path}, but the targets of a {task} model are tokens of its text; give --text {path}"
        )
    return draft.form.read(path)


def _shifted(model: nn.Module, labels: Tensor) -> Tensor:
    """What a decoder reads before it predicts the labels."""
    config: Any = model.config
    start = next((n for n in (config.decoder_start_token_id, config.bos_token_id) if n is not None), 0)
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)


def _outputs(draft: Draft) -> Tensor:
    """Run the model once."""
    reads = {**draft.inputs, "labels": draft.labels} if _decodes(draft) else draft.inputs
    with _tried(draft.model.model if isinstance(draft.model, SpanScores) else draft.model):
        return logits_of(draft.model(**reads))


@contextmanager
def _tried(model: nn.Module) -> Iterator[None]:
    """Inside, a model runs on data that it may not be made for."""
    try:
        yield
    except Exception as error:  # whatever the model does not like
        reason = " ".join(str(error).split())
        raise UnknownArchitectureError(
            "model", f"{type(model).__name__} does not run on the package's data ({reason}); {loading.CURE}"
        ) from error


def _decodes(draft: Draft) -> bool:
    """Whether the model makes the inputs of its decoder of the labels."""
    both = bool(getattr(getattr(draft.model, "config", None), "is_encoder_decoder", False))
    return both and draft.labels is not None and "decoder_input_ids" not in draft.inputs


# ---- what heads predict


def _of_head(model: nn.Module, shape: tuple[int, ...]) -> TargetForm:
    """The form of a classifier's targets, from its configuration."""
    config: Any = model.config
    problem, count = getattr(config, "problem_type", None), config.num_labels
    if problem == "regression" or (problem is None and count == 1):
        return Numbers((*shape, count))
    if problem == "multi_label_classification":
        return Bits((*shape, count))
    return Classes(shape, count, None if len(shape) == 1 else f"{count} classes per token")


# ---- images and sound: the package ships none


def _noise(model: nn.Module, shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal numbers in the precision of the model."""
    dtype = next(parameter.dtype for parameter in model.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _images(request: Request, loaded: Loaded) -> Draft:
    model, rows = loaded.model, request.sequences or _IMAGES
    config: Any = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = _noise(model, (rows, getattr(config, "num_channels", 3), height, width), request.seed)
    of = f"{rows} noise images, {height} x {width} random pixels"
    facts = {"noise images": rows, "height": height, "width": width}
    return Draft(model, {"pixel_values": pixels}, _of_head(model, (rows,)), of, facts)


def _sounds(request: Request, loaded: Loaded) -> Draft:
    model, rows = loaded.model, request.sequences or _TEXTS
    name, shape = _sound_shape(model, request.length)
    of = f"{rows} pieces of noise as sound, {' x '.join(map(str, shape))} random numbers each"
    inputs = {name: _noise(model, (rows, *shape), request.seed)}
    return Draft(model, inputs, _of_head(model, (rows,)), of, {"noise sounds": rows, "shape": list(shape)})


def _sound_shape(model: nn.Module, asked: int | None) -> tuple[str, tuple[int, ...]]:
    """The input for sound and its shape: bands of Whisper, a spectrogram, or a waveform of the length asked for."""
    config: Any = model.config
    name = str(getattr(model, "main_input_name", ""))
    bands, frames, length = (
        getattr(config, key, None) for key in ("num_mel_bins", "max_source_positions", "max_length")
    )
    shape: tuple[int, ...] | None = None
    if name == "input_features" and bands is not None and frames is not None:
        shape = (bands, 2 * frames)
    elif name == "input_values" and bands is not None and length is not None:
        shape = (length, bands)
    elif name == "input_values":
        return name, (asked or _WAVE,)
    if shape is None:
        raise UnknownArchitectureError(
            "model", f"{type(model).__name__} reads sound in a different form from Whisper or Wav2Vec2; {loading.CURE}"
        )
    if asked is not None:
        raise RangeError(
            "length", f"got {asked}, but {type(model).__name__} reads {shape[0]} x {shape[1]} numbers only"
        )
    return name, shape


# ---- texts


class _TextReader:
    """Texts as sequences of a model's tokens: the package's corpus, or the file that the request names."""

    def __init__(self, request: Request, loaded: Loaded, folder: Path | None) -> None:
        config: Any = loaded.model.config
        inner = config.get_text_config(decoder=True)
        contexts = (getattr(inner, name, None) for name in ("max_position_embeddings", "max_target_positions"))
        context = next((found for found in contexts if found is not None and found > 0), None)  # XLNet says -1
        self.rows = request.sequences if request.sequences is not None else _TEXTS
        self.length = request.length if request.length is not None else min(_TOKENS, context or _TOKENS)
        if context is not None and self.length > context:
            raise RangeError("length", f"got {self.length}, the model reads at most {context} tokens")
        self._name = "the package's corpus" if request.text is None else request.text
        source = text.corpus() if request.text is None else text.read(Path(request.text))
        self.vocabulary, self._masked = inner.vocab_size, loaded.task == ModelTask.MASKED
        self._tokenizer = None if folder is None else tokenizer(folder)
        self._encoded = self._encode(source)
        about = self._encoded.about
        sequences = "sequence" if self.rows == 1 else "sequences"
        self.of = f"{self.rows} {sequences} of {self.length} tokens from {self._name}; tokens: {about}"
        self.facts = {"text": self._name, "sequences": self.rows, "length": self.length, "tokens": about}

    def _encode(self, source: str) -> text.Encoded:
        return text.encode(source, self.vocabulary, self._tokenizer, self._masked)

    @property
    def mask(self) -> int:
        """The token for hidden ones."""
        assert self._encoded.mask is not None
        return self._encoded.mask

    def tokens(self) -> Tensor:
        """Sequences (N, L)."""
        return text.cut(self._encoded.tokens, self.rows, self.length)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Sequences (N, L), and those that follow each of them."""
        both = text.cut(self._encoded.tokens, self.rows, 2 * self.length)
        first, second = (half.contiguous() for half in both.chunk(2, 1))
        return first, second

    def targets(self, path: Path) -> Tensor:
        """A file as the sequences (N, L) that are to be predicted."""
        tokens, needed = self._encode(text.read(path, "targets")).tokens, self.rows * self.length
        if len(tokens) < needed:
            raise text.TextError("targets", f"{path} has {len(tokens)} tokens, expected {needed}: {self.of}")
        return text.cut(tokens, self.rows, self.length)


def _texts(request: Request, loaded: Loaded, task: ModelTask, folder: Path | None) -> Draft:
    reader, model = _TextReader(request, loaded, folder), loaded.model
    rows, length = reader.rows, reader.length
    if task in BOTH_SIDES:
        return _decoded(reader, model, task, request.seed)
    tokens = reader.tokens()
    inputs = {"input_ids": tokens}
    if task is ModelTask.CAUSAL:
        form: TargetForm = Classes((rows, length), reader.vocabulary, "the next token", shift=True)
        return Draft(model, inputs, form, reader.of, reader.facts, tokens)
    if task is ModelTask.MASKED:
        form = Classes((rows, length), reader.vocabulary, "15 % hidden tokens")
        hidden, labels = text.hide(tokens, reader.mask, request.seed)
        facts = reader.facts | {"hidden": int((labels != IGNORED).sum())}
        return Draft(model, {"input_ids": hidden}, form, reader.of, facts, labels)
    if task is ModelTask.QUESTION_ANSWERING:
        return Draft(SpanScores(model), inputs, Spans(rows, length), reader.of, reader.facts)
    config: Any = model.config
    if task is ModelTask.SEQUENCE_CLASSIFICATION and config.pad_token_id is None:
        config.pad_token_id = -1  # a decoder looks for the last token that is not padding: here every one
    shape = (rows,) if task is ModelTask.SEQUENCE_CLASSIFICATION else (rows, length)
    return Draft(model, inputs, _of_head(model, shape), reader.of, reader.facts)


def _decoded(reader: _TextReader, model: nn.Module, task: ModelTask, seed: int) -> Draft:
    """An encoder reads a text, or sound, and a decoder predicts a text."""
    form = Classes((reader.rows, reader.length), reader.vocabulary, f"the {reader.length} tokens that follow")
    if task is ModelTask.SEQ2SEQ:
        first, second = reader.pairs()
        return Draft(model, {"input_ids": first}, form, reader.of, reader.facts, second, reader.targets)
    name, shape = _sound_shape(model, None)
    form = Classes((reader.rows, reader.length), reader.vocabulary, "a text")
    of = f"noise as sound, unrelated to it: {reader.of}"
    inputs = {name: _noise(model, (reader.rows, *shape), seed)}
    facts = reader.facts | {"noise features": [reader.rows, *shape]}
    return Draft(model, inputs, form, of, facts, reader.tokens(), reader.targets)


def _embeddings(request: Request, loaded: Loaded, folder: Path | None) -> Data:
    """Each text is to find the one that follows it among those that follow the others."""
    model = loaded.model
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UnknownArchitectureError("task", f"embedding is for models of text; {type(model).__name__} reads none")
    reader, pooling = _TextReader(request, loaded, folder), MEAN if folder is None else pooling_of(folder)
    if reader.rows < 2:
        raise RangeError("sequences", f"got {reader.rows}, expected at least 2: each text is compared with the others")
    first, second = reader.pairs()
    with _tried(model):
        scores = EmbeddingScores(model, embedded(model, {"input_ids": second}, pooling), pooling)
    about = [
        f"Cross-entropy of finding the text that follows among {reader.rows}, from 20 times the cosine of embeddings "
        f"({pooling} of tokens), on {reader.of}.",
        "The embeddings of the texts that follow are constants.",
    ]
    batch = ({"input_ids": first}, torch.arange(reader.rows))
    return Data(scores, CrossEntropy(), batch, about, reader.facts | {"pooling": pooling, "targets": "text"})
