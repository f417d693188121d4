"""Products with an operator, counted and checked, and the arguments that all estimators share."""

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate.progress import Ticker
from curvoscope.estimate.space import Space
from curvoscope.magnitudes import exponent_of
from curvoscope.settings import current

COLUMNS = 8  # vectors a product, at most
LEAST = 16  # products before a tolerance may end the work
MOST = 100_000  # products before the work ends without meeting its tolerance
DEFAULT_MATVECS = 64
_ORDINARY = 100  # binary exponents whose sixfold a float64 still has
_ZERO = 2000  # the exponent of zero is below that of all numbers
_COPIES = 6  # of the columns and their products, in memory at once


@runtime_checkable
class Matrix(Protocol):
    """All that an estimator knows of an operator.

    An attribute `symmetric` is believed. Where there is none, eigenvalues and densities take symmetry for granted, and
    the others do without it. Where vectors are spread over processes, an attribute `spaces` says how (see `space`).

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> isinstance(torch.eye(3), estimate.Matrix)
        True
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, other: Tensor) -> Tensor: ...


class Products:
    """B / unit applied to columns in float64, a few at a time in the operator's own precision, counted and checked.

    The unit is one, unless the entries of the first product that is not zero are so large or small that their squares
    and cubes would leave the range of float64: then it is the power of two nearest to them, and answers are in units.

    Used as a context, so that a progress bar does not outlive its work.
    """

    def __init__(self, operator: Matrix, label: str, total: int | None = None) -> None:
        self.operator = operator
        self.rows, self.size = operator.shape  # B is (rows, size)
        spaces: tuple[Space, Space] | None = getattr(operator, "spaces", None)
        self.row_space, self.space = spaces or (Space(self.rows), Space(self.size))
        self._longest = max(self.row_space.longest, self.space.longest)
        # float64 where the device has it: the algebra around the products is done in it
        self.device = torch.device("cpu") if operator.device.type == "mps" else operator.device
        self.matvecs = 0
        self._exponent: int | None = None  # that of the unit, once known
        needed = _COPIES * 8 * max(1, self._longest)
        self.columns = max(1, min(COLUMNS, self.budget() // needed))  # vectors a product
        what = f"a product with a vector of length {self._longest}"
        checks.fits(self.columns * needed, self.budget(), what, "give a larger memory_limit")
        self._ticker = Ticker(label, total)

    def __enter__(self) -> "Products":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.close()

    def __call__(self, columns: Tensor) -> Tensor:
        """(size, c) -> (rows, c), both float64."""
        out = torch.empty(self.row_space.length, columns.shape[1], dtype=torch.float64, device=self.device)
        for start in range(0, columns.shape[1], self.columns):
            part = slice(start, start + self.columns)
            out[:, part] = self.at_once(columns[:, part]).to(self.device, torch.float64)
        return out

    def at_once(self, columns: Tensor) -> Tensor:
        """(size, c) -> (rows, c) in one product, in the operator's precision."""
        operator, count = self.operator, columns.shape[1]
        product = operator @ columns.to(operator.device, operator.dtype)
        if product.shape != (self.row_space.length, count):
            expected = (self.row_space.length, count)
            raise ShapeError("operator", f"gave shape {tuple(product.shape)}, expected {expected}")
        if not bool(torch.isfinite(product).all()):
            bad = int((~torch.isfinite(product)).sum())
            raise NonFiniteError("operator", f"{bad} of {product.numel()} entries of a product are NaN or infinite")
        self.matvecs += count
        self._ticker.advance(count)
        if self._exponent is None:
            self._exponent = self._common_exponent(product)
        return product if self.unit == 1 else product / self.unit

    @property
    def unit(self) -> float:
        """What answers are in."""
        return 2.0 ** (self._exponent or 0)

    def _common_exponent(self, product: Tensor) -> int | None:
        """The exponent of the largest entry in all processes, or 0 where it is ordinary; None for a zero product."""
        mine = exponent_of(product)
        exponent = -self.row_space.least(_ZERO if mine is None else -mine)
        if exponent == -_ZERO:
            return None
        return exponent if abs(exponent) > _ORDINARY else 0

    @property
    def epsilon(self) -> float:
        """The rounding of the operator's precision."""
        return float(torch.finfo(self.operator.dtype).eps)

    def identity(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The entries of B, a few columns at a time: unit vectors (size, c), and their columns of B (rows, c)."""
        for start in range(0, self.size, self.columns):
            stop = min(start + self.columns, self.size)
            unit = self.space.units(start, stop, self.device)
            yield unit, self(unit)

    def fits(self, columns: int) -> bool:
        """Whether so many float64 vectors of the operator's size fit in the memory at hand."""
        fit = 8 * self._longest * columns <= self.budget()
        checks.predict(8 * self._longest * columns if fit else 0)
        return fit

    def budget(self) -> int:
        """Bytes that may be used in this process, the same in all."""
        return self.space.least(checks.memory_budget())


class Probes:
    """Random columns from a generator of one's own, so that torch's global one is neither read nor moved."""

    def __init__(self, products: Products, seed: int | None) -> None:
        self._space, self._device = products.space, products.device
        # mixed, so that the probes of seeds 0, 1, 2, ... have nothing in common
        chosen = current().seed if seed is None else seed
        mixed = int(np.random.SeedSequence(chosen % 2**64).generate_state(1)[0])
        self._generator = torch.Generator(device="cpu").manual_seed(mixed)

    def signs(self, count: int) -> Tensor:
        """(size, count) of +1 and -1."""
        generator = self._generator
        drawn = self._space.random(
            lambda rows: torch.randint(0, 2, (rows, count), generator=generator, dtype=torch.int8)
        )
        return drawn.mul_(2).sub_(1).to(self._device, torch.float64)

    def normal(self, count: int) -> Tensor:
        """(size, count) of standard normals."""
        generator = self._generator
        drawn = self._space.random(lambda rows: torch.randn(rows, count, generator=generator, dtype=torch.float64))
        return drawn.to(self._device)


def check_budget(matvecs: int | None, tolerance: float | None, least: int = 2) -> None:
    """Raise `RangeError` unless at most one of the two is given, and in its range."""
    if matvecs is not None and tolerance is not None:
        raise RangeError("tolerance", "got both matvecs and tolerance; give a budget or a precision, not both")
    if matvecs is not None and matvecs < least:
        raise RangeError("matvecs", f"got {matvecs}, expected at least {least}")
    if tolerance is not None and not 0 < tolerance < 1:
        raise RangeError("tolerance", f"got {tolerance}, expected a relative error between 0 and 1")


def check_square(operator: Matrix, question: str) -> None:
    """Raise `ShapeError` unless the operator is square."""
    if operator.shape[0] != operator.shape[1]:
        raise ShapeError(
            "operator", f"{question} needs a square one, this is {operator.shape[0]} x {operator.shape[1]}"
        )


def check_symmetric(operator: Matrix, question: str) -> None:
    """Raise `ShapeError` unless the operator is square and does not say that it is not symmetric."""
    check_square(operator, question)
    if not getattr(operator, "symmetric", True):
        raise ShapeError("operator", f"{question} needs a symmetric one, and this one says that it is not")
