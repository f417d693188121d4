"""The Jacobians and the two theorems: Lemma B.1, equations (19) and (21), Theorems 3.1 and 3.2."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import (
    functional_blocks,
    outer_blocks,
    softmax_jacobian,
    softmax_second_derivative,
)
from curvoscope.papers.theorems.autodiff import Parameters, differentiate, jacobian, second_derivative
from curvoscope.papers.theorems.calculus import commutation, identity, kron, shuffle
from curvoscope.papers.theorems.registry import OWN, PAPER, Fails, largest, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import (
    ALL_PAIRS,
    AttentionInstance,
    Draw,
    attention_output,
    cross_entropy,
    jacobian_errors,
    rectangular_layers,
    square_layers,
)

PRINTED_PAIRS = (("V", "V"), ("Q", "Q"), ("V", "Q"), ("Q", "K"))
KEY_PAIRS = (("K", "K"), ("V", "K"))


@PAPER.holds("Theorem 3.1", "(V,V), (Q,Q), (V,Q), (Q,K)")
def outer_product_hessian(seed: int) -> Iterator[float]:
    """H_o in Z1 and M1."""
    yield from (_outer_errors(layer, PRINTED_PAIRS) for layer in square_layers(seed))


@OWN.holds("Theorem 3.1, key blocks", "(K,K) and (V,K), which the paper omits")
def outer_product_hessian_of_keys(seed: int) -> Iterator[float]:
    """The query formulas with (W_Q ⊗ I)K_{k,d} for I ⊗ W_K."""
    yield from (_outer_errors(layer, KEY_PAIRS) for layer in square_layers(seed))


@OWN.holds("Theorem 3.1, any value width", "all nine pairs; L, d, k, e all different")
def outer_product_hessian_rectangular(seed: int) -> Iterator[float]:
    """The factor is 2/(L e), the identity beside M1ᵀM1 has size e."""
    yield from (_outer_errors(layer, ALL_PAIRS) for layer in rectangular_layers(seed))


@PAPER.corrected("Theorem 3.1, proof", "1/√d_K once, M_1 for T_1 (E13)")
def proof_of_outer_product_hessian(seed: int) -> Iterator[float]:
    """The third line of the derivation of (V,Q) has 1/√k twice; the statement is not affected."""
    for layer in square_layers(seed):
        X, _, W_K, W_V = layer.weights
        (L, d), k = X.shape, W_K.shape[1]
        product = kron((layer.A @ X).T, W_V.T @ X.T) @ softmax_jacobian(layer.A) @ kron(X, X @ W_K) / math.sqrt(k)
        reference = layer.reference.outer["V", "Q"]
        yield relative_error(2 / (L * d) * product, reference)
        yield Fails(relative_error(2 / (L * d * math.sqrt(k)) * product, reference), "third line of the proof")


@PAPER.holds("Theorem 3.2", "(V,V) zero, (Q,Q), (V,Q), (Q,K)")
def functional_hessian(seed: int) -> Iterator[float]:
    """H_f in Z1, Z2 and the residual."""
    yield from (_functional_errors(layer, PRINTED_PAIRS) for layer in square_layers(seed))


@OWN.holds("Theorem 3.2, key blocks", "(K,K) and (V,K), which the paper omits")
def functional_hessian_of_keys(seed: int) -> Iterator[float]:
    """The query formulas with (W_Q ⊗ I)K_{k,d} for I ⊗ W_K."""
    yield from (_functional_errors(layer, KEY_PAIRS) for layer in square_layers(seed))


@OWN.holds("Theorem 3.2, any value width", "all nine pairs with the shuffle (I_e ⊗ K(e,d))(vec I_e ⊗ I_d)")
def functional_hessian_rectangular(seed: int) -> Iterator[float]:
    """The shuffle matrix of the theorem, for d_V outputs, needs the convention of Lemma B.2 when e ≠ d."""
    for layer in rectangular_layers(seed):
        yield _functional_errors(layer, ALL_PAIRS)
        d, e = layer.W_V.shape
        other = kron(identity(e), commutation(e, d)) @ kron(identity(e).reshape(-1, 1), identity(d))
        yield Fails(relative_error(other, shuffle(e, d)), "with K_{e,d} of Magnus and Neudecker in the shuffle")


@PAPER.holds("Equation (21)", "∂²F/∂W_Q∂W_K in two summands")
def query_key_second_derivative(seed: int) -> Iterator[float]:
    """(F1 ⊗ F2ᵀ) ∂G/∂W_K + (F1 G ⊗ I) ∂F2/∂W_K with F1 = I ⊗ W_VᵀXᵀ, G = ∂A/∂T, F2 = (X ⊗ XW_K)/√k."""
    for layer in square_layers(seed):
        X, W_Q, W_K, W_V = layer.weights
        (L, d), k = X.shape, W_Q.shape[1]
        F1, F2 = kron(identity(L), W_V.T @ X.T), kron(X, X @ W_K) / math.sqrt(k)
        G = softmax_jacobian(layer.A)
        dG = softmax_second_derivative(layer.A) @ kron(X @ W_Q, X) @ commutation(k, d) / math.sqrt(k)
        dF2 = kron(kron(X, X, identity(d)) @ shuffle(d, d), identity(k)) / math.sqrt(k)
        formula = kron(F1, F2.T) @ dG + kron(F1 @ G, identity(d * k)) @ dF2
        reference = second_derivative(layer.output_of, layer.parameters, "Q", "K")
        yield relative_error(formula, reference)


@PAPER.holds("Lemma B.1", "∂F/∂W_V and ∂F/∂W_Q")
def attention_jacobians(seed: int) -> Iterator[float]:
    """The Jacobians of self-attention."""
    yield from jacobian_errors(square_layers(seed), "VQ")


@OWN.holds("Lemma B.1, key Jacobian", "(I ⊗ W_VᵀXᵀ)(∂A/∂T)(XW_Q ⊗ X)K_{k,d}/√k; L, d, k, e all different")
def key_jacobian(seed: int) -> Iterator[float]:
    """The Jacobian that the paper leaves out, and the other two for any value width."""
    yield from jacobian_errors(rectangular_layers(seed), "VQK")


@PAPER.holds("Equation (19)", "∂A/∂T = blockdiag(diag(a) − a aᵀ)")
def row_softmax_jacobian(seed: int) -> Iterator[float]:
    """The Jacobian of the row-wise softmax."""
    yield from (
        relative_error(softmax_jacobian(layer.A), jacobian(layer.attention_of, layer.logits))
        for layer in square_layers(seed)
    )


@PAPER.corrected(
    "Section 3.1, value block of a full block", "H_f(V,V) = 0 when the split is at the attention output (E12)"
)
def value_functional_block(seed: int) -> Iterator[float]:
    """Behind a nonlinear tail the functional value block of the split at the logits is not zero."""
    draw = Draw(seed, 3, 1)
    L, d, k, hidden, classes = 5, 3, 2, 6, 7
    X, W_Q, W_K, W_V = draw.normal(L, d), draw.normal(d, k), draw.normal(d, k), draw.normal(d, d)
    up, down, unembedding = draw.normal(d, hidden), draw.normal(hidden, d), draw.normal(d, classes)
    loss = cross_entropy(unembedding, draw.labels(L, classes))

    def attention(parameters: Parameters) -> Tensor:
        return attention_output(X, W_Q, W_K, parameters["V"])

    def tail(output: Tensor) -> Tensor:
        stream = X + output
        return stream + torch.nn.functional.gelu(stream @ up) @ down

    early = differentiate(attention, lambda output: loss(tail(output)), {"V": W_V})
    late = differentiate(lambda parameters: tail(attention(parameters)), loss, {"V": W_V})
    pair = ("V", "V")
    yield relative_size(early.functional[pair], early.hessian[pair])
    yield Fails(relative_size(late.functional[pair], late.hessian[pair]), "split at the logits behind a GELU layer")


def _outer_errors(layer: AttentionInstance, pairs: tuple[tuple[str, str], ...]) -> float:
    blocks = outer_blocks(*layer.weights)
    return largest(relative_error(blocks[pair], layer.reference.outer[pair]) for pair in pairs)


def _functional_errors(layer: AttentionInstance, pairs: tuple[tuple[str, str], ...]) -> float:
    blocks = functional_blocks(*layer.weights, layer.Y)
    return largest(
        relative_error(blocks[pair], layer.reference.functional[pair], layer.reference.hessian[pair])
        if pair == ("V", "V")
        else relative_error(blocks[pair], layer.reference.functional[pair])
        for pair in pairs
    )
