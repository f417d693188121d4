"""A norm of queries or keys before their scores (QK-norm), over each head or over all, and its map in one head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.exact.attention.rotary import PositionMap, TokenMap
from curvoscope.exact.norms import Normalised


class QueryKeyNorm:
    """A norm of queries or keys before their scores: y = γ ∘ x̂ + β, x̂ = P x / σ, σ² = |P x|²/w + ε.

    P = I (RMS norm), or with `centred` it takes the mean away (layer norm).

    Args:
        gamma: γ, (d_k,) for every head or (heads*d_k,).
        beta: β, of the shape of γ, or None.
        eps: ε, at least 0.
        width: w, the features that are normalised together: d_k, or heads*d_k for all heads at once; None: as many as γ
            has.
        centred: whether the mean is taken away.

    Example:
        >>> import torch, curvoscope as cv
        >>> norm = cv.exact.QueryKeyNorm(torch.ones(2), eps=0.0)
        >>> norm(torch.tensor([[3.0, 3.0, 5.0, -5.0]]))
        tensor([[ 1.,  1.,  1., -1.]])
    """

    def __init__(
        self,
        gamma: Tensor,
        beta: Tensor | None = None,
        eps: float = 1e-6,
        *,
        width: int | None = None,
        centred: bool = False,
    ) -> None:
        checks.floating("gamma", gamma)
        if gamma.ndim != 1:
            raise ShapeError("gamma", f"expected a vector, got {tuple(gamma.shape)}")
        if beta is not None and checks.floating("beta", beta, like=gamma).shape != gamma.shape:
            raise ShapeError("beta", f"expected {tuple(gamma.shape)} like gamma, got {tuple(beta.shape)}")
        checks.real("eps", eps)
        if not 0 <= eps < float("inf"):
            raise RangeError("eps", f"got {eps}, expected a finite number that is not negative")
        self.gamma, self.beta, self.eps, self.centred = gamma, beta, float(eps), centred
        self.width = len(gamma) if width is None else width
        if self.width < 1 or len(gamma) % self.width:
            raise RangeError("width", f"got {width}, expected a divisor of the {len(gamma)} entries of gamma")

    def __call__(self, projected: Tensor) -> Tensor:
        """y, of the shape (..., heads*d_k) of the projection."""
        return self.at(projected).output

    def at(self, projected: Tensor) -> "NormAt":
        """The norm at one projection, with its derivatives there.

        Args:
            projected: the queries or keys, (..., heads*d_k).

        Returns:
            A `NormAt`: its `output` is y, of the shape of the projection.
        """
        features = projected.shape[-1]
        if features % len(self.gamma):
            raise ShapeError("gamma", f"has {len(self.gamma)} entries, no divisor of {features} features")
        found = Normalised.of(projected.reshape(-1, self.width), self.eps, self.centred)
        repeats = features // len(self.gamma)
        beta = None if self.beta is None else self.beta.repeat(repeats)
        return NormAt(found, self.gamma.repeat(repeats), beta, projected.shape)


@dataclass(frozen=True)
class NormAt:
    """γ ∘ x̂ + β at one projection; γ and β as long as its last axis."""

    normalised: Normalised
    gamma: Tensor
    beta: Tensor | None
    shape: torch.Size

    @property
    def output(self) -> Tensor:
        """y."""
        y = self.gamma * self.normalised.x_hat.view(self.shape)
        return y if self.beta is None else y + self.beta

    def push(self, direction: Tensor) -> Tensor:
        """γ ∘ J dx for directions (n, *shape)."""
        return self.gamma * self._across(self.normalised.push(self._rows(direction)))

    def pull(self, gradient: Tensor) -> Tensor:
        """J (γ ∘ g) for gradients (*shape) or (n, *shape)."""
        return self._across(self.normalised.push(self._rows(self.gamma * gradient)))

    def bend(self, direction: Tensor, gradient: Tensor) -> Tensor:
        """How J (γ ∘ g) moves along dx: directions (n, *shape), a gradient (*shape)."""
        rows = self._rows(self.gamma * gradient)
        return self._across(self.normalised.bend(rows, self._rows(direction)))

    def of_head(self, head: int, heads: int) -> tuple[Normalised, Tensor]:
        """x̂ and γ of one head that is normalised alone."""
        x_hat, sigma = (
            one.view(-1, heads, one.shape[-1])[:, head] for one in (self.normalised.x_hat, self.normalised.sigma)
        )
        return Normalised(x_hat, sigma, self.normalised.centred), self.gamma.view(heads, -1)[head]

    def _rows(self, values: Tensor) -> Tensor:
        """(..., *shape) -> (..., T, w)."""
        return values.reshape(*values.shape[: values.ndim - len(self.shape)], -1, self.normalised.d)

    def _across(self, rows: Tensor) -> Tensor:
        return rows.reshape(*rows.shape[:-2], *self.shape)


class HeadMap(TokenMap):
    """J_i = R_i diag(γ) dx̂_i/dx_i of one head; `normalised` x̂ (T, k)."""

    def __init__(
        self, positions: PositionMap | None, normalised: Normalised | None = None, gamma: Tensor | None = None
    ) -> None:
        self._positions, self._normalised, self._gamma = positions, normalised, gamma

    def back(self, values: Tensor, start: int, length: int) -> Tensor:
        """See `TokenMap`."""
        if self._positions is not None:
            values = self._positions.back(values, start, length)
        if self._normalised is None or self._gamma is None:
            return values
        x_hat, sigma = (one[start : start + len(values)] for one in (self._normalised.x_hat, self._normalised.sigma))
        here = Normalised(x_hat, sigma, self._normalised.centred)
        return here.push((self._gamma * values).transpose(0, 1)).transpose(0, 1)

    def curvature(self, gradient: Tensor, length: int) -> Tensor | None:
        """The second derivative of <g, y_i> in x_i (T, k, k) for gradients g (T, k); None if there is none."""
        if self._normalised is None or self._gamma is None:
            return None
        back = gradient if self._positions is None else self._positions.back(gradient[:, None], 0, length)[:, 0]
        return self._normalised.curvature(self._gamma * back)
