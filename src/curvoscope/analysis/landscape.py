"""Slices of the loss around the weights along one or two directions, with the quadratic that the curvature predicts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.surface import Direction, Surface, finite
from curvoscope.blocks import Blocks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.losses.objectives import LossFunction
from curvoscope.settings import chosen_seed

_RADIUS = 0.1  # of the norm of the weights
_PARALLEL = 1e-6  # two directions are one when their cosine is this near 1 in size


@dataclass(frozen=True, eq=False)
class Slice:
    """L(w + a u), (n,), or L(w + a u + b v), (n, n) with a along the rows, around the weights w.

    Args:
        directions: the one or two unit vectors.
        coordinates: distances from the weights (n,), the same on each axis; the weights are in the middle.
        losses: the loss at all places.
        loss: the loss at the weights.
        slopes: g·u for each of the d directions, (d,).
        curvatures: u·Hv for each pair of directions, (d, d).

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> found = cv.analysis.landscape(model, torch.nn.MSELoss(), data, ("top", "bottom"), points=5)
        >>> tuple(found.losses.shape), torch.allclose(found.losses, found.quadratic)  # the loss is quadratic
        ((5, 5), True)
    """

    directions: tuple[Direction, ...]
    coordinates: Tensor
    losses: Tensor
    loss: float
    slopes: Tensor
    curvatures: Tensor

    @property
    def quadratic(self) -> Tensor:
        """The second-order prediction at the same places, with the shape of `losses`."""
        places = _grid(self.coordinates, len(self.directions))
        bend = (places @ self.curvatures * places).sum(1) / 2
        return (self.loss + places @ self.slopes + bend).view(self.losses.shape)


def landscape(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    directions: str | Tensor | Sequence[str | Tensor] = ("top", "bottom"),
    radius: float | None = None,
    points: int = 21,
    *,
    blocks: Blocks | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Slice:
    """The loss on a line or a plane through the weights; every value is the exact mean over all loss terms.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`.
        directions: one or two of "gradient" (downhill), "top", "top2", ..., "bottom", ... (eigenvectors of the
            Hessian), "random", or vectors (P,) over the blocks in their order. They are scaled to unit length, not
            made orthogonal.
        radius: how far to go each way; None: a tenth of the norm of the weights.
        points: on each axis, odd, so that the weights themselves are the middle one.
        seed: for Lanczos and for random directions.

    Returns:
        The losses with slopes and curvatures along the directions.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> line = cv.analysis.landscape(model, torch.nn.MSELoss(), data, "top", radius=0.5, points=3)
        >>> line.coordinates.tolist(), round(line.curvatures.item(), 6)  # λ_max is 4
        ([-0.5, 0.0, 0.5], 4.0)
    """
    if points < 3 or points % 2 == 0:
        raise RangeError("points", f"got {points}, expected an odd number of at least 3")
    wanted = [directions] if isinstance(directions, str | Tensor) else list(directions)
    if len(wanted) not in (1, 2):
        raise ShapeError("directions", f"got {len(wanted)}, expected one or two")
    surface = Surface(model, loss_fn, batches, blocks, device)
    if radius is None:
        radius = _RADIUS * (float(surface.weights.norm()) or 1.0)
    checks.positive("a positive distance", radius=radius)
    lines = tuple(surface.direction(one, chosen_seed(seed) + i, "directions") for i, one in enumerate(wanted))
    vectors = torch.stack([line.vector for line in lines], 1)
    if len(lines) == 2 and abs(float(vectors[:, 0] @ vectors[:, 1])) > 1 - _PARALLEL:
        raise RangeError("directions", "the two are parallel: they span a line, not a plane")
    coordinates = torch.linspace(-radius, radius, points, dtype=torch.float64)
    places = _grid(coordinates, len(lines))
    losses = surface.losses(places @ vectors.T.cpu())
    finite(losses, "radius", places.norm(dim=1))
    bent = (surface.hessian.total @ vectors.to(surface.engine.dtype)).double()
    curvatures = (vectors.T @ bent).cpu()
    return Slice(
        lines,
        coordinates,
        losses.view([points] * len(lines)),
        surface.loss,
        (surface.gradient() @ vectors).cpu(),
        (curvatures + curvatures.T) / 2,
    )


def _grid(coordinates: Tensor, axes: int) -> Tensor:
    """All places of a line or a plane as rows (n, 1) or (n², 2)."""
    return torch.cartesian_prod(*[coordinates] * axes).view(-1, axes)
