"""Text as tokens: the small corpus that ships with the package, or a file, cut into sequences of equal length."""

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from curvoscope.errors import CurvoscopeError, EmptyError, RangeError

BYTES = 256
MASKED_SHARE = 0.15  # BERT's
IGNORED = -100  # the label of a token that is not hidden, torch's ignore_index


class TextError(CurvoscopeError, ValueError):
    """A text cannot be read, or its tokens do not fit the model."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a tokenizer: tokens of a text, and the token that stands for a hidden one."""

    about: str
    mask: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids, without those that mark a beginning or an end."""
        ...


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as tokens (T,), in words how that was done, and the token that stands for a hidden one."""

    tokens: Tensor
    about: str
    mask: int | None


def corpus() -> str:
    """The text that ships with the package: an essay of about two thousand words on curvature in daily life."""
    return resources.files("curvoscope.families").joinpath("corpus.txt").read_text(encoding="utf-8")


def read(path: Path, argument: str = "text") -> str:
    """The text of a file in UTF-8; errors name the argument that gave the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(argument, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TextError(
            argument, f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]}"
        ) from error
    if not text.strip():
        raise EmptyError(argument, f"{path} has no words")
    return text


def encode(text: str, vocabulary: int, tokenizer: Tokenizer | None = None, masked: bool = False) -> Encoded:
    """Text as tokens below `vocabulary`.

    Without a tokenizer the tokens are UTF-8 bytes. A vocabulary too small for bytes gets a token for each of the text's
    most frequent characters and one for all others.

    Args:
        text: the text.
        vocabulary: the number of tokens that the model has.
        tokenizer: the model's tokenizer; None: bytes or characters.
        masked: whether to provide a token for hidden ones: the tokenizer's, or the last of the vocabulary, which no
            text has.

    Returns:
        The tokens (T,), how they were made, and the token for hidden ones.

    Example:
        >>> from curvoscope.families.text import encode
        >>> encode("hello world", vocabulary=4).tokens  # l, o, space, others
        tensor([3, 3, 0, 0, 1, 2, 3, 1, 3, 0, 3])
    """
    if tokenizer is not None:
        return _tokenized(text, vocabulary, tokenizer, masked)
    room = vocabulary - masked
    mask = vocabulary - 1 if masked else None
    if room >= BYTES:
        return Encoded(torch.tensor(list(text.encode())), "one token per byte", mask)
    if room < 2:
        raise RangeError("vocabulary", f"got {vocabulary}, expected at least {2 + masked} tokens")
    counts = Counter(text)
    # by frequency, then by code, so that the order does not depend on where a character comes first
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[: room - 1]
    numbers = {character: i for i, character in enumerate(frequent)}
    share = 1 - sum(counts[character] for character in frequent) / len(text)
    about = f"one token for each of the text's {len(frequent)} most frequent characters"
    if share:
        about += f", one for all others ({share:.1%} of the text)"
    return Encoded(torch.tensor([numbers.get(character, room - 1) for character in text]), about, mask)


def _tokenized(text: str, vocabulary: int, tokenizer: Tokenizer, masked: bool) -> Encoded:
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    if tokens.numel() == 0:
        raise EmptyError("text", "the model's tokenizer returns no tokens for it")
    if masked and tokenizer.mask is None:
        raise TextError("text", "the model predicts hidden tokens, but its tokenizer has no mask token")
    if int(tokens.max()) >= vocabulary:
        raise TextError(
            "text", f"the tokenizer gives token {int(tokens.max())}, the model has {vocabulary}: they do not match"
        )
    return Encoded(tokens, tokenizer.about, tokenizer.mask)


def cut(tokens: Tensor, sequences: int, length: int) -> Tensor:
    """The first tokens as sequences of equal length, one after the other.

    Args:
        tokens: (T,).
        sequences: the number of sequences.
        length: of each one.

    Returns:
        The tokens as (sequences, length).

    Example:
        >>> import torch
        >>> from curvoscope.families.text import cut
        >>> cut(torch.arange(7), sequences=2, length=3)
        tensor([[0, 1, 2],
                [3, 4, 5]])
    """
    for argument, value, least in (("sequences", sequences, 1), ("length", length, 2)):
        if value < least:
            raise RangeError(argument, f"got {value}, expected at least {least}")
    needed = sequences * length
    if len(tokens) < needed:
        raise TextError(
            "text",
            f"has {len(tokens)} tokens, {sequences} sequences of {length} need {needed}; "
            "take fewer or shorter ones, or a longer text",
        )
    return tokens[:needed].view(sequences, length)


def hide(tokens: Tensor, mask: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens (N, L) with 15 % replaced by `mask`, and the hidden ones as labels, `IGNORED` elsewhere.

    Chosen at random over all sequences together, one at least; a function of the arguments alone.
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(MASKED_SHARE * tokens.numel()))
    chosen = torch.zeros(tokens.numel(), dtype=torch.bool)
    chosen[torch.randperm(tokens.numel(), generator=generator)[:count]] = True
    chosen = chosen.view(tokens.shape)
    return tokens.masked_fill(chosen, mask), tokens.masked_fill(~chosen, IGNORED)
