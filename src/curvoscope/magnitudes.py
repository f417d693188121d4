"""Sums of squares whose terms leave the range of floating point, though their root does not.

Squares of 1e-30 are zero in float32, those of 1e-200 in float64. So factors are brought near one by powers of two,
which costs no digit, and a number too large or too small for a float is kept as value · 2^exponent.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ScaledNumber = tuple[float, int]
"""value · 2^exponent."""

_LEAST = -1000  # 2^1000 is finite, 2^1074 is not
_ORDINARY = 12  # binary digits: products of a few factors within 2^-12 and 2^12 neither over- nor underflow


def exponent_of(values: Tensor) -> int | None:
    """The binary exponent of the largest entry; None if all are zero, or one is not finite."""
    low, high = torch.aminmax(values) if values.numel() else (values.new_zeros(()),) * 2
    largest = max(-float(low), float(high))
    return math.frexp(largest)[1] - 1 if largest and math.isfinite(largest) else None


def power_of_two(values: Tensor) -> float:
    """The one nearest below the largest entry, with a finite reciprocal; 1 if all entries are zero."""
    return 2.0 ** max(_LEAST, exponent_of(values) or 0)


def unit(values: Tensor) -> tuple[Tensor, int]:
    """values = result · 2^exponent, the largest entry of the result being of an ordinary size."""
    exponent = exponent_of(values) or 0
    if abs(exponent) <= _ORDINARY:
        return values, 0
    return values / 2.0**exponent, exponent


def total(parts: Iterable[ScaledNumber]) -> ScaledNumber:
    """The sum."""
    held = [(value, exponent) for value, exponent in parts if value]
    if not held:
        return 0.0, 0
    top = max(exponent for _, exponent in held)
    return sum(math.ldexp(value, exponent - top) for value, exponent in held), top


def root(square: ScaledNumber) -> float:
    """The square root of what is positive but for rounding; infinite if it overflows, NaN of NaN."""
    value, exponent = square
    try:
        return math.ldexp(math.sqrt(0.0 if value < 0 else value * (1 + exponent % 2)), exponent // 2)
    except OverflowError:
        return math.inf


def in_single(values: Tensor) -> Tensor:
    """The values, in single precision if they are in half precision, for which LAPACK has no routines."""
    return values.float() if values.element_size() < torch.float32.itemsize else values


def norm(values: Tensor) -> float:
    """The Euclidean norm of all entries, summed in float64."""
    near, exponent = unit(values)
    return root((float(near.double().square().sum()), 2 * exponent))
