"""The rows of an audit, the table that they make, and what they say."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from curvoscope.approximations import Approximation, GradientSource, approximation
from curvoscope.errors import DtypeError, ShapeError
from curvoscope.estimate import Estimate
from curvoscope.operators.base import LinearOperator
from curvoscope.text_table import ShownAsTable, TextTable

Standin = str | LinearOperator | Mapping[str, LinearOperator]
"""An approximation by its name, an operator, or operators by block."""

_CHEAP = 4  # floats per weight that an optimizer may keep
SPLIT = ("kronecker:1", "kfac")  # structures that are compared with one of them per head, or per weight of a group
_MANY = 10**8  # floats that are shown rounded
_MEASURED = {  # columns, without those that no row has
    "error": "error",
    "best scale": "best_scale_error",
    "cosine": "cosine",
    "trace": "trace_error",
    "λ max": "eigenvalue_error",
    "step": "step_error",
    "decrease": "decrease",
}


class AuditRow(NamedTuple):
    """One approximation A of one block H; norms are Frobenius norms.

    Args:
        block: its name.
        approximation: its name.
        error: |H - A| / |H|.
        best_scale_error: |H - s A| / |H| for the best number s, sqrt(1 - cosine²).
        cosine: <H, A> / (|H| |A|).
        trace_error: |tr A - tr H| / |tr H|.
        eigenvalue_error: the same of the largest eigenvalue; None if the block is sampled, or has more than 2,048
            entries and either more than 2,048 gradients or an operator for A.
        step_error: |s_A - s_H| / |s_H| for the steps s_A = (A + damping)^-1 g and s_H = (H + damping)^-1 g, over
            gradients g with covariance H; None as for the largest eigenvalue, or if A + damping is not positive
            definite.
        decrease: of the quadratic model g.s - s.(H + damping) s / 2 with the step s_A, as a share of that with s_H.
        floats: that A stores.
        size: of the block, entries of its weight.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> row = cv.analysis.audit(H, ["weight"], ["kfac"])[0]
        >>> row.block, row.approximation, row.error < 1e-12, abs(row.decrease - 1) < 1e-12
        ('weight', 'kfac', True, True)
    """

    block: str
    approximation: str
    error: Estimate
    best_scale_error: Estimate
    cosine: Estimate
    trace_error: Estimate
    eigenvalue_error: Estimate | None
    step_error: Estimate | None
    decrease: Estimate | None
    floats: int
    size: int


class AuditTable(ShownAsTable, Sequence[AuditRow]):
    """The rows of an audit; it shows itself as text, in a terminal with rich, and in a notebook.

    Args:
        rows: one per block and approximation.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> found = cv.analysis.audit(H, ["weight"], ["kfac", "diagonal"])
        >>> len(found), found.approximations, found.row("weight", "kfac").floats
        (2, ['kfac', 'diagonal'], 13)
    """

    def __init__(self, rows: Sequence[AuditRow]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    @property
    def rows(self) -> list[AuditRow]:
        """All of them, in order."""
        return list(self._rows)

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks, in order."""
        return list(dict.fromkeys(row.block for row in self._rows))

    @property
    def approximations(self) -> list[str]:
        """Names of the approximations, in order."""
        return list(dict.fromkeys(row.approximation for row in self._rows))

    def row(self, block: str, approximation: str) -> AuditRow | None:
        """The row of a block and an approximation, if there is one.

        Args:
            block: its name.
            approximation: its name.

        Returns:
            The row, or None.
        """
        both = (row for row in self._rows if (row.block, row.approximation) == (block, approximation))
        return next(both, None)

    def median_error(self, approximation: str, blocks: Sequence[str] | None = None) -> float | None:
        """The median of the best-scale errors of an approximation.

        Args:
            approximation: its name.
            blocks: over these; None: all.

        Returns:
            The median, or None without such a row.
        """
        rows = [row for row in self._rows if row.approximation == approximation]
        found = [row.best_scale_error for row in rows if blocks is None or row.block in blocks]
        return statistics.median(found) if found else None

    def recommendation(self) -> str:
        """Which approximation to take, and what splitting weights into heads gains.

        Returns:
            A few sentences.
        """
        everywhere = [name for name in self.approximations if all(self.row(block, name) for block in self.blocks)]
        cheap = [name for name in everywhere if self._floats(name) <= _CHEAP]
        known = {name: _median([row for row in self._rows if row.approximation == name]) for name in cheap}
        if not known:
            return "No approximation stores few enough floats to be recommended."
        best = min(known, key=lambda name: known[name].value)
        over = f" (median over {len(self.blocks)} blocks)" if len(self.blocks) > 1 else ""
        said = [
            f"Take {best}: its error is {_rounded(known[best])} of the block's norm at the best scale{over}, with "
            f"{self._floats(best):.2g} floats per weight."
        ]
        if "diagonal" in known and best != "diagonal":
            said.append(f"The diagonal, as in Adam, has {_rounded(known['diagonal'])}.")
        return " ".join([*said, *self.splitting()])

    def splitting(self) -> list[str]:
        """What one approximation per head gains over one per weight, and one per weight over one for a group.

        Returns:
            A sentence for each structure that was measured both ways.
        """
        found = (self._splitting(name, part) for part in ("heads", "layers") for name in SPLIT)
        return [sentence for sentence in found if sentence is not None]

    def _floats(self, name: str) -> float:
        """Floats per weight, over all blocks that have the approximation."""
        rows = [row for row in self._rows if row.approximation == name]
        return sum(row.floats for row in rows) / sum(row.size for row in rows)

    def _splitting(self, name: str, part: str) -> str | None:
        several = [row for row in self._rows if row.approximation == f"{name}/{part}"]
        blocks = [row.block for row in several]
        ones = [row for row in self._rows if row.approximation == name and row.block in blocks]
        if not ones or sum(row.floats for row in several) == sum(row.floats for row in ones):
            return None  # there is one head
        split, whole = _median(several), _median(ones)
        if split.stderr and abs(split - whole) <= 2 * math.hypot(split.stderr, whole.stderr):
            gains = "makes no clear difference to the error"
        elif round(split.value, 2) == round(whole.value, 2):
            gains = "has the same error"
        else:
            gains = f"{'lowers' if split < whole else 'raises'} the error"
        heads, members = "per head instead of one per weight", _members(blocks[0])
        instead = heads if part == "heads" else f"for each of {members} instead of one for all of them"
        said = f"One {name} {instead} {gains}: {_rounded(split)} against {_rounded(whole)}"
        steps = [[row.step_error for row in rows if row.step_error is not None] for rows in (several, ones)]
        if all(steps):
            said += "; the error of damped steps is "
            said += f"{statistics.median(steps[0]):.2f} against {statistics.median(steps[1]):.2f}"
        return f"{said}."

    def _shown(self) -> TextTable:
        def short(number: Estimate | None) -> str:
            if number is None:
                return "-"
            return f"{number.value:.3g}" if number.exact else f"{number.value:.3g} ± {number.stderr:.1g}"

        measured = {title: [getattr(row, field) for row in self._rows] for title, field in _MEASURED.items()}
        known = {title: numbers for title, numbers in measured.items() if any(one is not None for one in numbers)}
        names = [(named(row.block), row.approximation) for row in self._rows]
        floats = [f"{row.floats:,}" if row.floats < _MANY else f"{row.floats:.3g}" for row in self._rows]
        columns = [*zip(*names, strict=True), *(map(short, numbers) for numbers in known.values()), floats]
        return TextTable(
            ("block", "approximation", *known, "floats"), list(zip(*columns, strict=True)), right=("floats",)
        )

    def __str__(self) -> str:
        return str(self._shown())

    __repr__ = __str__


def _median(rows: Sequence[AuditRow]) -> Estimate:
    """The medians of the best-scale errors and of their standard errors, each that of one block."""
    errors = [row.best_scale_error for row in rows]
    return Estimate(statistics.median(errors), statistics.median(error.stderr for error in errors))


def _rounded(error: Estimate) -> str:
    return f"{error.value:.2f} ± {error.stderr:.1g}" if error.stderr else f"{error.value:.2f}"


def named(block: str) -> str:
    """A shorter name for several weights of one layer: "h.0.attn.Q+K+V"."""
    first, *others = block.split(" + ")
    layer = first.rpartition(".")[0]
    if not layer or any(name.rpartition(".")[0] != layer for name in others):
        return block
    return "+".join([first, *(name.rpartition(".")[2] for name in others)])


def _members(group: str) -> str:
    """The roles of the weights of a group, in words: "Q, K and V"."""
    *roles, last = (name.rpartition(".")[2] for name in group.split(" + "))
    return f"{', '.join(roles)} and {last}"


Making = tuple[str, Callable[[GradientSource], LinearOperator]]


def standins(block: str, wanted: Sequence[Standin]) -> Iterator[Making]:
    """The approximations of a block, by name, and what makes each; a second "kfac" is "kfac (2)"."""
    seen: Counter[str] = Counter()
    for name, make in _makings(block, wanted):
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})", make


def _makings(block: str, wanted: Sequence[Standin]) -> Iterator[Making]:
    for one in wanted:
        if isinstance(one, str):
            yield one, lambda source, name=one: approximation(source, name)  # type: ignore[misc]
        elif isinstance(one, LinearOperator):
            yield getattr(one, "name", type(one).__name__), lambda source, found=one: _fitting(found, source)  # type: ignore[misc]
        elif isinstance(one, Mapping):
            found = one.get(block)
            if found is not None:
                name = getattr(found, "name", type(found).__name__)
                yield name, lambda source, known=found: _fitting(known, source)  # type: ignore[misc]
        else:
            raise DtypeError(
                "approximations", f"got {type(one).__name__}, expected a name, an operator or a dictionary"
            )


def _fitting(operator: LinearOperator, source: GradientSource) -> LinearOperator:
    if not isinstance(operator, LinearOperator):
        raise DtypeError("approximations", f"got {type(operator).__name__} for {source.name!r}, expected an operator")
    size = source.shape[0] * source.shape[1]
    if operator.shape != (size, size):
        raise ShapeError(
            "approximations",
            f"an operator {operator.shape} is not an approximation of {source.name!r}, {size} x {size}",
        )
    return operator


def repeats_the_weight(name: str, source: GradientSource) -> bool:
    """Whether an approximation by heads is that of the whole weight, which has one head."""
    return source.heads == 1 and name.rpartition("/")[2] == "heads"


def floats_of(operator: LinearOperator) -> int:
    """What an approximation stores; of any other operator, its entries."""
    return operator.floats if isinstance(operator, Approximation) else operator.shape[0] * operator.shape[1]
