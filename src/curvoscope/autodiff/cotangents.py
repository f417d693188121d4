"""Random cotangents g of a model's outputs with E[g g^T] = S, the Hessian of the loss in the outputs, and roots of S.

Cross-entropy, for token t with probabilities p_t, weight w_t and independent signs e:

    g_t = sqrt(w_t) (sqrt(p_t) . e - p_t <sqrt(p_t), e>)            E[g_t g_t^T] = w_t (diag p_t - p_t p_t^T) = S_t

A vocabulary is walked in ranges of columns, and signs are drawn anew from their seeds whenever they are needed, so that
nothing of the size of (samples, tokens, vocabulary) is kept. For a loss whose S is diagonal, g = sqrt(diag S) . e; for
any other one g = R e with R R^T = S for each group of tokens that the loss couples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import LossError, ModelError
from curvoscope.estimate.products import random_signs
from curvoscope.losses import CrossEntropy, Objective
from curvoscope.losses.curvatures import PairCurvature, TokenCurvature, curvature_of, group_size
from curvoscope.losses.objectives import logits_of

COLUMNS = 8192  # of a vocabulary at a time
_INDEFINITE = 1e3  # units of rounding that an eigenvalue of S may lie below 0
_MOST_DENSE = 4096  # entries of a group of tokens up to which S is formed

SampleSeed = tuple[int, int]  # of the sweep and of one sample


def signs(shape: Sequence[int], seed: Sequence[int], like: Tensor) -> Tensor:
    """Independent signs, the same for the same seed."""
    mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    found = random_signs(torch.Size(shape).numel(), torch.Generator().manual_seed(mixed))
    return found.to(like).view(torch.Size(shape))


class Cotangents(ABC):
    """Draws of g for one micro-batch: one tensor for each tensor F that the loss reads."""

    @abstractmethod
    def draw(self, seed: SampleSeed) -> list[Tensor]:
        """One g."""

    @abstractmethod
    def root(self) -> list[Tensor]:
        """R with R R^T = S, its k columns one below the other: (k, *shape) for each F."""


def column_ranges(classes: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns in which g is made."""
    for start in range(0, classes, COLUMNS):
        yield start, min(start + COLUMNS, classes)


class SoftmaxCotangents(Cotangents):
    """Those of cross-entropy.

    Args:
        logits: gives columns start to stop of the logits, (T, stop - start).
        log_sums: log sum_v exp of each row, (T, 1).
        weights: w_t, (T, 1).
        classes: number of columns.
        restore: from (T, classes) to the shape of the model's output.
    """

    def __init__(
        self,
        logits: Callable[[int, int], Tensor],
        log_sums: Tensor,
        weights: Tensor,
        classes: int,
        restore: Callable[[Tensor], Tensor],
    ) -> None:
        self._logits, self._log_sums, self._roots = logits, log_sums, weights.sqrt()
        self.classes, self._restore = classes, restore

    def columns(self, start: int, stop: int, seeds: Sequence[SampleSeed], inner: Tensor) -> Tensor:
        """Columns of g for each seed, (n, T, stop - start), given `inner_products`."""
        roots = self._probabilities(start, stop).sqrt_()
        found = torch.stack([signs(roots.shape, (*seed, start), roots) for seed in seeds])
        found -= roots * inner
        return found.mul_(roots * self._roots)

    def inner_products(self, seeds: Sequence[SampleSeed]) -> Tensor:
        """<sqrt(p_t), e> for each seed, (n, T, 1)."""
        found = self._log_sums.new_zeros(len(seeds), *self._log_sums.shape)
        for start, stop in column_ranges(self.classes):
            roots = self._probabilities(start, stop).sqrt_()
            for i, seed in enumerate(seeds):
                found[i] += (signs(roots.shape, (*seed, start), roots) * roots).sum(-1, keepdim=True)
        return found

    def draw(self, seed: SampleSeed) -> list[Tensor]:
        """One g, in the shape of the output."""
        inner = self.inner_products([seed])
        return [
            self._restore(
                torch.cat([self.columns(*some, [seed], inner)[0] for some in column_ranges(self.classes)], -1)
            )
        ]

    def root(self) -> list[Tensor]:
        """sqrt(w_t) (sqrt(p_v) e_v - p_t sqrt(p_v)) for all tokens t that count and all classes v."""
        counted, n = self._roots.flatten().nonzero().flatten(), self.classes
        _check_room(len(counted) * n, len(self._roots) * n, self._roots)
        p = self._probabilities(0, n)[counted]
        blocks = torch.diag_embed(p.sqrt()) - p.sqrt()[:, :, None] * p[:, None, :]  # (t, v, entries)
        columns = p.new_zeros(len(counted), n, len(self._roots), n)
        columns[torch.arange(len(counted)), :, counted] = blocks * self._roots[counted, :, None]
        return [torch.stack([self._restore(column) for column in columns.flatten(0, 1)])]

    def _probabilities(self, start: int, stop: int) -> Tensor:
        return (self._logits(start, stop) - self._log_sums).exp_()


class DiagonalCotangents(Cotangents):
    """Those of a loss whose S is diagonal. `roots`: the roots of its entries, one tensor for each F."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self._roots = roots

    def draw(self, seed: SampleSeed) -> list[Tensor]:
        """sqrt(diag S) . e."""
        return [signs(root.shape, (*seed, i), root) * root for i, root in enumerate(self._roots)]

    def root(self) -> list[Tensor]:
        """One column for each entry that is not zero."""
        flat = torch.cat([root.flatten() for root in self._roots])
        places = flat.nonzero().flatten()
        _check_room(len(places), len(flat), flat)
        columns = flat.new_zeros(len(places), len(flat))
        columns[torch.arange(len(places)), places] = flat[places]
        sizes = [root.numel() for root in self._roots]
        return [part.view(-1, *root.shape) for part, root in zip(columns.split(sizes, 1), self._roots, strict=True)]


class GroupCotangents(Cotangents):
    """Those of a loss that couples the entries of groups of tokens. `roots`: R (groups, k, k), R R^T = S."""

    def __init__(self, roots: Tensor, shape: torch.Size) -> None:
        self._roots, self._shape = roots, shape

    def draw(self, seed: SampleSeed) -> list[Tensor]:
        """R e for each group."""
        groups, size, _ = self._roots.shape
        return [(self._roots @ signs((groups, size, 1), seed, self._roots)).reshape(self._shape)]

    def root(self) -> list[Tensor]:
        """The columns of R of every group."""
        groups, size, _ = self._roots.shape
        _check_room(groups * size, groups * size, self._roots)
        return [torch.block_diag(*self._roots).mT.reshape(-1, *self._shape)]


def _check_room(columns: int, entries: int, like: Tensor) -> None:
    """Raise unless all columns of R fit into memory."""
    checks.fits(
        2 * columns * entries * like.element_size(),
        None,
        f"all {columns:,} directions of a loss Hessian",
        "use a sweep, which samples them: cv.sweep(model, loss, batches, keep=[name])",
    )


def softmax_cotangents(
    objective: CrossEntropy, F: Tensor, targets: Any, logits: Callable[[int, int], Tensor] | None = None
) -> SoftmaxCotangents:
    """Those of cross-entropy at outputs F. `logits`: where columns come from, if F is not to be kept."""
    rows, shape, axis = objective.rows(F.detach(), targets), F.movedim(objective.class_axis(F), -1).shape, objective
    log_sums, kept = rows.logits.logsumexp(-1, keepdim=True), rows.logits if logits is None else None

    def restore(found: Tensor) -> Tensor:
        return found.view(shape).movedim(-1, axis.class_axis(F))

    def kept_logits(start: int, stop: int) -> Tensor:
        assert kept is not None
        return kept[:, start:stop]

    return SoftmaxCotangents(logits or kept_logits, log_sums, rows.weights, shape[-1], restore)


def cotangents(objective: Objective, outputs: Any, targets: Any) -> tuple[list[Tensor], Cotangents]:
    """The tensors F that the loss reads, and what draws g for them.

    `LossError` if S is not positive semidefinite: no g has it as its covariance.
    """
    if isinstance(objective, CrossEntropy) and objective.unembedding is None and objective.bias is None:
        F = logits_of(outputs)
        return [F], softmax_cotangents(objective, F, targets)
    if objective.reads_parameters:
        raise LossError(
            "loss_fn",
            f"is {type(objective).__name__}, which has curvature that does not come from the model's outputs; give the "
            "loss alone, or use cv.hessian(...).outer",
        )
    cut, gradient = objective.gradient(outputs, targets)
    if not cut:
        raise ModelError("model", "its outputs have no derivatives in the chosen blocks")
    if not any(G.requires_grad for G in gradient):
        raise LossError(
            "loss_fn",
            "is linear in the model's outputs, so the Gauss-Newton part is 0. If the model computes its loss, give "
            "one of its predictions, or None for that of a Hugging Face model",
        )

    def product(directions: Sequence[Tensor]) -> list[Tensor]:
        pairs = [(G, v) for G, v in zip(gradient, directions, strict=True) if G.requires_grad]
        if not pairs:
            return [torch.zeros_like(F) for F in cut]
        found = torch.autograd.grad(
            [G for G, _ in pairs], cut, [v for _, v in pairs], retain_graph=True, materialize_grads=True
        )
        return list(found)

    diagonal = _diagonal(product, cut)
    if diagonal is not None:
        least, most = min(float(d.min()) for d in diagonal), max(float(d.abs().max()) for d in diagonal)
        _check_convex(least, most, cut[0].dtype)
        return cut, DiagonalCotangents([d.clamp_min(0).sqrt() for d in diagonal])
    if len(cut) > 1:
        raise LossError("loss_fn", f"reads {len(cut)} tensors that its second derivative couples; use cv.hessian")
    return cut, _coupled(product, cut[0])


def _diagonal(product: Callable[[Sequence[Tensor]], list[Tensor]], cut: Sequence[Tensor]) -> list[Tensor] | None:
    """The diagonal of S, if two products show that it has nothing else.

    Entries of the probes are drawn from an interval: of two drawn from two values, short ones can be equal.
    """
    found, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2):
        probes = [0.5 + torch.rand(F.shape, generator=generator, dtype=torch.float64).to(F) for F in cut]
        found.append([Sv.detach() / v for Sv, v in zip(product(probes), probes, strict=True)])
    first, second = found
    size = max(float(d.abs().max()) for d in first)
    apart = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    return first if apart <= 64 * torch.finfo(cut[0].dtype).eps * size else None


def _coupled(product: Callable[[Sequence[Tensor]], list[Tensor]], F: Tensor) -> GroupCotangents:
    """R for each group of tokens that S couples."""
    shape = F.shape[0] if F.ndim > 1 else 1, F.shape[1:-1].numel(), F.shape[-1]
    cube = F.detach().reshape(shape)

    def products(directions: Tensor) -> Tensor:
        found = [product([v.reshape(F.shape)])[0].reshape(shape) for v in directions.reshape(-1, *shape)]
        return torch.stack(found).reshape(directions.shape).detach()

    size = group_size(products, cube)
    if size * shape[-1] > _MOST_DENSE:
        raise LossError(
            "loss_fn",
            f"its second derivative couples {size * shape[-1]:,} entries of the output, and a root of it is formed for "
            f"at most {_MOST_DENSE:,}; use cv.losses.CrossEntropy if it is one, or cv.hessian(...).outer",
        )
    curvature = curvature_of(products, cube, size)
    assert isinstance(curvature, TokenCurvature | PairCurvature)
    matrices = curvature.blocks.reshape(-1, size * shape[-1], size * shape[-1])
    values, vectors = torch.linalg.eigh(matrices)
    _check_convex(float(values.min()), float(values.abs().max()), F.dtype)
    return GroupCotangents(vectors * values.clamp_min(0).sqrt()[:, None, :], F.shape)


def _check_convex(least: float, most: float, dtype: torch.dtype) -> None:
    if least < -_INDEFINITE * torch.finfo(dtype).eps * most:
        raise LossError(
            "loss_fn",
            f"is not convex in the model's outputs: its Hessian there has the eigenvalue {least:.3g}, and a covariance "
            "has none below 0; use cv.hessian(...).outer",
        )
