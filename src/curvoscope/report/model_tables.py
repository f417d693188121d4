"""Tables of estimates for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from curvoscope.analysis.ledger import Ledger
from curvoscope.analysis.measurements import Measurement
from curvoscope.analysis.spectra import BlockSpectrum
from curvoscope.estimate import Estimate
from curvoscope.report.tables import empty_table


def block_table(rows: Sequence[Measurement], rounding: float = 0.0) -> Table:
    """Norm, trace and largest eigenvalue of each block and part, with their standard errors; ~0 up to rounding."""
    table = empty_table("Blocks of the Hessian", ("block", "part", "by"), ("‖H‖F", "trace", "λ max"))
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].block != row.block
        table.add_row(
            row.block if i == 0 or rows[i - 1].block != row.block else "",
            row.part,
            row.method,
            *(or_zero(number, rounding) for number in (row.frobenius_norm, row.trace, row.largest_eigenvalue)),
            end_section=last,
        )
    return table


def with_error(estimate: Estimate, digits: str = ".2e") -> str:
    """Three digits and the standard error, in percent unless it is ten times the value; no error for what is exact."""
    value, stderr = estimate.value, estimate.stderr
    if value == 0 and stderr == 0:
        return "0"
    if estimate.method == "exact" or stderr == 0:
        return f"{value:{digits}}"
    relative = stderr / abs(value) if value else float("inf")
    if relative >= 10:
        return f"0 ±{stderr:.0e}" if relative == float("inf") else f"{value:.0e} ±{stderr:.0e}"
    return f"{value:{digits}} ±{percent(relative)}"


def percent(error: float) -> str:
    """An error in percent, with one digit after the point if it is below ten: none is shown as zero."""
    return "<0.1%" if error < 0.0005 else f"{error:.1%}" if error < 0.0995 else f"{error:.0%}"


def spectrum_table(spectra: Sequence[BlockSpectrum]) -> Table:
    """Ends and quantiles of each block's spectrum, the shares of negative eigenvalues and of those near zero."""
    table = empty_table(
        "Eigenvalues of the blocks",
        ("block",),
        ("size", "λ min", "5 %", "median", "95 %", "λ max", "λ < 0", "near 0", "|λ| ≤"),
    )
    for one in spectra:
        low, high = _ends(one)
        quantiles = [_resolved(one.quantile(share)) for share in (0.05, 0.5, 0.95)]
        shares = [f"{estimate.value:.1%}" for estimate in (one.negative, one.near_zero)]
        reach = f"{one.log.reach:.0e}" if one.log.reach else "0"
        table.add_row(one.block, f"{one.size:,}", low, *quantiles, high, *shares, reach)
    return table


def ledger_table(ledger: Ledger) -> Table:
    """What each block contributes to the change of the loss, the largest first, and what it costs alone."""
    rows = sorted(ledger.changed, key=lambda one: -abs(one.first + one.second))
    with_pairs = any(row.alone is not None for row in rows)
    columns = ("alone, predicted", "alone, measured") if with_pairs else ()
    numbers = ("|d|/|w|", "first order", "second order", "share", *columns)
    table = empty_table("What the change costs", ("block",), numbers)
    for row in rows:
        alone = ("" if one is None else with_error(one) for one in (row.alone, row.measured)) if with_pairs else ()
        table.add_row(
            row.block,
            f"{row.relative:.2g}",
            *(with_error(one) for one in (row.first, row.second)),
            f"{row.share:.1%}",
            *alone,
        )
    return table


def allocation_table(rows: Sequence[tuple[str, float, float, Estimate]]) -> Table:
    """Formats for a budget: by which costs they were chosen, their bits, and the change of the loss."""
    table = empty_table("Formats for the budget", ("chosen by",), ("bits", "predicted", "measured"))
    for kind, bits, predicted, measured in rows:
        table.add_row(kind, f"{bits:.3g}", f"{predicted:.2e}", with_error(measured))
    return table


def spectrum_line(one: BlockSpectrum) -> str:
    """The ends of one block's spectrum."""
    low, high = _ends(one)
    return f"{one.block:<28} λ min {low:>18}   λ max {high:>18}"


def or_zero(estimate: Estimate, zero: float) -> str:
    """With its standard error in percent; ~0 if neither is larger than `zero`."""
    return "~0" if 0 < abs(estimate.value) <= zero and estimate.stderr <= zero else with_error(estimate)


def _ends(one: BlockSpectrum) -> tuple[str, str]:
    return or_zero(one.smallest, one.log.reach), or_zero(one.largest, one.log.reach)


def _resolved(value: float | None) -> str:
    return "~0" if value is None else f"{value:.1e}" if value else "0"
