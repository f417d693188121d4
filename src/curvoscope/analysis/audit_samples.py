"""Approximations against samples: made of one half of them, compared on the other, with error bars.

On samples that A has not seen, q_i = gamma_i^T A gamma_i has the mean <H, A>. Over pairs of them, q_i q_j has the mean
<H, A>² and <gamma_i, gamma_j>² the mean |H|². The squared cosine is the ratio of these two, which does not depend on
the lengths of the samples if one direction dominates H. Values and error bars are those of the jackknife.
Approximations that keep some entries of H and drop the others need no halves: see `approximations.projections`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from curvoscope.analysis.audit_table import AuditRow, AuditTable, Standin, floats_of, standins
from curvoscope.approximations import Approximation, GradientSource, joined
from curvoscope.approximations.factors import total
from curvoscope.approximations.projections import kept_pairs, others
from curvoscope.errors import BlockNameError, CurvoscopeError, DtypeError, EmptyError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.operators.base import LinearOperator
from curvoscope.sweep.statistics import LEAST, jackknifed

FEWEST = 32  # samples of an audit: intervals from fewer do not hold if a few samples are much longer than the others
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class _Compared:
    """What one set of samples says about one approximation.

    `square`: |A|²; `trace`: tr A; `sign` of <H, A>. Pairs of samples have numbers whose mean is <H, A>²: `products`
    (m,) are their sums over the others, for each sample, and `squares` (m,) those of <gamma_i, gamma_j>²; `lengths`
    (m,) are |gamma_i|². Of an approximation that keeps entries of H, the mean of the products is <H, A> = |A|² itself:
    `keeps`. H has `size` rows.
    """

    square: float
    trace: float
    products: Tensor
    squares: Tensor
    lengths: Tensor
    floats: int
    size: int
    keeps: bool = False
    sign: float = 1.0

    def __len__(self) -> int:
        return len(self.lengths)


class _BlockSamples:
    """The samples of one block in one chunk, as approximations are made of them and compared with them.

    In the basis of the inputs that the samples have, which is small, unless an approximation needs the inputs one by
    one: heads that are groups of inputs, and operators that are given.
    """

    def __init__(self, source: GradientSource) -> None:
        self.source, self._unit = source.scaled()
        self._spanned = self.source.spanned()
        self._rows = source.shape[0] * source.shape[1]

    @cached_property
    def _gram(self) -> Tensor:
        """K[i, j] = <gamma_i, gamma_j>, (m, m)."""
        gradients = torch.cat([some.flatten(1) for some in self._spanned.gradients()])
        return (gradients @ gradients.mT).double()

    @property
    def are_zero(self) -> bool:
        """Whether all gradients are zero, as those of a block that the loss does not depend on."""
        return not bool(self._gram.any())

    @cached_property
    def _halves(self) -> tuple[GradientSource, GradientSource]:
        return self._spanned.halves()

    @cached_property
    def _plain_halves(self) -> tuple[GradientSource, GradientSource]:
        return self.source.halves()

    def compared(self, name: str, make: Callable[[GradientSource], LinearOperator], given: bool) -> _Compared:
        """One approximation, made of the first half unless it is given."""
        kept = None if given else kept_pairs(self.source, name)
        if kept is not None:
            lengths = self._gram.diagonal()
            return _Compared(0.0, 0.0, kept[0], others(self._gram.square()), lengths, kept[1], self._rows, keeps=True)
        if given:  # it has seen none of the samples
            return self._measured(make(self.source), self.source, torch.arange(len(self.source)), self._unit**-2)
        by_input = name.endswith("/heads") and self.source.axis != self.source.outputs_axis
        first, second = self._plain_halves if by_input else self._halves
        return self._measured(make(first), second, self.source.second_half)

    def _measured(self, A: LinearOperator, source: GradientSource, places: Tensor, factor: float = 1.0) -> _Compared:
        """`factor` times A against the samples of `source`, which are those at `places` of the block."""
        if isinstance(A, Approximation):
            values = torch.cat([A.quadratic(part) for part in source.compact])
        else:
            formed = (some.flatten(1) for some in source.gradients())
            values = torch.cat([(some * A._matmat(some.mT).mT).sum(1) for some in formed])
        values, gram = values.double() * factor, self._gram[places[:, None], places]
        products = values * (values.sum() - values)
        square, lengths = (float(A.frobenius_norm()) * factor) ** 2, gram.diagonal()
        squares, sign = others(gram.square()), -1.0 if float(values.sum()) < 0 else 1.0
        trace = float(A.trace()) * factor
        return _Compared(square, trace, products, squares, lengths, floats_of(A), self._rows, sign=sign)


class SampledAudit:
    """Audits the samples of a sweep as they are made: give it to `cv.sweep` as `observe`.

    Half of the samples of a chunk make an approximation, the other half measures it; several chunks give the mean over
    their approximations. The diagonal, neurons, heads and layers of H keep entries of H: their errors are those of the
    kept entries of H itself, from all pairs of samples.

    Args:
        approximations: names, operators or dictionaries of operators, as for `audit`.
        strict: whether an approximation that a block cannot have is an error; otherwise it is left out.
        groups: names of blocks that are audited as one weight, for each group; None: every block alone.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        >>> X, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> found = cv.analysis.SampledAudit(["diagonal", "kfac"])
        >>> sweep = cv.sweep(model, torch.nn.CrossEntropyLoss(), [(X, labels)], samples=64, observe=found)
        >>> row = found.table().row("0.weight", "kfac")
        >>> row.error.exact, row.error.stderr > 0
        (False, True)
    """

    def __init__(
        self, approximations: Sequence[Standin], strict: bool = False, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        for argument, some in (("approximations", [approximations]), ("groups", groups or ())):
            text = next((one for one in some if isinstance(one, str)), None)
            if text is not None:
                raise DtypeError(argument, f"got the text {text!r} in place of a list")
        self._wanted, self._strict, self._groups = list(approximations), strict, groups
        self._waiting: dict[tuple[tuple[str, ...], int], dict[str, GradientSource]] = {}  # by group and chunk
        self._found: dict[str, dict[str, dict[int, _Compared]]] = {}
        self._samples: dict[str, int] = {}

    def __call__(self, chunk: int, source: GradientSource) -> None:
        """The samples of a block in one chunk."""
        for one in [source] if self._groups is None else self._completed(chunk, source):
            self._audit(chunk, one)

    def _completed(self, chunk: int, source: GradientSource) -> Iterator[GradientSource]:
        """The groups that a block is the last one of, as one weight."""
        for group in map(tuple, self._groups or ()):
            if source.name in group:
                known = self._waiting.setdefault((group, chunk), {})
                known[source.name] = source
                if len(known) == len(group):
                    yield joined([known[name] for name in group])
                    del self._waiting[group, chunk]

    def _audit(self, chunk: int, source: GradientSource) -> None:
        if len(source) < 2 * LEAST:
            raise RangeError("samples", f"got {len(source)} in a chunk, expected at least {2 * LEAST}: two halves")
        self._samples[source.name] = self._samples.get(source.name, 0) + len(source)
        samples = _BlockSamples(source)
        if samples.are_zero:
            if self._strict:
                raise RangeError("blocks", f"{source.name!r} is zero, so relative errors are not defined; omit it")
            return
        known = self._found.setdefault(source.name, {})
        for (name, make), given in zip(standins(source.name, self._wanted), self._given(source.name), strict=True):
            try:
                known.setdefault(name, {})[chunk] = samples.compared(name, make, given)
            except CurvoscopeError as error:
                if self._strict or error.argument not in ("block", "approximation"):
                    raise

    def _given(self, block: str) -> list[bool]:
        """Whether each approximation is an operator."""
        here = (one for one in self._wanted if isinstance(one, str | LinearOperator) or block in one)
        return [not isinstance(one, str) for one in here]

    def table(self) -> AuditTable:
        """The rows so far."""
        missing = next((group for group in self._groups or () if " + ".join(group) not in self._found), None)
        if missing is not None:
            raise BlockNameError("groups", f"the sweep has no samples of all of {', '.join(missing)}")
        fewest = min(self._samples.values(), default=FEWEST)
        if fewest < FEWEST:
            raise RangeError("samples", f"got {fewest}, expected at least {FEWEST}: error bars from fewer do not hold")
        rows = [
            _row(block, name, list(found.values()))
            for block, several in self._found.items()
            for name, found in several.items()
        ]
        if not rows:
            raise EmptyError("blocks", "all are zero or without samples, or none of the approximations applies to them")
        return AuditTable(rows)


def _row(block: str, name: str, found: Sequence[_Compared]) -> AuditRow:
    """The estimates of a block and an approximation from all chunks."""
    means = [_Means.of(one) for one in found]
    shares = torch.tensor([len(one) for one in found], dtype=torch.float64)
    shares /= shares.sum()
    whole = _Means.mixed(means, shares)
    left_out = [
        _Means.mixed([*means[:c], _Means.without_each(one), *means[c + 1 :]], shares) for c, one in enumerate(found)
    ]
    m = sum(map(len, found))

    def estimate(ask: Callable[[_Means], Tensor], power: float = 1.0) -> Estimate:
        """The jackknife's value and error of a function of the means; the root of it for `power` 2."""
        values = torch.cat([m * ask(whole) - (m - 1) * ask(some) for some in left_out])
        return jackknifed(values, power)

    trace = estimate(_Means.trace_error)
    return AuditRow(
        block,
        name,
        estimate(_Means.squared_error, 2.0),
        estimate(lambda means: 1 - means.squared_cosine(), 2.0),
        estimate(_Means.cosine),
        Estimate(**trace.facts() | {"value": abs(trace)}),
        None,
        None,
        None,
        found[0].floats,
        found[0].size,
    )


class _Means(NamedTuple):
    """What the samples estimate: |H|², <H, A>, <H, A>² / |A|² and tr H; and what is known of A: |A|² and tr A."""

    square: Tensor
    inner: Tensor
    projection: Tensor
    trace: Tensor
    approximation_square: Tensor
    approximation_trace: Tensor

    @classmethod
    def of(cls, one: _Compared) -> "_Means":
        """Over all samples and pairs."""
        return cls._from(one, len(one), torch.zeros(()))

    @classmethod
    def without_each(cls, one: _Compared) -> "_Means":
        """Over all but one sample, for each of them (m,)."""
        return cls._from(one, len(one) - 1, torch.ones(()))

    @classmethod
    def _from(cls, one: _Compared, count: int, less: Tensor) -> "_Means":
        square, product = (
            (rows.sum() - less * 2 * rows) / (count * (count - 1)) for rows in (one.squares, one.products)
        )
        trace = (one.lengths.sum() - less * one.lengths) / count
        if not less:
            square, product, trace = square[0], product[0], trace[0]
        if one.keeps:
            return cls(square, product, product, trace, product, trace)
        inner = one.sign * product.clamp_min(0).sqrt()
        known = torch.tensor(one.square, dtype=torch.float64), torch.tensor(one.trace, dtype=torch.float64)
        return cls(square, inner, product / known[0].clamp_min(_TINY), trace, *known)

    @classmethod
    def mixed(cls, several: "Sequence[_Means]", shares: Tensor) -> "_Means":
        """The mean over chunks, each with its approximation."""
        return cls(
            *(total(share * one[k] for share, one in zip(shares, several, strict=True)) for k in range(len(several[0])))
        )

    def squared_error(self) -> Tensor:
        """|H - A|² / |H|²."""
        return 1 + (self.approximation_square - 2 * self.inner) / self.square.clamp_min(_TINY)

    def squared_cosine(self) -> Tensor:
        """<H, A>² / (|H|² |A|²)."""
        return self.projection / self.square.clamp_min(_TINY)

    def cosine(self) -> Tensor:
        """Its root, with the sign of <H, A>."""
        return self.squared_cosine().clamp_min(0).sqrt().copysign(self.inner)

    def trace_error(self) -> Tensor:
        """(tr A - tr H) / tr H."""
        return self.approximation_trace / self.trace.clamp_min(_TINY) - 1
