"""One block for each weight of a group, such as Q, K and V."""

from collections.abc import Sequence

from curvoscope import checks
from curvoscope.approximations.gradients import GradientSource, joined
from curvoscope.approximations.roots import RootForm
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.approximations.split import SplitForm
from curvoscope.errors import ModelError


def layers(H: CurvatureSource, names: Sequence[str] | None = None) -> SplitForm:
    """A = H over several weights without the entries that couple two of them.

    Assumes that the weights do not interact; each block is kept whole. Vectors are those of `joined` weights: side by
    side if they read the same inputs (Q, K and V), one after the other otherwise.

    Args:
        H: a Hessian, a sweep that keeps the blocks, or the joined `GradientSource`.
        names: of the blocks.

    Returns:
        The approximation; it stores the squares of the blocks' sizes.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
        >>> X, Y = torch.randn(2, 2, 3, 4, dtype=torch.float64)
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)], cv.blocks_of(model).select("*.attn.[QK]"))
        >>> A = cv.approximations.layers(H, ["h.0.attn.Q", "h.0.attn.K"])
        >>> whole = cv.approximations.joined([cv.approximations.source_of(H, name) for name in H.names])
        >>> A.shape, bool(A.frobenius_norm() < whole.dense().norm())
        ((32, 32), True)
    """
    if names is not None:
        checks.different_blocks("names", names, {})
    source = source_of(H) if names is None else joined([source_of(H, name) for name in names])
    return SplitForm("layers", [RootForm.of("full", part) for part in members_of(source)], source.members_axis)


def members_of(source: GradientSource) -> list[GradientSource]:
    """The weights that are joined."""
    if not source.members:
        raise ModelError("block", f"{source.name!r} is one weight; give the names of several")
    return source.member_parts()
