"""Checks of what comes in from outside, and of the memory at hand."""

import difflib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _hooked_globally

from curvoscope.errors import (
    BlockNameError,
    DeviceError,
    DtypeError,
    EmptyError,
    MemoryLimitError,
    ModelError,
    NonFiniteError,
    RangeError,
)
from curvoscope.settings import current

_SHARE_OF_FREE_MEMORY = 0.4
_SHARE_OF_EXPONENTS = 0.2  # 5e7 in float32, 4e61 in float64: five such factors still have a product
_FEW_NAMES = 8  # an error shows so many names in full
LEAST_CHUNK = 2**20  # bytes that a chunk may always have


def floating(argument: str, tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Check that `tensor` is a finite floating-point tensor, alike in dtype and device to `like`, and return it."""
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
    if not all_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NonFiniteError(argument, f"{bad} of {tensor.numel()} entries are NaN or infinite")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. The sum tells for less; but it may overflow alone."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


Answer = TypeVar("Answer", float, Tensor)


def finite(question: str, answer: Answer) -> Answer:
    """Check that `answer` is finite and return it; every computed answer passes through here."""
    if not (all_finite(answer) if isinstance(answer, Tensor) else math.isfinite(answer)):
        raise NonFiniteError(question, "overflows; scale the weights and inputs down, or convert them to float64")
    return answer


def answered(question: str, compute: Callable[[], Answer]) -> Answer:
    """Check that the result of `compute()` is finite and return it."""
    try:
        return finite(question, compute())
    except (NonFiniteError, torch.linalg.LinAlgError) as error:  # the latter is what LAPACK says
        raise NonFiniteError(
            question, "the entries overflow; scale the weights and inputs down, or convert them to float64"
        ) from error


def commensurate(factors: Mapping[str, Tensor]) -> None:
    """Raise `RangeError` if huge factors of one product meet tiny ones: products of some of them would vanish on the
    way to a result that does not. Factors that are zero, or only tiny, or only huge, are harmless."""
    sizes = {name: float(torch.stack(torch.aminmax(factor)).abs().max()) for name, factor in factors.items()}
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        return
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    dtype = factors[least].dtype
    reach = torch.finfo(dtype).max ** _SHARE_OF_EXPONENTS
    if sizes[most] > reach and sizes[least] < 1 / reach:
        raise RangeError(
            least,
            f"has entries up to {sizes[least]:.1g}, {most} up to {sizes[most]:.1g}: products of both vanish in "
            f"{dtype}; move the scale from one to the other, or convert to float64",
        )


def module(model: object) -> None:
    """Raise `ModelError` unless the model is one of torch."""
    if not isinstance(model, nn.Module):
        raise ModelError("model", f"got a {type(model).__name__}, expected a torch.nn.Module")


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is the `forward` of its class alone: hooks may change what goes in and out."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) or _hooked_globally())


def choice(argument: str, value: str, allowed: tuple[str, ...]) -> str:
    """Check that `value` is one of `allowed` and return it."""
    if value not in allowed:
        raise RangeError(argument, f"got {value!r}, expected one of {', '.join(map(repr, allowed))}")
    return value


def listed(name: object, known: Collection[str]) -> str:
    """The known names, for an error about an unknown one: all if there are few, otherwise the nearest."""
    if len(known) > _FEW_NAMES:
        return f"{len(known)} names; nearest: {nearest(name, known)}"
    near = nearest(name, known, cutoff=0.3)
    return (", ".join(known) or "none") + (f"; nearest: {near}" if near else "")


def block_named(argument: str, name: object, known: Collection[str], hint: str = "") -> None:
    """Raise `BlockNameError` unless the name is known; the error lists the known names and ends with the hint."""
    if name not in known:
        raise BlockNameError(argument, f"there is no {name!r} among {listed(name, known)}{hint}")


def block_pair(argument: str, key: object) -> tuple[str, str]:
    """The names of a row and a column, for a pair or a single name; raise `BlockNameError` for anything else."""
    pair = key if isinstance(key, tuple) else (key, key)
    if len(pair) != 2 or not all(isinstance(name, str) for name in pair):
        raise BlockNameError(argument, f"expected a name or two, got {key!r}; for several blocks use select(names)")
    return pair


def different_blocks(argument: str, names: Sequence[str], aliases: Mapping[str, str]) -> None:
    """Raise `BlockNameError` unless `names` is a list of different blocks."""
    own = {aliases.get(name, name) for name in names} if isinstance(names, Collection) else set()
    if isinstance(names, str) or not 0 < len(own) == len(names):
        raise BlockNameError(argument, f"expected a list of different blocks, got {names!r}")


def nearest(name: object, known: Collection[str], cutoff: float = 0.0) -> str:
    """The three known names most similar to a name; `cutoff`: the least similarity, from 0 to 1."""
    return ", ".join(difflib.get_close_matches(str(name), known, n=3, cutoff=cutoff))


def real(argument: str, value: object, expected: str = "a number") -> None:
    """Raise `RangeError` unless the value is a real number."""
    if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise RangeError(argument, f"got {value!r}, expected {expected}")


def at_least(least: int, **numbers: int | None) -> None:
    """Raise `RangeError` unless the named numbers are whole and at least `least`; None is none."""
    for argument, value in numbers.items():
        if value is not None and not isinstance(value, Integral):
            raise RangeError(argument, f"got {value!r}, expected a whole number of at least {least}")
        if value is not None and value < least:
            raise RangeError(argument, f"got {value}, expected at least {least}")


def positive(expected: str = "a positive number", **numbers: float | None) -> None:
    """Raise `RangeError` if one of the named numbers is not positive and finite; None is none."""
    for argument, value in numbers.items():
        if value is not None:
            real(argument, value, expected)
        if value is not None and not 0 < value < math.inf:
            raise RangeError(argument, f"got {value}, expected {expected}")


def damping(value: object) -> float:
    """Check that a damping is one finite number of at least 0, and return it as a float."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last is what torch says of several numbers
        raise DtypeError("damping", f"got {type(value).__name__}, expected one number") from None
    if not 0 <= number < math.inf:
        raise RangeError("damping", f"got {value!r}, expected a finite number of at least 0")
    return number


def probability(argument: str, value: float) -> None:
    """Raise `RangeError` unless the value is between 0 and 1."""
    real(argument, value, "a probability between 0 and 1")
    if not 0 < value < 1:
        raise RangeError(argument, f"got {value}, expected a probability between 0 and 1")


def torch_seed(seed: int) -> None:
    """Raise `RangeError` unless the seed has at most 32 bits: torch's CPU generator ignores those above."""
    if not 0 <= seed < 2**32:
        raise RangeError("seed", f"got {seed}, expected 0 to 2**32 - 1")


def predict(peak: int) -> None:
    """Say how many bytes a computation will use."""
    here = current()
    here.predicted = max(here.predicted, peak)


def memory_budget() -> int:
    """Bytes that a computation may use: the memory limit in force, or a part of what is free."""
    limit = current().memory_limit
    return int(_SHARE_OF_FREE_MEMORY * _free_memory(int(time.monotonic()))) if limit is None else limit


@lru_cache(maxsize=1)
def _free_memory(second: int) -> int:
    """Bytes that are free in this second: to ask costs as much as a small block, so not more than once."""
    return int(psutil.virtual_memory().available)


def fits(needed: int, budget: int | None, what: str, instead: str) -> None:
    """Raise `MemoryLimitError` if `needed` bytes are more than the budget; None stands for `memory_budget()`."""
    budget = memory_budget() if budget is None else budget
    predict(needed)
    if needed > budget:
        message = f"{what} needs {readable_size(needed)}, the limit is {readable_size(budget)}; {instead}"
        raise MemoryLimitError("memory_limit", message, needed)


def chunks(
    tokens: int, period: int, bytes_per_token: int, budget: int, single: str = "a single token"
) -> Iterator[tuple[int, int]]:
    """Cut `tokens` into ranges of at most `budget` bytes: whole sequences of `period` tokens, or parts of one.

    `MemoryLimitError` if a `single` one needs more than there is.
    """
    if bytes_per_token > max(budget, LEAST_CHUNK):
        fits(bytes_per_token, None, single, "give a larger memory_limit, fewer tokens or narrower layers")
    at_once = max(1, budget // max(1, bytes_per_token))
    predict(bytes_per_token * min(tokens, at_once))
    if at_once >= period:
        step = at_once // period * period
        yield from ((start, min(start + step, tokens)) for start in range(0, tokens, step))
    else:
        for first in range(0, tokens, period):
            yield from (
                (start, min(start + at_once, first + period)) for start in range(first, first + period, at_once)
            )


def readable_size(number: int) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.4g} TiB"
