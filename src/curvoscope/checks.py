"""Checks of what comes in from outside, and of the memory at hand."""

import time
from collections.abc import Iterator
from functools import lru_cache

import psutil
import torch
from torch import Tensor

from curvoscope.errors import (
    DeviceError,
    DtypeError,
    EmptyError,
    MemoryLimitError,
    NonFiniteError,
    RangeError,
)

_SHARE_OF_FREE_MEMORY = 0.4


def floating(argument: str, tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """`tensor` itself, once it is known to be a finite floating-point tensor, alike in dtype and device to `like`."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(argument, f"expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise DtypeError(argument, f"expected floating point, got {tensor.dtype}; convert with .double()")
    if like is not None and tensor.dtype != like.dtype:
        raise DtypeError(argument, f"dtype {tensor.dtype} differs from {like.dtype} of the other tensors")
    if like is not None and tensor.device != like.device:
        raise DeviceError(argument, f"is on {tensor.device}, the other tensors on {like.device}")
    if tensor.numel() == 0:
        raise EmptyError(argument, f"is empty, shape {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NonFiniteError(argument, f"{bad} of {tensor.numel()} entries are NaN or infinite")
    return tensor


def choice(argument: str, value: str, allowed: tuple[str, ...]) -> str:
    """`value` itself, once it is known to be one of `allowed`."""
    if value not in allowed:
        raise RangeError(argument, f"got {value!r}, expected one of {', '.join(map(repr, allowed))}")
    return value


def memory_budget(memory_limit: int | None) -> int:
    """Bytes that a computation may use: the limit given, else a part of what is free."""
    if memory_limit is None:
        return int(_SHARE_OF_FREE_MEMORY * _free_memory(int(time.monotonic())))
    if memory_limit <= 0:
        raise RangeError("memory_limit", f"got {memory_limit}, expected a positive number of bytes")
    return memory_limit


@lru_cache(maxsize=1)
def _free_memory(second: int) -> int:
    """Bytes that are free in this second: to ask costs as much as a small block, so not more than once."""
    return int(psutil.virtual_memory().available)


def fits(needed: int, memory_limit: int | None, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` when `needed` bytes are more than the budget."""
    budget = memory_budget(memory_limit)
    if needed > budget:
        raise MemoryLimitError("memory_limit", f"{what} needs {_size(needed)}, the limit is {_size(budget)}; {instead}")


def chunks(tokens: int, period: int, bytes_per_token: int, budget: int) -> Iterator[tuple[int, int]]:
    """Cut `tokens` into ranges of at most `budget` bytes: whole sequences of `period` tokens, or parts of one."""
    at_once = max(1, budget // max(1, bytes_per_token))
    if at_once >= period:
        step = at_once // period * period
        yield from ((start, min(start + step, tokens)) for start in range(0, tokens, step))
    else:
        for first in range(0, tokens, period):
            yield from (
                (start, min(start + at_once, first + period)) for start in range(first, first + period, at_once)
            )


def _size(number: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.4g} TiB"
