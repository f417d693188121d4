"""Numbers as words and cells, for all pages of the gallery."""

import math
from collections.abc import Sequence

from gallery.claims import Claim, Ratio, middle
from gallery.measure import Facts

_ROUNDING = 1e-6  # of a value


def short(value: float) -> str:
    """Two digits, with a power of ten from a million on."""
    if math.isinf(value):
        return "∞"
    if not 100 <= abs(value) < 1e6:
        return f"{value:.2g}".replace("e+0", "e").replace("e+", "e")
    return f"{float(f'{value:.2g}'):,.0f}"


def interval(ratio: Ratio) -> str:
    """The quotient in bold if it is surely below 1, and its interval."""
    mark = "**" if ratio.high < 1 else ""
    value = f"{mark}{short(ratio.value)}{mark}"
    return value if ratio.low == ratio.high else f"{value} ({short(ratio.low)} to {short(ratio.high)})"


def counts(claim: Claim | None) -> str:
    """In how many layers a claim fails and holds, and the median quotient with its interval."""
    if claim is None:
        return "not measured"
    said = f"holds in {len(claim.holds)} of {len(claim.ratios)} layers"
    if claim.fails:
        said = f"**fails in {len(claim.fails)}**, {said}"
    return f"{said}; median quotient {interval(middle(claim.ratios))}"


def percent(share: Ratio) -> str:
    """A share and its interval."""
    return f"{share.value:.0%} ({100 * share.low:.0f} to {share.high:.0%})"


def plus_minus(number: Facts, digits: int = 3) -> str:
    """A value and its standard error; without one if it is exact or the error is that of rounding."""
    value, is_exact = _plain(number["value"], digits), number["stderr"] <= _ROUNDING * abs(number["value"])
    return value if is_exact else f"{value} ± {_plain(number['stderr'], 1)}"


def _plain(value: float, digits: int) -> str:
    """So many digits, without a power of ten unless the number is below 0.0001 or above a million."""
    return f"{float(f'{value:.{digits}g}'):,g}"


def signed(number: Facts) -> str:
    """A change of the loss and its standard error."""
    return f"{number['value']:+.2g} ± {number['stderr']:.1g}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]
