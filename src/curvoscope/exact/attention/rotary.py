"""Positions that act on queries and keys: R_i q_i, with a linear map R_i for every position i.

`Rotary` has R_i by a formula; `PositionMatrices` has any R_i, such as rotations of some features, or of neighbours.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.losses.curvatures import multiplied


class TokenMap(ABC):
    """A linear map J_i of the queries of one head for every token i."""

    @abstractmethod
    def back(self, values: Tensor, start: int, length: int) -> Tensor:
        """J_i^T v for values (t, ·, k) of the tokens from `start` on, in sequences of `length`."""


class PositionMap(TokenMap):
    """R_i for every position i."""

    def of_head(self, head: int) -> "PositionMap":
        """That of one head."""
        return self

    @abstractmethod
    def of_heads(self, vectors: Tensor, back: bool = False) -> Tensor:
        """R_i v, or R_i^T v if `back`, for vectors (..., N, H, L, k)."""


class Rotary(PositionMap):
    """Features p and p + k/2 of a query or key turn by the angle position * base^(-2p/k)."""

    def __init__(self, base: float, width: int) -> None:
        if width % 2:
            raise ShapeError("rotary", f"needs an even d_k, got {width}")
        checks.real("rotary", base, "a base, or a linear map for each position")
        if not base > 0:
            raise RangeError("rotary", f"the base must be positive, got {base}")
        self.base, self.width = base, width

    def of_heads(self, vectors: Tensor, back: bool = False) -> Tensor:
        """See `PositionMap`."""
        return self.turn(vectors, torch.arange(vectors.shape[-2], device=vectors.device), back)

    def back(self, values: Tensor, start: int, length: int) -> Tensor:
        """R_i^T v."""
        positions = torch.arange(start, start + len(values), device=values.device) % length
        return self.turn(values, positions[:, None], back=True)

    def turn(self, vectors: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """R_i v for vectors (..., k), or R_i^T v if `back`; `positions` broadcast against all axes but the last."""
        half = self.width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=vectors.device) * (-2.0 / self.width)
        angles = positions[..., None].double() * self.base**exponents
        cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
        sin = -sin if back else sin
        first, second = vectors[..., :half], vectors[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class PositionMatrices(PositionMap):
    """R_i as matrices (1 or N, 1 or H, L, k, k): the same for all sequences or heads, or of each."""

    def __init__(self, matrices: Tensor) -> None:
        if matrices.ndim != 5 or matrices.shape[-1] != matrices.shape[-2]:
            raise ShapeError("rotary", f"expected matrices (N, H, L, k, k), got {tuple(matrices.shape)}")
        self.matrices = matrices

    def of_head(self, head: int) -> "PositionMatrices":
        """See `PositionMap`."""
        return self if self.matrices.shape[1] == 1 else PositionMatrices(self.matrices[:, head : head + 1])

    def of_heads(self, vectors: Tensor, back: bool = False) -> Tensor:
        """See `PositionMap`."""
        return multiplied(self.matrices.mT if back else self.matrices, vectors)

    def back(self, values: Tensor, start: int, length: int) -> Tensor:
        """R_i^T v, for one head."""
        tokens = torch.arange(start, start + len(values), device=values.device)
        matrices = self.matrices[(tokens // length) % len(self.matrices), 0, tokens % length]
        return values @ matrices.to(values.dtype)
