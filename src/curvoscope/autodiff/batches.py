"""Batches in the forms that people have, cut into micro-batches, and proof that a second pass sees the same data."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from curvoscope import checks
from curvoscope.autodiff.safety import same_randomness
from curvoscope.errors import CurvoscopeError, EmptyError

_FORMS = "expected (inputs, targets), inputs being a tensor, a tuple or a dict, or a dict with the key 'labels'"
_LABELS = ("label", "label_ids")  # other names of "labels", as transformers' collator knows them
_DATASET_ROWS = 32  # rows of a dataset in a batch, at most
_HASHED = 65536  # numbers of a tensor that the fingerprint reads, evenly spread


class BatchError(CurvoscopeError, ValueError):
    """Batches have an unknown form, or differ on a second pass."""


@dataclass(frozen=True)
class Batch:
    """What the model is called with, `model(*arguments, **keywords)`, and the targets of the loss."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    targets: Any
    index: int
    labelled: bool = False  # whether the targets are the "labels" of a dict
    start: int = 0  # the row of the whole batch at which a micro-batch begins
    position: int = 0  # among all micro-batches

    @property
    def rows(self) -> int:
        """Length of the first axis of the first tensor."""
        return rows_of((self.arguments, self.keywords))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """A copy of the batch on `device`, its floating-point tensors in `dtype`: a loader may use its memory again."""

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach().to(device, dtype if leaf.is_floating_point() else None, copy=True)

        arguments, keywords, targets = tree_map(moved, (self.arguments, self.keywords, self.targets))
        return replace(self, arguments=arguments, keywords=keywords, targets=targets)

    def split(self, size: int | None) -> list["Batch"]:
        """Parts of at most `size` rows; tensors with another first axis go to each part whole."""
        rows = self.rows
        if size is None or rows <= size:
            return [self]

        def part(start: int) -> "Batch":
            def cut(leaf: Any) -> Any:
                is_row = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
                return leaf[start : start + size] if is_row else leaf

            arguments, keywords, targets = tree_map(cut, (self.arguments, self.keywords, self.targets))
            return replace(self, arguments=arguments, keywords=keywords, targets=targets, start=start)

        return [part(start) for start in range(0, rows, size)]

    def fingerprint(self) -> bytes:
        """A hash of all tensors: their shapes and a sample of their numbers."""
        digest = hashlib.blake2b(digest_size=16)
        for leaf in tree_flatten((self.arguments, self.keywords, self.targets))[0]:
            if isinstance(leaf, Tensor):
                numbers = leaf.detach().flatten()
                numbers = numbers[:: max(1, numbers.numel() // _HASHED)].contiguous().cpu()
                digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
                digest.update(numbers.view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(leaf).encode())
        return digest.digest()


class Batches:
    """An iterable of batches that gives the same data on every pass, which is checked on every pass.

    A Hugging Face dataset is read once, see `dataset_batches`. `may_be_empty`: if other processes have batches too.
    """

    def __init__(self, source: Iterable[Any], micro_batch: int | None = None, may_be_empty: bool = False) -> None:
        checks.at_least(1, micro_batch=micro_batch)
        if isinstance(source, Mapping | Tensor):
            several = f"choose one of {', '.join(map(str, source))}" if _is_dataset(source) else None
            cure = several or "put it into a list: [(inputs, targets)]"
            raise BatchError("batches", f"got one {type(source).__name__}; {cure}")
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise BatchError("batches", f"got {type(source).__name__}, expected a list of (inputs, targets)")
        if isinstance(source, Iterator):
            name = type(source).__name__
            raise BatchError("batches", f"a {name} can be iterated only once, and products need many passes: list(...)")
        if _is_dataset(source):
            source = dataset_batches(source)
        self._source, self._micro_batch = source, micro_batch
        self._prints: list[bytes] | None = None
        with same_randomness(self.generators):  # both passes in one: a loader that shuffles must not start afresh
            first = [batch.fingerprint() for batch in self._walk()]
            if not first and not may_be_empty:
                raise EmptyError("batches", "there are none; an exhausted iterator? Give a list or a DataLoader")
            self._prints = first
            if not isinstance(source, list | tuple):
                for _ in self._walk():
                    pass

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches, each with the index of its batch."""
        parts = (part for batch in self._walk() for part in batch.split(self._micro_batch))
        return (replace(part, position=position) for position, part in enumerate(parts))

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of the loader's own, which walking it would advance."""
        holders = (self._source, getattr(self._source, "sampler", None))
        found = (getattr(holder, "generator", None) for holder in holders)
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _walk(self) -> Iterator[Batch]:
        count = 0
        for index, item in enumerate(self._source):
            batch = batch_of(item, index)
            if self._prints is not None and (index >= len(self._prints) or batch.fingerprint() != self._prints[index]):
                raise BatchError(
                    "batches", f"batch {index} differs from that of the first pass; use shuffle=False, or list(loader)"
                )
            count += 1
            yield batch
        if self._prints is not None and count < len(self._prints):
            raise BatchError("batches", f"{count} on this pass, {len(self._prints)} on the first; use list(loader)")


def batch_of(item: Any, index: int = 0) -> Batch:
    """A batch in one of the forms that people have."""
    if isinstance(item, Mapping):
        if "labels" not in item:
            keys = ", ".join(map(str, item))
            raise BatchError("batches", f"batch {index} is a dict without 'labels', it has {keys}; {_FORMS}")
        batch = Batch((), {key: value for key, value in item.items() if key != "labels"}, item["labels"], index, True)
    elif isinstance(item, tuple | list) and len(item) == 2:
        inputs, targets = item
        if isinstance(inputs, Mapping):
            batch = Batch((), dict(inputs), targets, index)
        else:
            batch = Batch(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, targets, index)
    else:
        size = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise BatchError("batches", f"batch {index} is a {type(item).__name__}{size}; {_FORMS}")
    if batch.rows == 0:
        raise EmptyError("batches", f"batch {index} has no rows")
    return batch


def dataset_batches(dataset: Iterable[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """The rows of a Hugging Face dataset in their order, as dicts of tensors: neighbours of equal shapes are in one.

    Texts are left out and "label" is "labels", as in a Trainer.
    """
    rows = (_row(row, i) for i, row in enumerate(dataset))
    found = []
    for _, alike in groupby(rows, key=lambda row: [(name, value.shape) for name, value in row.items()]):
        while several := list(islice(alike, _DATASET_ROWS)):
            found.append({name: torch.stack([row[name] for row in several]) for name in several[0]})
    return found


def _is_dataset(source: Any) -> bool:
    """Whether it is a dataset of the package `datasets`, whose items are single rows, or a dictionary of them."""
    return hasattr(source, "with_format") and hasattr(source, "column_names")


def _row(row: Mapping[str, Any], number: int) -> dict[str, Tensor]:
    found = {}
    for name, value in row.items():
        tensor = _tensor(value)
        if tensor is None:
            cure = f"leave it out: dataset.remove_columns({name!r})"
            raise BatchError("batches", f"column {name!r} of row {number} is not an array of numbers; {cure}")
        if isinstance(tensor, Tensor):
            found["labels" if name in _LABELS else name] = tensor
    return found


def _tensor(value: Any) -> Tensor | str | None:
    """A value of a dataset as a tensor, in its own precision; the word "text" for text, None for anything else."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return "text" if array.dtype.kind in "US" else torch.as_tensor(array) if array.dtype.kind in "biuf" else None


def rows_of(inputs: Any, argument: str = "batches") -> int:
    """Length of the first axis of the first tensor."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    if not tensors:
        raise BatchError(argument, f"a batch has no tensors among its inputs; {_FORMS}")
    return tensors[0].shape[0] if tensors[0].ndim else 1
