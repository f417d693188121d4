"""LayerScale: y = λ ∘ x for each token, with λ (d,) one learned factor per feature.

J_t = 1 (x) diag(x_t)      H_o(λ, λ)[a, b] = Σ_t x_a S_t[a, b] x_b      H_f(λ, λ) = 0      H_f(λ, X)[a, tb] = δ_ab G_ta
"""

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import ShapeError
from curvoscope.exact.assembly import Directions
from curvoscope.exact.factor import Factor, TermList
from curvoscope.exact.tokenwise import Pairs, TokenwiseHessian, TokenwiseLayer
from curvoscope.losses import LossAt
from curvoscope.operators.base import Shape


class LayerScale(TokenwiseLayer):
    """y = λ ∘ x, with one block "scale" (1, d).

    Args:
        scale: λ (d,).

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.LayerScale(torch.ones(2))
        >>> H = layer.hessian(torch.tensor([[1.0, 2.0]]), cv.losses.MSE(torch.zeros(1, 2)))
        >>> H.names, H.dense().tolist()
        (['scale'], [[1.0, 0.0], [0.0, 4.0]])
    """

    def __init__(self, scale: Tensor) -> None:
        self.scale = checks.floating("scale", scale)
        if scale.ndim != 1:
            raise ShapeError("scale", f"expected a vector (d,), got {tuple(scale.shape)}")
        self.weights = {"scale": scale}
        self.d = self.d_out = len(scale)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """What x is multiplied with."""
        return dict(self.weights)

    def __call__(self, X: Tensor) -> Tensor:
        """y, of the shape of X."""
        checks.floating("X", X, like=self.scale)
        if X.ndim not in (2, 3) or X.shape[-1] != self.d:
            raise ShapeError("X", f"expected (L, {self.d}) or (N, L, {self.d}), got {tuple(X.shape)}")
        return X * self.weights["scale"]

    def _around(self, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> TokenwiseHessian:
        return _LayerScaleHessian(self.scale, X, loss, shapes)


class _LayerScaleHessian(TokenwiseHessian):
    def __init__(self, scale: Tensor, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> None:
        rows = X.flatten(0, 1)
        self._ones, self._scale = rows.new_ones(len(rows), 1), scale
        super().__init__({"scale": Factor(self._ones, scales=rows)}, X, loss, shapes)

    def functional_terms(self, row: str, column: str) -> TermList:
        """None: y is linear in λ."""
        return []

    def push(self, directions: Directions) -> tuple[Tensor, Directions]:
        """dy = dλ ∘ x + λ ∘ dx."""
        n = next(iter(directions.values())).shape[0]
        moved = self.X.new_zeros(n, *self.X.shape)
        if "scale" in directions:
            moved = moved + directions["scale"] * self.X
        return moved + self._scale * directions["X"] if "X" in directions else moved, {}

    def pull(self, directions: Directions, moved: Directions, back: Tensor, functional: bool) -> tuple[Pairs, Tensor]:
        """The gradients x ∘ G at λ and λ ∘ G at x: they move with G, and in the functional part with G held fixed."""
        at_scale, at_x = back * self.X, back * self._scale
        if functional and "X" in directions:
            at_scale = at_scale + self.gradient * directions["X"]
        if functional and "scale" in directions:
            at_x = at_x + self.gradient * directions["scale"]
        return {"scale": [(self._ones, at_scale)]}, at_x

    def mixed(self, name: str) -> list[Factor]:
        """δ_ab G_b."""
        identity = torch.eye(self.X.shape[1], dtype=self.X.dtype, device=self.X.device)
        return [Factor(self._ones, identity.expand(len(self.X), -1, -1), scales=self.gradient)]

    def input_jacobian(self) -> Tensor:
        """diag(λ)."""
        return torch.diag(self._scale).expand(len(self.X), -1, -1)

    def input_curvature(self) -> Tensor:
        """Zero: y is linear in x."""
        return self.X.new_zeros(len(self.X), *2 * self.X.shape[1:])
