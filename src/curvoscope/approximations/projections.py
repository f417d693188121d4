"""Approximations that keep some entries of H and drop the others: their norms from pairs of samples.

If A = P(H) keeps the entries within groups of weights, then <H, A> = |A|² is the mean over pairs of samples of
sum_g <gamma_i, gamma_j>_g², the inner products within the groups. So the error of A itself is known from a few samples,
though A made of as many samples would be poor: it has as many entries as a group squared.
"""

from dataclasses import replace

import torch
from torch import Tensor

from curvoscope.approximations.factors import GradientFactors, total
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.heads import heads_of
from curvoscope.approximations.layers import members_of
from curvoscope.approximations.neurons import outputs_of
from curvoscope.approximations.roots import cut
from curvoscope.magnitudes import power_of_two

_AT_ONCE = 2**20  # entries of gradients: few enough for the caches of a processor


def kept_pairs(source: GradientSource, name: str) -> tuple[Tensor, int] | None:
    """For each sample the sum over the others of sum_g <gamma_i, gamma_j>_g², (n,), and the entries that A keeps.

    None for an approximation of another kind.
    """
    a, p = source.shape
    if name == "diagonal":
        return _squares(source), a * p
    if name in ("neurons", "heads"):
        groups, axis = outputs_of(source) if name == "neurons" else heads_of(source)
        # the outputs of a layer are alike in every basis of its inputs
        seen = source.spanned() if axis == source.outputs_axis else source
        parts = torch.cat([cut(some, groups, axis) for some in seen.gradients()]).transpose(0, 1)
        unit = power_of_two(parts)
        pairs = (parts @ parts.mT).div_(unit).div_(unit).square_().sum(0)
        return others(pairs.double()) * unit**4, (a * p) ** 2 // groups
    if name == "layers":
        members = members_of(source)
        roots = [torch.cat([some.flatten(1) for some in part.gradients()]) for part in members]
        pairs = total((root @ root.mT).double().square() for root in roots)
        return others(pairs), sum(root.shape[1] ** 2 for root in roots)
    return None


def others(pairs: Tensor) -> Tensor:
    """The sum over all columns of a matrix but that of the row itself, (n,)."""
    return pairs.sum(1) - pairs.diagonal()


def _squares(source: GradientSource) -> Tensor:
    """sum over j != i of <gamma_i², gamma_j²>, from a few outputs of the layer at a time."""
    width = max(1, _AT_ONCE // (len(source) * source.sides[0]))
    unit = max(power_of_two(part.cotangents) for part in source.compact)  # fourth powers leave the range of floats
    parts = [replace(part, cotangents=part.cotangents / unit) for part in source.compact]
    found = torch.zeros(len(source), dtype=torch.float64)
    for start in range(0, source.sides[1], width):
        squares = torch.cat([_of_outputs(part, slice(start, start + width)) for part in parts]).square_()
        found += (squares @ squares.sum(0)).double() - squares.norm(dim=1).double().square()
    return found * unit**4


def _of_outputs(part: GradientFactors, some: slice) -> Tensor:
    """The entries of the gradients that belong to some outputs of the layer, (g n, entries), in one product."""
    cotangents = part.cotangents[..., some].mT
    formed = cotangents if part.inputs is None else cotangents.flatten(1, 2) @ part.inputs
    return formed.reshape(len(part), -1)
