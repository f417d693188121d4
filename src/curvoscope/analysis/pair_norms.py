"""Frobenius norms of all pairs of blocks by random vectors: one product serves a whole column of blocks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from curvoscope.analysis.heterogeneity import PARTS, Part
from curvoscope.curvature import ModelHessian
from curvoscope.estimate import Estimate


@dataclass(frozen=True)
class PairNorm:
    """|H(row, column)|_F of a part, the row before the column."""

    row: str
    column: str
    part: Part
    frobenius_norm: Estimate


def pair_norms(H: ModelHessian, probes: int = 8, seed: int = 0) -> Iterator[list[PairNorm]]:
    """The pairs of each block with those before it, as they are computed.

    With v of random signs in block b and zero elsewhere, H v has H(a, b) v in block a, and E|H(a, b) v|² =
    |H(a, b)|_F². The same v serve outer and functional part and their sum, from one pass. The error of
    the norm is that of its square by the delta method.
    """
    generator = torch.Generator().manual_seed(seed)
    ranges = H.total.ranges
    for place, column in enumerate(H.names):
        block = ranges[column]
        signs = torch.randint(0, 2, (block.stop - block.start, probes), generator=generator) * 2 - 1
        if not place:
            continue
        outer, functional = (H.stacked(column, H.names) @ signs.to(H.total.like)).chunk(2)
        found = dict(zip(PARTS, (outer, functional, outer + functional), strict=True))
        yield [
            PairNorm(row, column, part, _norm(product[ranges[row]].double().square().sum(0)))
            for row in H.names[:place]
            for part, product in found.items()
        ]


def _norm(squares: torch.Tensor) -> Estimate:
    """The root of the mean of (probes,) squares."""
    count, value = len(squares), math.sqrt(float(squares.mean()))
    stderr = float(squares.std()) / (2 * value * count**0.5) if value else 0.0
    return Estimate(value, stderr, count, "random signs", count - 1.0)
