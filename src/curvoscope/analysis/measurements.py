"""Sizes of the blocks of any model's Hessian, part by part: exact if there is a closed form, otherwise estimated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from curvoscope import checks, estimate
from curvoscope.analysis.heterogeneity import times
from curvoscope.analysis.pair_norms import PairNorm
from curvoscope.curvature import ModelHessian
from curvoscope.estimate import Estimate, JointEstimate
from curvoscope.estimate.products import check_budget
from curvoscope.operators import LinearOperator
from curvoscope.operators.block_matrix import PARTS, Part

DEFAULT_TOLERANCE = 0.05
_ALL_EIGENVALUES = 2048  # size of a closed form up to which its eigenvalues are exact
_MEMBERS: dict[Part, tuple[int, ...]] = {"outer": (0,), "functional": (1,), "total": (0, 1)}  # of `H.stacked`
_EIGENVALUE = 0.1  # of the tolerance: Lanczos converges at once where it converges


@dataclass(frozen=True)
class Effort:
    """The cost of a number: a number of products, or as many as its relative standard error needs."""

    tolerance: float | None = None
    matvecs: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.matvecs, self.tolerance)
        if self.tolerance is None and self.matvecs is None:
            object.__setattr__(self, "tolerance", DEFAULT_TOLERANCE)

    @property
    def eigenvalue_tolerance(self) -> float | None:
        """The error bar of an eigenvalue, relative to the largest one, at which Lanczos stops."""
        return None if self.tolerance is None else _EIGENVALUE * self.tolerance


_FIRST = Effort(tolerance=0.99)  # the first probes are enough, if only pairs are wanted


@dataclass(frozen=True)
class Measurement:
    """One diagonal block and part: |B|_F, tr B and the largest eigenvalue; `method` is how its entries are computed."""

    block: str
    part: Part
    shape: tuple[int, int]
    method: str
    frobenius_norm: Estimate
    trace: Estimate
    largest_eigenvalue: Estimate


@dataclass(frozen=True)
class Extremes:
    """The ends of the spectrum of the whole Hessian; their error bars are those of `estimate.lanczos`."""

    size: int
    largest: Estimate
    smallest: Estimate

    @property
    def critical_learning_rate(self) -> Estimate | None:
        """2 / λ_max, above which gradient descent diverges on the quadratic model; None if λ_max is not positive."""
        top = self.largest
        if top.value <= 0:
            return None
        rate = checks.finite("critical_learning_rate", 2 / top.value)
        return Estimate(rate, rate * (top.stderr / top.value), top.matvecs, top.method)


def measurements(H: ModelHessian, effort: Effort, seed: int | None = None) -> Iterator[Measurement]:
    """Rows for all blocks of `H` and all parts, as they are computed.

    The tolerance applies to the norms. The trace of an indefinite part can be much smaller than its norm, so that a
    relative error would be unaffordable: it comes from the products that the norms took, and has its own error bar.
    """
    for rows, _ in measured_columns(H, effort, seed):
        yield from rows


def measured_columns(
    H: ModelHessian, effort: Effort, seed: int | None = None, pairs: bool = False
) -> Iterator[tuple[list[Measurement], list[PairNorm]]]:
    """The rows of one block after the other and, with `pairs`, its pairs with the blocks before it.

    All that is not exact comes from one set of products with outer and functional part at once, but for the
    eigenvalues. Pairs take the first of them over all rows; the parts must be split at the model's output.
    """
    for place, name in enumerate(H.names):
        methods = {part: H.method_of(name, part) for part in PARTS}
        before = H.names[:place] if pairs else []
        known = all(method == "exact" for method in methods.values())
        asked = [part for part in PARTS if before or methods[part] != "exact"]
        found = _measured(H, name, before, asked, _FIRST if known else effort, seed) if asked else {}
        rows = []
        for part in PARTS:
            operator, exact = getattr(H, part)[name], methods[part] == "exact"
            norm = operator.frobenius_norm() if exact else found[part].frobenius_norm
            trace = operator.trace() if exact else found[part].trace
            top = _eigenvalue(operator, "LA", effort, seed, exact)
            rows.append(Measurement(name, part, H.shapes[name], methods[part], norm, trace, top))
        yield rows, [PairNorm(other, name, part, found[part].rows[other]) for other in before for part in PARTS]


def _measured(
    H: ModelHessian,
    name: str,
    before: Sequence[str],
    parts: Sequence[Part],
    effort: Effort,
    seed: int | None,
) -> dict[str, JointEstimate]:
    """All parts of a block, and the norms of its pairs with the blocks before it."""
    heights = [H[other].shape[0] for other in (name, *before)]
    ends = list(accumulate(heights))
    rows = {other: slice(start, end) for other, start, end in zip(before, ends, ends[1:], strict=False)}
    stripe = H.stacked(name, [name, *before]) if before else None
    return estimate.measure(
        H.stacked(name),
        {part: _MEMBERS[part] for part in parts},
        stripe=stripe,
        rows=rows,
        matvecs=effort.matvecs,
        tolerance=effort.tolerance,
        seed=seed,
    )


def extremes(H: ModelHessian, effort: Effort, seed: int | None = None) -> Extremes:
    """The largest and the smallest eigenvalue of the total over all blocks of `H`."""
    return Extremes(H.shape[0], *(_eigenvalue(H.total, which, effort, seed) for which in ("LA", "SA")))


def rounding_of(rows: Sequence[Measurement], dtype: torch.dtype) -> float:
    """The norm below which a block is indistinguishable from the rounding of the others: ε times the largest norm."""
    return torch.finfo(dtype).eps * max(row.frobenius_norm.value for row in rows)


def headline_of(rows: Sequence[Measurement], rounding: float) -> str:
    """The norms as a title: the ratio of the largest to the smallest block that is not zero to rounding."""
    total = sorted((row for row in rows if row.part == "total"), key=lambda row: row.frobenius_norm.value)
    total = [row for row in total if row.frobenius_norm.value > rounding]
    if len(total) < 2:
        return "Norms of the Hessian's blocks"
    low, high = total[0], total[-1]
    ratio = times(high.frobenius_norm.value / low.frobenius_norm.value)
    return f"{high.block} is {ratio} {low.block} (Frobenius norm)"


def _eigenvalue(
    operator: LinearOperator, which: str, effort: Effort, seed: int | None, exact: bool = False
) -> Estimate:
    """By Lanczos, unless the entries have a closed form and are few."""
    size = operator.shape[0]
    if exact and size <= _ALL_EIGENVALUES:
        return operator.eigenvalues(1, which)[0]
    if effort.matvecs is not None and size <= effort.matvecs:
        return estimate.eigenvalues(operator, 1, which, seed=seed)[0]
    return estimate.eigenvalues(
        operator, 1, which, tolerance=effort.eigenvalue_tolerance, matvecs=effort.matvecs, seed=seed
    )[0]
