"""Products with an operator, counted and checked, and the arguments that all estimators share."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate.progress import Ticker
from curvoscope.estimate.space import RandomFill, Space
from curvoscope.magnitudes import exponent_of
from curvoscope.settings import chosen_seed, current

COLUMNS = 8  # vectors that are drawn and compared with each other
LEAST = 16  # products before a tolerance may end the work
MOST = 100_000  # products before the work ends without meeting its tolerance
DEFAULT_MATVECS = 64
_ORDINARY = {torch.float64: 100, torch.float32: 20}  # binary exponents whose sixfold the precision still has
_ZERO = 2000  # the exponent of zero is below that of all numbers
_COPIES = 6  # of the columns and their products, in memory at once
_ENTRIES = 2**21  # in the vectors of one product: if they are long, several at once are no faster
_BITS = 64  # of a random word


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
    """B / unit applied to columns, a few at a time in the operator's own precision, counted and checked.

    Vectors are columns (n, c) whose entries lie one after the other in memory, in float64 for operators in float64 and
    in float32 for all others.

    The unit is one, unless the entries of the first product that is not zero are so large or small that their squares
    and cubes would leave the range of float64: then it is the power of two nearest to them, and answers are in units.

    Used as a context, so that a progress bar does not outlive its work, and an operator that has a context `steady` may
    examine once what it is made of, not at each product.
    """

    def __init__(self, operator: Matrix, label: str, total: int | None = None) -> None:
        self.operator = operator
        self.rows, self.size = operator.shape  # B is (rows, size)
        spaces: tuple[Space, Space] | None = getattr(operator, "spaces", None)
        self.row_space, self.space = spaces or (Space(self.rows), Space(self.size))
        self._longest = max(self.row_space.longest, self.space.longest)
        self.dtype = torch.float64 if operator.dtype == torch.float64 else torch.float32
        # sums over entries are float64, if the device has it
        self.device = torch.device("cpu") if operator.device.type == "mps" else operator.device
        self.matvecs = 0
        self._exponent: int | None = None  # that of the unit, once known
        needed = _COPIES * self.dtype.itemsize * max(1, self._longest)
        self.columns = max(1, min(COLUMNS, self.budget() // needed))  # vectors in memory at once
        self._together = max(1, min(self.columns, _ENTRIES // max(1, self._longest)))  # vectors per product
        what = f"a product with a vector of length {self._longest}"
        checks.fits(self.columns * needed, self.budget(), what, "give a larger memory_limit")
        self._ticker = Ticker(label, total)
        self._steady: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> "Products":
        self._steady = getattr(self.operator, "steady", nullcontext)()
        self._steady.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ticker.close()
        self._steady.__exit__(kind, error, trace)

    def __call__(self, columns: Tensor, out: Tensor | None = None, taller: Matrix | None = None) -> Tensor:
        """(size, c) -> (rows, c), in the memory of `out` if it is given; with `taller`, another operator with the same
        columns, the products with that one."""
        count = columns.shape[1]
        operator = self.operator if taller is None else taller
        if out is None and count <= self._together:
            return self._at_once(operator, columns).to(self.device, self.dtype)
        space = self.row_space if taller is None else Space(taller.shape[0])
        found = self.memory(count, space) if out is None else out
        for start in range(0, count, self._together):
            part = slice(start, start + self._together)
            found.T[part] = self._at_once(operator, columns[:, part]).T
        return found

    def memory(self, count: int, space: Space | None = None) -> Tensor:
        """Columns (size, count), or of another space, that are not written yet.

        They do not ask for huge pages: to make these free may take longer than a product.
        """
        return torch.empty(count, (space or self.space).length, dtype=self.dtype, device=self.device).T

    @property
    def scratch(self) -> Path | None:
        """The folder of the settings for long-lived vectors, which must be in the computer's own memory."""
        return current().scratch if self.device.type == "cpu" else None

    def basis(self, count: int) -> Tensor:
        """Columns (size, count) in the scratch folder of the settings, if there is one; otherwise as `memory`."""
        folder, numbers = self.scratch, count * self.space.length
        if folder is None or not numbers:
            return self.memory(count)
        size = numbers * self.dtype.itemsize
        with tempfile.NamedTemporaryFile(dir=folder, prefix="curvoscope-") as file:  # the mapping outlives the name
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk would end the process when it is written
            except OSError as error:
                lack = f"{folder} has no room for {checks.readable_size(size)} ({error.strerror})"
                raise RangeError("scratch", lack) from error
            return torch.from_file(file.name, shared=True, size=numbers, dtype=self.dtype).view(count, -1).T

    def _at_once(self, operator: Matrix, columns: Tensor) -> Tensor:
        """(size, c) -> (rows, c) in one product, in the operator's precision."""
        count = columns.shape[1]
        expected = (self.row_space.length if operator is self.operator else operator.shape[0], count)
        product = operator @ columns.to(operator.device, operator.dtype)
        if product.shape != expected:
            raise ShapeError("operator", f"gave shape {tuple(product.shape)}, expected {expected}")
        if not checks.all_finite(product):
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
        """The exponent of the largest entry in all processes, or 0 if it is ordinary; None for a zero product."""
        mine = exponent_of(product)
        exponent = -self.row_space.least(_ZERO if mine is None else -mine)
        if exponent == -_ZERO:
            return None
        return exponent if abs(exponent) > _ORDINARY[self.dtype] else 0

    @property
    def epsilon(self) -> float:
        """The rounding of the operator's precision."""
        return float(torch.finfo(self.operator.dtype).eps)

    def identity(self, taller: Matrix | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The entries of B, a few columns at a time: unit vectors (size, c), and their columns of B (rows, c), in
        float64; `taller` as for products."""
        for start in range(0, self.size, self.columns):
            stop = min(start + self.columns, self.size)
            unit = self.space.units(start, stop, self.device)
            yield unit, self(unit, taller=taller).double()

    def bytes(self, columns: int) -> int:
        """What so many vectors of the operator's size take."""
        return self.dtype.itemsize * self._longest * columns

    def fits(self, columns: int) -> bool:
        """Whether so many vectors fit in the memory at hand."""
        fit = self.bytes(columns) <= self.budget()
        checks.predict(self.bytes(columns) if fit else 0)
        return fit

    def budget(self) -> int:
        """Bytes that may be used in this process, the same in all."""
        return self.space.least(checks.memory_budget())


class Probes:
    """Random columns from a generator of one's own, so that torch's global one is neither read nor moved.

    They are drawn in single precision for all operators: 24 bits of a normal number are enough for its law.
    """

    def __init__(self, products: Products, seed: int | None) -> None:
        self._products = products
        # mixed, so that the probes of seeds 0, 1, 2, ... have nothing in common
        mixed = int(np.random.SeedSequence(chosen_seed(seed) % 2**64).generate_state(1)[0])
        self._generator = torch.Generator(device="cpu").manual_seed(mixed)

    def signs(self, count: int, out: Tensor | None = None) -> Tensor:
        """(size, count) of +1 and -1, in the memory of `out` if it is given."""
        return self._columns(count, out, lambda row: row.copy_(random_signs(row.numel(), self._generator)))

    def normal(self, count: int, out: Tensor | None = None) -> Tensor:
        """(size, count) of standard normals, in the memory of `out` if it is given."""
        return self._columns(count, out, lambda row: row.normal_(generator=self._generator))

    def _columns(self, count: int, out: Tensor | None, draw: RandomFill) -> Tensor:
        drawn = self._products.memory(count) if out is None else out
        for row in drawn.T:
            self._products.space.random(draw, row)
        return drawn


def random_signs(count: int, generator: torch.Generator) -> Tensor:
    """Signs (count,) in single precision: eight for each byte of random words."""
    words = torch.empty(-(-count // _BITS), dtype=torch.int64)
    words.random_(-(2 ** (_BITS - 1)), None, generator=generator)
    octets = words.view(torch.uint8).int()
    return torch.nn.functional.embedding(octets, _signs_of_octets()).flatten()[:count]


@lru_cache(maxsize=1)
def _signs_of_octets() -> Tensor:
    """(256, 8): the bits of a byte as signs."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) % 2 * 2 - 1).float()


def check_budget(matvecs: int | None, tolerance: float | None, least: int = 2) -> None:
    """Raise `RangeError` unless at most one of the two is given, and in its range."""
    if matvecs is not None and tolerance is not None:
        raise RangeError("tolerance", "got both matvecs and tolerance; give a budget or a precision, not both")
    checks.at_least(least, matvecs=matvecs)
    if tolerance is not None:
        checks.real("tolerance", tolerance)
    if tolerance is not None and not 0 < tolerance < 1:
        raise RangeError("tolerance", f"got {tolerance}, expected a relative error between 0 and 1")


def budget_of(matvecs: int | None, tolerance: float | None, default: int = DEFAULT_MATVECS) -> int | None:
    """The products to spend, once the two are checked; None: as many as the tolerance takes."""
    check_budget(matvecs, tolerance)
    return matvecs or (default if tolerance is None else None)


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
        raise ShapeError("operator", f"{question} needs a symmetric operator, but this one is declared not symmetric")
