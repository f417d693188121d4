"""The settings that all computations share: memory limit, progress bars, seed, scratch. One context holds them."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from curvoscope.errors import RangeError


@dataclass
class Settings:
    """The settings in force, and the largest memory peak that a computation has predicted under them."""

    memory_limit: int | None = None  # bytes; None: a part of what is free
    progress: bool = True  # whether estimators show a progress bar on a terminal or in a notebook
    seed: int = 0  # of estimators and random draws
    predicted: int = 0  # bytes
    scratch: Path | None = None  # a folder for the vectors of Lanczos; None: in memory


_current: ContextVar[Settings] = ContextVar("settings")


@contextmanager
def settings(
    memory_limit: int | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    scratch: str | Path | None = None,
) -> Iterator[Settings]:
    """Set the memory limit, progress bars, default seed and scratch folder for computations inside a `with` block.

    Settings that are not given stay as they are outside the block. Blocks can be nested; each thread has settings of
    its own.

    Args:
        memory_limit: bytes that one computation may use. A computation that needs more is cut into chunks, or refused
            with a `MemoryLimitError`. By default 40 % of the free memory.
        progress: whether an estimator that takes more than a second shows a bar, on a terminal or in a notebook.
        seed: seed of every estimate and random draw without a `seed=` of its own.
        scratch: folder for the vectors of Lanczos, in a memory-mapped file that is removed after the run. The memory
            limit does not count them; eigenvalues are the same to the bit, if without a folder the vectors fit.

    Returns:
        A context manager. What it yields has the settings in force, by these names, and `predicted`: the largest peak,
        in bytes, that a computation inside has predicted so far, even if refused.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.LinearMLP([torch.eye(3).double()])
        >>> H = layer.hessian(torch.ones(2, 3).double(), cv.losses.MSE(torch.zeros(2, 3).double()))
        >>> with cv.settings(memory_limit=100):
        ...     H.dense()
        Traceback (most recent call last):
        curvoscope.errors.MemoryLimitError: memory_limit: a dense block of 9 x 9 needs ...
    """
    if memory_limit is not None and not (isinstance(memory_limit, Real) and 1 <= memory_limit < math.inf):
        raise RangeError("memory_limit", f"got {memory_limit!r}, expected a positive number of bytes")
    if scratch is not None and not (isinstance(scratch, str | os.PathLike) and Path(scratch).is_dir()):
        raise RangeError("scratch", f"got {str(scratch)!r}, expected a folder that exists")
    around = current()
    here = Settings(
        around.memory_limit if memory_limit is None else int(memory_limit),
        around.progress if progress is None else progress,
        chosen_seed(seed),
        scratch=around.scratch if scratch is None else Path(scratch),
    )
    token = _current.set(here)
    try:
        yield here
    finally:
        _current.reset(token)
        around.predicted = max(around.predicted, here.predicted)


def chosen_seed(seed: int | None) -> int:
    """`seed`, or the seed of the settings in force if it is None; `RangeError` unless it is a whole number."""
    if seed is not None and not isinstance(seed, Integral):
        raise RangeError("seed", f"got {seed!r}, expected a whole number")
    return current().seed if seed is None else int(seed)


def current() -> Settings:
    """The settings in force: those of the innermost `with settings(...)`, or the defaults."""
    return _current.get(None) or Settings()
