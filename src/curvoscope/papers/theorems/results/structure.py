"""Structure that none of the sources states: gauge and Euler identities, the exact bulk, sharper ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import LossDerivatives, Parameters, differentiate
from curvoscope.papers.theorems.calculus import assemble, kron, rank, vec
from curvoscope.papers.theorems.registry import OWN, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import (
    NAMES,
    AttentionInstance,
    Draw,
    attention_output,
    cross_entropy,
    draw_layer,
    rectangular_layers,
)
from curvoscope.papers.theorems.results.query_key import (
    coupling,
    logit_gradient,
    paper_rank_bound,
    single_matrix_reference,
    visible_keys_rank_bound,
)


@OWN.holds("Gauge identity, query-key", "H·(W_QΞ, −W_KΞᵀ, 0, 0) = (−g_QΞᵀ, g_KΞ, 0, 0), cross-entropy")
def query_key_gauge(seed: int) -> Iterator[float]:
    """The loss does not change under W_Q → W_Q E, W_K → W_K E⁻ᵀ; differentiate that twice."""
    weights, reference = _with_output_weight(seed)
    g, Xi = reference.gradient, Draw(seed, 51).normal(3, 3)
    direction = {"Q": weights["Q"] @ Xi, "K": -weights["K"] @ Xi.T}
    expected = {"Q": -g["Q"] @ Xi.T, "K": g["K"] @ Xi}
    yield _product_error(weights, reference, direction, expected)


@OWN.holds("Gauge identity, value-output", "H·(0, 0, W_VΞ, −ΞW_O) = (0, 0, −g_VΞᵀ, Ξᵀg_O), cross-entropy")
def value_output_gauge(seed: int) -> Iterator[float]:
    """The loss does not change under W_V → W_V E, W_O → E⁻¹ W_O."""
    weights, reference = _with_output_weight(seed)
    g, Xi = reference.gradient, Draw(seed, 52).normal(2, 2)
    direction = {"V": weights["V"] @ Xi, "O": -Xi @ weights["O"]}
    expected = {"V": -g["V"] @ Xi.T, "O": Xi.T @ g["O"]}
    yield _product_error(weights, reference, direction, expected)


@OWN.holds("Euler identity", "H_f(θ, V) vec W_V = ∂ℓ/∂θ for θ = Q, K, O, cross-entropy")
def euler_identity(seed: int) -> Iterator[float]:
    """F is linear in W_V."""
    weights, reference = _with_output_weight(seed)
    yield from (
        relative_error(reference.functional[name, "V"] @ vec(weights["V"]), vec(reference.gradient[name]))
        for name in ("Q", "K", "O")
    )


@OWN.holds("Exact bulk, eigenvectors", "(u_j ⊗ n; ±v_j ⊗ n; 0) with W_Q n = αu_j, W_K n = ∓αv_j, whole Hessian")
def bulk_eigenvectors(seed: int) -> Iterator[float]:
    """Every ±sσ_j(B) is an eigenvalue of the complete Hessian over W_Q, W_K, W_V, with these eigenvectors."""
    for layer in _wide_keys(seed):
        whole = assemble(layer.reference.hessian, NAMES)
        left, values, right = torch.linalg.svd(coupling(layer))
        for j, value in enumerate(values):
            u, v = left[:, j : j + 1], right[j : j + 1].T
            for sign in (1.0, -1.0):
                conditions = torch.cat([torch.cat([layer.W_Q, -u], dim=1), torch.cat([layer.W_K, sign * v], dim=1)])
                # The last rows of Vh span what the 2d conditions leave of the k + 1 unknowns (n, α).
                for solution in torch.linalg.svd(conditions).Vh[len(conditions) :]:
                    n = solution[:-1, None]
                    tail = torch.zeros(layer.W_V.numel(), 1, dtype=torch.float64)
                    vector = torch.cat([kron(u, n), sign * kron(v, n), tail])
                    yield relative_error(whole @ vector, sign * layer.s * value * vector, whole)


@OWN.holds("Exact bulk, multiplicity", "±sσ_j(B) at least k + 1 − 2d times among all eigenvalues")
def bulk_multiplicity(seed: int) -> Iterator[float]:
    """The k + 1 − 2d eigenvalues nearest to each ±sσ_j(B) coincide with it."""
    for layer in _wide_keys(seed):
        d, k = layer.W_Q.shape
        eigenvalues = torch.linalg.eigvalsh(assemble(layer.reference.hessian, NAMES))
        for value in torch.linalg.svdvals(coupling(layer)):
            for target in (layer.s * value, -layer.s * value):
                nearest = (eigenvalues - target).abs().sort().values[: k + 1 - 2 * d]
                yield relative_size(nearest, eigenvalues)


@OWN.holds("Lemma D.2, sharper", "rank ≤ Σ_i min(d, n_i − 1), n_i the keys that query i sees; excess over the bound")
def sharper_ranks(seed: int) -> Iterator[float]:
    """T-outer part and H(K,K) with width d, H(Q,Q) with width k; for short sequences far below the paper's bound."""
    for L, d, k, causal in ((3, 5, 4, True), (3, 5, 4, False), (4, 6, 5, True), (2, 4, 3, False)):
        layer = draw_layer(seed, L, d, k, d)
        if causal:
            layer = replace(layer, bias=_causal_mask(L))
        visible = [i + 1 if causal else L for i in range(L)]
        split, whole = layer.logit_reference, layer.reference.hessian
        logit_outer = assemble(split.outer, ("Q", "K"))
        for matrix, width in ((logit_outer, d), (whole["K", "K"], d), (whole["Q", "Q"], k)):
            bound = visible_keys_rank_bound(width, visible)
            yield max(rank(matrix) - bound, 0) / bound
        yield Fails(paper_rank_bound(d, k) / rank(logit_outer) - 1, "for L ≤ 4 the bound of the paper, as the rank,")


@OWN.holds("Single matrix, index form", "H[ab, a'b'] = Σ_i X_ia X_ia' (c M2_i W_V W_VᵀM2_i + Y_i)[b, b']")
def single_matrix_index_form(seed: int) -> Iterator[float]:
    """Lemma 4.1 without Z1 and Z2: the Hessian in every row of T, contracted with X."""
    yield from (
        relative_error(_single_matrix_by_index(layer), single_matrix_reference(layer))
        for layer in rectangular_layers(seed)
    )


def _single_matrix_by_index(layer: AttentionInstance) -> Tensor:
    """Y_i = Σ_j P_ij x̃_j x̃_jᵀ is the third central moment contracted with the gradient, P = ∂ℓ/∂T."""
    A, X, W_V = layer.A, layer.X, layer.W_V
    deviations = X[None, :, :] - (A @ X)[:, None, :]
    second = torch.einsum("ij,ija,ijb->iab", A, deviations, deviations)
    third = torch.einsum("ij,ija,ijb->iab", logit_gradient(layer), deviations, deviations)
    inner = 2 / layer.Y.numel() * second @ W_V @ W_V.T @ second + third
    d = X.shape[1]
    return torch.einsum("ia,ic,ibd->abcd", X, X, inner).reshape(d * d, d * d)


def _with_output_weight(seed: int) -> tuple[dict[str, Tensor], LossDerivatives]:
    """A head with output weights under the cross-entropy: L = 5, d = 4, k = 3, e = 2, m = 6."""
    draw = Draw(seed, 53)
    X = draw.normal(5, 4)
    shapes = {"Q": (4, 3), "K": (4, 3), "V": (4, 2), "O": (2, 6)}
    weights = {name: 0.6 * draw.normal(*shape) for name, shape in shapes.items()}
    loss = cross_entropy(draw.normal(6, 7), draw.labels(5, 7))

    def network(parameters: Parameters) -> Tensor:
        return attention_output(X, parameters["Q"], parameters["K"], parameters["V"]) @ parameters["O"]

    return weights, differentiate(network, loss, weights)


def _product_error(
    weights: dict[str, Tensor],
    reference: LossDerivatives,
    direction: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> float:
    """Relative error of H·direction, the blocks that are not named being zero."""
    flat = torch.cat([vec(direction.get(name, torch.zeros_like(weight))) for name, weight in weights.items()])
    target = torch.cat([vec(expected.get(name, torch.zeros_like(weight))) for name, weight in weights.items()])
    return relative_error(assemble(reference.hessian, weights) @ flat, target)


def _wide_keys(seed: int) -> list[AttentionInstance]:
    """Layers with k + 1 > 2d; L, d, k, e all different."""
    return [draw_layer(seed, L, d, k, e) for L, d, k, e in ((5, 1, 4, 2), (4, 2, 6, 3), (5, 3, 8, 2))]


def _causal_mask(L: int) -> Tensor:
    mask = torch.full((L, L), -math.inf, dtype=torch.float64)
    return mask.triu(diagonal=1)
