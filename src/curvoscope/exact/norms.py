"""LayerNorm and RMSNorm, each token alone.

    P = I - 1 1^T / d  (RMSNorm: P = I)     σ = √(|P x|²/d + ε)     x̂ = P x / σ     y = γ ∘ x̂ + β

    dx̂/dx = J = (P - x̂ x̂^T / d) / σ        symmetric, with eigenvalues 1/σ, ε/σ³ along x̂ and, for LayerNorm, 0 along 1
    dy/dx = diag(γ) J      dy/dγ = diag(x̂)      dy/dβ = I      d²y_a/dγ_b dx_c = δ_ab J_ac
    sum_a h_a d²x̂_a = -[P h x̂^T + x̂ (P h)^T + (h·x̂) (P - 3 x̂ x̂^T / d)] / (σ² d)

For a loss with gradient G and Hessian S at y, with h = γ ∘ G in the last line, and sums over the tokens t:

    H(γ,γ) = Σ diag(x̂_t) S_t diag(x̂_t)    H(γ,β) = Σ diag(x̂_t) S_t    H(β,β) = Σ S_t      nothing functional
    H_o(x,x) = J diag(γ) S diag(γ) J      H_o(γ,x) = diag(x̂) S diag(γ) J      H_o(β,x) = S diag(γ) J
    H_f(x,x) = sum_a γ_a G_a d²x̂_a        H_f(γ,x) = diag(G) J                H_f(β,x) = 0
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.exact.assembly import Directions
from curvoscope.exact.factor import Factor, TermList
from curvoscope.exact.tokenwise import Pairs, TokenwiseHessian, TokenwiseLayer
from curvoscope.losses import LossAt
from curvoscope.operators.base import Shape


@dataclass(frozen=True)
class Normalised:
    """Rows x (T, d) seen by a norm: x̂ (T, d), σ (T, 1) and P."""

    x_hat: Tensor
    sigma: Tensor
    centred: bool

    @classmethod
    def of(cls, rows: Tensor, eps: float, centred: bool) -> "Normalised":
        """Of rows x (T, d)."""
        if centred:
            rows = rows - rows[:, :1]  # constant rows become exactly 0, and large offsets cost no digits
            rows = rows - rows.mean(-1, keepdim=True)
        variance = rows.square().mean(-1, keepdim=True)
        shifted = variance + eps
        if not bool(torch.isfinite(shifted).all()):
            raise NonFiniteError("X", "the variance of a row overflows; scale the input down")
        singular = ~torch.isfinite(1 / shifted)
        if bool(singular.any()):
            row = int(singular.flatten().nonzero()[0])
            remedy = f"1/(variance + eps) overflows in {rows.dtype}; convert to float32 or use a larger eps"
            remedy = "use eps > 0" if eps == 0 else remedy
            raise RangeError("eps", f"got {eps}, and row {row} of X has variance {float(variance[row]):.3g}; {remedy}")
        sigma = shifted.sqrt()
        return cls(rows / sigma, sigma, centred)

    @property
    def d(self) -> int:
        """Features that are normalised together."""
        return self.x_hat.shape[1]

    def project(self, values: Tensor) -> Tensor:
        """P v."""
        return values - values.mean(-1, keepdim=True) if self.centred else values

    def push(self, values: Tensor) -> Tensor:
        """J v for v (..., T, d)."""
        along = (self.x_hat * values).sum(-1, keepdim=True)
        return (self.project(values) - self.x_hat * along / self.d) / self.sigma

    def bend(self, h: Tensor, values: Tensor) -> Tensor:
        """sum_a h_a d²x̂_a applied to v (..., T, d)."""
        ph, along = self.project(h), (self.x_hat * values).sum(-1, keepdim=True)
        across, weight = (ph * values).sum(-1, keepdim=True), (h * self.x_hat).sum(-1, keepdim=True)
        curved = weight * (self.project(values) - 3 * self.x_hat * along / self.d)
        return -(ph * along + self.x_hat * across + curved) / (self.sigma.square() * self.d)

    @cached_property
    def projector(self) -> Tensor:
        """P, (d, d)."""
        return self.project(torch.eye(self.d, dtype=self.x_hat.dtype, device=self.x_hat.device))

    @cached_property
    def jacobian(self) -> Tensor:
        """J of every token, (T, d, d)."""
        rank_one = self.x_hat[:, :, None] * self.x_hat[:, None, :] / self.d
        return (self.projector - rank_one) / self.sigma[:, :, None]

    def curvature(self, h: Tensor) -> Tensor:
        """sum_a h_a d²x̂_a of every token for h (T, d): (T, d, d)."""
        mixed = self.project(h)[:, :, None] * self.x_hat[:, None, :]
        weight = (h * self.x_hat).sum(-1)[:, None, None]
        curved = self.projector - (self.x_hat[:, :, None] * self.x_hat[:, None, :]) * (3 / self.d)
        return -(mixed + mixed.mT + weight * curved) / (self.sigma.square() * self.d)[:, :, None]


class _Norm(TokenwiseLayer):
    """y = γ ∘ x̂ + β for a fixed P; `gamma` (d,), `beta` (d,) or None."""

    _centred: bool

    def __init__(self, gamma: Tensor, beta: Tensor | None, eps: float) -> None:
        self.gamma = checks.floating("gamma", gamma)
        if gamma.ndim != 1:
            raise ShapeError("gamma", f"expected a vector (d,), got {tuple(gamma.shape)}")
        self.beta = beta
        if beta is not None and checks.floating("beta", beta, like=gamma).shape != gamma.shape:
            raise ShapeError("beta", f"expected {tuple(gamma.shape)} like gamma, got {tuple(beta.shape)}")
        checks.real("eps", eps)
        if not 0 <= eps < math.inf:
            raise RangeError("eps", f"got {eps}, expected a finite number that is not negative")
        self.eps = float(eps)
        self.weights = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
        self.d = self.d_out = len(gamma)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """What x̂ is multiplied with."""
        return {"gamma": self.gamma}

    def __call__(self, X: Tensor) -> Tensor:
        """y, of the shape of X."""
        return self._output(self._at(X)).view(X.shape)

    def x_hat(self, X: Tensor) -> Tensor:
        """x̂ = P x / σ, of the shape of X."""
        return self._at(X).x_hat.view(X.shape)

    def sigma(self, X: Tensor) -> Tensor:
        """σ = √(|P x|²/d + ε), (L,) or (N, L)."""
        return self._at(X).sigma.view(X.shape[:-1])

    def input_jacobian(self, X: Tensor) -> Tensor:
        """dy/dx = diag(γ) (P - x̂ x̂^T / d) / σ of every token, (T, d, d)."""
        return self.gamma[:, None] * self._at(X).jacobian

    def second_derivative(self, X: Tensor, gradient: Tensor) -> Tensor:
        """sum_a g_a d²y_a/dx² of every token for a gradient at y, of the shape of X: (T, d, d), O(d²) per token."""
        at = self._at(X)
        if gradient.shape != X.shape:
            raise ShapeError("gradient", f"expected {tuple(X.shape)} like X, got {tuple(gradient.shape)}")
        return at.curvature(self.gamma * checks.floating("gradient", gradient, like=X).reshape(at.x_hat.shape))

    def jacobian_norm(self, X: Tensor) -> Tensor:
        """|J| of dx̂/dx for every token, (L,) or (N, L): 1/σ, or ε/σ³ if x̂ spans the range of P."""
        at, rank = self._at(X), self._rank
        norm = 1 / at.sigma if rank > 1 else rank * self.eps / at.sigma**3
        return norm.view(X.shape[:-1])

    def second_derivative_norm(self, X: Tensor, *, flattened: bool = False) -> Tensor:
        """|D²x̂| for every token, (L,) or (N, L): the largest |D²x̂[u, v]| over unit u, v.

        With ρ² = |x̂|²/d it is 2/(√(3d) σ²) if ρ ≥ 1/√3, otherwise 3ρ(1 - ρ²)/(√d σ²); in one dimension always the
        latter. `flattened`: the spectral norm of D²x̂ as a matrix (d·d, d), whose Gram matrix has the eigenvalues
        2ρ²/(d σ⁴) across x̂ and ρ² (r - 1 + 9 (1 - ρ²)²)/(d σ⁴) along it, r the rank of P.
        """
        at, rank = self._at(X), self._rank
        variance = at.sigma.square()
        rho = (at.x_hat.square().sum(-1, keepdim=True) / at.d).sqrt()
        away = self.eps / variance  # 1 - ρ², without cancellation
        if flattened:
            along = (max(rank, 1) - 1 + 9 * away.square()).sqrt()
            norm = rho * (along.clamp_min(math.sqrt(2)) if rank > 1 else along)
        else:
            norm = 3 * rho * away
            if rank > 1:
                norm = norm.where(rho < 1 / math.sqrt(3), 2 / math.sqrt(3))
        return (norm / (math.sqrt(at.d) * variance)).view(X.shape[:-1])

    def _around(self, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> TokenwiseHessian:
        return _NormHessian(self.gamma, self._at(X), X, loss, shapes)

    @property
    def _rank(self) -> int:
        """The rank of P."""
        return len(self.gamma) - self._centred

    def _output(self, at: Normalised) -> Tensor:
        y = self.gamma * at.x_hat
        return y if self.beta is None else y + self.beta

    def _at(self, X: Tensor) -> Normalised:
        d = len(self.gamma)
        checks.floating("X", X, like=self.gamma)
        if X.ndim not in (2, 3) or X.shape[-1] != d:
            raise ShapeError("X", f"expected (L, {d}) or (N, L, {d}), got {tuple(X.shape)}")
        return Normalised.of(X.flatten(0, -2), self.eps, self._centred)


class LayerNorm(_Norm):
    """y = γ ∘ (x - mean)/σ + β with σ² = var + ε: blocks "gamma", "beta" (if given), and "X" on request.

    Args:
        gamma: γ (d,).
        beta: β (d,) or None.
        eps: ε, at least 0.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.LayerNorm(torch.ones(2), torch.zeros(2), eps=0.0)
        >>> layer(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
        >>> layer.hessian(torch.tensor([[1.0, 3.0]]), cv.losses.MSE(torch.zeros(1, 2))).names
        ['gamma', 'beta']
    """

    _centred = True

    def __init__(self, gamma: Tensor, beta: Tensor | None = None, eps: float = 1e-5) -> None:
        super().__init__(gamma, beta, eps)


class RMSNorm(_Norm):
    """y = γ ∘ x/σ with σ² = |x|²/d + ε: block "gamma", and "X" on request.

    Args:
        gamma: γ (d,).
        eps: ε, at least 0.

    Example:
        >>> import torch, curvoscope as cv
        >>> layer = cv.exact.RMSNorm(torch.ones(2), eps=0.0)
        >>> H = layer.hessian(torch.ones(1, 2), cv.losses.MSE(torch.zeros(1, 2)), wrt_input=True)
        >>> H.names, H["gamma"].dense()
        (['gamma', 'X'], tensor([[1., 0.],
                [0., 1.]]))
    """

    _centred = False

    def __init__(self, gamma: Tensor, eps: float = 1e-6) -> None:
        super().__init__(gamma, None, eps)


class _NormHessian(TokenwiseHessian):
    def __init__(self, gamma: Tensor, at: Normalised, X: Tensor, loss: LossAt, shapes: dict[str, Shape]) -> None:
        ones = torch.ones_like(at.sigma)
        factors = {"gamma": Factor(ones, scales=at.x_hat), "beta": Factor(ones)}
        super().__init__({name: factors[name] for name in shapes if name != "X"}, X, loss, shapes)
        self._gamma, self._at = gamma, at

    def functional_terms(self, row: str, column: str) -> TermList:
        """Nothing: y is linear in γ and β together."""
        return []

    def push(self, directions: Directions) -> tuple[Tensor, Directions]:
        """dF = γ ∘ J dx + x̂ ∘ dγ + dβ."""
        at, zero = self._at, torch.zeros((), dtype=self.X.dtype, device=self.X.device)
        d_gamma, d_beta, dX = (directions.get(name, zero) for name in ("gamma", "beta", "X"))
        n = next(iter(directions.values())).shape[0]
        d_hat = at.push(dX.expand(n, *self.X.shape))
        return self._gamma * d_hat + at.x_hat * d_gamma + d_beta, {"x_hat": d_hat}

    def pull(self, directions: Directions, moved: Directions, back: Tensor, functional: bool) -> tuple[Pairs, Tensor]:
        """The gradients Σ x̂ ∘ G, Σ G and J (γ ∘ G) move with G, or with G held."""
        at = self._at
        at_gamma, at_hat = at.x_hat * back, self._gamma * back
        if functional:
            at_gamma = at_gamma + moved["x_hat"] * self.gradient
            if "gamma" in directions:
                at_hat = at_hat + directions["gamma"] * self.gradient
        at_X = at.push(at_hat)
        if functional and "X" in directions:
            at_X = at_X + at.bend(self._gamma * self.gradient, directions["X"])
        ones = self.factors["gamma"].vectors
        return {"gamma": [(ones, at_gamma)], "beta": [(ones, back)]}, at_X

    def mixed(self, name: str) -> list[Factor]:
        """H_f(x, γ) = J diag(G); β moves no gradient at x."""
        if name == "beta":
            return []
        return [Factor(self.factors["gamma"].vectors, (self._at.jacobian * self.gradient[:, None, :]).mT)]

    def input_jacobian(self) -> Tensor:
        """diag(γ) J."""
        return self._gamma[:, None] * self._at.jacobian

    def input_curvature(self) -> Tensor:
        """sum_a γ_a G_a d²x̂_a."""
        return self._at.curvature(self._gamma * self.gradient)
