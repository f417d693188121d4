"""Elementwise maps: activations with their exact derivatives.

    ReLU            φ = max(h, 0)    φ' = 1[h > 0]                  φ'' = 0
    ReLU²           φ = max(h, 0)²   φ' = 2 max(h, 0)               φ'' = 2 1[h > 0]
    GELU (erf)      φ = h Φ(h)       φ' = Φ + h ϕ                   φ'' = (2 - h²) ϕ        Φ, ϕ of the normal law
    h s(w(h))       φ = h s          φ' = s + h s s̄ w'              φ'' = s s̄ (2 w' + h w'' + h (1 - 2 s) w'²)

with the logistic s and s̄ = 1 - s: w = h is SiLU, w = 1.702 h the quick GELU of CLIP, and w = 2 √(2/π) (h + 0.044715 h³)
is GELU in its tanh form. Bloom has 0.79788456 for √(2/π), which changes the tenth digit.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvoscope.magnitudes import unit
from curvoscope.operators.cores import Core, RowForm

# φ, φ' and φ'' at h, elementwise; None for a second derivative that vanishes almost everywhere
ActivationDerivatives = tuple[Tensor, Tensor, Tensor | None]

_FAR = 40.0  # past this |h| every density below is 0 in float64, and h² or h³ may overflow


def _relu(h: Tensor) -> ActivationDerivatives:
    return h.clamp_min(0), (h > 0).to(h.dtype), None


def _gelu(h: Tensor) -> ActivationDerivatives:
    below = 0.5 * torch.erfc(-h / math.sqrt(2))  # Φ, without the cancellation of 1 + erf for h << 0
    near = h.clamp(-_FAR, _FAR)
    density = torch.exp(-near.square() / 2) / math.sqrt(2 * math.pi)
    return h * below, below + near * density, (2 - near.square()) * density


def _relu2(h: Tensor) -> ActivationDerivatives:
    positive = h.clamp_min(0)
    return positive.square(), 2 * positive, 2 * (h > 0).to(h.dtype)


def _gelu_tanh(h: Tensor, root: float = math.sqrt(2 / math.pi)) -> ActivationDerivatives:
    near, slope, cubic = h.clamp(-_FAR, _FAR), 2 * root, 0.044715
    w = slope * (near + cubic * near**3)
    _, first, second = _times_logistic(near, w, slope * (1 + 3 * cubic * near.square()), slope * 6 * cubic * near)
    return h * w.sigmoid(), first, second


def _silu(h: Tensor) -> ActivationDerivatives:
    return _times_logistic(h, h, torch.ones_like(h), torch.zeros_like(h))


def _quick_gelu(h: Tensor) -> ActivationDerivatives:
    return _times_logistic(h, 1.702 * h, torch.full_like(h, 1.702), torch.zeros_like(h))


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
    "quick_gelu": _quick_gelu,
    "relu2": _relu2,
    "gelu_bloom": partial(_gelu_tanh, root=0.79788456),
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

    def row_form(self) -> RowForm:
        """diag(s_t) itself."""
        values, exponent = unit(self._values)
        return RowForm(None, None, values[None], exponent=exponent)

    @property
    def kept(self) -> int:
        """The values."""
        return self.shape[0]

    numbers_workspace = diagonal_workspace

    def numbers(self, start: int, stop: int) -> Tensor:
        """The values."""
        return self._values[start:stop]

    def times(self, numbers: Tensor, matrices: Tensor) -> Tensor:
        """diag(s_t) M_t."""
        return numbers[:, :, None] * matrices

    def with_numbers(self, tokens: int) -> "DiagonalCore":
        """The same."""
        return self
