"""KFAC's approximation of the Gauss-Newton block of one parameter, from random cotangents, and its eigenbasis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.cotangents import SampleSeed, cotangents
from curvoscope.autodiff.uses import WeightUse, find_uses, nodes_below
from curvoscope.losses.objectives import Objective

_LARGEST = 1024  # side of a matrix up to which its factor is formed; that of a longer one is a diagonal


@dataclass(frozen=True, eq=False)
class SampledGradient:
    """The gradient of a matrix along one random cotangent, sum_t rows_t columns_t^T over the T tokens that it met.

    Args:
        rows: (T, r0), or the rows (T,) that a look-up reads.
        columns: (T, r1).
        shape: (r0, r1).
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def factor(self, axis: int) -> Tensor:
        """KFAC's factor, the mean of rows_t rows_t^T or the sum of columns_t columns_t^T; a long one's diagonal."""
        vectors = (self.rows, self.columns)[axis]
        if vectors.ndim == 1:
            found = torch.bincount(vectors, minlength=self.shape[0]).to(self.columns)
        elif self.shape[axis] > _LARGEST:
            found = vectors.square().sum(0)
        else:
            found = vectors.mT @ vectors
        return found if axis else found / len(vectors)


def sampled_gradients(
    objective: Objective, outputs: Any, targets: Any, parameters: Mapping[str, Tensor], seed: SampleSeed
) -> dict[str, SampledGradient | Tensor]:
    """The gradient of each parameter along one random cotangent, from one backward pass through the outputs' graph.

    That of a matrix that only multiplies tokens, or is only looked up, comes in factors.
    """
    cut, draws = cotangents(objective, outputs, targets)
    roots = [F.grad_fn for F in cut if F.grad_fn is not None]
    uses, _ = find_uses(nodes_below(roots), parameters)
    products: dict[str, list[WeightUse]] = {}
    for use in uses:
        products.setdefault(use.parameter, []).append(use)
    products = {name: several for name, several in products.items() if _alike(several, parameters[name])}
    others = [name for name in parameters if name not in products]
    places: Any = [use.edge for several in products.values() for use in several]
    places += [parameters[name] for name in others]
    deltas = iter(torch.autograd.grad(cut, places, draws.draw(seed), retain_graph=True, allow_unused=True))
    found: dict[str, SampledGradient | Tensor] = {}
    for name, several in products.items():
        pairs = [_vectors(use, delta) for use in several if (delta := next(deltas)) is not None]
        if pairs:
            rows, columns = (torch.cat(vectors) for vectors in zip(*pairs, strict=True))
            found[name] = SampledGradient(rows, columns, (parameters[name].shape[0], parameters[name].shape[1]))
    found |= {name: gradient for name, gradient in zip(others, deltas, strict=True) if gradient is not None}
    return found


def _vectors(use: WeightUse, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of one use."""
    columns = use.delta(delta[None])[0]
    if use.is_look_up:
        counted = use.factor >= 0
        return use.factor[counted], columns[counted]
    return (columns, use.factor) if use.transposed else (use.factor, columns)


def _alike(uses: Sequence[WeightUse], parameter: Tensor) -> bool:
    """Whether all uses are look-ups, or all products with the whole parameter on the same side."""
    whole = tuple(slice(0, size) for size in parameter.shape)
    kinds = {(use.transposed, use.is_look_up) for use in uses}
    return len(kinds) == 1 and all(use.region == whole for use in uses)


@dataclass(frozen=True, eq=False)
class ParameterCurvature:
    """The Gauss-Newton block of one parameter: (U_0 (x) U_1) diag(values) (U_0 (x) U_1)^T.

    Args:
        values: of the shape of the parameter.
        factors: KFAC's, one for each axis of a matrix, running means; a vector is a diagonal one. None: the block is
            taken as a diagonal, and `values` are the running means.
        bases: U_0 and U_1, nearly the eigenvectors of the factors; None: the identity.
        samples: how many samples the means hold.
    """

    values: Tensor
    factors: tuple[Tensor, Tensor] | None = None
    bases: tuple[Tensor | None, Tensor | None] = (None, None)
    samples: int = 1

    @staticmethod
    def of(sample: SampledGradient | Tensor) -> "ParameterCurvature":
        """From one sample."""
        if isinstance(sample, Tensor):
            return ParameterCurvature(sample.square())
        return ParameterCurvature(sample.columns, (sample.factor(0), sample.factor(1))).turned()

    def mixed(self, sample: SampledGradient | Tensor, decay: float) -> "ParameterCurvature":
        """With a new sample in the running means, which are plain means at first."""
        decay, samples = min(decay, self.samples / (self.samples + 1)), self.samples + 1
        if isinstance(sample, Tensor) and self.factors is None:
            return ParameterCurvature(torch.lerp(sample.square(), self.values, decay), samples=samples)
        if isinstance(sample, Tensor) or self.factors is None:
            return ParameterCurvature.of(sample)  # the model uses it in another way than before
        left, right = (torch.lerp(sample.factor(axis), known, decay) for axis, known in enumerate(self.factors))
        return replace(self, factors=(left, right), samples=samples)

    def turned(self) -> "ParameterCurvature":
        """With bases that are nearer to the eigenvectors, and the factors' values along them."""
        if self.factors is None:
            return self
        (left, first), (right, second) = map(_basis, self.factors, self.bases)
        return replace(self, values=torch.outer(first, second), bases=(left, right))

    def into(self, tensor: Tensor) -> Tensor:
        """U_0^T tensor U_1."""
        left, right = self.bases
        tensor = tensor if left is None else left.mT @ tensor
        return tensor if right is None else tensor @ right

    def back(self, tensor: Tensor) -> Tensor:
        """U_0 tensor U_1^T."""
        left, right = self.bases
        tensor = tensor if left is None else left @ tensor
        return tensor if right is None else tensor @ right.mT


def _basis(factor: Tensor, known: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Orthonormal columns and the factor's values along them: eigenvectors at first, then one step of orthogonal
    iteration, which is cheaper and keeps the order of the columns. Values fall: QR turns a column away from those
    before it, and where the factor is 0 its product with a column is noise, from which none may be turned away."""
    if factor.ndim == 1:
        return None, factor
    if known is None:
        # in double precision: in single precision, eigenvectors of small entries can end as NaN
        found = torch.linalg.eigh(factor.double()).eigenvectors.flip(1).to(factor)
    else:
        found = torch.linalg.qr(factor @ known).Q
    return found, (found * (factor @ found)).sum(0).clamp_min(0)
