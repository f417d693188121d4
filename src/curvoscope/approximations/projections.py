"""Approximations that keep some entries of H and drop the others: their norms from pairs of samples.

If A = P(H) keeps the entries within groups of weights, then <H, A> = |A|² is the mean over pairs of samples of
sum_g <gamma_i, gamma_j>_g², the inner products within the groups. So the error of A itself is known from a few samples,
though A made of as many samples would be poor: it has as many entries as a group squared.
"""

import torch
from torch import Tensor

from curvoscope.approximations.gradients import GradientSource, total
from curvoscope.approximations.heads import heads_of
from curvoscope.approximations.neurons import outputs_of
from curvoscope.approximations.roots import cut


def kept_pairs(source: GradientSource, name: str) -> Tensor | None:
    """sum_g <gamma_i, gamma_j>_g² for all pairs of samples, (n, n); None for a name of another kind."""
    if name == "diagonal":
        squares = torch.cat([some.flatten(1) for some in source.gradients()]).double().square()
        return squares @ squares.mT
    if name in ("neurons", "heads"):
        groups, axis = outputs_of(source) if name == "neurons" else heads_of(source)
        parts = torch.cat([cut(some, groups, axis) for some in source.gradients()]).transpose(0, 1)
        return (parts @ parts.mT).double().square().sum(0)
    if name == "layers":
        roots = [torch.cat([some.flatten(1) for some in part.gradients()]) for part in source.member_parts()]
        return total((root @ root.mT).double().square() for root in roots)
    return None
