"""One block for each output of a layer."""

from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.groups import GroupForm
from curvoscope.approximations.roots import RootForm
from curvoscope.approximations.source import CurvatureSource, source_of


def neurons(H: CurvatureSource, name: str | None = None) -> RootForm:
    """A = H without the entries that couple the weights of two outputs: p blocks (a, a).

    Assumes that the outputs of a layer do not interact, as GPTQ and Optimal Brain Compression (arXiv 2208.11580) do for
    the layer's own squared error, where it is exact. An operator does not say which side of its weight the outputs are:
    they are taken to be the columns.

    Args:
        H: a Hessian, a sweep that keeps the block, a `GradientSource`, or any symmetric operator, such as
            `H.total[name]`.
        name: of the block.

    Returns:
        The approximation; it stores p a² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> A = cv.approximations.neurons(H, "weight")  # exact: squared errors of outputs do not interact
        >>> bool(torch.allclose(A.dense(), H.outer["weight"].dense())), A.floats
        (True, 18)
    """
    source = source_of(H, name, signed=True)
    return (GroupForm if source.negative else RootForm).of("neurons", source, *outputs_of(source))


def outputs_of(source: GradientSource) -> tuple[int, int]:
    """The number of outputs of the layer, and the side of the block that they are."""
    return source.sides[1], source.outputs_axis
