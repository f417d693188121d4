"""`SplitForm`: one approximation for each part of a weight."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.factors import GradientFactors


class SplitForm(Approximation):
    """Approximations of parts of a weight W, which follow each other along the rows (axis 0) or columns (axis 1)."""

    def __init__(self, name: str, parts: Sequence[Approximation], axis: int) -> None:
        sides = [sum(part.row_shape[axis] for part in parts), parts[0].row_shape[1 - axis]]
        rows, columns = sides if axis == 0 else reversed(sides)
        super().__init__(name, (rows, columns), parts[0].like, sum(part.floats for part in parts))
        self.parts, self._axis = list(parts), axis

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._by_part(columns, lambda part, some: part._matmat(some))

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        return self._by_part(columns, lambda part, some: part._solve(some, damping))

    def _by_part(self, columns: Tensor, action: Callable[[Approximation, Tensor], Tensor]) -> Tensor:
        cut = columns.mT.unflatten(1, self.row_shape).split(self._sizes, 1 + self._axis)
        found = [
            action(part, some.flatten(1).mT).mT.unflatten(1, part.row_shape)
            for part, some in zip(self.parts, cut, strict=True)
        ]
        return torch.cat(found, 1 + self._axis).flatten(1).mT

    @property
    def _sizes(self) -> list[int]:
        return [part.row_shape[self._axis] for part in self.parts]

    def _ends(self) -> tuple[float, float]:
        ends = [part._ends() for part in self.parts]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _trace(self) -> float:
        return sum(part._trace() for part in self.parts)

    def _norm(self) -> float:
        return float(torch.tensor([part._norm() for part in self.parts], dtype=torch.float64).norm())

    def _spectrum_is_cheap(self) -> bool:
        return all(part._spectrum_is_cheap() for part in self.parts)

    def _all_eigenvalues(self) -> Tensor:
        return torch.cat([part._all_eigenvalues() for part in self.parts]).sort().values

    def quadratic(self, found: GradientFactors) -> Tensor:
        """The sum over the parts, for each gradient, (n,)."""
        ends = torch.tensor(self._sizes).cumsum(0).tolist()
        starts = [end - size for end, size in zip(ends, self._sizes, strict=True)]
        values = [
            part.quadratic(found.part(self._axis, start, end).compact)
            for part, start, end in zip(self.parts, starts, ends, strict=True)
        ]
        return torch.stack(values).sum(0)
