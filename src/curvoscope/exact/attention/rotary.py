"""Rotary positions: features p and p + k/2 of a query or key turn by the angle position * base^(-2p/k)."""

import torch
from torch import Tensor

from curvoscope.errors import RangeError, ShapeError


class Rotary:
    """R_i for every position i, as a function on vectors (..., k)."""

    def __init__(self, base: float, width: int) -> None:
        if width % 2:
            raise ShapeError("rotary", f"needs an even d_k, got {width}")
        if not base > 0:
            raise RangeError("rotary", f"the base must be positive, got {base}")
        self.base, self.width = base, width

    def turn(self, vectors: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """R_i v for vectors (..., k), or R_i^T v if `back`; `positions` broadcast against all axes but the last."""
        half = self.width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=vectors.device) * (-2.0 / self.width)
        angles = positions[..., None].double() * self.base**exponents
        cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
        sin = -sin if back else sin
        first, second = vectors[..., :half], vectors[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
