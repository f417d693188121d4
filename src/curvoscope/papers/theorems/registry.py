"""How a result of the sources is examined: the form that must hold, the form that must not, and the verdict."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partialmethod
from typing import Literal, TypeVar

import torch
from torch import Tensor

TheoremStatus = Literal["holds as printed", "holds corrected", "false"]
Error = TypeVar("Error", bound=float)

EXACT = 1e-10
"""Tolerance of an identity in float64."""
REFUTED = 1e-2
"""A form whose relative error exceeds this does not hold: far above rounding, far below the errors of the errata."""


class Fails(float):
    """The relative error of a form that must fail; a check yields it among the errors that must be small.

    `form` names the other form in the note of the result.
    """

    form: str

    def __new__(cls, error: float, form: str = "printed form") -> "Fails":
        """An error of `form`."""
        found = super().__new__(cls, error)
        found.form = form
        return found


Check = Callable[[int], Iterable[float]]
"""seed -> relative errors, of the form that must hold and, as `Fails`, of another form that must not."""


@dataclass(frozen=True)
class Result:
    """One result of a source, compared with automatic differentiation.

    Args:
        name: as in the source.
        source: "paper", "slides", "block paper", "article" or "Curvoscope".
        verdict: "holds as printed", "holds corrected" or "false".
        error: the largest relative error, over all draws and blocks, of the form that must hold; for the verdict
            "false", of the printed form.
        tolerance: the largest error that still counts as agreement.
        note: what the form is; for an erratum, which form fails and why.
        refuted: the relative error of the form that must fail: the printed one of an erratum, or another reading.

    Example:
        >>> from curvoscope.papers.theorems import Result
        >>> Result("Equation (2)", "paper", "holds as printed", error=8e-16, tolerance=1e-10, note="").holds
        True
        >>> Result("Equation (2)", "paper", "holds as printed", error=0.5, tolerance=1e-10, note="").holds
        False
    """

    name: str
    source: str
    verdict: TheoremStatus
    error: float
    tolerance: float
    note: str
    refuted: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the verdict is confirmed; never with an error that is NaN."""
        if self.verdict == "false":
            return self.error > self.tolerance
        return self.error <= self.tolerance and (self.refuted is None or self.refuted > REFUTED)


@dataclass(frozen=True)
class Theorem:
    """A result of a source and the check that examines it.

    What counts is the largest error of the form that must hold (the smallest, if the verdict is "false") and the
    smallest of the form that must fail: it fails on every draw or, with `somewhere`, on one of them.
    """

    name: str
    source: str
    check: Check
    verdict: TheoremStatus = "holds as printed"
    tolerance: float = EXACT
    note: str = ""
    somewhere: bool = False

    def examine(self, seed: int) -> Result:
        """Run the check. A formula whose shapes do not fit together counts as infinitely wrong."""
        note, refuted = self.note, None
        try:
            errors = list(self.check(seed))
        except RuntimeError as problem:
            errors, note = [math.inf], str(problem).splitlines()[0]
        fails = [error for error in errors if isinstance(error, Fails)]
        errors = [error for error in errors if not isinstance(error, Fails)]
        error = smallest(errors) if self.verdict == "false" else largest(errors)
        if fails:
            failing = largest(fails) if self.somewhere else smallest(fails)
            refuted = float(failing)
            note = f"{note}; {failing.form} {_how_wrong(refuted)}".removeprefix("; ")
        return Result(self.name, self.source, self.verdict, error, self.tolerance, note, refuted)


THEOREMS: dict[str, Theorem] = {}


@dataclass(frozen=True)
class Source:
    """A source of results. `@source.holds(name, note)` registers a check of one; so do `corrected` and `false`."""

    name: str

    def holds(
        self,
        name: str,
        note: str = "",
        *,
        verdict: TheoremStatus = "holds as printed",
        tolerance: float = EXACT,
        somewhere: bool = False,
    ) -> Callable[[Check], Check]:
        """Register a check of a result that holds as printed; for the options see `Theorem`."""

        def register(check: Check) -> Check:
            if name in THEOREMS:
                raise ValueError(f"{name!r} is registered twice")
            THEOREMS[name] = Theorem(name, self.name, check, verdict, tolerance, note, somewhere)
            return check

        return register

    corrected = partialmethod(holds, verdict="holds corrected")
    false = partialmethod(holds, verdict="false", tolerance=REFUTED)


PAPER = Source("paper")
SLIDES = Source("slides")
BLOCK_PAPER = Source("block paper")
ARTICLE = Source("article")
OWN = Source("Curvoscope")


def relative_error(computed: Tensor, reference: Tensor, scale: Tensor | None = None) -> float:
    """Largest absolute deviation / largest absolute entry of `scale`, by default of the reference.

    Infinite if the shapes differ, NaN if any entry is NaN.
    """
    if computed.shape != reference.shape:
        return math.inf
    deviation = float((computed - reference).abs().max())
    size = float((reference if scale is None else scale).abs().max())
    if size == 0.0:
        return 0.0 if deviation == 0.0 else math.nan if math.isnan(deviation) else math.inf
    return deviation / size


def relative_size(block: Tensor, scale: Tensor) -> float:
    """Largest absolute entry of a block that should be zero / largest absolute entry of `scale`."""
    return relative_error(block, torch.zeros_like(block), scale)


def excess(value: float, bound: float) -> float:
    """How far a value is above its upper bound, relative to the bound; 0 if the bound holds."""
    if bound == 0.0:
        return 0.0 if value == 0.0 else math.inf
    ratio = value / bound
    return ratio if math.isnan(ratio) else max(0.0, ratio - 1)


def misfit(product: Callable[[], object]) -> float:
    """Infinite if the factors of a product do not fit together, else 0."""
    try:
        product()
    except RuntimeError:
        return math.inf
    return 0.0


def largest(errors: Iterable[Error]) -> Error:
    """The largest error; NaN if any is NaN, whereas the result of the built-in `max` would depend on the order."""
    return _extreme(list(errors), max)


def smallest(errors: Iterable[Error]) -> Error:
    """The smallest error, for forms that must fail on every draw; NaN if any is NaN."""
    return _extreme(list(errors), min)


def _extreme(errors: list[Error], choose: Callable[[list[Error]], Error]) -> Error:
    if not errors:
        raise ValueError("no comparison was made")
    return next((error for error in errors if math.isnan(error)), choose(errors))


def _how_wrong(error: float) -> str:
    return "has the wrong shape" if math.isinf(error) else f"off by {error:.2g}"
