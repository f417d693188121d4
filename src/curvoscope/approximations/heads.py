"""One block for each attention head."""

from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.roots import RootForm
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.errors import RangeError


def heads(H: CurvatureSource, name: str | None = None) -> RootForm:
    """A = H without the entries that couple two attention heads.

    Assumes that heads do not interact; each block of a head is kept whole.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block: Q, K, V or O of an attention layer.

    Returns:
        The approximation; it stores (a p)² / heads floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
        >>> X, Y = torch.randn(2, 2, 3, 4, dtype=torch.float64)
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)], cv.blocks_of(model).select("*.attn.Q"))
        >>> A, truth = cv.approximations.heads(H, "h.0.attn.Q"), H.outer["h.0.attn.Q"].dense()
        >>> bool(A.dense()[0, 3] == 0), bool(torch.isclose(A.dense()[0, 1], truth[0, 1]))
        (True, True)
    """
    source = source_of(H, name)
    return RootForm.of("heads", source, *heads_of(source))


def heads_of(source: GradientSource) -> tuple[int, int]:
    """The number of heads, and the side of the block along which they follow each other."""
    if source.heads is None or source.axis is None:
        raise RangeError("block", f"{source.name!r} has no heads; take another approximation")
    return source.heads, source.axis
