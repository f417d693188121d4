"""Approximations against blocks whose gradients are all known: every number is exact."""

import math
from functools import cached_property

import torch
from torch import Tensor

from curvoscope.analysis.audit_table import AuditRow, floats_of
from curvoscope.approximations import Approximation, GradientSource
from curvoscope.errors import RangeError
from curvoscope.estimate import Estimate
from curvoscope.operators.base import LinearOperator

_DAMPING = 0.1  # times the mean eigenvalue
_GRADIENTS = 2048  # of a block that is not formed, up to which its largest eigenvalue and its steps are measured
_ENTRIES = 2**25  # of these gradients together
_AT_ONCE = 256  # steps


class DenseTruth:
    """A block that is formed; compared in float64, as squares of its entries may leave the range of float32.

    Args:
        block: H, (n, n).
        source: of the outer part, whose gradients the steps are for.
        damping: of the steps; None: a tenth of the mean eigenvalue of the outer part.
    """

    def __init__(self, block: Tensor, source: GradientSource, damping: float | None) -> None:
        self._block, self._source = block.double(), source
        mean = float(sum(part.double().square().sum() for part in source.gradients())) * source.weight / len(block)
        self._asked, self.damping = damping, _DAMPING * mean if damping is None else damping

    @property
    def norm(self) -> float:
        """|H|."""
        return float(self._block.norm())

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(self._block)

    @cached_property
    def _gradients(self) -> Tensor:
        """G (n, r) with G G^T the outer part."""
        root = self._source.root().double()
        return root.mT if len(root) <= root.shape[1] else torch.linalg.qr(root).R.mT

    @cached_property
    def _steps(self) -> Tensor | None:
        """(H + damping)^-1 G; None if the matrix is not positive definite."""
        values, vectors = self._spectrum
        least = float(values[0]) + self.damping
        rounding = 0.0 if self.damping else len(values) * torch.finfo(values.dtype).eps * float(values.abs().max())
        if least <= rounding:
            if not self.damping:
                raise RangeError(
                    "damping",
                    f"got 0, but {self._source.name!r} is singular: its smallest eigenvalue is {float(values[0]):.3g}; "
                    "give a positive number",
                )
            return None
        return vectors @ ((vectors.mT @ self._gradients) / (values + self.damping)[:, None])

    def row(self, block: str, name: str, A: LinearOperator) -> AuditRow:
        """What an approximation misses."""
        H, dense = self._block, A.dense().double()
        norm, size, inner = H.norm(), dense.norm(), (H * dense).sum()
        scale = inner / size.square() if size > 0 else size
        step, decrease = self._step_errors(A)
        trace = float(H.trace())
        return AuditRow(
            block,
            name,
            Estimate(float((H - dense).norm() / norm)),
            Estimate(float((H - scale * dense).norm() / norm)),
            Estimate(float(inner / (norm * size)) if size > 0 else 0.0),
            Estimate(abs(float(dense.trace()) - trace) / abs(trace)),
            self._eigenvalue_error(A),
            step,
            decrease,
            floats_of(A),
            A.shape[0],
        )

    def _eigenvalue_error(self, A: LinearOperator) -> Estimate:
        largest = float(self._spectrum[0][-1])
        return Estimate(abs(float(A.eigenvalues().value[-1]) - largest) / abs(largest))

    def _step_errors(self, A: LinearOperator) -> tuple[Estimate | None, Estimate | None]:
        right, G = self._steps, self._gradients
        if right is None:
            return None, None
        try:
            if isinstance(A, Approximation):
                found = A.damped_solve(G.to(A.dtype), self.damping).double()
            else:
                found = _solved(A, G, self.damping)
        except RangeError:
            if not self.damping:
                raise
            return None, None
        error = float((found - right).norm() / right.norm())

        def gain(steps: Tensor) -> float:
            return float((steps * (G - (self._block @ steps + self.damping * steps) / 2)).sum())

        return Estimate(error), Estimate(gain(found) / gain(right))


def _solved(A: LinearOperator, G: Tensor, damping: float) -> Tensor:
    matrix = A.dense().double()
    matrix.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise RangeError(
            "damping", f"got {damping:g}, but operator + damping is not positive definite; give a larger one"
        )
    return torch.cholesky_solve(G, factor)


class FactoredTruth:
    """A block that is too large to be formed, by its gradients G (n, r) with G G^T = H.

    With few gradients, those of G^T G (r, r) are the eigenvalues of H, and (H + damping)^-1 G = G (G^T G + damping)^-1.
    With more, the largest eigenvalue and the steps are not measured.

    Args:
        source: of the block.
        damping: of the steps; None: a tenth of the mean eigenvalue.
    """

    def __init__(self, source: GradientSource, damping: float | None) -> None:
        self._source = source
        self._trace = source.weight * sum(float(some.double().square().sum()) for some in source.gradients())
        size = source.shape[0] * source.shape[1]
        self.damping = _DAMPING * self._trace / size if damping is None else damping
        self._is_small = len(source) <= _GRADIENTS and len(source) * size <= _ENTRIES
        if damping == 0 and self._is_small and len(source) < size:
            raise RangeError(
                "damping",
                f"got 0, but {source.name!r} is singular: {len(source)} gradients span it; give a positive number",
            )

    @property
    def norm(self) -> float:
        """|H|."""
        return math.sqrt(self._square)

    @cached_property
    def _square(self) -> float:
        """|H|² = sum over pairs of <gamma, gamma'>²."""
        source, found = self._source, 0.0
        for number, one in enumerate(source.gradients()):
            for other, two in enumerate(source.gradients()):
                if other <= number:
                    squares = float((one.flatten(1) @ two.flatten(1).mT).double().square().sum())
                    found += squares if other == number else 2 * squares
        return found * source.weight**2

    @cached_property
    def _scaled(self) -> tuple[GradientSource, float]:
        return self._source.scaled()

    @cached_property
    def _root(self) -> Tensor:
        """G^T, (r, n)."""
        return self._source.root()

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Of G^T G."""
        return torch.linalg.eigh(self._root @ self._root.mT)

    @cached_property
    def _steps(self) -> Tensor:
        """The transpose of (H + damping)^-1 G, (r, n)."""
        values, vectors = self._spectrum
        return (vectors / (values + self.damping)) @ vectors.mT @ self._root

    def row(self, block: str, name: str, A: LinearOperator) -> AuditRow:
        """What an approximation misses."""
        source, unit = self._scaled
        if isinstance(A, Approximation):
            found = sum(float(A.quadratic(part).sum()) for part in source.parts)
        else:
            formed = (some.flatten(1) for some in source.gradients())
            found = sum(float((some * A._matmat(some.mT).mT).sum()) for some in formed)
        inner = source.weight * unit**2 * found
        size, norm = float(A.frobenius_norm()), self.norm
        cosine = inner / (norm * size) if size else 0.0
        largest, step, decrease = self._of_few(A)
        return AuditRow(
            block,
            name,
            Estimate(math.sqrt(max(0.0, self._square - 2 * inner + size**2)) / norm),
            Estimate(math.sqrt(max(0.0, 1 - cosine**2))),
            Estimate(cosine),
            Estimate(abs(float(A.trace()) - self._trace) / self._trace),
            largest,
            step,
            decrease,
            floats_of(A),
            A.shape[0],
        )

    def _of_few(self, A: LinearOperator) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
        """The errors of the largest eigenvalue and of the steps, and the decrease, some directions at a time."""
        if not (self._is_small and isinstance(A, Approximation)):
            return None, None, None
        values = self._spectrum[0].clamp_min(0)
        largest = Estimate(abs(A._ends()[1] / float(values[-1]) - 1))
        missed = gained = 0.0
        for some, rights in zip(self._root.split(_AT_ONCE), self._steps.split(_AT_ONCE), strict=True):
            directions, right = some.mT, rights.mT
            try:
                steps = A.damped_solve(directions, self.damping)
            except RangeError:
                if not self.damping:
                    raise
                return largest, None, None
            missed += float((steps - right).square().sum())
            curved = (self._root @ steps).square().sum() + self.damping * steps.square().sum()
            gained += float((steps * directions).sum() - curved / 2)
        best = float((values / (values + self.damping)).sum()) / 2
        return largest, Estimate(math.sqrt(missed) / float(self._steps.norm())), Estimate(gained / best)
