"""The article on whole blocks: what its text and code take for curvature, compared with curvature."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvoscope.papers.theorems import layer_norm as norms
from curvoscope.papers.theorems.autodiff import hessian, jacobian, mean_square
from curvoscope.papers.theorems.calculus import identity, kron
from curvoscope.papers.theorems.layer_norm import normalised, scaling_term
from curvoscope.papers.theorems.post_norm_block import NAMES, row_jacobian, row_second_derivative
from curvoscope.papers.theorems.registry import ARTICLE, Fails, relative_error
from curvoscope.papers.theorems.results.draws import Draw
from curvoscope.papers.theorems.results.instances import layer
from curvoscope.papers.theorems.results.post_norm_block import draw_block, loss_reference


@ARTICLE.corrected("Article, LayerNorm Jacobian", "the term of the variance is missing (A1)")
def layer_norm_jacobian(seed: int) -> Iterator[float]:
    """diag(γ) (C − z zᵀ/d)/σ for every row; the code returns C/σ."""
    X, gamma, _ = _layer_norm(seed)
    reference = jacobian(lambda values: gamma * normalised(values), X)
    scale = torch.diag(gamma.repeat(len(X)))
    yield relative_error(scale @ row_jacobian(X), reference)
    yield Fails(relative_error(scaling_term(X), reference))


@ARTICLE.corrected("Article, ∂²ℓ/∂γ²", "Σ diag(z) S diag(z), not the identity (A2)")
def layer_norm_scale_hessian(seed: int) -> Iterator[float]:
    """For the square loss S = 2/(L d) I."""
    X, gamma, target = _layer_norm(seed)
    z = normalised(X)
    reference = hessian(lambda values: mean_square(target)(values * z), gamma)
    found = 2 / X.numel() * torch.diag(z.square().sum(0))
    yield relative_error(found, reference)
    yield Fails(relative_error(identity(len(gamma)), reference))


@ARTICLE.corrected("Article, LayerNorm Hessian", "more than the second derivative of 1/σ (A3)")
def layer_norm_hessian(seed: int) -> Iterator[float]:
    """∂²LN contracted with a gradient: the product rule adds the terms of ∂P with ∂M."""
    X, _, gradient = _layer_norm(seed)
    (L, d), root = X.shape, 1 / math.sqrt(X.shape[1])
    weights = kron(gradient.reshape(1, -1), identity(L * d))
    reference = hessian(lambda values: (gradient * normalised(values)).sum(), X)
    normaliser = kron(identity(L), norms.centred(X).T, identity(L * d)) @ norms.inverse_second_derivative(X, True, root)
    yield relative_error(weights @ row_second_derivative(X), reference)
    yield Fails(relative_error(weights @ normaliser, reference))


@ARTICLE.false(
    "Article, derivative of GELU",
    "Φ of the tanh form with the density of the exact one (A4); counterexample: h = 2.59",
    tolerance=1e-5,
)
def gelu_derivative(seed: int) -> Iterator[float]:
    """Largest deviation from the derivative of h Φ(h); the tanh form is missed by more."""
    h = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    tanh_form = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    density = torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi)
    slopes = torch.diagonal(jacobian(torch.nn.functional.gelu, h))
    yield relative_error(tanh_form + h * density, slopes)


@ARTICLE.corrected("Article, Gauss-Newton matrix", "JᵀSJ; printed Jᵀ diag(F − Y) J (A5)")
def gauss_newton_matrix(seed: int) -> Iterator[float]:
    """Residuals in the place of the loss Hessian, for the value weight of an attention layer."""
    one = layer(seed, 5, 4, 3, 4)
    J, reference = one.reference.jacobian["V"], one.reference.outer["V", "V"]
    residual = torch.diag((one.reference.output - one.Y).flatten())
    yield relative_error(J.T @ one.reference.loss_hessian @ J, reference)
    yield Fails(relative_error(J.T @ residual @ J, reference))


@ARTICLE.false(
    "Article, top eigenvalues",
    "the last iterates of one power iteration all give the first (A8); counterexample: eigenvalues 5, 3, 1",
)
def top_eigenvalues(seed: int) -> Iterator[float]:
    """Relative error of the second."""
    matrix = torch.diag(torch.tensor([5.0, 3.0, 1.0], dtype=torch.float64))
    vector, found = Draw(seed, 26, 2).normal(3), []
    for _ in range(60):
        vector = matrix @ vector / (matrix @ vector).norm()
        found.append(float(vector @ matrix @ vector))
    yield abs(found[-2] - 3) / 3


@ARTICLE.false(
    "Article, gradients as curvature",
    "g gᵀ has rank one and is 0 at a minimum (A9); counterexample: any attention layer",
)
def gradient_outer_product(seed: int) -> Iterator[float]:
    """Relative error of g gᵀ as the Hessian in W_V."""
    reference = layer(seed, 5, 4, 3, 4).reference
    gradient = reference.gradient["V"].flatten()
    yield relative_error(torch.outer(gradient, gradient), reference.hessian["V", "V"])


@ARTICLE.false(
    "Article, zero blocks", "no block of a whole block's Hessian is zero (A10); counterexample: any post-norm block"
)
def zero_blocks(seed: int) -> Iterator[float]:
    """The share of ‖H‖_F² off the diagonal; 0 if any block were zero."""
    blocks = loss_reference(draw_block(seed, 3, 4, 2, 5)).hessian
    squares = {pair: float(block.square().sum()) for pair, block in blocks.items()}
    share = 1 - sum(squares[name, name] for name in NAMES) / sum(squares.values())
    yield share if min(squares.values()) > 0 else 0.0


@ARTICLE.corrected(
    "Article, adding a sample", "(Δ + ∇Δ·δ + ½ δᵀ∇²Δ δ)/(k + 1) with Δ = ℓ_{k+1} − L_k; printed ½ δᵀHδ (A11)"
)
def one_more_sample(seed: int) -> Iterator[float]:
    """Exact for quadratic losses."""
    draw = Draw(seed, 26, 3)
    k, start, step = 6, draw.normal(4), draw.normal(4)
    centres, factors = draw.normal(k + 1, 4), draw.normal(k + 1, 4, 4)

    def losses(w: Tensor) -> Tensor:
        return 0.5 * torch.einsum("iab,ib->ia", factors, w - centres).square().sum(1)

    def difference(w: Tensor) -> Tensor:
        return losses(w)[k] - losses(w)[:k].mean()

    curvature, slope = hessian(difference, start), jacobian(difference, start)[0]
    expansion = (difference(start) + slope @ step + 0.5 * step @ curvature @ step) / (k + 1)
    change = losses(start + step).mean() - losses(start + step)[:k].mean()
    printed = 0.5 * step @ hessian(lambda w: losses(w).mean(), start) @ step
    yield relative_error(expansion, change)
    yield Fails(relative_error(printed, change))


def _layer_norm(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, γ, and a target or gradient."""
    draw = Draw(seed, 26, 1)
    return draw.normal(3, 5), 1 + 0.5 * draw.normal(5), draw.normal(3, 5)
