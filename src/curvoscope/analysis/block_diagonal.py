"""How much of a Hessian lies outside of its diagonal blocks."""

from collections.abc import Sequence

import torch

from curvoscope.approximations import source_of
from curvoscope.approximations.source import Curvature
from curvoscope.errors import EmptyError
from curvoscope.estimate import Estimate
from curvoscope.sweep import Sweep
from curvoscope.sweep.statistics import jackknifed_ratio


def block_diagonal_error(H: Curvature | Sweep, blocks: Sequence[str] | None = None) -> Estimate:
    """|H - blockdiag(H)| / |H| over several blocks, in the Frobenius norm, of the outer part.

    It is what every approximation misses that treats the blocks one by one. With K_b the Gram matrix of a block's
    gradients, |H|² sums the squares of the entries of sum_b K_b, and |blockdiag(H)|² those of every K_b.

    Args:
        H: the Hessian of a small model, or a sweep.
        blocks: names of two or more; heads of a sweep can be named too. None: all.

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
    names = list(blocks if blocks is not None else getattr(H, "names", ()))
    if len(names) < 2:
        raise EmptyError("blocks", f"got {len(names)}, expected two or more")
    if isinstance(H, Sweep):
        grams = [torch.stack(chunk) for chunk in zip(*H.grams(*names), strict=True)]
        found = jackknifed_ratio([some.square().sum(0) for some in grams], [some.sum(0).square() for some in grams])
        return Estimate(**found.facts() | {"value": 1 - found, "skewness": -found.skewness}).root()
    kept, whole = 0.0, torch.zeros(())
    for name in names:
        root = source_of(H, name).root()
        gram = root @ root.mT
        kept, whole = kept + float(gram.square().sum()), whole + gram
    return Estimate(max(0.0, 1 - kept / float(whole.square().sum())) ** 0.5)
