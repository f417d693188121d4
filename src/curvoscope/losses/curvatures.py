"""S, the Hessian of a loss in an output F (N, L, m), in the sparsest form that it has.

These are c I (`ScalarCurvature`), one m x m matrix per token (`TokenCurvature`, `SoftmaxCurvature`), or one matrix over
all tokens of a group that the loss mixes (`PairCurvature`). A head sees S through its port: the rows of W_O that lead
from the head to the output, or the columns of F that it fills. Two weights see it through two (`ProjectedCurvature`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import LossError

Port = Tensor | slice | None

_AT_ONCE = 64  # directions for which products with S are asked for together


def through(values: Tensor, port: Port) -> Tensor:
    """The last axis of `values`, from the output's m to the port's e: W_O (e, m) applied, or columns taken."""
    if port is None:
        return values
    if isinstance(port, slice):
        return values[..., port]
    return values @ port.mT


class Curvature(ABC):
    """S, the Hessian of a loss in the output F (N, L, m).

    Example:
        >>> import torch, curvoscope as cv
        >>> F = torch.zeros(1, 2, 3).double()
        >>> S = cv.losses.MSE(torch.ones(1, 2, 3).double()).at(F).curvature
        >>> S.apply(torch.full((1, 2, 3), 6.0))[0, 0]
        tensor([2., 2., 2.])
    """

    @abstractmethod
    def apply(self, direction: Tensor) -> Tensor:
        """S dF.

        Args:
            direction: dF, one or several directions (..., N, L, m).

        Returns:
            The products, of the same shape.
        """


def multiplied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """M v for matrices (*batch, p, q) and vectors (..., *batch, q): those of one matrix are columns of one product."""
    columns = vectors.reshape(-1, *vectors.shape[1 - matrices.ndim :]).movedim(0, -1)
    return (matrices @ columns).movedim(-1, 0).reshape(*vectors.shape[:-1], matrices.shape[-2])


class ScalarCurvature(Curvature):
    """S = c I.

    Args:
        factor: c.

    Example:
        >>> import torch, curvoscope as cv
        >>> cv.losses.ScalarCurvature(2.0).apply(torch.ones(1, 1, 3))
        tensor([[[2., 2., 2.]]])
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, direction: Tensor) -> Tensor:
        """c dF.

        Args:
            direction: dF, of any shape.

        Returns:
            The product, of the same shape.
        """
        return self.factor * direction

    def between(self, left: Port, right: Port, identity: Tensor) -> Tensor:
        """c P P'^T: S through two ports. A port is W_O (e, m), a slice of the output's columns, or None for all.

        Args:
            left: the port P, to e values.
            right: the port P', to e' values.
            identity: the identity matrix (m, m) of the output's width.

        Returns:
            The matrix (e, e'), the same for all tokens.
        """
        return self.factor * (through(identity, left).mT @ through(identity, right))


class PerToken(Curvature):
    """S with a block S_t (m, m) for each token and nothing between tokens."""

    @abstractmethod
    def between(self, left: Port, right: Port, start: int, stop: int) -> Tensor:
        """P S_t P'^T for tokens start to stop: (t, e, e')."""

    @abstractmethod
    def diagonal(self, port: Port, start: int, stop: int) -> Tensor:
        """The diagonals of P S_t P^T for tokens start to stop: (t, e)."""

    @abstractmethod
    def workspace(self, left: Port, right: Port) -> int:
        """Numbers that `between` needs for a token."""

    def by_words(self, port: Port) -> Tensor | None:
        """Features B (v, e) with P S_t P'^T = B^T E_t B', if there are few words v; E_t is `word_covariance`."""
        return None

    def word_covariance(self, start: int, stop: int) -> Tensor:
        """E_t, (t, v, v)."""
        raise LossError("loss", "has no words")


class TokenCurvature(PerToken):
    """S with one matrix per token and nothing between tokens.

    Args:
        blocks: S_t, (N, L, m, m).

    Example:
        >>> import torch, curvoscope as cv
        >>> S = cv.losses.TokenCurvature(torch.tensor([[[[2.0, 1.0], [1.0, 3.0]]]]))
        >>> S.apply(torch.tensor([[[1.0, 0.0]]]))
        tensor([[[2., 1.]]])
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def apply(self, direction: Tensor) -> Tensor:
        """S_t dF_t for each token t.

        Args:
            direction: dF (..., N, L, m).

        Returns:
            The products, of the same shape.
        """
        return multiplied(self.blocks, direction)

    def between(self, left: Port, right: Port, start: int, stop: int) -> Tensor:
        """P S_t P'^T: S through two ports. A port is W_O (e, m), a slice of the output's columns, or None for all.

        Args:
            left: the port P, to e values.
            right: the port P', to e' values.
            start: the first token, counted through all sequences.
            stop: the end of the range of tokens, not included.

        Returns:
            One matrix for each of the t tokens, (t, e, e').
        """
        blocks = self.blocks.flatten(0, 1)[start:stop]
        return through(through(blocks, right).mT, left).mT

    def diagonal(self, port: Port, start: int, stop: int) -> Tensor:
        """The diagonals of P S_t P^T.

        Args:
            port: P, as in `between`.
            start, stop: the range of tokens, as in `between`.

        Returns:
            The diagonals, (t, e).
        """
        return self.between(port, port, start, stop).diagonal(dim1=1, dim2=2)

    def workspace(self, left: Port, right: Port) -> int:
        """Numbers that `between` needs for a token: S_t, and S_t through one port.

        Args:
            left, right: the ports, as in `between`.

        Returns:
            The number, 2 m².
        """
        return 2 * self.blocks.shape[-1] ** 2


class PairCurvature(Curvature):
    """S between all tokens of a group: a sequence, or the whole batch.

    Args:
        blocks: S of each group, (groups, g, m, g, m) with g tokens per group.

    Example:
        >>> import torch, curvoscope as cv
        >>> S = cv.losses.PairCurvature(torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(1, 2, 1, 2, 1))
        >>> S.apply(torch.tensor([[[5.0], [7.0]]])).flatten()
        tensor([7., 5.])
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def apply(self, direction: Tensor) -> Tensor:
        """sum_u S_tu dF_u over the tokens u of the group of t.

        Args:
            direction: dF (..., N, L, m).

        Returns:
            The products, of the same shape.
        """
        groups, size, width = self.blocks.shape[:3]
        matrix = self.blocks.reshape(groups, size * width, size * width)
        grouped = direction.reshape(*direction.shape[:-3], groups, size * width)
        return multiplied(matrix, grouped).reshape(direction.shape)


@dataclass(frozen=True)
class LossAt:
    """A loss around one output.

    Args:
        value: the loss.
        gradient: G, (N, L, m).
        curvature: S.

    Example:
        >>> import torch, curvoscope as cv
        >>> found = cv.losses.MSE(torch.ones(1, 2, 2)).at(torch.zeros(1, 2, 2))
        >>> found.value, found.gradient[0, 0], found.curvature.factor
        (1.0, tensor([-0.5000, -0.5000]), 0.5)
    """

    value: float
    gradient: Tensor
    curvature: Curvature


def group_size(product: Callable[[Tensor], Tensor], F: Tensor) -> int:
    """How many tokens S couples, from its products: does the loss mix tokens, and if so, sequences?"""
    sequences, length, _ = F.shape
    sequence = torch.arange(sequences, device=F.device).repeat_interleave(length).view(sequences, length)
    token = torch.arange(sequences * length, device=F.device).view(sequences, length)
    if not _mixes(product, F, token):
        return 1
    return length if not _mixes(product, F, sequence) else sequences * length


def curvature_of(products: Callable[[Tensor], Tensor], F: Tensor, size: int) -> Curvature:
    """S from its products with directions (n, N, L, m), when it couples groups of `size` tokens: one product for each
    entry of a group."""
    sequences, length, width = F.shape
    groups = sequences * length // size
    checks.fits(
        groups * (size * width) ** 2 * F.element_size(),
        None,
        "the loss Hessian at the output",
        "use fewer tokens",
    )
    columns = []
    for entries in torch.arange(size * width, device=F.device).split(max(1, min(_AT_ONCE, 2**24 // F.numel()))):
        directions = F.new_zeros(len(entries), groups, size * width)
        directions[torch.arange(len(entries)), :, entries] = 1
        columns.append(products(directions.view(-1, *F.shape)).reshape(directions.shape))
    blocks = torch.cat(columns).permute(1, 2, 0)
    blocks = (blocks + blocks.mT) / 2
    if size == 1:
        return TokenCurvature(blocks.view(sequences, length, width, width))
    return PairCurvature(blocks.view(groups, size, width, size, width))


def _mixes(product: Callable[[Tensor], Tensor], F: Tensor, group: Tensor) -> bool:
    """Whether S has entries between different groups. Two groups differ in some bit of their number, so one random
    direction per bit, on the groups where the bit is 0, reaches every pair."""
    generator = torch.Generator().manual_seed(0)
    for bit in range(int(group.max()).bit_length()):
        on = (group >> bit & 1 == 0)[..., None]
        noise = torch.randn(F.shape, generator=generator, dtype=F.dtype).to(F.device)
        answer = product(noise * on)
        off = answer.masked_fill(on, 0).abs().max()
        if off > 16 * torch.finfo(F.dtype).eps * answer.abs().max():
            return True
    return False


@dataclass(frozen=True)
class ProjectedCurvature:
    """P S_t P'^T: one matrix for all tokens, `shared` (e, e'), or `blocks(start, stop)` -> (t, e, e').

    `diagonal(start, stop)` -> (t, e) if both ports are the same. `factor`: the matrix is this multiple of I.
    """

    shared: Tensor | None
    factor: float | None
    blocks: Callable[[int, int], Tensor]
    diagonal: Callable[[int, int], Tensor] | None
    shape: tuple[int, int]
    workspace: int
    words: tuple[Tensor, Tensor, Callable[[int, int], Tensor]] | None = None  # B, B', E with blocks B^T E_t B'

    def kernel(self, values: Tensor, others: Tensor, start: int, stop: int) -> Tensor:
        """V P S_t P'^T V'^T for whole sequences of tokens, values (n, L, e) and (n, L, e'): (n, L or 1, L, L)."""
        if self.shared is not None:
            return (values @ self.shared @ others.mT)[:, None]
        n, length = values.shape[:2]
        if self.words is not None:
            left, right, covariance = self.words
            inner = covariance(start, stop).unflatten(0, (n, length))
            return (values @ left.mT)[:, None] @ (inner @ (others @ right.mT).mT[:, None])
        blocks = self.blocks(start, stop).unflatten(0, (n, length))
        return values[:, None] @ blocks @ others.mT[:, None]

    def times(self, matrices: Tensor, start: int, stop: int) -> Tensor:
        """P S_t P'^T M_t for matrices (t, e', q): (t, e, q)."""
        return self.factor * matrices if self.factor is not None else self.blocks(start, stop) @ matrices

    @property
    def symmetric(self) -> bool:
        """Whether both ports are the same."""
        return self.diagonal is not None


def seen_through(curvature: Curvature, left: Port, right: Port, width: int, like: Tensor) -> ProjectedCurvature:
    """S, c I or with one block per token, through two ports to an output of the given width."""
    sizes = tuple(through(like.new_empty(1, width), port).shape[1] for port in (left, right))
    shape, same = (sizes[0], sizes[1]), _same(left, right)
    if isinstance(curvature, ScalarCurvature):
        shared = curvature.between(left, right, torch.eye(width, dtype=like.dtype, device=like.device))
        diagonal = (lambda start, stop: shared.diagonal().expand(stop - start, -1)) if same else None
        factor = curvature.factor if same and not isinstance(left, Tensor) else None
        return ProjectedCurvature(shared, factor, lambda start, stop: shared, diagonal, shape, 0)
    assert isinstance(curvature, PerToken)
    first = curvature.by_words(left)
    words = first, first if same else curvature.by_words(right)
    return ProjectedCurvature(
        None,
        None,
        lambda start, stop: curvature.between(left, right, start, stop),
        (lambda start, stop: curvature.diagonal(left, start, stop)) if same else None,
        shape,
        curvature.workspace(left, right) + shape[0] * shape[1],
        None if words[0] is None or words[1] is None else (words[0], words[1], curvature.word_covariance),
    )


def _same(left: Port, right: Port) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.data_ptr() == right.data_ptr()
    return left == right if isinstance(left, slice) and isinstance(right, slice) else left is right
