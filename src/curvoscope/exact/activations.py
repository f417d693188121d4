"""Elementwise maps: activations with their exact derivatives, and how weights reach the output through such maps.

    ReLU            φ = max(h, 0)    φ' = 1[h > 0]                  φ'' = 0
    GELU (erf)      φ = h Φ(h)       φ' = Φ + h ϕ                   φ'' = (2 - h²) ϕ        Φ, ϕ of the normal law
    h s(w(h))       φ = h s          φ' = s + h s s̄ w'              φ'' = s s̄ (2 w' + h w'' + h (1 - 2 s) w'²)

with the logistic s and s̄ = 1 - s: w = h is SiLU, and w = 2 √(2/π) (h + 0.044715 h³) is GELU in its tanh form.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.exact.ports import ProjectedCurvature
from curvoscope.losses import Port, through
from curvoscope.operators.cores import Core

# φ, φ' and φ'' at h, elementwise; None for a second derivative that vanishes almost everywhere
ActivationDerivatives = tuple[Tensor, Tensor, Tensor | None]

_KEPT_NUMBERS = 2**23
_FAR = 40.0  # past this |h| every density below is 0 in float64, and h² or h³ may overflow


def _relu(h: Tensor) -> ActivationDerivatives:
    return h.clamp_min(0), (h > 0).to(h.dtype), None


def _gelu(h: Tensor) -> ActivationDerivatives:
    below = 0.5 * torch.erfc(-h / math.sqrt(2))  # Φ, without the cancellation of 1 + erf for h << 0
    near = h.clamp(-_FAR, _FAR)
    density = torch.exp(-near.square() / 2) / math.sqrt(2 * math.pi)
    return h * below, below + near * density, (2 - near.square()) * density


def _gelu_tanh(h: Tensor) -> ActivationDerivatives:
    near, slope, cubic = h.clamp(-_FAR, _FAR), 2 * math.sqrt(2 / math.pi), 0.044715
    w = slope * (near + cubic * near**3)
    _, first, second = _times_logistic(near, w, slope * (1 + 3 * cubic * near.square()), slope * 6 * cubic * near)
    return h * w.sigmoid(), first, second


def _silu(h: Tensor) -> ActivationDerivatives:
    return _times_logistic(h, h, torch.ones_like(h), torch.zeros_like(h))


def _times_logistic(h: Tensor, w: Tensor, first: Tensor, second: Tensor) -> ActivationDerivatives:
    """h s(w) from w(h) and its derivatives; 1 - 2 s(w) = -tanh(w/2)."""
    s = w.sigmoid()
    spread = s * (-w).sigmoid()
    bend = spread * (2 * first + h * second - h * (w / 2).tanh() * first.square())
    return h * s, s + h * spread * first, bend


ACTIVATIONS: dict[str, Callable[[Tensor], ActivationDerivatives]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}


class DiagonalCore(Core):
    """C_t = diag(s_t), from the values s (T, p)."""

    def __init__(self, values: Tensor) -> None:
        super().__init__((values.shape[1], values.shape[1]), 1, 0, symmetric=True)
        self._values = values

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, p)."""
        return torch.diag_embed(self._values[start:stop])

    @property
    def diagonal_workspace(self) -> int:
        """None but the values."""
        return self.shape[0]

    def diagonal(self, start: int, stop: int) -> Tensor:
        """The values."""
        return self._values[start:stop]


class ScaledCore(Core):
    """C_t = diag(s_t) P S_t P'^T diag(s'_t): the loss Hessian through two ports, each behind an elementwise map.

    `left` s (T, p) and `right` s' (T, q); None is a vector of ones.
    """

    def __init__(self, seen: ProjectedCurvature, left: Tensor | None, right: Tensor | None, period: int) -> None:
        super().__init__(seen.shape, period, seen.workspace, seen.symmetric and left is right)
        self._seen, self._left, self._right = seen, left, right
        self._last: tuple[int, int, Tensor] | None = None

    def dense(self, start: int, stop: int) -> Tensor:
        """(t, p, q). Small ones are kept: a weight and its bias share them."""
        if self._last is not None and self._last[:2] == (start, stop):
            return self._last[2]
        blocks = self._seen.blocks(start, stop)
        if self._left is not None:
            blocks = self._left[start:stop, :, None] * blocks
        blocks = blocks if self._right is None else blocks * self._right[start:stop, None, :]
        self._last = (start, stop, blocks) if blocks.numel() <= _KEPT_NUMBERS else None
        return blocks

    def diagonal(self, start: int, stop: int) -> Tensor:
        """(t, p), without the blocks where both ports are the same."""
        if self._seen.diagonal is None:
            return super().diagonal(start, stop)
        values = self._seen.diagonal(start, stop)
        for scales in (self._left, self._right):
            values = values if scales is None else values * scales[start:stop]
        return values


@dataclass(frozen=True)
class Reach:
    """How a weight W (a, p) moves the output: dF_t = (l_t^T dW ∘ s_t) P.

    `vectors` l (T, a); `scales` s (T, p), or None for ones; `port` P (p, m), or None for the identity.
    """

    vectors: Tensor
    scales: Tensor | None
    port: Port

    def jacobian(self, width: int, name: str) -> Tensor:
        """dF/dW as a dense matrix: J[tm, ap] = l_t[a] s_t[p] P[p, m]."""
        identity = torch.eye(width, dtype=self.vectors.dtype, device=self.vectors.device)
        behind = through(identity, self.port).mT.expand(len(self.vectors), -1, -1)  # (T, p, m)
        rows, columns = len(self.vectors) * width, self.vectors.shape[1] * behind.shape[1]
        fits_jacobian(rows, columns, name, identity)
        if self.scales is not None:
            behind = self.scales[:, :, None] * behind
        return torch.einsum("ta,tpm->tmap", self.vectors, behind).reshape(rows, columns)


def fits_jacobian(rows: int, columns: int, name: str, like: Tensor) -> None:
    """Raise where a dense Jacobian is larger than the memory at hand."""
    what = f"the Jacobian in {name}, {rows} x {columns}"
    checks.fits(rows * columns * like.element_size(), None, what, "use fewer tokens, or products of the Hessian")


def fits_jacobians(output: Tensor, sizes: Mapping[str, int]) -> None:
    """Raise where those of an output in all that is named are, together."""
    fits_jacobian(output.numel(), sum(sizes.values()), ", ".join(sizes), output)
