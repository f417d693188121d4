"""How much of a Hessian lies outside of its diagonal blocks."""

from collections.abc import Sequence
from itertools import chain, islice

import torch

from curvoscope import checks
from curvoscope.approximations import source_of
from curvoscope.approximations.factors import total
from curvoscope.approximations.source import CurvatureSource
from curvoscope.errors import DtypeError, EmptyError
from curvoscope.estimate import Estimate
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.sweep import Sweep
from curvoscope.sweep.statistics import jackknifed_ratio


def block_diagonal_error(H: CurvatureSource | Sweep, blocks: Sequence[str | Sequence[str]] | None = None) -> Estimate:
    """|H - blockdiag(H)| / |H| over several blocks, in the Frobenius norm, of the outer part.

    It is what every approximation misses that treats the blocks one by one. With K_b the Gram matrix of a block's
    gradients, |H|² sums the squares of the entries of sum_b K_b, and |blockdiag(H)|² those of every K_b.

    Args:
        H: the Hessian of a small model, or a sweep.
        blocks: names of two or more; heads of a sweep can be named too. Several names in a tuple are one block, such as
            all weights of a layer. None: all.

    Returns:
        The relative error, exact or with its standard error.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        >>> X, Y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])
        >>> truth, kept = H.outer.dense(), torch.block_diag(*(H.outer[name].dense() for name in H.names))
        >>> bool(abs((truth - kept).norm() / truth.norm() - cv.analysis.block_diagonal_error(H)) < 1e-12)
        True
    """
    if not isinstance(H, Sweep | BlockHessian | BlockMatrix):
        raise DtypeError("H", f"got {type(H).__name__}, expected a Hessian or a sweep")
    chosen = H.names if blocks is None else blocks
    groups = [[one] if isinstance(one, str) else list(one) for one in chosen]
    if isinstance(blocks, str) or len(groups) < 2 or not all(groups):
        raise EmptyError("blocks", f"got {blocks!r}, expected two or more blocks")
    checks.different_blocks("blocks", list(chain.from_iterable(groups)), {})
    if isinstance(H, Sweep):
        known = iter(H.grams(*chain.from_iterable(groups)))
        summed = [[total(some) for some in zip(*islice(known, len(names)), strict=True)] for names in groups]
        grams = [torch.stack(chunk) for chunk in zip(*summed, strict=True)]
        found = jackknifed_ratio([some.square().sum(0) for some in grams], [some.sum(0).square() for some in grams])
        return Estimate(**found.facts() | {"value": 1 - found, "skewness": -found.skewness}).root()
    kept, whole = 0.0, torch.zeros(())
    for names in groups:
        roots = (source_of(H, name).root() for name in names)
        gram = total(root @ root.mT for root in roots)
        kept, whole = kept + float(gram.square().sum()), whole + gram
    return Estimate(max(0.0, 1 - kept / float(whole.square().sum())) ** 0.5)
