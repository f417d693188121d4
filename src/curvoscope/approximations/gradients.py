"""What approximations are made of: gradients gamma with sum gamma gamma^T = H, the outer part of a block.

For a product y = X w with a weight w (a, p), the gradient of w is gamma = X^T delta (a, p) with delta the cotangent of
y. If delta runs over all columns of a root of the loss Hessian, the sum over gamma gamma^T is H, exactly. If it is
drawn at random, the mean over the samples is an unbiased estimate of H. Both are a `GradientSource`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from curvoscope.approximations.factors import GradientFactors, moment, symmetric, total
from curvoscope.errors import EmptyError, ModelError, RangeError
from curvoscope.magnitudes import power_of_two
from curvoscope.operators.base import Shape

OfSide = TypeVar("OfSide")  # what belongs to one side of a weight

_FAR = 2.0**20  # entries of gradients, from which on they are scaled
_FEW = 0.5  # tokens for each entry of x or delta, up to which their span is smaller than its space


@dataclass(frozen=True, eq=False)
class GradientSource:
    """Gradients gamma of one block with H = sum gamma gamma^T (`exact`), or H = E[gamma gamma^T] over samples.

    Made by `source_of`, from a Hessian, a sweep or a closed form.

    Args:
        name: of the block.
        parts: its gradients; of samples, each part has one group.
        exact: whether the sum over all gradients is H.
        heads: number of heads that the weight is cut into, if any.
        axis: the side of the weight along which heads follow each other: 0 for rows, 1 for columns.
        sequences: whether the tokens of a group are those of one sequence.
        labelled: gradients of the labels that the data has, one for each sequence, if they are known.
        members: sizes of the weights that are joined in this one, along `members_axis`.
        members_axis: 1 if they stand side by side, 0 if one after the other.
        silent: directions of the inputs that no gradient has and `spanned` has left out.
        negative: gradients whose squares are subtracted, of a matrix with negative eigenvalues; see `source_of`.
        seed: of the `halves`; one of its own for each chunk of a sweep, whose samples are ordered by micro-batch.

    Example:
        >>> import torch
        >>> from curvoscope.approximations import GradientFactors, GradientSource
        >>> tokens, cotangents = torch.eye(2)[None], torch.ones(1, 1, 2, 3)
        >>> source = GradientSource("W", (GradientFactors(tokens, cotangents),), exact=True)
        >>> source.shape, len(source), source.dense().shape
        ((2, 3), 1, torch.Size([6, 6]))
    """

    name: str
    parts: tuple[GradientFactors, ...]
    exact: bool
    heads: int | None = None
    axis: int | None = None
    sequences: bool = False
    labelled: tuple[GradientFactors, ...] = ()
    members: tuple[int, ...] = ()
    members_axis: int = 1
    silent: int = 0
    negative: tuple[GradientFactors, ...] = ()
    seed: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def shape(self) -> Shape:
        """(a, p)."""
        return self.parts[0].shape

    @property
    def bytes(self) -> int:
        """Of X and delta."""
        return sum(one.nbytes for part in self.parts for one in (part.inputs, part.cotangents) if one is not None)

    @property
    def like(self) -> Tensor:
        """An empty tensor of the dtype of the gradients, on their device."""
        return self.parts[0].cotangents.new_empty(0)

    @property
    def weight(self) -> float:
        """w in H = w sum gamma gamma^T: one, or one over the number of samples."""
        return 1.0 if self.exact else 1 / len(self)

    def share(self, part: GradientFactors) -> float:
        """The weight of the inputs of one part in a sum over all inputs.

        Args:
            part: one of `parts`.

        Returns:
            1 for exact gradients; for samples, the part's share of them.
        """
        return 1.0 if self.exact else part.each / len(self)

    @property
    def inputs(self) -> list[tuple[float, Tensor]]:
        """X (g, T, a) of each part with its share; `ModelError` for a weight that no product reads."""
        found = [(self.share(part), part.inputs) for part in self.parts if part.inputs is not None]
        if len(found) < len(self.parts):
            raise ModelError(
                "block",
                f"{self.name!r} is not the weight of a linear layer: it has no inputs; take another approximation",
            )
        return found

    def gradients(self) -> Iterator[Tensor]:
        """All gradients, (n, a, p), a few at a time."""
        return (some.gradients() for part in self.compact for some in part.pieces())

    def signed_gradients(self) -> Iterator[tuple[float, Tensor]]:
        """Gradients (n, a, p), a few at a time, and the weight of their squares in H."""
        yield from ((self.weight, some) for some in self.gradients())
        yield from ((-1.0, some.gradients()) for part in self.negative for some in part.pieces())

    def root(self) -> Tensor:
        """R (n, a p) with R^T R = H, exactly or on average."""
        return torch.cat([some.flatten(1) for some in self.gradients()]) * self.weight**0.5

    def dense(self) -> Tensor:
        """H, (a p, a p)."""
        root = self.root()
        found = root.mT @ root
        for part in self.negative:
            flat = part.gradients().flatten(1)
            found = found - flat.mT @ flat
        return found

    @property
    def flipped(self) -> bool:
        """Whether the rows of the block are the outputs of its layer, not the inputs."""
        return self.parts[0].flipped

    def ordered(self, of_inputs: OfSide, of_outputs: OfSide) -> tuple[OfSide, OfSide]:
        """The same two things, for the rows of the block and for its columns.

        Args:
            of_inputs: what belongs to the inputs of the layer.
            of_outputs: what belongs to its outputs.

        Returns:
            The pair (of rows, of columns): exchanged if the block is `flipped`.
        """
        return (of_outputs, of_inputs) if self.flipped else (of_inputs, of_outputs)

    @cached_property
    def token_moments(self) -> tuple[Tensor, Tensor, float]:
        """Sums over tokens of x x^T (a, a) and delta delta^T (p, p), and the number of tokens."""
        left = total([share * moment(X) for share, X in self.inputs])
        right = total([moment(part.cotangents) for part in self.parts]) * self.weight
        return left, right, sum(share * len(X) * X.shape[1] for share, X in self.inputs)

    @cached_property
    def token_spans(self) -> tuple[Tensor | None, Tensor | None]:
        """All x and all delta, (tokens, a) and (tokens, p), each if they are few: they span their moments."""
        return _few([X for _, X in self.inputs]), _few([part.cotangents for part in self.parts])

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of inputs and of outputs of the layer, with those inputs that are left out."""
        a, p = reversed(self.shape) if self.flipped else self.shape
        return a + self.silent, p

    @property
    def product_floats(self) -> int:
        """What a Kronecker product stores, a² + p²."""
        a, p = self.sides
        return a**2 + p**2

    @property
    def outputs_axis(self) -> int:
        """The side of the block that the outputs of the layer are."""
        return 0 if self.flipped else 1

    @cached_property
    def compact(self) -> tuple[GradientFactors, ...]:
        """The parts, each formed if that takes no more numbers."""
        return tuple(part.compact for part in self.parts)

    def outward(self, matrix: Tensor | None = None) -> Tensor:
        """E[gamma Y gamma^T], with gamma as (a, p) for a inputs and p outputs; the sum if the source is `exact`.

        Args:
            matrix: Y (p, p), symmetric, or None for the identity.

        Returns:
            A symmetric matrix (a, a).
        """
        return symmetric(
            self.weight
            * total(part.outward() if matrix is None else part.outward_symmetric(matrix) for part in self.compact)
        )

    def outward_inverse(self, factor: Tensor) -> Tensor:
        """E[gamma Y^-1 gamma^T] for Y = L L^T over the outputs; the sum if the source is `exact`.

        Args:
            factor: L (p, p), the lower Cholesky factor of Y.

        Returns:
            A symmetric matrix (a, a).
        """
        parts = (replace(part, cotangents=_divided(part.cotangents, factor)) for part in self.compact)
        return symmetric(self.weight * total(part.outward() for part in parts))

    def inward_inverse(self, factor: Tensor) -> Tensor:
        """E[gamma^T Z^-1 gamma] for Z = L L^T over the inputs; the sum if the source is `exact`.

        Args:
            factor: L (a, a), the lower Cholesky factor of Z.

        Returns:
            A symmetric matrix (p, p).
        """
        parts = (
            replace(part, cotangents=torch.linalg.solve_triangular(factor, part.cotangents, upper=False))
            if part.inputs is None
            else replace(part, inputs=_divided(part.inputs, factor))
            for part in self.compact
        )
        return self.weight * total(moment(part.cotangents, part.weighted()) for part in parts)

    def inward(self, matrix: Tensor | None = None) -> Tensor:
        """E[gamma^T Z gamma], with gamma as (a, p) for a inputs and p outputs; the sum if the source is `exact`.

        Args:
            matrix: Z (a, a), symmetric, or None for the identity.

        Returns:
            A symmetric matrix (p, p).
        """
        return self.weight * total(moment(part.cotangents, part.weighted(matrix)) for part in self.compact)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """E[gamma gamma^T] (a, a) over the inputs and E[gamma^T gamma] (p, p) over the outputs."""
        return self.outward(), self.inward()

    def spanned(self) -> "GradientSource":
        """The same gradients in an orthonormal basis of the span of all inputs, if that has fewer directions.

        Kronecker products and their audits do not depend on the basis; the other directions are `silent`. Heads that
        are groups of inputs are not known any more.
        """
        if any(part.inputs is None for part in self.parts):
            return self
        tokens = torch.cat([X.flatten(0, 1) for _, X in self.inputs])
        if len(tokens) >= tokens.shape[1]:
            return self
        basis = torch.linalg.qr(tokens.mT).Q
        parts = tuple(replace(part, inputs=part.inputs @ basis) for part in self.parts if part.inputs is not None)
        heads, axis = (self.heads, self.axis) if self.axis == self.outputs_axis else (None, None)
        silent = tokens.shape[1] - len(tokens)
        return replace(self, parts=parts, silent=silent, labelled=(), heads=heads, axis=axis)

    def scaled(self) -> "tuple[GradientSource, float]":
        """The same gradients divided by a number if their fourth powers may leave the range of their dtype.

        Returns:
            The source, and the number: a power of two near the largest entries, or 1.
        """
        sides = [
            [part.inputs for part in self.parts if part.inputs is not None],
            [one.cotangents for one in self.parts],
        ]
        units = [max((power_of_two(one) for one in side), default=1.0) for side in sides]
        if 1 / _FAR <= units[0] * units[1] <= _FAR:
            return self, 1.0
        parts = (
            replace(
                part,
                inputs=None if part.inputs is None else part.inputs / units[0],
                cotangents=part.cotangents / units[1],
            )
            for part in self.parts
        )
        return replace(self, parts=tuple(parts), labelled=()), units[0] * units[1]

    def head(self, number: int) -> "GradientSource":
        """The gradients of one head alone.

        Args:
            number: of the head, from 0.

        Returns:
            The source of the head's rows or columns, named "Q.2" for head 2 of block "Q"; raises `RangeError` if
            there is no such head.
        """
        if self.heads is None or self.axis is None or not 0 <= number < self.heads:
            raise RangeError("block", f"{self.name!r} has no head {number}; take another block or approximation")
        width = self.shape[self.axis] // self.heads
        return self._slice(f"{self.name}.{number}", self.axis, number * width, (number + 1) * width)

    def member_parts(self) -> "list[GradientSource]":
        """Each of the weights that are joined in this one."""
        ends = torch.tensor(self.members).cumsum(0).tolist()
        return [
            self._slice(f"{self.name}[{i}]", self.members_axis, end - size, end)
            for i, (size, end) in enumerate(zip(self.members, ends, strict=True))
        ]

    def _slice(self, name: str, axis: int, start: int, stop: int) -> "GradientSource":
        parts, labelled = (
            tuple(part.part(axis, start, stop) for part in several) for several in (self.parts, self.labelled)
        )
        return GradientSource(
            name,
            parts,
            self.exact,
            sequences=self.sequences,
            labelled=labelled,
            silent=self.silent,
            seed=self.seed,
        )

    @property
    def second_half(self) -> Tensor:
        """The places of the samples of the second of the `halves`, in order."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.seed))
        return order[len(self) // 2 :].sort().values

    def halves(self) -> "tuple[GradientSource, GradientSource]":
        """Two sets of samples, each as if drawn alone: a random half of them, and the others."""
        second = torch.zeros(len(self), dtype=torch.bool)
        second[self.second_half] = True
        found = []
        for wanted in (~second, second):
            places = (some.nonzero().flatten() for some in wanted.split([len(part) for part in self.parts]))
            parts = (part.chosen(some) for part, some in zip(self.parts, places, strict=True))
            found.append(replace(self, parts=tuple(part for part in parts if len(part))))
        return found[0], found[1]


def joined(sources: Sequence[GradientSource]) -> GradientSource:
    """Several weights as one: side by side if they read the same inputs, otherwise one after the other, as vectors.

    Args:
        sources: of the weights, with the same samples.

    Returns:
        The gradients of all of them together.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> both = cv.approximations.joined([cv.approximations.source_of(H, name) for name in H.names])
        >>> bool(torch.allclose(both.dense(), H.outer.dense()))
        True
    """
    if not sources:
        raise EmptyError("sources", "got none, expected the gradients of at least one weight")
    if not _alike([source.parts for source in sources]):
        raise ModelError(
            "blocks",
            f"{', '.join(source.name for source in sources)} come from different samples; take them from one sweep, or "
            "from one Hessian with the same samples and seed",
        )
    name = " + ".join(source.name for source in sources)
    first = sources[0]
    columns = list(zip(*(source.parts for source in sources), strict=True))
    known = [source.labelled for source in sources]
    labelled = list(zip(*known, strict=True)) if _alike(known) else []
    if all(_same_inputs(some) for some in columns):
        axis = 0 if first.flipped else 1
        sizes, join = tuple(source.shape[axis] for source in sources), _side_by_side
    else:
        axis = 0
        sizes, join = tuple(source.shape[0] * source.shape[1] for source in sources), _as_vectors
    return GradientSource(
        name,
        tuple(map(join, columns)),
        first.exact,
        sequences=first.sequences and join is _side_by_side,
        labelled=tuple(map(join, labelled)),
        members=sizes,
        members_axis=axis,
        seed=first.seed,
    )


def _alike(several: Sequence[tuple[GradientFactors, ...]]) -> bool:
    """Whether all have as many gradients in each part."""
    return len({tuple(len(part) for part in parts) for parts in several}) == 1


def _side_by_side(parts: Sequence[GradientFactors]) -> GradientFactors:
    return replace(parts[0], cotangents=torch.cat([part.cotangents for part in parts], 3))


def _as_vectors(parts: Sequence[GradientFactors]) -> GradientFactors:
    return GradientFactors(None, torch.cat([part.gradients().flatten(1) for part in parts], 1)[None, :, :, None])


def _same_inputs(parts: Sequence[GradientFactors]) -> bool:
    first = parts[0].inputs
    alike = all(part.flipped == parts[0].flipped for part in parts)
    others = (part.inputs for part in parts)
    return alike and first is not None and all(X is not None and torch.equal(X, first) for X in others)


@runtime_checkable
class GivesGradients(Protocol):
    """What knows the gradients of its blocks: a model's Hessian, or a sweep that keeps them."""

    def gradient_source(self, name: str) -> GradientSource:
        """The gradients of one block."""


def _divided(vectors: Tensor, factor: Tensor) -> Tensor:
    """L^-1 v of all vectors v of the last axis."""
    rows = vectors.flatten(0, -2)
    return torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False).view(vectors.shape)


def _few(tensors: Sequence[Tensor]) -> Tensor | None:
    """All vectors (n, size) of the last axes, if n is at most half of their size."""
    count = sum(some.shape[:-1].numel() for some in tensors)
    return torch.cat([some.flatten(0, -2) for some in tensors]) if count <= _FEW * tensors[0].shape[-1] else None
