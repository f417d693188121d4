"""How many terms a loss function is the mean of, found by comparing the loss of a batch with those of its parts.

A function f(outputs, targets) that is a mean over n terms has, for any cut of a batch into parts,

    f(whole) = sum_i n_i f(part_i) / sum_i n_i,

and a sum has f(whole) = sum_i f(part_i). The number n may count rows, entries, targets that are not ignored, or add up
weights. A comparison that contradicts a count rules it out; what is left says how batches are weighted. A function that
no count explains mixes rows, as a contrastive loss does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvoscope.errors import LossError
from curvoscope.losses.outputs import change, cut, joined, tensors

LossOfOutputs = Callable[[Any, Any], Tensor]

_DISTINCT = 64  # values of integer targets that are tried as the one to ignore
_WIDENED = 2**24  # entries of the outputs up to which comparisons are made in float64
_ROUNDING = 256  # times epsilon: what the loss of a batch and that of its parts may differ by
_MEAN = 1  # of the ways of nll_loss to reduce
_NLL = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


@dataclass(frozen=True)
class Count:
    """A way to count terms. `leaf` is the number of a tensor of the targets, `value` one of its entries."""

    kind: str
    leaf: int = 0
    value: int = 0

    def __str__(self) -> str:
        place = f"targets[{self.leaf}]"
        return self.kind.format(place=place, value=self.value)


ROWS = Count("rows")
TARGETS = Count("entries of the targets")
OUTPUTS = Count("entries of the outputs")
OBSERVED = Count("weights inside torch's cross-entropy")
SUM = Count("nothing: a sum")
_ADDED = "sum of {place}"
_KEPT = "{place} other than {value}"


@dataclass(frozen=True)
class TermCounts:
    """What can be counted in one batch or in a part of it."""

    rows: float
    targets: float
    outputs: float
    observed: float | None
    sums: dict[int, float]
    occurrences: dict[int, tuple[int, dict[int, int]]]  # of the values of integer targets, by leaf

    def candidates(self) -> Iterator[Count]:
        """The ways to count that make sense here."""
        yield from (ROWS, TARGETS, OUTPUTS)
        if self.observed is not None:
            yield OBSERVED
        for leaf in self.sums:
            yield Count(_ADDED, leaf)
        for leaf, (_, found) in self.occurrences.items():
            for value in dict.fromkeys((-100, -1, *found)):
                yield Count(_KEPT, leaf, value)

    def number(self, count: Count) -> float | None:
        """The number of terms; None if they cannot be counted this way here."""
        if count.kind == _ADDED:
            return self.sums.get(count.leaf)
        if count.kind == _KEPT:
            if count.leaf not in self.occurrences:
                return None
            size, found = self.occurrences[count.leaf]
            return float(size - found.get(count.value, 0))
        numbers = {ROWS: self.rows, TARGETS: self.targets, OUTPUTS: self.outputs, OBSERVED: self.observed}
        return numbers.get(count)


def tally(outputs: Any, targets: Any, observed: float | None = None) -> TermCounts:
    """All that can be counted in a batch."""
    wanted, given = list(tensors(targets)), list(tensors(outputs))
    first = next(iter(wanted + given), None)
    sums, occurrences = {}, {}
    for leaf, tensor in enumerate(wanted):
        if tensor.dtype == torch.bool or (leaf and bool((tensor >= 0).all())):
            sums[leaf] = float(tensor.sum(dtype=torch.float64))
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            values, sizes = tensor.unique(return_counts=True)
            often = sizes.argsort(descending=True, stable=True)[:_DISTINCT]
            found = dict(zip(values[often].tolist(), sizes[often].tolist(), strict=True))
            occurrences[leaf] = (tensor.numel(), found)
    return TermCounts(
        1.0 if first is None else float(first.shape[0]),
        float(wanted[0].numel()) if wanted else 0.0,
        float(given[0].numel()) if given else 0.0,
        observed,
        sums,
        occurrences,
    )


class _Denominators(TorchDispatchMode):
    """Records the mean and the sum of weights of each negative log-likelihood that torch computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NLL and args[3] == _MEAN:
            self.found.append((float(result[0]), float(result[1])))
        return result


@dataclass(frozen=True)
class Measured:
    """The loss of a batch or of a part of it, and what can be counted there."""

    value: float
    tally: TermCounts
    is_torch_mean: bool  # whether the loss is torch's own mean of the negative log-likelihood, and nothing else


def measure(function: LossOfOutputs, outputs: Any, targets: Any) -> Measured:
    """Evaluate the function."""
    with torch.no_grad(), _Denominators() as inside:
        value = float(function(outputs, targets))
    weights = {weight for _, weight in inside.found}
    observed = weights.pop() if len(weights) == 1 else None
    same = len(inside.found) == 1 and (inside.found[0][0] == value or observed == 0)
    return Measured(value, tally(outputs, targets, observed), same)


def number_of_terms(function: LossOfOutputs, count: Count, outputs: Any, targets: Any) -> float:
    """The number of terms of a batch, by the count that explains the function."""
    found = measure(function, outputs, targets).tally if count == OBSERVED else tally(outputs, targets)
    number = found.number(ROWS if count == SUM else count)
    if number is None:
        raise LossError("targets", f"the loss was found to be a mean over {count}, but this batch has none; {WAY_OUT}")
    return number


Comparison = tuple[Measured, list[Measured]]  # a whole and its parts; no parts if the function does not take them


@dataclass
class Evidence:
    """What the batches of one process tell about a loss function."""

    epsilon: float = 0.0  # of the least precise of the losses
    batches: list[Measured] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)  # cut along the first axis, the rows
    over_tokens: list[Comparison] = field(default_factory=list)  # cut along the second axis


class Inquiry:
    """Gathers evidence about a function from its micro-batches. A single one needs none."""

    def __init__(self, function: LossOfOutputs) -> None:
        self._function = function
        self._waiting: tuple[Any, Any] | None = None  # the first micro-batch, until there is a second
        self._before: tuple[Measured, Any, Any] | None = None
        self._evidence = Evidence()

    def add(self, outputs: Any, targets: Any) -> None:
        """One more micro-batch."""
        self._evidence.batches.append(measure(self._function, outputs, targets))
        if len(self._evidence.batches) == 1:
            self._waiting = outputs, targets
        else:
            self._look_at_first()
            self._look(outputs, targets)

    def evidence(self, alone: bool) -> Evidence:
        """What was found; `alone`: no other process has batches."""
        if not alone:
            self._look_at_first()
        return self._evidence

    def _look_at_first(self) -> None:
        if self._waiting is not None:
            self._look(*self._waiting)
            self._waiting = None

    def _look(self, outputs: Any, targets: Any) -> None:
        """Compare a micro-batch with parts of itself, or, if it has a single row, with the one before."""
        outputs, targets = self._widened(outputs, targets)
        precise = [torch.finfo(t.dtype).eps for t in tensors(outputs) if t.is_floating_point()]
        self._evidence.epsilon = max(self._evidence.epsilon, *precise, 0.0)
        whole = measure(self._function, outputs, targets)
        rows = int(whole.tally.rows)
        for at in sorted({1, rows // 2} - {0, rows}):
            self._compare(self._evidence.comparisons, whole, self._halves(outputs, targets, 0, at, rows))
        if rows == 1 and self._before is not None:
            self._join(whole, outputs, targets)
        first, target = next(tensors(outputs), None), next(tensors(targets), None)
        if first is not None and target is not None and target.ndim > 1 and first.shape[:2] == target.shape[:2]:
            length = target.shape[1]
            if length > 1:
                halves = self._halves(outputs, targets, 1, length // 2, length)
                self._compare(self._evidence.over_tokens, whole, halves)
        self._before = whole, outputs, targets

    def _widened(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """The batch in float64, unless the function has tensors of its own in another precision."""
        if sum(tensor.numel() for tensor in tensors(outputs)) > _WIDENED:
            return outputs, targets
        wide = change(outputs, _double), change(targets, _double)
        return (outputs, targets) if self._tried(*wide) is None else wide

    def _halves(self, outputs: Any, targets: Any, axis: int, at: int, size: int) -> list[tuple[Any, Any]]:
        pair = outputs, targets
        return [cut(pair, axis, 0, at, size), cut(pair, axis, at, size, size)]

    def _compare(self, kept: list[Comparison], whole: Measured, parts: Sequence[tuple[Any, Any]]) -> None:
        found = [self._tried(*part) for part in parts]
        kept.append((whole, [part for part in found if part is not None] if None not in found else []))

    def _join(self, whole: Measured, outputs: Any, targets: Any) -> None:
        assert self._before is not None
        before, *earlier = self._before
        try:
            both = joined([tuple(earlier), (outputs, targets)])
        except (RuntimeError, ValueError):  # of other shapes
            return
        together = self._tried(*both)
        if together is not None:
            self._evidence.comparisons.append((together, [before, whole]))

    def _tried(self, outputs: Any, targets: Any) -> Measured | None:
        """None if the function does not take such data."""
        try:
            return measure(self._function, outputs, targets)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


WAY_OUT = (
    "give cv.losses.MeanLoss(function, terms), terms(outputs, targets) being the number that the mean divides by; "
    "for a loss that mixes rows cv.losses.Contrastive(function)"
)


def conclude(evidence: Sequence[Evidence]) -> Count:
    """The count that explains the function on all batches of all processes.

    With one batch the count does not matter. With several, counts that weigh batches differently must be told apart.
    """
    epsilon = max(one.epsilon for one in evidence)
    batches = [batch for one in evidence for batch in one.batches]
    comparisons = [pair for one in evidence for pair in one.comparisons]
    over_tokens = [pair for one in evidence for pair in one.over_tokens]
    candidates = dict.fromkeys(c for batch in batches for c in batch.tally.candidates())
    left = [c for c in candidates if all(_explains(c, *pair, epsilon) for pair in comparisons)]
    # a part whose loss is 0 may have no terms at all: then a mean looks like a sum
    told = any(sum(part.value != 0 for part in parts) > 1 for _, parts in comparisons)
    is_sum = told and all(_explains(SUM, *pair, epsilon) for pair in comparisons)
    if OBSERVED in left and all(batch.is_torch_mean for batch in batches):
        return OBSERVED
    if len(batches) <= 1:
        return next(iter(left), SUM if is_sum else ROWS)
    if not comparisons and not over_tokens:
        raise LossError(
            "loss_fn", f"batches of one row and of different shapes do not determine the number of terms; {WAY_OUT}"
        )
    if not left and is_sum:
        return SUM
    if not left:
        whole, parts = next(pair for pair in comparisons if not _explains(ROWS, *pair, epsilon))
        seen = " and ".join(f"{part.value:.6g}" for part in parts) or "none"
        raise LossError(
            "loss_fn",
            f"is {whole.value:.6g} on a batch and {seen} on its parts, which no number of terms explains; {WAY_OUT}",
        )
    plain = [c for c in left if c.kind != _KEPT or c.value == -100] or left  # any other value may be so by chance
    for choice in (plain, [c for c in plain if all(_explains(c, *pair, epsilon) for pair in over_tokens)]):
        if choice and all(_same_weights(choice[0], other, batches) for other in choice):
            return choice[0]
    named = ", ".join(str(c) for c in plain)
    raise LossError("loss_fn", f"may be a mean over {named}, which give these batches different weights; {WAY_OUT}")


def _explains(count: Count, whole: Measured, parts: Sequence[Measured], epsilon: float) -> bool:
    """Whether the loss of the whole is the mean of those of the parts, weighted by this count."""
    if not parts:
        return False
    limit = _ROUNDING * epsilon
    if count == SUM:
        return abs(whole.value - sum(p.value for p in parts)) <= limit * sum(abs(p.value) for p in parts)
    total, numbers = whole.tally.number(count), [part.tally.number(count) for part in parts]
    if total is None or any(number is None for number in numbers):
        return False
    known = [(number, part.value) for number, part in zip(numbers, parts, strict=True) if number]
    if abs(total - sum(number for number, _ in known)) > limit * max(1.0, total):
        return False
    if not total:
        return True
    apart = sum(number * value for number, value in known)
    size = sum(number * abs(value) for number, value in known)
    return abs(whole.value * total - apart) <= limit * size


def _same_weights(one: Count, other: Count, batches: Sequence[Measured]) -> bool:
    """Whether two counts give each batch the same share."""
    pairs = [(batch.tally.number(one), batch.tally.number(other)) for batch in batches]
    if any(a is None or b is None for a, b in pairs):
        return False
    first, second = (sum(pair[i] or 0.0 for pair in pairs) for i in (0, 1))
    return all(abs((a or 0) * second - (b or 0) * first) <= 1e-9 * first * second for a, b in pairs)
