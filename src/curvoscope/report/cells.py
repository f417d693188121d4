"""Numbers as cells of a report's tables: three digits, the error bar, and the full value behind them."""

from curvoscope.estimate import Estimate
from curvoscope.report.contents import Cell
from curvoscope.report.model_tables import or_zero, percent, with_error


def amount(value: float) -> str:
    """A number inside a sentence: three digits, or whole from a thousand to a million."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def count(value: int) -> Cell:
    """A whole number."""
    return Cell(f"{value:,}", float(value))


def estimated(estimate: Estimate | None, zero: float = 0.0) -> Cell:
    """With its standard error in percent; ~0 if neither is larger than `zero`, nothing for what was not measured."""
    if estimate is None:
        return Cell("")
    return Cell(or_zero(estimate, zero), estimate.value, estimate.stderr)


def plain(value: float | None, tolerance: float | None = None) -> Cell:
    """A number that is exact, or has the error `tolerance`: ~0 if it is not larger."""
    if value is None:
        return Cell("")
    zero = tolerance is not None and 0 < abs(value) <= tolerance
    return Cell("~0" if zero else f"{value:.2e}" if value else "0", value, tolerance)


def short(value: float | None) -> Cell:
    """Three digits, without an exponent if the number is of a common size."""
    return Cell("") if value is None else Cell(f"{value:.3g}", value)


def measured(estimate: Estimate | None, zero: float = 0.0) -> Cell:
    """Three digits without an exponent, and the standard error; ~0 for what is not larger than `zero`."""
    if estimate is None:
        return Cell("")
    if 0 < abs(estimate.value) <= zero:
        return Cell("~0", estimate.value, estimate.stderr)
    return Cell(with_error(estimate, ".3g"), estimate.value, estimate.stderr)


def resolved(value: float | None) -> Cell:
    """None: among the eigenvalues too small to be resolved."""
    return Cell("~0") if value is None else plain(value)


def share(value: float | None, stderr: float | None = None) -> Cell:
    """In percent."""
    if value is None:
        return Cell("")
    return Cell(f"{value:.1%} ±{percent(stderr)}" if stderr else f"{value:.1%}", value, stderr)
