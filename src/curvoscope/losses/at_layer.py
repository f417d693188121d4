"""Losses at a layer's output F (N, L, m): the value, the gradient G and the Hessian S.

S is kept in the sparsest form that it has: c I (`ScalarCurvature`), one m x m matrix a token (`TokenCurvature`,
`SoftmaxCurvature`), or one matrix over all tokens of a group that the loss mixes (`PairCurvature`). A head sees S
through its port: the rows of W_O that lead from the head to the output, or the columns of F that it fills.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import DeviceError, DtypeError, LossError, NonFiniteError, RangeError, ShapeError

Port = Tensor | slice | None
LossFunction = Callable[[Tensor], Tensor]

_AT_ONCE = 64  # directions for which products with S are asked for together


def through(values: Tensor, port: Port) -> Tensor:
    """The last axis of `values`, from the output's m to the port's e: W_O (e, m) applied, or columns taken."""
    if port is None:
        return values
    if isinstance(port, slice):
        return values[..., port]
    return values @ port.mT


class Curvature(ABC):
    """S, the Hessian of a loss in the output F (N, L, m)."""

    @abstractmethod
    def apply(self, direction: Tensor) -> Tensor:
        """S dF for directions (..., N, L, m)."""


class ScalarCurvature(Curvature):
    """S = c I."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, direction: Tensor) -> Tensor:
        """c dF."""
        return self.factor * direction

    def between(self, left: Port, right: Port, identity: Tensor) -> Tensor:
        """c P P'^T, (e, e'), from the identity matrix of the output's width."""
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
        """Features B (v, e) with P S_t P'^T = B^T E_t B', where there are few words v; E_t is `word_covariance`."""
        return None

    def word_covariance(self, start: int, stop: int) -> Tensor:
        """E_t, (t, v, v)."""
        raise LossError("loss", "has no words")


class TokenCurvature(PerToken):
    """S_t given, (N, L, m, m)."""

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks

    def apply(self, direction: Tensor) -> Tensor:
        """S_t dF_t."""
        return torch.matmul(self._blocks, direction[..., None])[..., 0]

    def between(self, left: Port, right: Port, start: int, stop: int) -> Tensor:
        """P S_t P'^T."""
        blocks = self._blocks.flatten(0, 1)[start:stop]
        return through(through(blocks, right).mT, left).mT

    def diagonal(self, port: Port, start: int, stop: int) -> Tensor:
        """Of P S_t P^T."""
        return self.between(port, port, start, stop).diagonal(dim1=1, dim2=2)

    def workspace(self, left: Port, right: Port) -> int:
        """S_t through one port."""
        return 2 * self._blocks.shape[-1] ** 2


class SoftmaxCurvature(PerToken):
    """Cross-entropy after logits F U: S_t = w_t U (diag pi_t - pi_t pi_t^T) U^T, never formed in full.

    The variance under pi_t is taken around its mean, so that it keeps its digits when pi_t is nearly one-hot.
    """

    def __init__(self, weights: Tensor, probabilities: Tensor, unembedding: Tensor) -> None:
        self._weights, self._probabilities, self._unembedding = weights, probabilities, unembedding

    def apply(self, direction: Tensor) -> Tensor:
        """w U (pi . u - pi (pi^T u)) with u = U^T dF, relative to its value at the likeliest word."""
        u = direction @ self._unembedding
        likeliest = self._probabilities.argmax(-1, keepdim=True).expand(*u.shape[:-1], 1)
        u = u - u.gather(-1, likeliest)
        u = self._probabilities * (u - (self._probabilities * u).sum(-1, keepdim=True))
        return (self._weights[..., None] * u) @ self._unembedding.mT

    def between(self, left: Port, right: Port, start: int, stop: int) -> Tensor:
        """w P U (diag pi - pi pi^T) U^T P'^T."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        first = self._centred(left, probabilities)
        second = first if left is right else self._centred(right, probabilities)
        return (first * (weights[:, None] * probabilities)[:, None, :]) @ second.mT

    def diagonal(self, port: Port, start: int, stop: int) -> Tensor:
        """w times the variance of P U under pi_t."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        return weights[:, None] * (self._centred(port, probabilities).square() @ probabilities[:, :, None])[..., 0]

    def workspace(self, left: Port, right: Port) -> int:
        """The centred unembeddings, (e, v) and (e', v)."""
        seen = (through(self._unembedding.mT[:1], port).shape[1] for port in (left, right))
        return 2 * sum(seen) * self._unembedding.shape[1]

    def by_words(self, port: Port) -> Tensor | None:
        """The unembedding through the port, (v, e), where the words are fewer than the values."""
        seen = through(self._unembedding.mT, port)
        return seen if seen.shape[0] <= seen.shape[1] else None

    def word_covariance(self, start: int, stop: int) -> Tensor:
        """w (diag pi - pi pi^T), its rows summing to zero to the last digit, (t, v, v)."""
        probabilities = self._probabilities.flatten(0, 1)[start:stop]
        weights = self._weights.flatten()[start:stop]
        products = (weights[:, None] * probabilities)[:, :, None] * probabilities[:, None, :]
        products.diagonal(dim1=1, dim2=2).zero_()
        return torch.diag_embed(products.sum(-1)) - products

    def _centred(self, port: Port, probabilities: Tensor) -> Tensor:
        """P U minus its mean under pi_t, (t, e, v)."""
        seen = through(self._unembedding.mT, port).mT
        return seen - (probabilities @ seen.mT)[:, :, None]


class PairCurvature(Curvature):
    """S between all tokens of a group, (groups, g, m, g, m): a sequence, or the whole batch."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def apply(self, direction: Tensor) -> Tensor:
        """sum_u S_tu dF_u."""
        groups, size, width = self.blocks.shape[:3]
        matrix = self.blocks.reshape(groups, size * width, size * width)
        grouped = direction.reshape(*direction.shape[:-3], groups, size * width, 1)
        return torch.matmul(matrix, grouped).reshape(direction.shape)


@dataclass(frozen=True)
class LossAt:
    """A loss around one output: value, gradient G (N, L, m) and Hessian S."""

    value: float
    gradient: Tensor
    curvature: Curvature


class MSE:
    """The mean over all entries, 1/(N L m) |F - Y|^2."""

    def __init__(self, Y: Tensor) -> None:
        self.Y = checks.floating("Y", Y)

    def __call__(self, F: Tensor) -> Tensor:
        """The loss at F, differentiable."""
        return (F - self._targets(F)).square().mean()

    def at(self, F: Tensor) -> LossAt:
        """G = 2/(N L m) (F - Y), S = 2/(N L m) I."""
        residual = F - self._targets(F)
        factor = 2.0 / F.numel()
        return LossAt(float(residual.square().mean()), factor * residual, ScalarCurvature(factor))

    def _targets(self, F: Tensor) -> Tensor:
        checks.floating("Y", self.Y, like=F)
        Y = self.Y[None] if self.Y.ndim == F.ndim - 1 else self.Y
        if Y.shape != F.shape:
            raise ShapeError("Y", f"got {tuple(self.Y.shape)}, the layer's output has {tuple(F.shape)}")
        return Y


class CrossEntropy:
    """Mean over the targets of -log softmax(F U + b)[target]; targets equal to `ignore_index` do not count."""

    def __init__(
        self, targets: Tensor, unembedding: Tensor, bias: Tensor | None = None, ignore_index: int = -100
    ) -> None:
        self.unembedding = checks.floating("unembedding", unembedding)
        if unembedding.ndim != 2:
            raise ShapeError("unembedding", f"expected (m, vocabulary), got {tuple(unembedding.shape)}")
        vocabulary = unembedding.shape[1]
        if bias is not None and checks.floating("bias", bias, like=unembedding).shape != (vocabulary,):
            raise ShapeError("bias", f"expected ({vocabulary},), got {tuple(bias.shape)}")
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise DtypeError("targets", f"expected integers, got {targets.dtype}")
        if targets.device != unembedding.device:
            raise DeviceError("targets", f"is on {targets.device}, the unembedding on {unembedding.device}")
        self.counted = targets != ignore_index
        if not bool(self.counted.any()):
            raise RangeError("targets", f"all equal ignore_index = {ignore_index}; the mean has no terms")
        seen = targets[self.counted]
        if int(seen.min()) < 0 or int(seen.max()) >= vocabulary:
            worst = int(seen.max()) if int(seen.max()) >= vocabulary else int(seen.min())
            raise RangeError("targets", f"{worst} is outside the vocabulary 0 to {vocabulary - 1}")
        self.targets, self.bias, self.ignore_index = targets, bias, ignore_index

    def __call__(self, F: Tensor) -> Tensor:
        """The loss at F, differentiable."""
        targets, _ = self._fitting(F)
        return torch.nn.functional.cross_entropy(
            self._logits(F).flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index
        )

    def at(self, F: Tensor) -> LossAt:
        """G_t = w_t U (pi_t - onehot_t), S_t = w_t U (diag pi_t - pi_t pi_t^T) U^T, w_t = 1/#targets."""
        targets, counted = self._fitting(F)
        logits = self._logits(F)
        probabilities = logits.softmax(-1)
        weights = counted.to(F.dtype) / counted.sum()
        index = targets.where(counted, 0)[..., None]
        others = probabilities.scatter(-1, index, 0.0)  # pi - onehot, without 1 - pi at the target
        errors = others.scatter(-1, index, -others.sum(-1, keepdim=True))
        gradient = (weights[..., None] * errors) @ self.unembedding.mT
        return LossAt(float(self(F)), gradient, SoftmaxCurvature(weights, probabilities, self.unembedding))

    def _logits(self, F: Tensor) -> Tensor:
        logits = F @ self.unembedding
        return logits if self.bias is None else logits + self.bias

    def _fitting(self, F: Tensor) -> tuple[Tensor, Tensor]:
        checks.floating("unembedding", self.unembedding, like=F)
        if F.shape[-1] != self.unembedding.shape[0]:
            raise ShapeError(
                "unembedding",
                f"has {self.unembedding.shape[0]} rows, the layer's output {F.shape[-1]} columns",
            )
        targets, counted = self.targets, self.counted
        if targets.ndim == F.ndim - 2:
            targets, counted = targets[None], counted[None]
        if targets.shape != F.shape[:-1]:
            raise ShapeError(
                "targets", f"got {tuple(self.targets.shape)}, the layer's output has {tuple(F.shape[:-1])}"
            )
        return targets, counted


def at(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """Value, gradient and Hessian of any loss at F (N, L, m); `squeeze` when the loss expects (L, m)."""
    found = loss.at(F) if isinstance(loss, MSE | CrossEntropy) else _by_autodiff(loss, F, squeeze)
    if not math.isfinite(found.value):
        raise NonFiniteError("loss", f"is {found.value} at this input")
    return found


def _by_autodiff(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """G and S by double backward, which is right also where nested torch.func transforms are not."""
    leaf = F.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf[0] if squeeze else leaf)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LossError("loss", f"must return a scalar tensor, got {shape}")
        if not value.requires_grad:
            raise LossError("loss", "does not depend on the layer's output, or detaches it")
        gradient = torch.autograd.grad(value.reshape(()), leaf, create_graph=True)[0]

    def product(direction: Tensor) -> Tensor:
        if not gradient.requires_grad:  # a loss linear in F
            return torch.zeros_like(leaf)
        found = torch.autograd.grad(gradient, leaf, direction, retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(leaf) if found is None else found

    def products(directions: Tensor) -> Tensor:
        return torch.stack([product(direction) for direction in directions])

    return LossAt(float(value.detach()), gradient.detach(), curvature_of(products, F, group_size(product, F)))


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
    direction a bit, on the groups where the bit is 0, reaches every pair."""
    generator = torch.Generator().manual_seed(0)
    for bit in range(int(group.max()).bit_length()):
        on = (group >> bit & 1 == 0)[..., None]
        noise = torch.randn(F.shape, generator=generator, dtype=F.dtype).to(F.device)
        answer = product(noise * on)
        off = answer.masked_fill(on, 0).abs().max()
        if off > 16 * torch.finfo(F.dtype).eps * answer.abs().max():
            return True
    return False
