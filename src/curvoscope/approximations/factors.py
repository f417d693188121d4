"""`GradientFactors`: gradients of a linear layer's weight, by its inputs and the cotangents of its outputs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

from torch import Tensor

from curvoscope.operators.base import Shape

_PANELS = 16, 256  # columns of a symmetric product at a time, at least and at most
_FORMED = 2**25  # entries of gradients that are formed at a time


@dataclass(frozen=True, eq=False)
class GradientFactors:
    """Gradients X_g^T delta_gi (a, p) in g groups, each of n gradients that share X_g.

    Args:
        inputs: X (g, T, a); None if the gradients themselves are known.
        cotangents: delta (g, n, T, p), or the gradients (g, n, a, p).
        flipped: whether the block is stored as (p, a): its gradients are delta^T X.

    Example:
        >>> import torch
        >>> from curvoscope.approximations import GradientFactors
        >>> found = GradientFactors(torch.ones(1, 5, 2), torch.ones(1, 4, 5, 3))
        >>> len(found), found.shape, found.gradients().shape
        (4, (2, 3), torch.Size([4, 2, 3]))
    """

    inputs: Tensor | None
    cotangents: Tensor
    flipped: bool = False

    @property
    def groups(self) -> int:
        """g."""
        return len(self.cotangents)

    @property
    def each(self) -> int:
        """n, the gradients of a group."""
        return self.cotangents.shape[1]

    def __len__(self) -> int:
        return self.groups * self.each

    @property
    def shape(self) -> Shape:
        """(a, p), or (p, a) if flipped."""
        a = self.cotangents.shape[2] if self.inputs is None else self.inputs.shape[2]
        p = self.cotangents.shape[3]
        return (p, a) if self.flipped else (a, p)

    def gradients(self) -> Tensor:
        """All of them, (g n, *shape)."""
        formed = self.cotangents if self.inputs is None else self.inputs.mT[:, None] @ self.cotangents
        return (formed.mT if self.flipped else formed).flatten(0, 1)

    def pieces(self) -> Iterator["GradientFactors"]:
        """The same gradients a few at a time, in their order."""
        step = max(1, _FORMED // (self.shape[0] * self.shape[1]))
        if step >= self.each:
            for start in range(0, self.groups, step // self.each):
                some = slice(start, start + step // self.each)
                inputs = None if self.inputs is None else self.inputs[some]
                yield replace(self, inputs=inputs, cotangents=self.cotangents[some])
            return
        for group in range(self.groups):
            inputs = None if self.inputs is None else self.inputs[group : group + 1]
            for start in range(0, self.each, step):
                cotangents = self.cotangents[group : group + 1, start : start + step]
                yield replace(self, inputs=inputs, cotangents=cotangents)

    def turned(self, left: Tensor | None, right: Tensor | None) -> "GradientFactors":
        """left^T gamma right for each gradient.

        Args:
            left: (rows, k) for gradients (rows, columns), or None for the identity.
            right: (columns, l), or None for the identity.

        Returns:
            Gradients of shape (k, l), in the same groups.
        """
        first, second = (right, left) if self.flipped else (left, right)
        inputs, cotangents = self.inputs, self.cotangents
        if first is not None:
            inputs, cotangents = (None, first.mT @ cotangents) if inputs is None else (inputs @ first, cotangents)
        return replace(self, inputs=inputs, cotangents=cotangents if second is None else cotangents @ second)

    def quadratic(self, left: Tensor, right: Tensor) -> Tensor:
        """<gamma, left gamma right> for each gradient.

        Args:
            left: a symmetric matrix, (rows, rows) for gradients (rows, columns).
            right: a symmetric matrix, (columns, columns).

        Returns:
            The values, (g n,).
        """
        found = self.compact
        of_inputs, of_outputs = (right, left) if self.flipped else (left, right)
        weighted = found.weighted(of_inputs)
        halves = _half_products(found.cotangents, of_outputs)
        return 2 * total((columns * weighted[..., here]).sum((2, 3)) for here, columns in halves).flatten()

    def part(self, axis: int, start: int, stop: int) -> "GradientFactors":
        """Some rows or columns of each gradient.

        Args:
            axis: 0 for rows, 1 for columns.
            start: the first of them.
            stop: the end of the range, not included.

        Returns:
            As many gradients, of the rows or columns `start` to `stop`.
        """
        if (axis == 1) != self.flipped:
            found = replace(self, cotangents=self.cotangents[..., start:stop])
        elif self.inputs is None:
            found = replace(self, cotangents=self.cotangents[:, :, start:stop])
        else:
            found = replace(self, inputs=self.inputs[..., start:stop])
        return self._formed_alike(found, lambda formed: formed.part(axis, start, stop))

    def chosen(self, places: Tensor) -> "GradientFactors":
        """Some gradients of a single group.

        Args:
            places: their indices in the group, (k,).

        Returns:
            The k gradients, in the order of `places`.
        """
        found = replace(self, cotangents=self.cotangents[:, places])
        return self._formed_alike(found, lambda formed: formed.chosen(places))

    @cached_property
    def compact(self) -> "GradientFactors":
        """The same, formed if that takes no more numbers than X and delta: once for all that is a part of it."""
        if self.inputs is None or self.inputs.shape[2] > self.inputs.shape[1]:
            return self
        return replace(self, inputs=None, cotangents=self.inputs.mT[:, None] @ self.cotangents)

    def _formed_alike(
        self, found: "GradientFactors", of: Callable[["GradientFactors"], "GradientFactors"]
    ) -> "GradientFactors":
        """A part of these gradients, whose `compact` is the same part of theirs."""
        if self.compact is not self:
            vars(found)["compact"] = of(self.compact)
        return found

    def outward(self, matrix: Tensor | None = None) -> Tensor:
        """sum gamma Y gamma^T = sum X^T (delta Y delta^T) X over all gradients, with gamma as (a, p) even if flipped.

        Args:
            matrix: Y (p, p), or None for the identity.

        Returns:
            The sum, (a, a).
        """
        if matrix is None and self.inputs is None:
            return moment(self.cotangents.mT)
        turned = self.cotangents if matrix is None else self.cotangents @ matrix
        middle = (turned @ self.cotangents.mT).sum(1)
        if self.inputs is None:
            return middle.sum(0)
        return (self.inputs.mT @ middle @ self.inputs).sum(0)

    def outward_symmetric(self, matrix: Tensor) -> Tensor:
        """`outward` for a symmetric Y, with half of the multiplications.

        Args:
            matrix: Y (p, p), symmetric.

        Returns:
            The sum, (a, a).
        """
        halves = _half_products(self.cotangents, matrix)
        half = total((columns @ self.cotangents[..., here].mT).sum(1) for here, columns in halves)
        middle = half + half.mT
        return middle.sum(0) if self.inputs is None else (self.inputs.mT @ middle @ self.inputs).sum(0)

    def weighted(self, matrix: Tensor | None = None) -> Tensor:
        """(X Z X^T) delta; Z gamma if the gradients themselves are known.

        Args:
            matrix: Z (a, a), or None for the identity.

        Returns:
            A tensor of the shape of `cotangents`.
        """
        X, middle = self.inputs, matrix
        if X is not None:
            middle = X @ X.mT if matrix is None else X @ matrix @ X.mT
            middle = middle[:, None]
        return self.cotangents if middle is None else middle @ self.cotangents

    def inward(self, matrix: Tensor | None = None) -> Tensor:
        """sum gamma^T Z gamma = sum delta^T (X Z X^T) delta over all gradients, with gamma as (a, p) even if flipped.

        Args:
            matrix: Z (a, a), or None for the identity.

        Returns:
            The sum, (p, p).
        """
        return self.cotangents.flatten(0, 2).mT @ self.weighted(matrix).flatten(0, 2)


def moment(vectors: Tensor, others: Tensor | None = None) -> Tensor:
    """sum v w^T over all axes but the last, symmetric to the bit, for w = v or `others` with which it is symmetric.

    Only what is on and above the diagonal is multiplied, a few columns at a time.
    """
    rows = vectors.flatten(0, -2)
    columns = rows if others is None else others.flatten(0, -2)
    size = rows.shape[1]
    found = rows.new_empty(size, size)
    for start, step in _panels(size):
        here, after = slice(start, start + step), slice(start + step, size)
        panel = rows[:, here].mT @ columns[:, start:]
        found[here, here] = symmetric(panel[:, :step])
        found[here, after] = panel[:, step:]
        found[after, here] = panel[:, step:].mT
    return found


def _half_products(vectors: Tensor, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Places of columns and those columns of V N, with vectors V as rows and N + N^T = M, a symmetric matrix.

    N is the part of M on and below the diagonal, so that V N takes half of the time of V M.
    """
    for start, step in _panels(len(matrix)):
        here = slice(start, start + step)
        half = matrix[start:, here].clone()
        half[:step] /= 2
        yield here, vectors[..., start:] @ half


def _panels(size: int) -> Iterator[tuple[int, int]]:
    """Where each panel of columns starts, and how wide it is at most."""
    step = min(max(size // 4, _PANELS[0]), _PANELS[1])
    return ((start, step) for start in range(0, size, step))


def symmetric(matrix: Tensor) -> Tensor:
    """(M + M^T) / 2, symmetric to the bit."""
    return (matrix + matrix.mT) / 2


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum; there is at least one."""
    return reduce(add, tensors)
