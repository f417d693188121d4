"""KFAC's factors of every parameter of a model, from random cotangents of one batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.cotangents import SampleSeed, cotangents
from curvoscope.autodiff.uses import WeightUse, find_uses, nodes_below
from curvoscope.losses.objectives import Objective


@dataclass(frozen=True, eq=False)
class ParameterCurvature:
    """The Gauss-Newton block of one parameter: left (x) right on the two axes of a matrix, or a diagonal.

    Args:
        left: (r0, r0), if the parameter is a matrix (r0, r1) that something is multiplied with.
        right: (r1, r1).
        diagonal: of the shape of the parameter, if it is anything else.
        bases: eigenvectors and eigenvalues of left and right, once they are known.
    """

    left: Tensor | None = None
    right: Tensor | None = None
    diagonal: Tensor | None = None
    bases: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def mixed(self, new: "ParameterCurvature", decay: float) -> "ParameterCurvature":
        """decay times this one and 1 - decay times a new one; the new one if it has another form."""
        if (self.diagonal is None) != (new.diagonal is None):
            return new
        left, right, diagonal = (
            None if mine is None or theirs is None else torch.lerp(theirs, mine, decay)
            for mine, theirs in ((self.left, new.left), (self.right, new.right), (self.diagonal, new.diagonal))
        )
        return ParameterCurvature(left, right, diagonal)

    def diagonalised(self) -> "ParameterCurvature":
        """With its bases."""
        if self.left is None or self.right is None:
            return self
        (first, left), (second, right) = (torch.linalg.eigh(factor) for factor in (self.left, self.right))
        return replace(self, bases=(left, first.clamp_min(0), right, second.clamp_min(0)))

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """(A + damping)^-1 of a gradient of the parameter's shape."""
        if self.bases is None:
            assert self.diagonal is not None
            return gradient / (self.diagonal + damping)
        left, first, right, second = self.bases
        turned = (left.T @ gradient @ right) / (torch.outer(first, second) + damping)
        return left @ turned @ right.T


def sampled_curvature(
    objective: Objective, outputs: Any, targets: Any, parameters: Mapping[str, Tensor], seeds: Sequence[SampleSeed]
) -> dict[str, ParameterCurvature]:
    """The curvature of each parameter, from one backward pass for each seed through the graph of the outputs."""
    cut, draws = cotangents(objective, outputs, targets)
    roots = [F.grad_fn for F in cut if F.grad_fn is not None]
    uses, _ = find_uses(nodes_below(roots), parameters)
    products: dict[str, list[WeightUse]] = {}
    for use in uses:
        products.setdefault(use.parameter, []).append(use)
    products = {name: found for name, found in products.items() if _is_whole(found, parameters[name])}
    others = [name for name in parameters if name not in products]
    places: Any = [use.edge for found in products.values() for use in found] + [parameters[name] for name in others]
    inner = {name: torch.zeros((), dtype=p.dtype, device=p.device) for name, p in parameters.items()}
    for seed in seeds:
        deltas = iter(torch.autograd.grad(cut, places, draws.draw(seed), retain_graph=True, allow_unused=True))
        for name, several in products.items():
            for use in several:
                delta = next(deltas)
                if delta is not None:
                    rows = use.delta(delta[None])[0]
                    inner[name] = inner[name] + rows.T @ rows / len(seeds)
        for name, gradient in zip(others, deltas, strict=True):
            if gradient is not None:
                inner[name] = inner[name] + gradient.square() / len(seeds)
    result = {name: ParameterCurvature(diagonal=inner[name].expand(parameters[name].shape)) for name in others}
    for name, several in products.items():
        tokens = sum(len(use.factor) for use in several)
        inputs = torch.stack([use.factor.T @ use.factor for use in several]).sum(0) / tokens
        outer = inner[name] if inner[name].ndim else torch.zeros(several[0].width, several[0].width).to(inputs)
        pair = (outer, inputs) if several[0].transposed else (inputs, outer)
        result[name] = ParameterCurvature(*pair)
    return result


def _is_whole(uses: Sequence[WeightUse], parameter: Tensor) -> bool:
    """Whether all uses are products with the whole parameter, on the same side."""
    whole = tuple(slice(0, size) for size in parameter.shape)
    alike = len({use.transposed for use in uses}) == 1
    return alike and all(use.region == whole and not use.is_look_up for use in uses)
